"""One connection of the HTTP API: Hypercorn's HTTP/1.1 between a stream of bytes and an ASGI application.

Written against Hypercorn 0.18, of which it uses `H11Protocol` and nothing private (tests/api/test_connection.py says
what of it). Hypercorn's own class for a connection is not used, because in it whatever a client makes the protocol
raise ends the whole server, a client that has gone keeps its descriptor until it would have been idle for too long,
and what waits to be sent cannot be cancelled.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import trio
from hypercorn.config import Config as HypercornConfig
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from starlette.types import ASGIApp, Scope

from swarmnode.api.http1 import PlainHttp
from swarmnode.config import ApiConfig

log = logging.getLogger(__name__)

READ_BYTES = 1 << 16

Address: TypeAlias = tuple[str, int]
Put: TypeAlias = Callable[[Any], Awaitable[None]]


@dataclass(frozen=True)
class Serving:
    """What all connections share."""

    app: ASGIApp
    hypercorn: HypercornConfig
    config: ApiConfig


class Connection:
    """Requests one after the other, until the client has gone, was idle for too long, or the answer said so."""

    def __init__(
        self, serving: Serving, stream: trio.abc.HalfCloseableStream, client: Address, server: Address
    ) -> None:
        self._serving = serving
        self._stream = stream
        self._client = client
        self._server = server
        self._send_lock = trio.Lock()
        self._until_s = math.inf
        self._waiting = trio.CancelScope()
        self._is_woken = False
        self._held = bytearray()
        """What came behind a request that is not answered yet."""
        self._http = PlainHttp(serving.hypercorn.h11_max_incomplete_size)
        self._is_ending = False
        self._is_over = False
        """`end` was called: nothing more is read, whatever happens just then."""
        self.idle_since_s: float | None = None
        """Trio's clock; None while there is a request."""
        self._set_idle(True)

    async def run(self) -> None:
        """Serve it. Raises nothing: what goes wrong here ends this connection only."""
        try:
            async with trio.open_nursery() as nursery:
                await self._serve(nursery)
        except* (
            Exception
        ) as errors:  # nobody knows what bytes make a protocol raise; all of it is the client's
            log.warning("the connection of an HTTP client was ended: %r", errors.exceptions[0])
        finally:
            await trio.aclose_forcefully(self._stream)

    def end(self) -> None:
        """As if it had been idle for too long."""
        self._is_over = True
        self._waiting.cancel()

    async def _serve(self, nursery: trio.Nursery) -> None:
        hypercorn = self._serving.hypercorn
        context = WorkerContext(None)
        self._protocol = H11Protocol(
            cast(Any, self._serving.app),  # which is handed on to _Apps only
            hypercorn,
            context,
            cast(Any, _Apps(nursery)),
            ConnectionState({}),
            False,
            self._client,
            self._server,
            self._send,
        )
        self._protocol.connection = self._http
        while (data := await self._receive()) is not None:
            if not self._is_ending:
                await self._take(data)
        await context.terminated.set()  # an answer that is on its way is the last one
        await self._protocol.handle(Closed())

    async def _take(self, data: bytes) -> None:
        """Hand on what the client sent; behind a request only when that is answered: who has all of an answer may ask
        again before we know that it is sent. Reading goes on meanwhile, or nobody would hear that a client has gone.
        """
        self._held += data
        if not self._http.is_answering:
            data, self._held = bytes(self._held), bytearray()
            await self._protocol.handle(RawData(data))
        elif len(self._held) > READ_BYTES and self._http.can_say_last:
            self._http.end_with_this_answer()
            self._held.clear()

    async def _receive(self) -> bytes | None:
        """None when the client has gone, or nothing more is waited for; b"" when an answer has ended."""
        if self._is_over:
            return None
        self._is_woken = False
        with trio.CancelScope(deadline=self._until_s) as self._waiting:
            if len(self._held) > READ_BYTES and not self._is_ending:
                await (
                    trio.sleep_forever()
                )  # until this answer has ended: its head is out, so the next request is kept
            try:
                return bytes(await self._stream.receive_some(READ_BYTES)) or None
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return None
        return b"" if self._is_woken and not self._is_over else None

    async def _send(self, event: Event) -> None:
        """What Hypercorn calls."""
        match event:
            case RawData():
                await self._send_bytes(event.data)
            case Closed():
                await self._end()
                await self._protocol.handle(Closed())
            case Updated():
                self._set_idle(event.idle)

    async def _send_bytes(self, data: bytes) -> None:
        try:
            async with self._send_lock:
                await self._stream.send_all(data)
            return
        except trio.Cancelled:  # a part of a piece cannot be taken back
            await trio.aclose_forcefully(self._stream)
            raise
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        await self._protocol.handle(Closed())

    async def _end(self) -> None:
        """The last answer is sent. What the client still sends is read: if not, the kernel may take the answer back.

        Shielded: an application hears that its client is gone as soon as all is sent, and may cancel itself in here;
        the client would then wait for the end of its answer, and this for the client, for ever.
        """
        self._is_ending = True
        self._wait_until(trio.current_time() + self._serving.config.linger_s)
        with trio.CancelScope(shield=True):
            try:
                await self._stream.send_eof()
            except (trio.BusyResourceError, trio.BrokenResourceError, trio.ClosedResourceError):
                await trio.aclose_forcefully(self._stream)  # busy: it takes nothing of what waits to be sent
        if self._held:
            self._held.clear()
            self._wake()

    def _set_idle(self, idle: bool) -> None:
        now_s = trio.current_time()
        has_next = idle and (bool(self._held) or self._http.has_more)
        self.idle_since_s = now_s if idle and not has_next else None
        self._wait_until(now_s + self._serving.config.idle_s if idle else math.inf)
        if has_next:
            self._wake()

    def _wake(self) -> None:
        """Have the reader look at what is held."""
        self._is_woken = True
        self._waiting.cancel()

    def _wait_until(self, until_s: float) -> None:
        self._until_s = self._waiting.deadline = until_s


class _Apps:
    """Runs the application for Hypercorn's protocol, once a request: the part of its `TaskGroup` that HTTP needs."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery

    async def spawn_app(self, app: ASGIApp, config: HypercornConfig, scope: Scope, send: Put) -> Put:
        """Start it; returns where its events go."""
        to_app, events = trio.open_memory_channel[Any](config.max_app_queue_size)
        self._nursery.start_soon(_run_app, app, scope, events, send)

        async def put(event: Any) -> None:
            with suppress(trio.BrokenResourceError):  # it has ended, and takes no more
                await to_app.send(event)

        return put


async def _run_app(app: ASGIApp, scope: Scope, events: trio.MemoryReceiveChannel[Any], send: Put) -> None:
    """Hypercorn is told by None when it has ended; it answers with status 500 then if there was no answer."""
    async with events:
        try:
            await app(scope, events.receive, send)
        except Exception:
            log.exception("the application failed")
    await send(None)
