"""TCP, IPv4 and IPv6. Names are dialled by happy eyeballs: an address that does not answer costs 250 ms, no more."""

from __future__ import annotations

import socket
from functools import partial

import trio

from swarmnode.net.transport import StreamHandler

BACKLOG = 128


class TcpTransport:
    """The default transport. trio's SocketStream sets TCP_NODELAY (both for dialled and accepted sockets) and
    TCP_NOTSENT_LOWAT = 16 KiB, which keeps the kernel's queue short."""

    async def connect(self, host: str, port: int) -> trio.SocketStream:
        """See Transport."""
        return await trio.open_tcp_stream(host, port)

    async def listen(
        self,
        handler: StreamHandler,
        host: str | None,
        port: int,
        *,
        task_status: trio.TaskStatus[list[tuple[str, int]]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """See Transport. Running out of descriptors pauses accepting for 100 ms (trio's serve_listeners)."""
        listeners = await trio.open_tcp_listeners(port, host=host, backlog=BACKLOG)
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(trio.serve_listeners, partial(_accepted, handler), listeners))
            task_status.started([listener.socket.getsockname()[:2] for listener in listeners])


async def _accepted(handler: StreamHandler, stream: trio.SocketStream) -> None:
    try:
        peer = stream.socket.getpeername()
    except OSError:  # gone already
        await trio.aclose_forcefully(stream)
        return
    if stream.socket.family in (socket.AF_INET, socket.AF_INET6):
        await handler(stream, peer[0])
    else:
        await handler(stream, str(peer))
