"""Slots for all experts of a shape in one stacked tensor: address space now, memory as slots are filled.

The system promises pages when address space is reserved, and gives them when they are first written. So one tensor
has a slot for every expert that the budget could pay for, whatever the order in which they come, and the pages of an
expert that goes are given back from the middle of it. Any pairs of experts of one range are one graph.

Linux takes the pages back at once. Other systems have nothing like it that Python could call: with MADV_FREE their
pages are free for whoever needs memory, but until somebody does they count as the process's (macOS, FreeBSD).
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from swarmnode.compute.layout import LayerLayout
from swarmnode.compute.slots import Segment
from swarmnode.compute.tensors import bind_host_memory
from swarmnode.errors import DeviceError
from swarmnode.state_file import read_small

try:
    import resource
except ImportError:  # Windows
    LIMITS: tuple[int, ...] = ()
else:
    LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA)

OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_NEVER = b"2"
"""Address space counts as memory, used or not."""

_IS_LINUX = sys.platform in ("linux", "android")
_LINUX_NORESERVE = 0x4000
"""On every processor that ggml has kernels for; Python knows the name since 3.13."""
_GIVE_BACK: int | None = getattr(mmap, "MADV_DONTNEED" if _IS_LINUX else "MADV_FREE", None)


def can_reserve() -> bool:
    """Whether address space costs nothing here, and pages in the middle of it can be given back.

    Not where something bounds it: what a range took, other parts of the process could not have.
    """
    if _GIVE_BACK is None or not hasattr(mmap.mmap, "madvise") or sys.maxsize < 2**32:
        return False
    if any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in LIMITS):
        return False
    try:
        return read_small(OVERCOMMIT, 16).strip() != _NEVER
    except OSError:  # only Linux has it
        return True


class SlotRange(Segment):
    """A segment whose slots take memory only while there is an expert in them, to the page."""

    def __init__(self, layout: LayerLayout, capacity: int) -> None:
        """DeviceError if the system has no address space for so many."""
        super().__init__(layout, capacity)
        self._maps: list[mmap.mmap] = []
        self._unmap = weakref.finalize(self.arena, _close_all, self._maps)  # graphs keep the arena, not this
        self._unmap.atexit = False  # the compute thread may still be at it
        try:
            for tensor in self.tensors:
                self._maps.append(_reserved(tensor.n_bytes))
                bind_host_memory(self.arena, tensor, _address(self._maps[-1]))
        except OSError as error:
            self.close()
            raise DeviceError(f"no address space for {capacity} experts: {error}") from error
        self.free = list(range(capacity))[::-1]

    def release(self, slot: int) -> None:
        """Free a taken slot and give its pages back, those on its edges too if nobody else has a part of them."""
        self.free.append(slot)
        self.free.sort(reverse=True)  # the lowest goes first: neighbours share the pages on their edges
        free = set(self.free)
        first, end = slot, slot + 1
        while first - 1 in free:
            first -= 1
        while end in free:
            end += 1
        for pages, n_bytes in zip(self._maps, self.slab_bytes, strict=True):
            start = max(_floor(slot * n_bytes), _ceil(first * n_bytes))
            last = len(pages) if end == self.capacity else _floor(end * n_bytes)
            stop = min(_ceil((slot + 1) * n_bytes), last)
            if start < stop:
                _give_back(pages, start, stop)

    def close(self) -> None:
        """Free the tensors, then what they point to."""
        super().close()
        self._unmap()


def _reserved(n_bytes: int) -> mmap.mmap:
    """Private memory, whole pages of zeros, none of them there yet. OSError."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    # Without it Linux refuses more in one piece than the machine has, which the budget bounds well enough.
    flags |= getattr(mmap, "MAP_NORESERVE", _LINUX_NORESERVE if _IS_LINUX else 0)
    pages = mmap.mmap(-1, _ceil(n_bytes), flags=flags)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            # Of 2 MiB at a time, a taken slot would keep much of its free neighbours, and bring it back.
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return pages


def _address(pages: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(pages))


def _give_back(pages: mmap.mmap, start: int, stop: int) -> None:
    if _GIVE_BACK is not None:
        with suppress(OSError):  # a process whose memory is locked (mlockall) keeps it
            pages.madvise(_GIVE_BACK, start, stop - start)


def _close_all(maps: Sequence[mmap.mmap]) -> None:
    for pages in maps:
        pages.close()


def _floor(n_bytes: int) -> int:
    return n_bytes - n_bytes % mmap.PAGESIZE


def _ceil(n_bytes: int) -> int:
    return _floor(n_bytes + mmap.PAGESIZE - 1)
