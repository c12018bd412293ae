"""A network in memory for tests: hosts by name, latency, partitions, broken connections; exact under a mock clock.

network = MemoryNetwork(latency_s=0.02)
await nursery.start(partial(serve, network.host("a"), ..., host=None, port=1))
peer = await nursery.start(partial(dial, network.host("b"), PeerAddress(id_a, "a", 1), ...))
network.partition({"a"}, {"b"})      # bytes stop, nothing breaks
network.heal()
network.break_all("a")               # every stream of host a breaks, as when a process dies
stream.reset()                       # this one breaks
"""

from __future__ import annotations

import errno
import operator
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import trio

from swarmnode.net.transport import StreamHandler

WINDOW_BYTES = 64 * 1024
"""Bytes in flight one way before `send_all` has to wait, like a kernel's buffers, unless a network has others."""


class _Pipe:
    """One direction of a stream."""

    def __init__(self, network: MemoryNetwork, sender: str, receiver: str) -> None:
        self._network = network
        self._ends = (sender, receiver)
        self._chunks: deque[tuple[float, bytes]] = deque()
        self._n_bytes = 0
        self._changed = trio.lowlevel.ParkingLot()
        self.is_ended = False
        """The sender closed: what is under way still arrives."""
        self.is_broken = False

    def touch(self) -> None:
        self._changed.unpark_all()

    @property
    def has_room(self) -> bool:
        return self._n_bytes < self._network.window_bytes

    async def wait_room(self) -> None:
        while not (self.has_room or self.is_broken or self.is_ended):
            await self._changed.park()

    async def send(self, data: memoryview) -> None:
        while data:
            await self.wait_room()
            if self.is_broken or self.is_ended:
                raise trio.BrokenResourceError("the memory connection is broken")
            chunk = bytes(data[: self._network.window_bytes - self._n_bytes])
            data = data[len(chunk) :]
            self._chunks.append((trio.current_time() + self._network.latency_s, chunk))
            self._n_bytes += len(chunk)
            self.touch()

    async def receive(self, max_bytes: int) -> bytes:
        while True:
            if self.is_broken:
                raise trio.BrokenResourceError("the memory connection is broken")
            if self._network.is_cut(*self._ends):
                await self._changed.park()
            elif self._chunks:
                wait_s = self._chunks[0][0] - trio.current_time()
                if wait_s <= 0:
                    return self._take(max_bytes)
                with trio.move_on_after(wait_s):
                    await self._changed.park()
            elif self.is_ended:
                return b""
            else:
                await self._changed.park()

    def _take(self, max_bytes: int) -> bytes:
        ready_s, chunk = self._chunks.popleft()
        if len(chunk) > max_bytes:
            self._chunks.appendleft((ready_s, chunk[max_bytes:]))
            chunk = chunk[:max_bytes]
        self._n_bytes -= len(chunk)
        self.touch()
        return chunk


class MemoryStream(trio.abc.HalfCloseableStream):
    """One end of a memory connection."""

    def __init__(self, sending: _Pipe, receiving: _Pipe, on_close: Callable[[], None]) -> None:
        self._sending = sending
        self._receiving = receiving
        self._on_close = on_close
        self._is_closed = False
        self._has_sent_eof = False
        self._is_sending = False
        self._is_receiving = False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """See trio.abc.SendStream."""
        self._check_can_send()
        self._is_sending = True
        try:
            await trio.lowlevel.checkpoint()
            await self._sending.send(memoryview(bytes(data)))
        except trio.BrokenResourceError:
            self._check_open(False)
            raise
        finally:
            self._is_sending = False

    async def wait_send_all_might_not_block(self) -> None:
        """See trio.abc.SendStream."""
        self._check_can_send()
        self._is_sending = True
        try:
            await trio.lowlevel.checkpoint()
            await self._sending.wait_room()
            self._check_open(False)
        finally:
            self._is_sending = False

    async def send_eof(self) -> None:
        """See trio.abc.HalfCloseableStream."""
        self._check_open(self._is_sending)
        self._has_sent_eof = self._sending.is_ended = True
        self._sending.touch()
        await trio.lowlevel.checkpoint()

    def reset(self) -> None:
        """Break this connection at once, as a RST does: both ends lose what is under way."""
        for pipe in (self._sending, self._receiving):
            pipe.is_broken = True
            pipe.touch()
        self._close()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """See trio.abc.ReceiveStream."""
        max_bytes = WINDOW_BYTES if max_bytes is None else operator.index(max_bytes)
        if max_bytes < 1:
            raise ValueError("max_bytes must be positive")
        self._check_open(self._is_receiving)
        self._is_receiving = True
        try:
            await trio.lowlevel.checkpoint()
            return await self._receiving.receive(max_bytes)
        except trio.BrokenResourceError:
            self._check_open(False)
            raise
        finally:
            self._is_receiving = False

    async def aclose(self) -> None:
        """Close: the other end reads what is under way, then the end; what it sends breaks."""
        self._close()
        await trio.lowlevel.checkpoint()

    def _close(self) -> None:
        if not self._is_closed:
            self._on_close()
        self._is_closed = True
        self._sending.is_ended = True
        self._receiving.is_broken = True
        self._sending.touch()
        self._receiving.touch()

    def _check_can_send(self) -> None:
        if self._has_sent_eof and not self._is_closed:
            raise trio.ClosedResourceError("this end has said that it sends no more")
        self._check_open(self._is_sending)

    def _check_open(self, is_busy: bool) -> None:
        if self._is_closed:
            raise trio.ClosedResourceError("this end is closed")
        if is_busy:
            raise trio.BusyResourceError("another task is using this end")


