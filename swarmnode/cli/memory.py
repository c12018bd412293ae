"""Keeps what a process takes from the system close to what it uses: a worker's budget is a promise."""

from __future__ import annotations

import ctypes

from swarmnode.config import KIB, MIB

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

_BLOCK_BYTES = 128 * KIB
"""What glibc begins with: blocks of this size and more are mapped on their own. A worker's rows, slabs and received
blocks (StoreConfig.block_bytes) are; between small objects they left holes of 5 to 10 MB in a heap."""


def return_freed_memory() -> None:
    """Make glibc's malloc give large blocks back as soon as they are freed; call it before threads start.

    By itself it keeps up to 32 MiB of them, for each thread that ever freed one: after a download of 300 MB a worker
    held 25 MB that nobody used. Other C libraries are left as they are.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return
    libc.mallopt(_M_ARENA_MAX, 1)
    libc.mallopt(_M_MMAP_THRESHOLD, _BLOCK_BYTES)  # setting it also ends its growth to 32 MiB
    libc.mallopt(_M_TRIM_THRESHOLD, 2 * MIB)
    trim_heap()


def trim_heap() -> None:
    """Give holes in the heap back to the system: what importing or a download took for a while, 1 to 2 MB."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.malloc_trim(ctypes.c_size_t(0))
