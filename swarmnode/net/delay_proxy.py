"""A link that is slower than this machine's: every chunk of bytes comes out a set time after it went in.

`Link` says how slow, and may be changed while bytes travel; `join` ties two streams together through it; a
`DelayedTransport` puts it in front of everything that it listens on. Bytes are neither looked at nor lost nor put in
another order. What is under way is bounded: whoever sends more waits, as for a kernel's full buffer.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import trio

from swarmnode.config import KIB, MIB
from swarmnode.net.tcp import BACKLOG, TcpStream, TcpTransport
from swarmnode.net.transport import StreamHandler

LOOPBACK = "127.0.0.1"
READ_BYTES = 256 * KIB
WINDOW_BYTES = 8 * MIB
"""Under way in one direction: 400 MB/s at 20 ms one way, more than a sealed stream of two processes here sends."""


@dataclass
class Link:
    """How long bytes take, one way: half of the RTT."""

    delay_s: float = 0.0
    bytes_per_s: float | None = None
    """None: as fast as they come."""

    def set_rtt_ms(self, rtt_ms: float) -> None:
        """What goes in from now on takes half of it each way; it does not overtake what is under way."""
        self.delay_s = rtt_ms / 2e3


class _Way:
    """One direction: what is under way, and when it is due."""

    def __init__(self, link: Link, window_bytes: int) -> None:
        self._link = link
        self._window_bytes = window_bytes
        self._chunks: deque[tuple[float, bytes | bytearray]] = deque()
        """(when it is due, the bytes); no bytes: the sender's end."""
        self._n_bytes = 0
        self._free_s = 0.0
        """When the last byte that came has left the sender's side, at the link's rate."""
        self._due_s = 0.0
        self._changed = trio.lowlevel.ParkingLot()

    async def take(self, source: trio.abc.ReceiveStream) -> None:
        """Read until the source has ended, no more than the window holds. Raises what the source raises."""
        data: bytes | bytearray = b"first"
        while data:
            while self._n_bytes >= self._window_bytes:
                await self._changed.park()
            data = await source.receive_some(min(READ_BYTES, self._window_bytes - self._n_bytes))
            self._chunks.append((self._due(len(data)), data))
            self._n_bytes += len(data)
            self._changed.unpark_all()

    def _due(self, n_bytes: int) -> float:
        now_s = trio.current_time()
        self._free_s = max(self._free_s, now_s)
        if self._link.bytes_per_s is not None:
            self._free_s += n_bytes / self._link.bytes_per_s
        self._due_s = max(self._due_s, self._free_s + self._link.delay_s)
        return self._due_s

    async def give(self, sink: trio.abc.HalfCloseableStream) -> None:
        """Write what is due, and at last the end. Raises what the sink raises."""
        while True:
            while not self._chunks:
                await self._changed.park()
            due_s, data = self._chunks[0]
            await trio.sleep_until(due_s)
            if not data:
                await sink.send_eof()
                return
            await sink.send_all(data)
            self._chunks.popleft()  # only now: what the sink does not take yet counts as under way
            self._n_bytes -= len(data)
            self._changed.unpark_all()


async def join(
    one: trio.abc.HalfCloseableStream,
    other: trio.abc.HalfCloseableStream,
    link: Link,
    window_bytes: int = WINDOW_BYTES,
) -> None:
    """Carry bytes both ways until both ends have ended theirs; then close both streams.

    An end of one direction arrives like bytes and leaves the other direction open. When a stream breaks both are
    closed at once. Raises nothing of theirs.
    """
    there, back = _Way(link, window_bytes), _Way(link, window_bytes)
    try:
        async with one, other, trio.open_nursery() as nursery:
            nursery.start_soon(there.take, one)
            nursery.start_soon(there.give, other)
            nursery.start_soon(back.take, other)
            nursery.start_soon(back.give, one)
    except* (trio.BrokenResourceError, trio.ClosedResourceError):
        pass


class DelayedTransport:
    """TCP on this machine, listening behind the link: nobody learns of an address that goes around it.

    What it dials itself is not delayed.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._tcp = TcpTransport()

    async def connect(self, host: str, port: int) -> TcpStream:
        """See Transport."""
        return await self._tcp.connect(host, port)

    async def listen(
        self,
        handler: StreamHandler,
        host: str | None,
        port: int,
        *,
        task_status: trio.TaskStatus[list[tuple[str, int]]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """See Transport; the places told are the proxy's."""
        listeners = await trio.open_tcp_listeners(port, host=host, backlog=BACKLOG)
        async with trio.open_nursery() as nursery:
            inner = await nursery.start(partial(self._tcp.listen, handler, LOOPBACK, 0))
            accepted = partial(self._accepted, inner[0][1])
            await nursery.start(partial(trio.serve_listeners, accepted, listeners))
            task_status.started([listener.socket.getsockname()[:2] for listener in listeners])

    async def _accepted(self, port: int, outer: trio.SocketStream) -> None:
        with suppress(OSError):
            inner = await trio.open_tcp_stream(LOOPBACK, port)
            await join(outer, inner, self._link)
