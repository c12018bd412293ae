"""An exclusive lock on an open file that the system drops when the process ends, on POSIX and on Windows."""

from __future__ import annotations

import sys

if sys.platform == "win32":
    import msvcrt

    def try_lock(descriptor: int) -> bool:
        """Lock without waiting; False if another process has it. OSError for anything else."""
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except PermissionError:
            return False
        return True

    def wait_lock(descriptor: int) -> None:
        """Lock once no other process has it; OSError if that takes more than ten seconds, and for anything else."""
        msvcrt.locking(descriptor, msvcrt.LK_LOCK, 1)

else:
    import fcntl

    def try_lock(descriptor: int) -> bool:
        """Lock without waiting; False if another process has it. OSError for anything else."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def wait_lock(descriptor: int) -> None:
        """Lock once no other process has it. OSError for anything else."""
        fcntl.flock(descriptor, fcntl.LOCK_EX)
