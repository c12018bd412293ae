"""Runs the check of a libggml in a process of its own, and compares the numbers of two libraries."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from swarmnode.errors import DeviceError

TRIAL_S = 120.0
"""A check takes 1 to 2 s; a phone, or a GPU driver that compiles its kernels, takes longer."""
MIN_COSINE = 0.9999
"""As for the self-test's `rounded` reference. Kernels may sum in another order; a wrong parameter shows in digits."""
MAX_RELATIVE = 0.02
"""Largest difference, as a part of the largest number."""


CRASHES = frozenset({"SIGSEGV", "SIGABRT", "SIGILL", "SIGBUS", "SIGFPE"})
"""What a process gets for what its own code does; every other signal comes from outside (a user, the OOM killer)."""
FIRST_STAGE = "reading its version"
"""What the check does before it loads the bindings."""


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


def try_library(package: Path, newer_than: str = "") -> Trial:
    """Check the library of a package `ggml`; with `newer_than`, only if it is newer.

    DeviceError if its process ended in a way that says nothing about the library: too late, by an exception or a signal
    from outside, or before it loaded the bindings.
    """
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(entry for entry in sys.path if entry))
    command = [sys.executable, "-P", "-m", "swarmnode.compute.library_check", str(package), newer_than]
    try:
        ended = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=TRIAL_S
        )
    except subprocess.TimeoutExpired:
        raise DeviceError(f"its check did not end within {TRIAL_S:.0f} s") from None
    return _trial(_reported(ended.stdout), ended)


def _reported(output: bytes) -> dict[str, Any]:
    """Lines of JSON objects, later ones on top; other lines are not ours (a driver's, say)."""
    report: dict[str, Any] = {}
    for line in output.decode("utf-8", "replace").splitlines():
        if line.startswith("{"):
            try:
                report |= json.loads(line)
            except ValueError:
                continue
    return report


def _trial(report: Mapping[str, Any], ended: subprocess.CompletedProcess[bytes]) -> Trial:
    version, refused = str(report.get("version", "")), str(report.get("refused", ""))
    if ended.returncode == 0 and report.get("stage") == "done":
        older, inexact = bool(report.get("older")), str(report.get("inexact", ""))
        return Trial(version, refused, older, inexact, dict(report.get("numbers", {})))
    if refused:
        return Trial(version, refused)
    lines = ended.stderr.decode("utf-8", "replace").strip().splitlines()
    last = "".join(character for character in (lines or [""])[-1] if character.isprintable())[:200]
    name = f"ggml {version}" if version else "it"
    stage = str(report.get("stage", ""))
    crash = _signal(ended.returncode)
    ending = f"failed (exit code {ended.returncode})" if ended.returncode >= 0 else f"crashed ({crash})"
    what = f"{name} {ending} while {stage or 'the check was started'}" + (f": {last}" if last else "")
    if crash not in CRASHES or stage in ("", FIRST_STAGE):
        raise DeviceError(f"{what} (the next start checks it again)")
    return Trial(version, what)


def _signal(code: int) -> str:
    """Name of the signal that ended a process with this code; empty if it ended by itself."""
    if code >= 0:
        return ""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """The first sample in which two libraries differ by more than rounding, in words; empty if none does."""
    if ours.keys() != theirs.keys():
        return "other samples"
    for name in ours:
        a, b = (
            np.frombuffer(base64.b64decode(side[name]), np.float32).astype(float) for side in (ours, theirs)
        )
        if a.shape != b.shape or not np.isfinite(b).all():
            return f"{name} has another size, or numbers that are not finite"
        cosine = float(a @ b / max(float(np.sqrt((a @ a) * (b @ b))), 1e-30))
        relative = float(np.abs(a - b).max() / max(float(np.abs(a).max()), 1e-30))
        if cosine < MIN_COSINE or relative > MAX_RELATIVE:
            return f"{name}, cosine {cosine:.6f}, largest difference {relative:.1e} of the largest number"
    return ""
