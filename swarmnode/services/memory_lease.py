"""One account of memory for all workers of a machine: two of them must not both count on the same free RAM.

A lease is an empty file whose name says how many bytes of which device, locked as long as its process lives; so a crash
gives it back. The folder is the user's, whatever `--home` a node has, and the machine's: cache folders may be shared.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import platformdirs

from swarmnode.errors import BudgetError
from swarmnode.weights.file_lock import try_lock

log = logging.getLogger(__name__)


def lease_folder() -> Path:
    """Where this user's leases are on this machine."""
    machine = hashlib.sha256(platform.node().encode()).hexdigest()[:16]
    return platformdirs.user_cache_path("swarmnode", appauthor=False) / "memory" / machine


@contextmanager
def memory_lease(folder: Path, device: str, n_bytes: int, total_bytes: int) -> Iterator[None]:
    """Hold `n_bytes` of a device that has `total_bytes` (0: unknown, nothing is checked).

    Blocks, up to a second where other processes look as well: enter it before anything is served. Raises BudgetError if
    leases of other processes leave less than that (what one process alone may ask for is for others to say). A folder
    that cannot be used costs a warning: the account is a help.
    """
    taken: tuple[int, Path] | None = None
    try:
        taken = _take(folder, device, n_bytes, total_bytes)
    except OSError as error:
        log.warning("%s: no account of this machine's memory is kept: %s", folder, error.strerror)
    try:
        yield
    finally:
        if taken is not None:
            _give_back(*taken)


def _take(folder: Path, device: str, n_bytes: int, total_bytes: int) -> tuple[int, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    with _only_one(folder):
        taken = _taken_bytes(folder, device)
        if taken and 0 < total_bytes < taken + n_bytes:
            raise BudgetError(
                f"other workers on this machine may use {taken / 1e6:.1f} MB of the {total_bytes / 1e6:.1f} MB "
                f"of {device}, so a budget of {n_bytes / 1e6:.1f} MB does not fit; give a smaller --budget"
            )
        path = folder / f"{n_bytes}-{_plain(device)}-{os.urandom(4).hex()}.lease"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try_lock(descriptor)
        return descriptor, path


def _give_back(descriptor: int, path: Path) -> None:
    with suppress(OSError):  # Windows deletes no open file; an unlocked lease is deleted by the next process
        path.unlink()
    os.close(descriptor)


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Processes that start at once look one after the other. One that does not get its turn within a second goes on:
    the account is there to warn of a mistake, and a stopped process must not keep others from starting."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        for _ in range(100):
            if try_lock(descriptor):
                break
            time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def _taken_bytes(folder: Path, device: str) -> int:
    """Bytes of the leases of living processes on this device; those of dead ones are deleted."""
    taken = 0
    for path in folder.glob("*.lease"):
        size, _, rest = path.stem.partition("-")
        if _is_alive(path) and size.isdigit() and rest.rpartition("-")[0] == _plain(device):
            taken += int(size)
    return taken


def _is_alive(path: Path) -> bool:
    """Whether the process that made the lease lives; if not, it is deleted."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        if not try_lock(descriptor):
            return True
    except OSError:
        return True
    finally:
        os.close(descriptor)
    with suppress(OSError):
        path.unlink()
    return False


def _plain(device: str) -> str:
    """A device's name as part of a file's name."""
    return re.sub(r"[^A-Za-z0-9]", "_", device)[:64]
