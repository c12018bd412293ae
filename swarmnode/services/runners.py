"""Where blocking work runs: `ComputeGate` on the thread that owns ggml, `Threads` on any other, `Inline` right here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import trio

from swarmnode.compute.thread import ComputeThread

T = TypeVar("T")


class Runner(Protocol):
    """Something that runs blocking functions for trio tasks."""

    async def run(self, function: Callable[[], T]) -> T:
        """Run `function` and return its result; whatever it raises is raised here."""
        ...


class ComputeGate:
    """Runs functions on a `ComputeThread`, one at a time, in the order of asking.

    A call cannot be cancelled once it has begun: ggml cannot be interrupted and the memory it writes must stay.
    Calls are short (one graph, one prefill chunk), and cancellation is seen right after.
    """

    def __init__(self, thread: ComputeThread) -> None:
        self._thread = thread

    async def run(self, function: Callable[[], T]) -> T:
        token = trio.lowlevel.current_trio_token()
        task = trio.lowlevel.current_task()
        outcome: list[T | BaseException] = []

        def done(result: T | BaseException) -> None:
            outcome.append(result)
            token.run_sync_soon(trio.lowlevel.reschedule, task)

        await trio.lowlevel.checkpoint_if_cancelled()
        self._thread.submit(function, on_done=done)
        # Not abortable: see the class docstring.
        await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)
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
