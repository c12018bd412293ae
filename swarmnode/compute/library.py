"""Which libggml this process computes with: the built-in one, SWARMNODE_GGML_LIB's, or llama-cpp-python's.

ggml-python loads the libraries from the folder `lib` beside its own file, and nothing else can be told to it. So
another library gets a package of its own in the cache folder (library_store.py): copies of the two Python files, and
`lib` as a link to the other folder. It is imported only after another process has tried it (library_check.py):
a wrong struct or enum ends in an abort or in other people's memory, never in an exception.

Nothing here imports ggml; `ggml.py` asks here before it does.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from swarmnode.compute.library_store import built_in_package, has_libraries, package_of, verdict_on
from swarmnode.compute.library_trial import Verdict
from swarmnode.config import Folders
from swarmnode.errors import DeviceError, LocalError

VARIABLE = "SWARMNODE_GGML_LIB"
BUILT_IN = "builtin"
"""The variable's value that also keeps llama-cpp-python's library away."""
LLAMA_CPP = "llama-cpp-python"

_log = logging.getLogger("swarmnode.ggml")


@dataclass(frozen=True)
class Library:
    """The library chosen, and why."""

    origin: str
    """'built in', 'SWARMNODE_GGML_LIB' or 'llama-cpp-python'."""
    folder: Path
    """Where the shared libraries are."""
    package: Path
    """Folder of the package `ggml` that loads them."""
    inexact: str = ""
    """What is not bit-exact with it though it is with the built-in one; empty if nothing is."""
    passed_over: str = ""
    """Why the library that was found automatically is not used; empty if there is none or it is the one."""


def built_in() -> Library:
    """The library that came with ggml-python; DeviceError if ggml-python is not installed."""
    package = built_in_package()
    return Library("built in", package / "lib", package)


_chosen: Library | None = None


def chosen() -> Library:
    """Choose, once in a process. DeviceError if SWARMNODE_GGML_LIB names a library that cannot be used."""
    if _chosen is None:
        use(choose())
    assert _chosen is not None
    return _chosen


def use(library: Library) -> None:
    """Take this one, unchecked; it does nothing once `ggml.py` is imported. For the check itself."""
    global _chosen
    _chosen = library


def choose() -> Library:
    """What the environment and the installed packages lead to. DeviceError as `chosen`; may take seconds."""
    wanted = os.environ.get(VARIABLE, "").strip()
    if wanted == BUILT_IN:
        return built_in()
    if wanted:
        return _explicit(_folder(wanted))
    found = _llama_cpp_folder()
    return built_in() if found is None else _automatic(found)


@contextmanager
def importable(library: Library) -> Iterator[None]:
    """Within it `import ggml` finds that library's package. DeviceError if another was imported before."""
    loaded = sys.modules.get("ggml")
    if loaded is not None and Path(loaded.__file__ or "").parent != library.package:
        raise DeviceError(f"ggml was imported from {loaded.__file__} before {library.folder} could be chosen")
    place = str(library.package.parent)
    sys.path.insert(0, place)
    try:
        yield
    finally:
        sys.path.remove(place)


def _folder(wanted: str) -> Path:
    try:
        return Path(wanted).expanduser().absolute()
    except (RuntimeError, OSError) as error:  # no such user; no current folder any more
        raise DeviceError(f"{VARIABLE}={wanted}: {error}; give the folder's full path") from error


def _explicit(folder: Path) -> Library:
    try:
        verdict = verdict_on(_cache(), folder)
        if verdict.refused:
            raise DeviceError(f"this libggml cannot be used: {verdict.refused}")
        package = package_of(_cache(), folder)
    except LocalError as error:
        raise DeviceError(f"{VARIABLE}={folder}: {error}") from error
    if not verdict.inexact:
        return Library(VARIABLE, folder, package)
    inexact = _inexact(verdict)
    _log.warning("%s=%s: %s", VARIABLE, folder, inexact)
    return Library(VARIABLE, folder, package, inexact)


def _inexact(verdict: Verdict) -> str:
    return (
        f"ggml {verdict.version} computes a row of {verdict.inexact} experts differently in batches of other sizes: "
        "--exact is then not exact to the last bits"
    )


def _automatic(folder: Path) -> Library:
    """llama-cpp-python's library if it is newer and fits; otherwise the built-in one, after one warning.

    Nobody asked for it, so it must also keep the promise of bit-equal answers.
    """
    try:
        verdict = verdict_on(_cache(), folder, only_newer=True)
        if not (verdict.refused or verdict.older or verdict.inexact):
            return Library(LLAMA_CPP, folder, package_of(_cache(), folder))
    except LocalError as error:
        verdict = Verdict(refused=str(error))
    if verdict.older:
        return built_in()
    reason = f"libggml of {LLAMA_CPP} ({folder}) is not used: {verdict.refused or _inexact(verdict)}"
    _log.warning("%s; computing with the built-in one (%s=%s: no warning)", reason, VARIABLE, BUILT_IN)
    return replace(built_in(), passed_over=reason)


def _cache() -> Path:
    """`--home` is not known yet when ggml is imported; the variable SWARMNODE_HOME is."""
    home = os.environ.get("SWARMNODE_HOME")
    return Folders.under(Path(home) if home else None).cache.absolute() / "ggml"


def _llama_cpp_folder() -> Path | None:
    """`lib` of an installed llama-cpp-python that has shared libraries; the package is not imported."""
    spec = importlib.util.find_spec("llama_cpp")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        if has_libraries(Path(place) / "lib"):
            return Path(place) / "lib"
    return None
