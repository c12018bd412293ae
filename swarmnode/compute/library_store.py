"""Another libggml on disk: the package that loads it, and what the check said, kept in the cache folder.

    cache/ggml/KEY/ggml/__init__.py, ggml.py    copies of ggml-python's
    cache/ggml/KEY/ggml/lib                     a link to the folder with the libraries
    cache/ggml/KEY/verdict.json                 what the check said

KEY is PLACE-FACTS. FACTS is a hash of path, size and modification time of the libraries, of the built-in ones and of
ggml-python's files: any change of either means another check. PLACE is a hash of the folders, of the machine (homes are
shared, kernels differ with the CPU) and of the Python: entries of one place with other facts are of the past.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import shutil
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path

from swarmnode.compute.library_trial import Verdict, checked, difference, try_library
from swarmnode.errors import DeviceError, StoreError
from swarmnode.state_file import read_small, replace_small

CHECK_VERSION = 1
"""Counts changes of the check: verdicts of an older one are not believed."""
UNUSED_S = 86_400.0
"""What nobody has started with for so long is removed: until then it may be another machine's, or be in the making."""

_VERDICT, _VERDICT_NEWER = "verdict.json", "verdict-newer.json"
_MAX_VERDICT_BYTES = 16_384
_KEPT = ("ggml", _VERDICT, _VERDICT_NEWER)
_GONE = "gone-"
_BINDINGS = ("__init__.py", "ggml.py")
_NEEDED = ("ggml", "ggml-base", "ggml-cpu")


@lru_cache(maxsize=1)
def built_in_package() -> Path:
    """ggml-python's folder, without importing it; DeviceError if it is not installed.

    Remembered: once another library's package is imported, Python knows only that one by the name.
    """
    spec = importlib.util.find_spec("ggml")
    if spec is None or spec.origin is None:
        raise DeviceError("ggml-python is not installed: see docs/operations.md")
    return Path(spec.origin).parent


def library_file(folder: Path, name: str) -> Path | None:
    """The shared library of that base name, as this system (and ggml-python) spells it."""
    if sys.platform == "win32":
        names = [f"{name}.dll"]
    else:
        names = [f"lib{name}.so", f"lib{name}.dylib"]
    return next((folder / spelled for spelled in names if os.path.isfile(folder / spelled)), None)


def has_libraries(folder: Path) -> bool:
    """True if the folder holds the three libraries without which nothing is computed."""
    return all(library_file(folder, name) for name in _NEEDED)


def package_of(cache: Path, folder: Path) -> Path:
    """The package that loads the libraries in `folder`, made if it is not there. StoreError, DeviceError."""
    entry = cache / _key(folder)
    package = entry / "ggml"
    if not package.exists():
        try:
            _make_package(entry, folder)
        except OSError as error:
            raise StoreError(f"{entry} could not be written: {error}") from error
    return package


def _make_package(entry: Path, folder: Path) -> None:
    """Under another name first: a second process that starts now sees all of it or nothing."""
    entry.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = Path(tempfile.mkdtemp(dir=entry, prefix="draft-"))
    try:
        for name in _BINDINGS:
            shutil.copy(built_in_package() / name, draft / name)
        (draft / "lib").symlink_to(folder, target_is_directory=True)
        draft.rename(entry / "ggml")
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
        if not (entry / "ggml").exists():  # else another process was faster
            raise


def verdict_on(cache: Path, folder: Path, *, only_newer: bool = False) -> Verdict:
    """The kept verdict, or that of a check made now in other processes: 2 to 5 seconds.

    A refusal names the file that keeps it. DeviceError, of which nothing is kept, if there are no libraries or the
    check ended without saying anything about them (`try_library`); StoreError.
    """
    if not has_libraries(folder):
        missing = ", ".join(f"lib{name}" for name in _NEEDED if library_file(folder, name) is None)
        raise DeviceError(f"it does not hold {missing} as shared libraries")
    kept = cache / _key(folder) / (_VERDICT_NEWER if only_newer else _VERDICT)
    with suppress(OSError):  # it is not there yet
        os.utime(kept.parent)  # in use
    verdict = _read(kept)
    if verdict is None:
        verdict = _check(package_of(cache, folder), only_newer)
        _write(kept, verdict)
        _tidy(kept.parent, folder)
    if not verdict.refused:
        return verdict
    return replace(verdict, refused=f"{verdict.refused} (to check it again, delete {kept})")


