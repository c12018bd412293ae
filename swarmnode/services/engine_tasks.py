"""Where the engine's answers and steps run: tasks of one nursery, which anybody may start without waiting."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

import trio

from swarmnode.errors import EngineStoppedError

Task: TypeAlias = Callable[[], Awaitable[None]]


class EngineTasks:
    """Runs what is started until `run` is cancelled.

    Not a queue that a task reads: when all is cancelled that task ends at once, and what others put in meanwhile would
    never begin, nor end. Tasks of a cancelled nursery still run to their first wait, and can tell who waits for them.
    """

    def __init__(self) -> None:
        self._start_soon: Callable[[Task], None] | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled, and until all tasks have ended then."""
        try:
            async with trio.open_nursery() as nursery:
                self._start_soon = nursery.start_soon
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._start_soon = None

    def start(self, task: Task) -> None:
        """Run it as a task. EngineStoppedError if `run` does not run, or has just ended."""
        if self._start_soon is None:
            raise EngineStoppedError
        try:
            self._start_soon(task)
        except RuntimeError:  # the nursery is closed, and `run` has not gone on yet
            raise EngineStoppedError from None
