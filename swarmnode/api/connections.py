"""The connections of the HTTP API together: how many there may be, and who has to go for a new one."""

from __future__ import annotations

import logging

import trio

from swarmnode.api.connection import Address, Connection, Serving
from swarmnode.net.accepting import accept_forever
from swarmnode.net.descriptors import most_descriptors

log = logging.getLogger(__name__)


class Connections:
    """All connections of one listener."""

    def __init__(self, serving: Serving, most: int) -> None:
        """At most `most` at a time."""
        self._serving = serving
        self._most = most
        self._open: set[Connection] = set()
        self._busy = _busy_answer(serving.config.retry_after_s)

    def __len__(self) -> int:
        return len(self._open)

    async def serve(self, listener: trio.SocketListener) -> None:
        """Accept and serve until cancelled."""
        await accept_forever(listener, self._accepted)

    async def handle(self, stream: trio.abc.HalfCloseableStream, client: Address, server: Address) -> None:
        """Serve one. If there are too many, one without a request makes room; if all have one, status 503."""
        if len(self._open) >= self._most and not self._make_room():
            log.info("an HTTP client was refused: %d are served already", len(self._open))
            with trio.move_on_after(self._serving.config.linger_s):
                await stream.send_all(self._busy)
            return
        connection = Connection(self._serving, stream, client, server)
        self._open.add(connection)
        try:
            await connection.run()
        finally:
            self._open.discard(connection)

    def _make_room(self) -> bool:
        """The one that has been idle for longest goes."""
        idle = [(item.idle_since_s, item) for item in self._open if item.idle_since_s is not None]
        if not idle:
            return False
        _, longest = min(idle, key=lambda pair: pair[0])
        self._open.discard(longest)
        longest.end()
        return True

    async def _accepted(self, stream: trio.SocketStream) -> None:
        try:
            client, server = stream.socket.getpeername()[:2], stream.socket.getsockname()[:2]
        except OSError:  # gone already
            return
        await self.handle(stream, client, server)


def most_connections(wanted: int, share: float) -> int:
    """`wanted`, but no more than this share of the descriptors that the process may have open."""
    return max(1, min(wanted, int(share * most_descriptors())))


def _busy_answer(retry_after_s: int) -> bytes:
    head = (
        "HTTP/1.1 503 Service Unavailable",
        f"Retry-After: {retry_after_s}",
        "Content-Length: 0",
        "Connection: close",
    )
    return "".join(f"{line}\r\n" for line in (*head, "")).encode()
