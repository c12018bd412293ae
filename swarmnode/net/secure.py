"""Drives a wire.Connection over a stream: one task reads, one task writes, one watches that the peer is alive.

Only the writer touches the sending side: a cancelled write leaves half a record behind, which would end the connection.
Callers queue in the connection, wake the writer, and wait elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

import trio

from swarmnode.config import WireConfig
from swarmnode.errors import OTHER_NETWORK, ConnectionLostError, HandshakeError, ProtocolError
from swarmnode.wire.connection import Connection
from swarmnode.wire.constants import ConnectionClass
from swarmnode.wire.events import Ended, Event, Opened, PongReceived

log = logging.getLogger(__name__)

_WRITES_AT_ONCE = 8
"""Before others have their turn: a message of more is a prompt's or a slice, and nobody's token waits for that."""


class SecureStream:
    """One connection with its stream. `open`, then `run`; both close the stream when they fail or end."""

    def __init__(self, stream: trio.abc.Stream, connection: Connection, config: WireConfig) -> None:
        self.connection = connection
        self._stream = stream
        self._send_now: Callable[[bytes | bytearray], int] | None = getattr(stream, "send_now", None)
        self.local_host: str | None = getattr(stream, "local_host", None)
        """Our own address, if the stream knows it (net.tcp)."""
        self._unsent: memoryview | None = None
        """The rest of what `_send_at_once` could not hand over; the writer sends it first."""
        self._is_writer_idle = False
        self._is_mute = False
        """Nothing can be sent any more, not even a bye."""
        self._config = config
        self._early: list[Event] = []
        self._writer_lot = trio.lowlevel.ParkingLot()
        self._room_lot = trio.lowlevel.ParkingLot()
        self._write_scope = trio.CancelScope()
        self._write_bytes = config.chunk_bytes
        self._max_write_bytes = config.max_write_bytes
        self._max_read_bytes = config.receive_bytes
        self._received_bytes = 0
        self._received_at_s = 0.0
        self._ping_nonce = 0
        self._pinged_at_s = 0.0
        self.rtt_s: float | None = None
        """Round trip of the last ping that was answered, queues included."""
        self.ended: Ended | None = None
        """Why the connection ended; the first reason counts."""

    async def open(self) -> Opened:
        """Handshake and settings.

        Raises HandshakeError, ProtocolError or ConnectionLostError; the stream is then closed.
        """
        try:
            with trio.move_on_after(self._config.handshake_timeout_s):
                return await self._open()
            raise HandshakeError(f"no handshake within {self._config.handshake_timeout_s:g} s")
        except BaseException:
            await trio.aclose_forcefully(self._stream)
            raise

    async def run(self, on_event: Callable[[Event], None]) -> Ended:
        """Read, write and watch until the connection ends; every event but the last goes to `on_event`."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read, on_event)
                nursery.start_soon(self._watch)
                await self._write()
                nursery.cancel_scope.cancel()
        finally:
            self.close("done", "closed by this node")
            await trio.aclose_forcefully(self._stream)
        assert self.ended is not None  # ours: _end has set it
        return self.ended

    def wake(self) -> None:
        """Something was queued in the connection: send it."""
        if not self._is_writer_idle or not self.connection.has_data_to_send:
            return
        if self._send_now is not None and self._send_at_once(self._send_now):
            return
        self._is_writer_idle = False
        self._writer_lot.unpark()

    def close(self, code: str, reason: str) -> None:
        """Say bye and end. What is queued and not sent is dropped."""
        self.connection.close(code, reason)
        self._end(Ended(code, reason, None))

    async def wait_room(self) -> None:
        """Wait until the peer takes one more request and the queue is below its cap. Raises ConnectionLostError."""
        while not self.has_room():
            await self._room_lot.park()

    def has_room(self) -> bool:
        """Whether one more request may be made now. Raises ConnectionLostError."""
        return self.room() > 0

    def room(self) -> int:
        """How many requests the peer takes now; 0 while the queue is at its cap. Raises ConnectionLostError."""
        if self.ended is not None:
            raise self.lost()
        if self.connection.queued_bytes >= self._config.max_queued_bytes:
            return 0
        return self.connection.n_requests_left

    async def wait_change(self) -> None:
        """Wait until something has left, has come, or `tell_change` was called. Cancelled when the connection ends."""
        await self._room_lot.park()

    def tell_change(self) -> None:
        """Let those look again who wait for room."""
        if self._room_lot:
            self._room_lot.unpark_all()

    def lost(self) -> ConnectionLostError:
        """The error for whoever still waits for something on this connection."""
        ended = self.ended
        return ConnectionLostError(
            "the connection ended" if ended is None else f"{ended.code}: {ended.reason}"
        )

    def _send_at_once(self, send_now: Callable[[bytes | bytearray], int]) -> bool:
        """In the writer's place, while it is idle: what the kernel takes without waiting. True if that was all.

        A little first, and then as much at a time as the link has taken lately.
        """
        n_bytes = self._config.chunk_bytes
        for _ in range(_WRITES_AT_ONCE):
            try:
                data = self.connection.data_to_send(n_bytes)
            except ProtocolError as error:  # no nonce is left
                self._fail(Ended(error.code, error.reason, error))
                return False
            self.tell_change()
            n_sent = send_now(data)
            if n_sent < len(data):
                self._unsent = memoryview(data)[n_sent:]
                return False
            if not self.connection.has_data_to_send:
                return True
            n_bytes = self._write_bytes
        return False

    async def _open(self) -> Opened:
        while True:
            data = self.connection.data_to_send(self._config.chunk_bytes)
            try:
                if data:
                    await self._stream.send_all(data)
                received = await self._stream.receive_some(self._config.chunk_bytes)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise ConnectionLostError("the stream broke during the handshake") from error
            if not received:
                raise ConnectionLostError(
                    f"the peer hung up during the handshake: {OTHER_NETWORK}, or it lets others in only"
                )
            events = self.connection.receive_data(received)
            if events:
                return await self._opened(events)

    async def _opened(self, events: list[Event]) -> Opened:
        first, self._early = events[0], events[1:]
        if isinstance(first, Opened):
            return first
        assert isinstance(first, Ended)  # ours: nothing else may come before Opened
        if data := self.connection.data_to_send(self._config.chunk_bytes):
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await self._stream.send_all(data)
        if isinstance(first.error, HandshakeError | ProtocolError):
            raise first.error
        raise ConnectionLostError(f"the peer hung up: {first.code}: {first.reason}")

    async def _read(self, on_event: Callable[[Event], None]) -> None:
        self._received_at_s = trio.current_time()
        if self.connection.connection_class is ConnectionClass.BULK:
            self._max_write_bytes = self._max_read_bytes = self._config.bulk_step_bytes
            if (hold := getattr(self._stream, "hold", None)) is not None:
                hold(self._config.bulk_held_bytes)
        if self._deliver(self._early, on_event):
            return
        self._early = []
        receive_bytes = self._config.chunk_bytes
        while True:
            try:
                data = await self._stream.receive_some(receive_bytes)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                data = b""
            # A large buffer costs 15 us to allocate, so it is only asked for while it is filled.
            receive_bytes = self._max_read_bytes if len(data) == receive_bytes else self._config.chunk_bytes
            self._received_at_s = trio.current_time()
            self._received_bytes += len(data)
            events = self.connection.receive_data(data) if data else self.connection.receive_eof()
            if self._deliver(events, on_event) or not data:
                return

    def _deliver(self, events: list[Event], on_event: Callable[[Event], None]) -> bool:
        """Hand out events; True when the last one was the end."""
        for event in events:
            if self.ended is not None:
                return True
            if isinstance(event, Ended):
                self._end(event)
                return True
            if isinstance(event, PongReceived):
                if event.nonce == self._ping_nonce:
                    self.rtt_s = self._received_at_s - self._pinged_at_s
            else:
                on_event(event)
        self.wake()
        self.tell_change()
        return False

    def _end(self, ended: Ended) -> None:
        """The connection is over: let the writer send a last bye, but not for long."""
        if self.ended is not None:
            return
        self.ended = ended
        self._write_scope.deadline = min(
            self._write_scope.deadline, trio.current_time() + self._config.close_timeout_s
        )
        self._is_writer_idle = False
        self._writer_lot.unpark()
        self._room_lot.unpark_all()

    async def _write(self) -> None:
        """Send until the connection is over and its last message has left."""
        connection = self.connection
        is_backlogged = False
        while True:
            if self._is_mute:
                return
            if self._unsent is None and not connection.has_data_to_send:
                if self.ended is not None:
                    return
                is_backlogged = False
                self._is_writer_idle = True
                await self._writer_lot.park()
                continue
            started_s = trio.current_time()
            limit_s = self._config.write_timeout_s if self.ended is None else self._config.close_timeout_s
            with trio.move_on_after(limit_s) as self._write_scope:
                if is_backlogged:
                    # What is most urgent is chosen only when the kernel takes it.
                    await self._stream.wait_send_all_might_not_block()
                await self._write_some()
            if self._write_scope.cancelled_caught:
                self._end(
                    Ended("dead", "the peer does not read", ConnectionLostError("the peer does not read"))
                )
                return
            is_backlogged = True
            self._adapt(trio.current_time() - started_s)

    async def _write_some(self) -> None:
        try:
            data = self._unsent or self.connection.data_to_send(self._write_bytes)
            self._unsent = None
            self.tell_change()
            await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._fail(Ended("ended", "the stream broke", ConnectionLostError("the stream broke")))
        except ProtocolError as error:  # no nonce is left
            self._fail(Ended(error.code, error.reason, error))

    def _fail(self, ended: Ended) -> None:
        """End without a bye."""
        self._is_mute = True
        self.connection.close()
        self._end(ended)

    def _adapt(self, spent_s: float) -> None:
        """Longer writes while they drain at once, shorter ones when they do not (WireConfig.fast_write_s)."""
        if spent_s < self._config.fast_write_s:
            self._write_bytes = min(2 * self._write_bytes, self._max_write_bytes)
        elif spent_s > 4 * self._config.fast_write_s:
            self._write_bytes = max(self._write_bytes // 2, self._config.chunk_bytes)

    async def _watch(self) -> None:
        """Ping, and end a connection that is dead or crawls."""
        config = self._config
        stuck_since = (0, 0)
        while self.ended is None:
            self._ping_nonce += 1
            self._pinged_at_s = trio.current_time()
            self.connection.send_ping(self._ping_nonce)
            self.wake()
            before = (self.connection.oldest_incomplete, self._received_bytes)
            await trio.sleep(config.ping_interval_s)
            silent_s = trio.current_time() - self._received_at_s
            if silent_s > config.dead_after_pings * config.ping_interval_s:
                self._give_up("dead", f"nothing came for {silent_s:.0f} s")
            elif self._crawls(stuck_since):
                self._give_up("too_slow", "a message makes no progress")
            stuck_since = before

    def _crawls(self, since: tuple[int, int]) -> bool:
        """Whether the message that was incomplete two ping intervals ago still is, and little came meanwhile."""
        message, received_bytes = since
        if message == 0 or message != self.connection.oldest_incomplete:
            return False
        least_bytes = 2 * self._config.ping_interval_s * self._config.min_progress_bytes_per_s
        return self._received_bytes - received_bytes < least_bytes

    def _give_up(self, code: str, reason: str) -> None:
        self.connection.close(code, reason)
        self._end(Ended(code, reason, ConnectionLostError(f"{code}: {reason}")))
