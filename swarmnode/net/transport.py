"""What carries bytes between two nodes: TCP, a relay, or the memory network of the tests. Each is one of these."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeAlias

import trio

StreamHandler: TypeAlias = Callable[[trio.abc.Stream, str], Awaitable[None]]
"""Called in its own task with an accepted stream and the address (without port) it came from. Must not raise."""


class SendsNow(Protocol):
    """A stream that can also send without waiting, which saves the writer task a wake-up for each short message."""

    def send_now(self, data: bytes | bytearray | memoryview) -> int:
        """Hand over what fits at once, 0 bytes if nothing does; never while a `send_all` is under way. Does not raise:
        a broken stream takes 0 bytes, and the next `send_all` says so."""
        ...


class Transport(Protocol):
    """Opens and accepts streams. Knows nothing of keys: what goes through it is sealed end to end."""

    async def connect(self, host: str, port: int) -> trio.abc.Stream:
        """A stream to a listener. Raises OSError."""
        ...

    async def listen(
        self,
        handler: StreamHandler,
        host: str | None,
        port: int,
        *,
        task_status: trio.TaskStatus[list[tuple[str, int]]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Accept until cancelled; tells the addresses listened on. Raises OSError if it cannot listen.

        `host` None: all interfaces; `port` 0: any free one.
        """
        ...
