"""Whatever the metadata of a file says: it runs, or it is refused with a reason. ggml aborts the process otherwise."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

REASONS = {"runs", "ModelFileError", "UnsupportedModelError", "DeviceError"}
N_LIES, N_SHAPES = 400, 200


def test_no_metadata_ends_the_process(tmp_path: Path) -> None:
    script = Path(__file__).with_name("lying_files.py")
    arguments = [str(tmp_path), "7", str(N_LIES), str(N_SHAPES)]
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, (lines[-1:], done.stderr[-2000:])
    outcomes = Counter(line.split()[1] for line in lines if line.startswith("->"))
    assert lines[1] == "-> runs"
    assert outcomes.total() == 1 + N_LIES + N_SHAPES
    assert set(outcomes) <= REASONS, [line for line in lines if line.startswith("-> UsageError")][:3]
    # Of the shapes, enough got as far as the ops for these to have been tried.
    assert outcomes["runs"] > N_SHAPES // 5, outcomes