def _check(package: Path, only_newer: bool) -> Verdict:
    try:
        ours = try_library(built_in_package())
    except DeviceError as error:
        raise DeviceError(f"the built-in libggml could not be checked: {error}") from error
    if ours.refused:
        raise DeviceError(f"the built-in libggml does not pass the check: {ours.refused}")
    theirs = try_library(package, newer_than=ours.version if only_newer else "")
    if theirs.older or theirs.refused:
        return Verdict(theirs.version, theirs.refused, theirs.older)
    found = difference(ours.numbers, theirs.numbers)
    if found:
        return Verdict(
            theirs.version, f"ggml {theirs.version} computes other numbers than {ours.version}: {found}"
        )
    return Verdict(theirs.version, inexact="" if ours.inexact else theirs.inexact)


def _key(folder: Path) -> str:
    """DeviceError if a folder cannot be read."""
    try:
        facts = _facts(folder)
    except OSError as error:
        raise DeviceError(f"the libraries cannot be read: {error}") from error
    place = (platform.node(), sys.version_info[:2], str(built_in_package()), str(folder))
    return f"{_hash(place)[:12]}-{_hash((CHECK_VERSION, facts))[:24]}"


def _hash(facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _facts(folder: Path) -> list[tuple[str, int, int]]:
    package = built_in_package()
    files = [package / name for name in _BINDINGS]
    files += sorted(path for path in (package / "lib").iterdir() if path.is_file())
    files += sorted(path for path in folder.iterdir() if path.is_file() and "ggml" in path.name)
    status = [(path, path.stat()) for path in files]
    return [(str(path), found.st_size, found.st_mtime_ns) for path, found in status]


def _read(path: Path) -> Verdict | None:
    """None also for a file that is not a verdict: then the check is made again."""
    try:
        return Verdict(**checked(json.loads(read_small(path, _MAX_VERDICT_BYTES)), Verdict))
    except (OSError, ValueError, TypeError):
        return None


def _write(path: Path, verdict: Verdict) -> None:
    try:
        replace_small(path, json.dumps(asdict(verdict)).encode(), sync=False)
    except OSError as error:
        raise StoreError(f"{path} could not be written: {error}") from error


def _tidy(entry: Path, folder: Path) -> None:
    """Remove entries that this one replaces, and what processes left behind that died. What cannot be removed stays."""
    with suppress(OSError):
        now_s = (
            entry.stat().st_mtime
        )  # just written to; by the file system's clock, which may be another machine's
        for path in [*entry.parent.iterdir(), *entry.iterdir()]:
            with suppress(OSError):  # another process was faster
                if _is_left_over(path, entry, folder, now_s - path.stat().st_mtime > UNUSED_S):
                    _remove(path)


def _is_left_over(path: Path, entry: Path, folder: Path, is_unused: bool) -> bool:
    if path.parent == entry:
        return is_unused and path.name not in _KEPT
    if path == entry:
        return False
    if path.name.startswith(f"{entry.name.partition('-')[0]}-"):
        return True
    link = path / "ggml" / "lib"
    return is_unused and (path.name.startswith(_GONE) or not link.exists() or link.samefile(folder))


def _remove(path: Path) -> None:
    """At once, for whoever looks: a node that starts finds a whole entry or none."""
    gone = path.with_name(f"{_GONE}{path.name}-{os.getpid()}")
    path.rename(gone)
    if gone.is_dir():
        shutil.rmtree(gone, ignore_errors=True)
    else:
        gone.unlink()
