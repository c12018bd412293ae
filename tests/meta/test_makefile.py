"""`make` with the wrong Python: what is said, and which venv is kept. Nothing is installed: the Pythons are scripts."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")

PYTHON = """#!/bin/sh
# A Python {name}: -c says which one it is (nothing: too old), -m venv makes one of these, -m pip does nothing.
case "$1 $2" in
    "-c "*) printf '%s' "{says}" ;;
    "--version "*) echo "Python {name}" ;;
    "-m venv") rm -rf .venv; mkdir -p .venv/bin; cp "{path}" .venv/bin/python; echo "venv of {name}" >>log ;;
    "-m pip") echo "pip of {name}" >>log ;;
esac
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    for name, says in (("new", "/usr 3.12"), ("newer", "/opt 3.13"), ("old", "")):
        path = tmp_path / name
        path.write_text(PYTHON.format(name=name, says=says, path=path))
        path.chmod(0o755)
    return tmp_path


def make(clone: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "PYTHON"))
    }
    return subprocess.run(
        ["make", *arguments, "setup"], cwd=clone, env=environment, capture_output=True, text=True, check=False
    )


def log_of(clone: Path) -> list[str]:
    path = clone / "log"
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return lines


@pytest.mark.parametrize("name", ["./old", "./missing"])
def test_a_python_that_is_too_old_is_told_before_anything_is_made(clone: Path, name: str) -> None:
    result = make(clone, f"PYTHON={name}")
    assert result.returncode != 0
    assert f"swarmnode needs Python 3.11 or newer; '{name}' is:" in result.stderr
    assert "make PYTHON=python3.12 setup" in result.stderr
    assert "compiling" not in result.stdout
    assert log_of(clone) == []
    assert not (clone / ".venv").exists()


def test_another_python_makes_the_venv_anew_and_the_same_one_does_not(clone: Path) -> None:
    assert make(clone, "PYTHON=./new").returncode == 0
    assert log_of(clone)[0] == "venv of new"
    assert make(clone, "PYTHON=./new").returncode == 0
    assert make(clone).returncode == 0  # whatever python3 is: there is a venv
    assert log_of(clone) == []
    assert make(clone, "PYTHON=./old").returncode != 0
    assert log_of(clone) == []
    assert make(clone, "PYTHON=./newer").returncode == 0
    assert log_of(clone)[:2] == ["venv of newer", "pip of newer"]


def test_a_new_requirement_does_not_compile_everything_again(clone: Path) -> None:
    assert make(clone, "PYTHON=./new").returncode == 0
    log_of(clone)
    os.utime(clone / "pyproject.toml", (2e9, 2e9))
    assert make(clone).returncode == 0
    assert set(log_of(clone)) == {"pip of new"}


def test_a_venv_left_half_made_is_made_anew(clone: Path) -> None:
    broken = clone / ".venv" / "bin" / "python"
    broken.parent.mkdir(parents=True)
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    assert make(clone, "PYTHON=./new").returncode == 0
    assert log_of(clone)[0] == "venv of new"
