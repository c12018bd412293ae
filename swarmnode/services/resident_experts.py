"""Keeps the most wanted experts in memory: counts what passes choose, and has what enters read before it counts.

schedule/residents.py decides. Without a budget there is nothing to bring in; then this only counts.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import trio

from swarmnode.config import DispatchConfig
from swarmnode.schedule.residents import Residents
from swarmnode.services.runners import Runner
from swarmnode.weights.index import ModelIndex

Experts: TypeAlias = Sequence[tuple[int, int]]
"""(layer, expert)"""
Chosen: TypeAlias = Iterable[tuple[int, npt.NDArray[np.int32]]]
"""(layer, expert ids of any shape)"""


class Pages(Protocol):
    """Where experts are when they are in memory. Blocks: on a helper thread, never the compute thread."""

    def bring(self, experts: Experts) -> None:
        """Have them in memory when this returns."""
        ...

    def drop(self, experts: Experts) -> None:
        """They need not be there any more."""
        ...


class MappedPages:
    """The page cache behind a mapped GGUF."""

    def __init__(self, index: ModelIndex) -> None:
        self._index = index

    def bring(self, experts: Experts) -> None:
        """See Pages. The kernel is told first, so that the disk has more than one read to do at a time."""
        if hasattr(mmap, "MADV_WILLNEED"):
            self._advise(experts, mmap.MADV_WILLNEED)
        for slab in self._slabs(experts):
            int(np.frombuffer(slab, np.uint8)[:: mmap.PAGESIZE].max())

    def drop(self, experts: Experts) -> None:
        """See Pages."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._advise(experts, mmap.MADV_DONTNEED)

    def _advise(self, experts: Experts, advice: int) -> None:
        for layer, expert in experts:
            self._index.advise(layer, expert, advice)

    def _slabs(self, experts: Experts) -> Iterable[memoryview]:
        for layer, expert in experts:
            for kind in self._index.expert_layers[layer].kinds:
                yield self._index.slab(layer, expert, kind)


class ResidentExperts:
    """Trio's thread, but for `Pages`."""

    def __init__(self, residents: Residents, pages: Pages, threads: Runner, config: DispatchConfig) -> None:
        self.residents = residents
        self._pages = pages
        self._threads = threads
        self._config = config
        self._n_counted = 0
        self._due = trio.Event()

    def count(self, chosen: Chosen, fused: Chosen, ends_prompt: bool) -> None:
        """What a pass chose; what of that was computed in its own graph (of the rest, whoever computes it tells
        `Residents`); whether a prompt ended with it, whose answer now begins.
        """
        for layer, ids in chosen:
            self.residents.count(layer, ids)
        for layer, ids in fused:
            self.residents.computed(layer, ids.ravel())
        self._n_counted += 1
        if ends_prompt or self._n_counted >= self._config.replace_passes:
            self._n_counted = 0
            self._due.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Place anew whenever that is due, until cancelled."""
        task_status.started()
        while True:
            await self._due.wait()
            self._due = trio.Event()
            await self.place()

    async def place(self) -> None:
        """Place, read what enters, and only then count on it."""
        placing = self.residents.place()
        if placing is None:
            return
        if placing.enter:
            await self._threads.run(partial(self._pages.bring, placing.enter))
        self.residents.publish(placing)
        if placing.leave:
            await self._threads.run(partial(self._pages.drop, placing.leave))
