"""TCP, IPv4 and IPv6. Names are dialled by happy eyeballs: an address that does not answer costs 250 ms, no more."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from functools import partial

import trio

from swarmnode.net.accepting import accept_forever
from swarmnode.net.transport import StreamHandler

BACKLOG = 128


class TcpStream(trio.abc.Stream):
    """A connected socket that can also send without waiting (net.transport.SendsNow)."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self.local_host = _local_host(stream)
        """The address that this end of the connection has."""
        self._is_drained = False
        """The last read took all there was: the next one would only be told to wait."""

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """See trio.abc.SendStream."""
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        """See trio.abc.SendStream."""
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """See trio.abc.ReceiveStream."""
        data: bytes | bytearray
        if not self._is_drained or max_bytes is None or max_bytes < 1 or os.name != "posix":
            data = await self._stream.receive_some(max_bytes)
        else:
            data = await self._receive_awaited(max_bytes)
        self._is_drained = max_bytes is not None and len(data) < max_bytes
        return data

    async def _receive_awaited(self, max_bytes: int) -> bytes | bytearray:
        """Wait first, then read: a reply costs half of what trio's read, wait and read again does."""
        own = self._stream.socket
        if own.fileno() >= 0:
            await trio.lowlevel.wait_readable(own.fileno())
        if own.fileno() >= 0:  # asked again: of a socket closed since, the number may be another connection's
            try:
                return os.read(own.fileno(), max_bytes)
            except BlockingIOError:
                pass  # woken for nothing
            except OSError as error:
                raise trio.BrokenResourceError(f"receiving failed: {error.strerror}") from error
        return await self._stream.receive_some(max_bytes)

    async def aclose(self) -> None:
        """See trio.abc.AsyncResource."""
        await self._stream.aclose()

    def hold(self, n_bytes: int) -> None:
        """Let the kernel take so many bytes ahead of what it can send, where it can be told."""
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            with suppress(OSError):
                self._stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, n_bytes)

    def send_now(self, data: bytes | bytearray | memoryview) -> int:
        """See SendsNow. trio has no call for it; the descriptor is its own, and it is non-blocking."""
        descriptor = self._stream.socket.fileno()
        if descriptor < 0 or os.name != "posix":
            return 0
        try:
            return os.write(descriptor, data)
        except OSError:
            return 0


def _local_host(stream: trio.SocketStream) -> str | None:
    try:
        return str(stream.socket.getsockname()[0])
    except (OSError, IndexError):  # gone already, or a pair of sockets without names
        return None


class TcpTransport:
    """The default transport. trio's SocketStream sets TCP_NODELAY (both for dialled and accepted sockets) and
    TCP_NOTSENT_LOWAT = 16 KiB, which keeps the kernel's queue short."""

    async def connect(self, host: str, port: int) -> TcpStream:
        """See Transport."""
        return TcpStream(await trio.open_tcp_stream(host, port))

    async def listen(
        self,
        handler: StreamHandler,
        host: str | None,
        port: int,
        *,
        task_status: trio.TaskStatus[list[tuple[str, int]]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """See Transport. Running out of descriptors pauses accepting (net/accepting)."""
        listeners = await trio.open_tcp_listeners(port, host=host, backlog=BACKLOG)
        async with trio.open_nursery() as nursery:
            for listener in listeners:
                nursery.start_soon(_accept, listener, handler)
            task_status.started([listener.socket.getsockname()[:2] for listener in listeners])


async def _accept(listener: trio.SocketListener, handler: StreamHandler) -> None:
    async with listener:
        await accept_forever(listener, partial(_accepted, handler))


async def _accepted(handler: StreamHandler, stream: trio.SocketStream) -> None:
    try:
        peer = stream.socket.getpeername()
    except OSError:  # gone already
        await trio.aclose_forcefully(stream)
        return
    if stream.socket.family in (socket.AF_INET, socket.AF_INET6):
        await handler(TcpStream(stream), peer[0])
    else:
        await handler(TcpStream(stream), str(peer))
