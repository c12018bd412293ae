"""A job queue under test: jobs that only leave their names, and a runner that computes when it is told to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import trio
import trio.testing

from swarmnode.config import ServeConfig
from swarmnode.services.job_queue import Computed, JobQueue

T = TypeVar("T")
QUEUE_CONFIG = ServeConfig(max_queued_pairs=1000, small_pairs=64, small_before_large=3)


class Held:
    """A runner that computes one batch whenever `step` is called, and would notice a second one beside it."""

    def __init__(self) -> None:
        self._may_go, self._go = trio.open_memory_channel[None](100)
        self._running = False

    async def run(self, function: Callable[[], T]) -> T:
        assert not self._running, "one at a time"
        self._running = True
        try:
            await self._go.receive()
            return function()
        finally:
            self._running = False

    async def step(self, n_batches: int = 1) -> None:
        for _ in range(n_batches):
            self._may_go.send_nowait(None)
            await trio.testing.wait_all_tasks_blocked()


@dataclass(frozen=True, eq=False)
class NamedJob:
    """Its result is its name. `act` is called when it is computed. Without a layer it is in nobody's company."""

    name: str
    n_pairs: int
    act: Callable[[], object] = int
    layer: int | None = None
    urgent: bool | None = None
    """None: if it is small."""

    @property
    def is_urgent(self) -> bool:
        return self.n_pairs <= QUEUE_CONFIG.small_pairs if self.urgent is None else self.urgent

    @property
    def width(self) -> int:
        return self.n_pairs

    @property
    def group(self) -> object:
        return self if self.layer is None else self.layer


class Names:
    """Batches of named jobs: a ValueError is the job's own, others end the batch."""

    max_width = 64

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    def run(self, jobs: Sequence[NamedJob]) -> list[str | Exception]:
        outcomes: list[str | Exception] = []
        for job in jobs:
            try:
                job.act()
                outcomes.append(job.name)
            except ValueError as error:
                outcomes.append(error)
        self.batches.append([job.name for job in jobs])
        return outcomes


class Bench:
    """A queue whose jobs leave their names in `done` and, by batch, in `batches`."""

    def __init__(self, config: ServeConfig = QUEUE_CONFIG) -> None:
        self.runner = Held()
        self.names = Names()
        self.queue: JobQueue[NamedJob, str] = JobQueue(self.runner, self.names, config)
        self.computed: dict[str, Computed[str]] = {}

    @property
    def batches(self) -> list[str]:
        """The names of each batch, joined."""
        return ["".join(batch) for batch in self.names.batches]

    @property
    def done(self) -> list[str]:
        """The names of all that were computed, in order."""
        return [name for batch in self.names.batches for name in batch]

    async def job(
        self,
        name: str,
        n_pairs: int,
        owner: str = "me",
        layer: int | None = None,
        urgent: bool | None = None,
    ) -> None:
        job = NamedJob(name, n_pairs, layer=layer, urgent=urgent)
        self.computed[name] = await self.queue.run(owner, job)

    async def start(self, nursery: trio.Nursery, *jobs: tuple[str, int] | tuple[str, int, int]) -> None:
        """Jobs (name, pairs) or (name, pairs, layer), each of another owner."""
        for name, n_pairs, *rest in jobs:
            layer = rest[0] if rest else None
            nursery.start_soon(self.job, name, n_pairs, f"owner of {name}", layer)
            await trio.testing.wait_all_tasks_blocked()
