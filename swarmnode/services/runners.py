"""Where blocking work runs: `ComputeGate` on the thread that owns ggml, `Threads` on any other, `Inline` right here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import trio

from swarmnode.compute.thread import ComputeThread

T = TypeVar("T")


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

    async def run(self, function: Callable[[], T]) -> T:
        """See Runner."""
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
