"""Where blocking work runs: `ComputeGate` on the thread that owns ggml, `Threads` on any other, `Inline` right here.

What is brief may run right here, too: a hop to another thread and back takes as long as the experts of some layers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import trio

from swarmnode.compute.thread import ComputeThread

T = TypeVar("T")


BRIEF_S = 0.01
"""What is expected to take less is brief: for so long a node may be deaf, which is less than a round on most ways."""


class Brief(Generic[T]):
    """A function that is expected to take less than BRIEF_S."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function

    def __call__(self) -> T:
        return self._function()


class Runner(Protocol):
    """Something that runs blocking functions for trio tasks."""

    async def run(self, function: Callable[[], T]) -> T:
        """Run `function` and return its result; whatever it raises is raised here."""
        ...


class _Job:
    """A function on its way to the compute thread: begun there, or dropped before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = False
        self.dropped = False

    def begin(self) -> bool:
        """From the compute thread: False if the job was dropped."""
        with self._lock:
            self._begun = not self.dropped
            return self._begun

    def drop(self) -> bool:
        """From trio: False if the job has begun."""
        with self._lock:
            self.dropped = not self._begun
            return self.dropped


class ComputeGate:
    """Runs functions on a `ComputeThread`, one at a time, in the order of asking.

    A function that is cancelled while it waits never runs. One that has begun cannot be cancelled: ggml cannot be
    interrupted, and the memory it writes must stay. Functions are short (one graph, one layer of a prompt), and
    cancellation is seen right after.
    """

    def __init__(self, thread: ComputeThread) -> None:
        self._thread = thread
        self._n_jobs = 0
        self.may_stand_in = False
        """Whether trio's thread may compute what is brief while the other one has nothing to do."""

    async def run(self, function: Callable[[], T]) -> T:
        """See Runner. What is brief and need not wait has no checkpoint unless it is cancelled already."""
        if self.may_stand_in and not self._n_jobs and isinstance(function, Brief):
            await trio.lowlevel.checkpoint_if_cancelled()
            here: list[T] = []
            if self._ran_here(function, here):
                return here.pop()
        self._n_jobs += 1
        try:
            return await self._run_there(function)
        finally:
            self._n_jobs -= 1

    @trio.lowlevel.enable_ki_protection  # Ctrl-C waits for the next checkpoint: the right is given back before that
    def _ran_here(self, function: Callable[[], T], result: list[T]) -> bool:
        with self._thread.stand_in() as is_free:
            if is_free:
                result.append(function())
        return is_free

    async def _run_there(self, function: Callable[[], T]) -> T:
        token = trio.lowlevel.current_trio_token()
        task = trio.lowlevel.current_task()
        job = _Job()
        outcome: list[T | BaseException] = []

        def guarded() -> T | None:
            return function() if job.begin() else None

        def done(result: Any) -> None:
            if not job.dropped:
                outcome.append(result)
                token.run_sync_soon(trio.lowlevel.reschedule, task)

        def abort(_: Any) -> trio.lowlevel.Abort:
            return trio.lowlevel.Abort.SUCCEEDED if job.drop() else trio.lowlevel.Abort.FAILED

        await trio.lowlevel.checkpoint_if_cancelled()
        self._thread.submit(guarded, on_done=done)
        await trio.lowlevel.wait_task_rescheduled(abort)
        result = outcome.pop()
        if isinstance(result, BaseException):
            raise result
        return result


class Threads:
    """Runs functions on trio's worker threads: disk and hashing, never ggml. A call that has begun runs to its end.

    At most `at_once` of them; each thread that ever ran holds 8 MiB of address space for its stack.
    """

    def __init__(self, at_once: int = 40) -> None:
        self._limiter = trio.CapacityLimiter(at_once)

    async def run(self, function: Callable[[], T]) -> T:
        """See Runner."""
        return await trio.to_thread.run_sync(function, limiter=self._limiter)


class Inline:
    """Runs functions right where they are called: for tests on a mock clock.

    The mock clock cannot see work in other threads and would jump over every deadline meanwhile.
    """

    async def run(self, function: Callable[[], T]) -> T:
        """See Runner."""
        await trio.lowlevel.checkpoint()
        return function()
