"""Runs the check of a libggml in a process of its own, and compares the numbers of two libraries."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from swarmnode.errors import DeviceError
from swarmnode.state_file import read_small

TRIAL_S = 120.0
"""A check takes 1 to 2 s; a phone, or a GPU driver that compiles its kernels, takes longer."""
MIN_COSINE = 0.9999
"""As for the self-test's `rounded` reference. Kernels may sum in another order; a wrong parameter shows in digits."""
MAX_RELATIVE = 0.02
"""Largest difference, as a part of the largest number."""


CRASHES = frozenset({"SIGSEGV", "SIGABRT", "SIGILL", "SIGBUS", "SIGFPE"})
"""What a process gets for what its own code does; every other signal comes from outside (a user, the OOM killer)."""
FIRST_STAGE, DONE = "reading its version", "done"
"""What the check does before it loads the bindings; what it says at its end."""
MAX_REPORT_BYTES = 1024 * 1024
"""Of what it says; the samples are 66 KB."""
MAX_ERROR_BYTES = 4096
"""Of what it writes to standard error only the last line is wanted."""


@dataclass(frozen=True)
class Verdict:
    """What the check said."""

    version: str = ""
    refused: str = ""
    """Why it cannot be used; empty if it can."""
    older: bool = False
    """Not newer than the built-in one (only asked about libraries that nobody chose)."""
    inexact: str = ""
    """Expert types for which, unlike with the built-in one, a row's last bits depend on the rows beside it."""


@dataclass(frozen=True)
class Trial(Verdict):
    """What the process reported: a verdict, and the numbers that it is still to be judged by."""

    numbers: Mapping[str, str] = field(default_factory=dict)
    """By name of the sample: f32 values, base64."""


@dataclass(frozen=True)
class _Report(Trial):
    """What the process said so far."""

    stage: str = ""
    """What it was about to do."""


def try_library(package: Path, newer_than: str = "") -> Trial:
    """Check the library of a package `ggml`; with `newer_than`, only if it is newer.

    DeviceError if its process ended in a way that says nothing about the library: too late, by an exception or a signal
    from outside, or before it loaded the bindings; or if what it said makes no sense.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="swarmnode-check-", ignore_cleanup_errors=True) as folder:
            report, errors = Path(folder, "report"), Path(folder, "errors")
            code = run_check([str(report), str(package), newer_than], errors)
            return _trial(_reported(report), code, _last_line(errors))
    except OSError as error:
        raise DeviceError(f"its check could not be run: {error}") from error


def run_check(arguments: list[str], errors: Path) -> int:
    """The exit code of library_check.py, with its standard error in a file. DeviceError if it takes too long; OSError.

    Files and a session of its own, because a library (or a GPU driver) may start processes: they hold no pipe that we
    would wait for, and end with the check.
    """
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(entry for entry in sys.path if entry))
    command = [sys.executable, "-P", "-m", "swarmnode.compute.library_check", *arguments]
    with errors.open("wb") as file:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=file,
            start_new_session=True,
        )
    try:
        return process.wait(TRIAL_S)
    except subprocess.TimeoutExpired:
        raise DeviceError(f"its check did not end within {TRIAL_S:.0f} s") from None
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Also what it left behind; a process group keeps its number as long as anything of it lives."""
    if os.name == "posix":
        with suppress(OSError):  # nothing is left of it
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()


def _reported(report: Path) -> _Report:
    """Lines of JSON objects, later ones on top. DeviceError for what the check does not say: a broken library may
    write anywhere, and what is kept of it is believed at every start."""
    said: dict[str, Any] = {}
    try:
        for line in read_small(report, MAX_REPORT_BYTES).splitlines():
            said |= json.loads(line)
        found = _Report(**checked(said, _Report))
        for text in found.numbers.values():
            _values(text)
        return found
    except FileNotFoundError:
        return _Report()  # it did not come so far
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DeviceError(f"its check said what makes no sense: {error}"[:300]) from error


def checked(values: object, kind: type) -> dict[str, Any]:
    """The values, if they are fields of a dataclass and of the types of its defaults. TypeError."""
    if not isinstance(values, dict):
        raise TypeError(f"{values!r} is no object")
    defaults = vars(kind())
    for name, value in values.items():
        if name not in defaults or type(value) is not type(defaults[name]):
            raise TypeError(f"{name} is {value!r}")
    return values


def _last_line(errors: Path) -> str:
    with errors.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_ERROR_BYTES))
        lines = file.read(MAX_ERROR_BYTES).decode("utf-8", "replace").strip().splitlines()
    return "".join(character for character in (lines or [""])[-1] if character.isprintable())[:200]


def _trial(report: _Report, code: int, last_line: str) -> Trial:
    if code == 0 and report.stage == DONE:
        return report
    if report.refused:
        return Trial(report.version, report.refused)
    name = f"ggml {report.version}" if report.version else "it"
    crash = _signal(code)
    ending = f"failed (exit code {code})" if code >= 0 else f"crashed ({crash})"
    what = f"{name} {ending} while {report.stage or 'the check was started'}"
    what += f": {last_line}" if last_line else ""
    if crash not in CRASHES or report.stage in ("", FIRST_STAGE):
        raise DeviceError(f"{what} (the next start checks it again)")
    return Trial(report.version, what)


def _signal(code: int) -> str:
    """Name of the signal that ended a process with this code; empty if it ended by itself."""
    if code >= 0:
        return ""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _values(text: str) -> npt.NDArray[np.float64]:
    """ValueError or TypeError if it is no base64 of f32 values."""
    return np.frombuffer(base64.b64decode(text, validate=True), np.float32).astype(float)


def difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """The first sample in which two libraries differ by more than rounding, in words; empty if none does."""
    if ours.keys() != theirs.keys():
        return "other samples"
    for name in ours:
        a, b = _values(ours[name]), _values(theirs[name])
        if a.shape != b.shape or not np.isfinite(b).all():
            return f"{name} has another size, or numbers that are not finite"
        cosine = float(a @ b / max(float(np.sqrt((a @ a) * (b @ b))), 1e-30))
        relative = float(np.abs(a - b).max() / max(float(np.abs(a).max()), 1e-30))
        if cosine < MIN_COSINE or relative > MAX_RELATIVE:
            return f"{name}, cosine {cosine:.6f}, largest difference {relative:.1e} of the largest number"
    return ""
