"""`make TARGET` and `python -m benchmarks.NAME` in README and docs: each is there, and takes the options shown."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.meta.test_documented_commands import DOCUMENTS, ROOT

TEXTS = {path: path.read_text() for path in [*DOCUMENTS, ROOT / "benchmarks" / "README.md"]}


def found(pattern: str) -> list[str]:
    return sorted({match for text in TEXTS.values() for match in re.findall(pattern, text, re.MULTILINE)})


TARGETS = found(r"(?:`|^    )make (?:[A-Z]+=\S+ )?([a-z-]+)")
BENCHMARKS = found(r"python -m (benchmarks\.\w+[^`\n]*)")


def test_the_scans_find_something() -> None:
    assert {"demo", "test", "bench", "test-vulkan"} <= set(TARGETS)
    assert len(BENCHMARKS) > 20


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_a_documented_target_is_one() -> None:
    """`make -n` reads the Makefile and prints what it would do; the first target that there is not ends it."""
    result = subprocess.run(["make", "-n", *TARGETS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_every_target_is_documented() -> None:
    phony = re.search(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert set(phony[1].split()) - {"clean"} == set(TARGETS)


@pytest.mark.parametrize("words", BENCHMARKS)
def test_a_documented_benchmark_takes_its_options(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *arguments = words.replace("[", " ").replace("]", " ").split()
    text = help_of(name, monkeypatch, capsys)
    for word in arguments:
        if word.startswith("--"):
            assert word in text, f"{name} has no {word}"


def help_of(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What `python -m NAME --help` prints; in this process, as an interpreter each takes half a second."""
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main()
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: ")
    return text


def test_what_the_readme_calls_a_benchmark_is_a_program() -> None:
    for words in BENCHMARKS:
        path = ROOT / Path(*words.split()[0].split(".")).with_suffix(".py")
        assert 'if __name__ == "__main__":' in path.read_text()