@dataclass
class _Link:
    """A connection that at least one end has not closed."""

    ends: tuple[str, str]
    pipes: tuple[_Pipe, _Pipe]
    n_open: int = 2


class MemoryNetwork:
    """Hosts, and what is wrong between them. All randomness comes from `seed`."""

    def __init__(
        self,
        *,
        latency_s: float = 0.0,
        connect_loss: float = 0.0,
        seed: int = 0,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self.latency_s = latency_s
        """One way."""
        self.window_bytes = window_bytes
        self.connect_loss = connect_loss
        """Share of connection attempts that fail."""
        self._random = random.Random(seed)
        self._listeners: dict[tuple[str, int], Callable[[MemoryStream, str], None]] = {}
        self._links: dict[int, _Link] = {}
        self._next_link = 0
        self._cuts: set[frozenset[str]] = set()
        self._next_port = 50_000
        self._healed = trio.lowlevel.ParkingLot()

    def __len__(self) -> int:
        """Connections that at least one end has not closed."""
        return len(self._links)

    def host(self, name: str) -> MemoryHost:
        """The transport of one host."""
        return MemoryHost(self, name)

    def is_cut(self, one: str, other: str) -> bool:
        """Whether bytes between two hosts stand still."""
        return frozenset((one, other)) in self._cuts

    def partition(self, side: Iterable[str], other_side: Iterable[str]) -> None:
        """Stop all bytes between two groups of hosts; streams stay open, new connections hang."""
        others = list(other_side)
        self._cuts |= {frozenset((one, other)) for one in side for other in others}
        self._touch()

    def heal(self) -> None:
        """Let everything through again."""
        self._cuts.clear()
        self._healed.unpark_all()
        self._touch()

    def break_all(self, host: str) -> None:
        """Break every stream of a host, as when its process dies."""
        for link in list(self._links.values()):
            if host in link.ends:
                for pipe in link.pipes:
                    pipe.is_broken = True
                    pipe.touch()

    async def _connect(self, source: str, host: str, port: int) -> MemoryStream:
        await trio.sleep(2 * self.latency_s)
        while self.is_cut(source, host):
            await self._healed.park()
        accept = self._listeners.get((host, port))
        if accept is None or self._random.random() < self.connect_loss:
            raise ConnectionRefusedError(f"nobody listens at {host} port {port}")
        there, back = _Pipe(self, source, host), _Pipe(self, host, source)
        self._next_link += 1
        number = self._next_link
        link = self._links[number] = _Link((source, host), (there, back))

        def closed() -> None:
            link.n_open -= 1
            if link.n_open == 0:
                del self._links[number]

        accept(MemoryStream(back, there, closed), source)
        return MemoryStream(there, back, closed)

    def _touch(self) -> None:
        for link in list(self._links.values()):
            for pipe in link.pipes:
                pipe.touch()


class MemoryHost:
    """A swarmnode.net.transport.Transport on the memory network."""

    def __init__(self, network: MemoryNetwork, name: str) -> None:
        self._network = network
        self.name = name

    async def connect(self, host: str, port: int) -> MemoryStream:
        """See Transport."""
        return await self._network._connect(self.name, host, port)

    async def listen(
        self,
        handler: StreamHandler,
        host: str | None,
        port: int,
        *,
        task_status: trio.TaskStatus[list[tuple[str, int]]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """See Transport; `host` is ignored, the listener's host is `self.name`."""
        network = self._network
        if port == 0:
            network._next_port += 1
            port = network._next_port
        key = (self.name, port)
        if key in network._listeners:
            raise OSError(errno.EADDRINUSE, f"{self.name} listens on port {port} already")
        async with trio.open_nursery() as nursery:

            def accept(stream: MemoryStream, source: str) -> None:
                nursery.start_soon(handler, stream, source)

            network._listeners[key] = accept
            try:
                task_status.started([key])
                await trio.sleep_forever()
            finally:
                del network._listeners[key]
