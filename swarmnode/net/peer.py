"""A connected node: requests to it, handlers for what it asks.

A request is a call: it returns the reply or raises. Cancelling it (a deadline of the caller's) tells the peer, and a
reply that was on its way is dropped. Each request of the peer's has a task to itself, which starts when there is room
for its reply (reply_room.py); what it raises ends that request.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import TypeAlias

import trio

from swarmnode.config import WireConfig
from swarmnode.errors import RequestRefusedError, UsageError
from swarmnode.identity import NodeId
from swarmnode.net.reply_room import ReplyRoom
from swarmnode.net.secure import SecureStream
from swarmnode.wire.connection import Connection, printable
from swarmnode.wire.constants import ConnectionClass, TrafficClass
from swarmnode.wire.events import Ended, Event, Opened, ReplyReceived, RequestCancelled, RequestReceived
from swarmnode.wire.messages import Experts, Message, Refused, Settings

log = logging.getLogger(__name__)

Body: TypeAlias = Sequence[bytes | bytearray | memoryview]
"""The parts of a body, one after the other. They must not change until the message has left."""
Handler: TypeAlias = Callable[["Peer", Message, memoryview], Awaitable[tuple[Message, Body]]]
"""Answers one type of request; raises RequestRefusedError to refuse. Cancelled when the asker or connection goes."""
asked_in: ContextVar[TrafficClass] = ContextVar("asked_in", default=TrafficClass.DECODE)
"""While a handler runs: in which class of traffic its asker sent the request, and so how soon it wants the reply."""
OnPeer: TypeAlias = Callable[["Peer"], Awaitable[None]]
"""Runs beside a connection once it is open, and is cancelled when it ends. Returning early is fine."""


class _Waiter:
    """Someone who waits for a reply."""

    __slots__ = ("came_at_s", "event", "reply", "woken")

    def __init__(self) -> None:
        self.event = trio.Event()
        self.woken: trio.Event | None = None
        self.came_at_s = math.inf
        self.reply: ReplyReceived | None = None

    def settle(self) -> None:
        self.event.set()
        if self.woken is not None:
            self.woken.set()


class Asked:
    """A request that is on its way."""

    __slots__ = ("_peer", "_request_id", "_waiter")

    def __init__(self, peer: Peer, request_id: int, waiter: _Waiter) -> None:
        self._peer = peer
        self._request_id = request_id
        self._waiter = waiter

    @property
    def is_settled(self) -> bool:
        """The reply is here, or never will be: `reply` does not wait."""
        return self._waiter.event.is_set()

    @property
    def came_at_s(self) -> float:
        """When the reply was here, on trio's clock; infinity before that."""
        return self._waiter.came_at_s

    async def wait_settled(self) -> None:
        """Wait for that. Cancelling this leaves the request as it is."""
        await self._waiter.event.wait()

    def wake(self, event: trio.Event) -> None:
        """Have this event set, too, when it is settled, and not one named before: who waits for the first of many needs
        no task for each.
        """
        self._waiter.woken = event
        if self.is_settled:
            event.set()

    async def reply(self) -> tuple[Message, memoryview]:
        """The reply with its body (read-only); no checkpoint if it is here. Cancelling tells the peer; errors as
        `Peer.request`.
        """
        return await self._peer._reply(self._request_id, self._waiter)

    def abandon(self) -> None:
        """Tell the peer that the reply is no longer wanted. Does nothing after `reply`."""
        self._peer._abandon(self._request_id, self._waiter)


