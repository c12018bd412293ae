"""Files in the cache folder: they appear whole or not at all, and trouble names the folder and what to do."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swarmnode.errors import StoreError

PARTIAL_SUFFIX = ".partial"
"""Of a file that is being written; whoever finds one after a crash may delete it."""

CAN_SYNC_FOLDERS = os.name == "posix"
"""Windows opens no folder as a file; NTFS journals a rename by itself."""


def store_error(folder: Path, error: OSError) -> StoreError:
    """The error for a cache folder in which something failed."""
    reason = error.strerror or str(error)
    return StoreError(
        f"{folder}: the cache folder cannot be used: {reason}; free space or choose another: --home DIR"
    )


def make_folder(folder: Path) -> None:
    """Create the folder if need be and try that files can be created in it. Raises StoreError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = _partial(folder / "probe")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise store_error(folder, error) from error


@contextmanager
def replacing(path: Path, *, sync: bool = True) -> Iterator[Path]:
    """Yields a path to write to; leaving the block makes that file, synced to disk, appear as `path` at once.

    Without `sync` that holds for a process that dies, not for a power cut. If the block raises, nothing is left.
    OSErrors (disk full, read-only, broken) become StoreErrors.
    """
    partial = _partial(path)
    try:
        try:
            yield partial
            if sync:
                _sync(partial)
            os.replace(partial, path)
            if sync and CAN_SYNC_FOLDERS:
                _sync_folder(path.parent)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise store_error(path.parent, error) from error


def _partial(path: Path) -> Path:
    """A name no other thread or process uses."""
    return path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}{PARTIAL_SUFFIX}")


def _sync(path: Path) -> None:
    with path.open("r+b") as file:  # Windows flushes only what may be written
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """Make a rename in it survive a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
