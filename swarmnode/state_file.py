"""Small files that a node keeps for itself: read without waiting, replaced whole. Below all rooms: OSErrors go out.

What stands at such a path is not always what was written there: a pipe that nobody writes to, a link to a device
without an end, a file that somebody else has filled. None of them may hold up the thread that all of a node runs on.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path

_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
"""To open a pipe without O_NONBLOCK is to wait until somebody writes to it; Windows has neither."""


def read_small(path: Path, max_bytes: int) -> bytes:
    """All of a regular file of up to `max_bytes`. OSError, with `strerror` set, for everything else."""
    data, _ = _read(path, max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"over {max_bytes} bytes", str(path))
    return data


def read_private(path: Path, max_bytes: int) -> tuple[bytes, bool]:
    """The first `max_bytes` of a regular file, and whether only its owner may read it. OSError as `read_small`.

    True where files have no such modes. A secret says itself where it ends: in a longer file is another thing.
    """
    data, mode = _read(path, max_bytes)
    return data, os.name != "posix" or not mode & 0o077


def replace_small(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Write a file that only its owner may read: whoever looks, or crashes, sees the old or the new one. OSError.

    What stood there is replaced, not written through: a link, a pipe. Without `sync` a power cut may leave nothing.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def create_small(path: Path, data: bytes) -> None:
    """Write a file that only its owner may read, unless somebody else was first: that one stays. Whoever looks sees
    none or all of it. OSError.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=path.name, dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        _publish(Path(temporary), path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _publish(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        return
    except OSError:  # some phones' file systems have no hard links
        temporary.rename(path)


def _read(path: Path, max_bytes: int) -> tuple[bytes, int]:
    descriptor = os.open(path, _FLAGS)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        data = b""
        while piece := os.read(descriptor, max_bytes - len(data)):
            data += piece
    finally:
        os.close(descriptor)
    return data, mode