class Peer:
    """One open connection to a node. Made by `open_peer`."""

    def __init__(
        self,
        stream: SecureStream,
        opened: Opened,
        handlers: Mapping[type[Message], Handler],
        config: WireConfig,
        remote: str,
    ) -> None:
        self.node_id: NodeId = opened.node_id
        self.settings: Settings = opened.settings
        self.remote = remote
        """Where the connection comes from or goes to, for people."""
        self.rows_at_s = -math.inf
        """When rows were last asked for, either way, of answers or prompts: senders of slices make room for them."""
        self._stream = stream
        self._connection = stream.connection
        self._handlers = handlers
        self._config = config
        self._waiting: dict[int, _Waiter] = {}
        self._running: dict[int, trio.CancelScope] = {}
        self._held_bytes = 0
        self._reply_room = ReplyRoom(stream, config)
        self._closed = trio.Event()

    def __repr__(self) -> str:
        return f"<Peer {self.node_id.short} at {self.remote}>"

    @property
    def is_dialer(self) -> bool:
        """True when this side opened the connection."""
        return self._connection.is_dialer

    @property
    def connection_class(self) -> ConnectionClass:
        """What the connection is for."""
        return self._connection.connection_class or ConnectionClass.LATENCY

    @property
    def local_host(self) -> str | None:
        """Our own address as this connection uses it; None where the transport knows none."""
        return self._stream.local_host

    @property
    def rtt_s(self) -> float | None:
        """Round trip of the last ping, None before the first."""
        return self._stream.rtt_s

    @property
    def ended(self) -> Ended | None:
        """Why the connection ended; None while it is open."""
        return self._stream.ended

    async def request(
        self, message: Message, body: Body = (), *, traffic_class: TrafficClass | None = None
    ) -> tuple[Message, memoryview]:
        """Ask, and return the reply with its body (read-only).

        Waits while the peer has as many requests as it takes or too much is queued for it; the caller sets a deadline.
        Raises RequestRefusedError, ConnectionLostError, or UsageError for a message over its caps.
        """
        await self._stream.wait_room()
        asked = self.begin(message, body, traffic_class=traffic_class)
        assert asked is not None  # there is room, and nothing ran in between
        return await asked.reply()

    def room(self) -> int:
        """How many requests `begin` would take now, if their bodies are short: ask before a message is made.

        Raises ConnectionLostError.
        """
        return self._stream.room()

    def begin(
        self, message: Message, body: Body = (), *, traffic_class: TrafficClass | None = None
    ) -> Asked | None:
        """Ask without waiting: the request is on its way when this returns, None if there is no room for it now.

        Whoever begins must await `reply()` or call `abandon()`. Raises ConnectionLostError or UsageError.
        """
        if not self._stream.has_room():
            return None
        request_id = self._connection.send_request(message, flat_parts(body), traffic_class)
        if isinstance(message, Experts):
            self.rows_at_s = trio.current_time()
        self._waiting[request_id] = waiter = _Waiter()
        self._stream.wake()
        return Asked(self, request_id, waiter)

    async def _reply(self, request_id: int, waiter: _Waiter) -> tuple[Message, memoryview]:
        try:
            if not waiter.event.is_set():
                await waiter.event.wait()
        finally:
            self._abandon(request_id, waiter)
        if waiter.reply is None:
            raise self._stream.lost()
        reply = waiter.reply.message
        if isinstance(reply, Refused):
            raise RequestRefusedError(reply.code, reply.reason, reply.retry_after_ms)
        return reply, waiter.reply.body

    def _abandon(self, request_id: int, waiter: _Waiter) -> None:
        if self._waiting.pop(request_id, None) is not None and waiter.reply is None:
            self._connection.cancel_request(request_id)
            self._stream.wake()

    def close(self, code: str = "done", reason: str = "") -> None:
        """Say bye and end the connection; requests in flight raise ConnectionLostError. Never blocks."""
        self._stream.close(code, reason)

    async def wait_closed(self) -> Ended | None:
        """Wait until the connection has ended."""
        await self._closed.wait()
        return self._stream.ended

    async def run(self, on_peer: OnPeer | None = None) -> None:
        """Serve the connection until it ends. Called once. A fault of ours ends it too, and is logged."""
        try:
            async with trio.open_nursery() as nursery:
                if on_peer is not None:
                    nursery.start_soon(self._beside, on_peer)

                def on_event(event: Event) -> None:
                    self._on_event(event, nursery)

                ended = await self._stream.run(on_event)
                log.info("%r ended: %s: %s", self, ended.code, ended.reason)
                nursery.cancel_scope.cancel()
        except Exception:
            log.exception("serving %r failed", self)
        finally:
            self._closed.set()
            for waiter in self._waiting.values():
                waiter.settle()

    async def _beside(self, on_peer: OnPeer) -> None:
        try:
            await on_peer(self)
        except Exception:
            log.exception("serving %r failed", self)
            self.close("internal")

    def _on_event(self, event: Event, nursery: trio.Nursery) -> None:
        match event:
            case ReplyReceived():
                waiter = self._waiting.pop(event.request_id)
                waiter.reply, waiter.came_at_s = event, trio.current_time()
                waiter.settle()
            case RequestReceived():
                self._on_request(event, nursery)
            case RequestCancelled():
                scope = self._running.get(event.request_id)
                if scope is not None:
                    scope.cancel()
            case _:
                raise AssertionError(f"{event} is not for a peer")

    def _on_request(self, event: RequestReceived, nursery: trio.Nursery) -> None:
        if isinstance(event.message, Experts):
            self.rows_at_s = trio.current_time()
        handler = self._handlers.get(type(event.message))
        held_bytes = self._held_bytes
        if handler is None:
            refused = Refused("unsupported", f"no {type(event.message).__name__} here", 0)
        elif held_bytes and held_bytes + len(event.body) > self._config.max_held_bytes:
            refused = Refused("busy", f"{held_bytes} bytes are being worked on", self._config.busy_retry_ms)
        else:
            self._held_bytes += len(event.body)
            scope = self._running[event.request_id] = trio.CancelScope()
            nursery.start_soon(self._answer, event, handler, scope)
            return
        self._connection.send_reply(event.request_id, refused)

    async def _answer(self, event: RequestReceived, handler: Handler, scope: trio.CancelScope) -> None:
        reply: Message = Refused("cancelled", "", 0)
        body: Body = ()
        reserved = None
        asked_in.set(event.traffic_class)  # of this task alone
        try:
            with scope:
                reserved = await self._reply_room.reserve(event)
                reply, body = await self._handle(event, handler)
        finally:
            del self._running[event.request_id]
            self._held_bytes -= len(event.body)
        try:
            self._connection.send_reply(event.request_id, reply, flat_parts(body))
        except UsageError:
            log.exception("%s for %r cannot be sent", type(reply).__name__, self)
            self._connection.send_reply(event.request_id, Refused("internal", "", 0))
        if reserved is not None:
            self._reply_room.release(reserved)
        self._stream.wake()

    async def _handle(self, event: RequestReceived, handler: Handler) -> tuple[Message, Body]:
        try:
            return await handler(self, event.message, event.body)
        except RequestRefusedError as refusal:
            return Refused(refusal.code, printable(refusal.reason), refusal.retry_after_ms), ()
        except Exception:
            log.exception("the handler of %s failed for %r", type(event.message).__name__, self)
            return Refused("internal", "", 0), ()


def flat_parts(body: Body) -> list[memoryview]:
    """Views of single bytes, without the empty ones."""
    views = [part if type(part) is memoryview else memoryview(part) for part in body]
    return [
        view if view.format == "B" and view.ndim == 1 else view.cast("B") for view in views if view.nbytes
    ]


async def open_peer(
    stream: trio.abc.Stream,
    connection: Connection,
    *,
    handlers: Mapping[type[Message], Handler],
    config: WireConfig,
    remote: str,
) -> Peer:
    """Handshake and settings on a fresh stream; the peer is then to be `run`.

    Raises HandshakeError, ProtocolError or ConnectionLostError; the stream is then closed.
    """
    secure = SecureStream(stream, connection, config)
    opened = await secure.open()
    return Peer(secure, opened, handlers, config, remote)
