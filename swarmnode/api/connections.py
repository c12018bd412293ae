"""The connections of the HTTP API together: how many there may be, and who has to go for a new one."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable

import trio

from swarmnode.api.connection import Address, Connection, Serving
from swarmnode.api.forms import error_object
from swarmnode.net.accepting import accept_forever
from swarmnode.net.admission import source_block
from swarmnode.net.descriptors import most_descriptors

log = logging.getLogger(__name__)


class Connections:
    """All connections of one listener."""

    def __init__(self, serving: Serving, most: int) -> None:
        """At most `most` at a time, and of one address (ApiConfig.max_connections_per_address) a quarter of that."""
        self._serving = serving
        self._most = most
        self._most_of_one = max(1, min(serving.config.max_connections_per_address, most // 4))
        self._open: dict[Connection, str | None] = {}
        """And the address that it counts for; None: loopback."""

    def __len__(self) -> int:
        return len(self._open)

    async def serve(self, listener: trio.SocketListener) -> None:
        """Accept and serve until cancelled."""
        await accept_forever(listener, self._accepted)

    async def handle(self, stream: trio.abc.HalfCloseableStream, client: Address, server: Address) -> None:
        """Serve one. If there are too many, one without a request makes room, of the same address if that has too many;
        if all have one, status 503, or 429.
        """
        source = source_block(client[0])
        of_it = [item for item, other in self._open.items() if other == source]
        if source is not None and len(of_it) >= self._most_of_one and not self._make_room(of_it):
            await self._refuse(stream, "429 Too Many Requests", len(of_it))
            return
        if len(self._open) >= self._most and not self._make_room(self._open):
            await self._refuse(stream, "503 Service Unavailable", len(self._open))
            return
        connection = Connection(self._serving, stream, client, server)
        self._open[connection] = source
        try:
            await connection.run()
        finally:
            self._open.pop(connection, None)

    def _make_room(self, among: Iterable[Connection]) -> bool:
        """The one that has been idle for longest goes."""
        idle = [(item.idle_since_s, item) for item in among if item.idle_since_s is not None]
        if not idle:
            return False
        _, longest = min(idle, key=lambda pair: pair[0])
        del self._open[longest]
        longest.end()
        return True

    async def _refuse(self, stream: trio.abc.HalfCloseableStream, status: str, n_served: int) -> None:
        log.info("an HTTP client was refused (%s): %d are served already", status, n_served)
        config = self._serving.config
        with trio.move_on_after(config.linger_s):
            await stream.send_all(_refusal(status, config.retry_after_s))

    async def _accepted(self, stream: trio.SocketStream) -> None:
        try:
            client, server = stream.socket.getpeername()[:2], stream.socket.getsockname()[:2]
        except OSError:  # gone already
            return
        await self.handle(stream, client, server)


def most_connections(wanted: int, share: float) -> int:
    """`wanted`, but no more than this share of the descriptors that the process may have open."""
    return max(1, min(wanted, int(share * most_descriptors())))


def _refusal(status: str, retry_after_s: int) -> bytes:
    """An answer that is sent before anything was asked."""
    code = int(status[:3])
    message = f"too many connections; try again in {retry_after_s} s"
    kind, name = (
        ("rate_limit_error", "rate_limit_exceeded") if code == 429 else ("server_error", "overloaded")
    )
    body = json.dumps(error_object(message, kind, name)).encode()
    head = (
        f"HTTP/1.1 {status}",
        f"Retry-After: {retry_after_s}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
    )
    return "".join(f"{line}\r\n" for line in (*head, "")).encode() + body
