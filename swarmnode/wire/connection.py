"""One authenticated connection as a state machine without I/O: bytes in, events out; messages in, bytes out.

    state          waits for                    next state
    -------------  ---------------------------  ---------------------------------------------
    HELLO          hello (acceptor only)        MESSAGE_1
    MESSAGE_1      Noise message 1 (acceptor)   MESSAGE_3, answers message 2
    MESSAGE_2      Noise message 2 (dialer)     SETTINGS, answers message 3 and our settings
    MESSAGE_3      Noise message 3 (acceptor)   SETTINGS, sends our settings
    SETTINGS       the peer's settings          OPEN
    OPEN           frames                       OPEN
    any            bye, end of stream, an error CLOSED

Two rules. (1) Until SETTINGS an error closes the connection without an answer, and so does a broken seal at any time;
later errors are answered with a bye that names them. (2) Each request has exactly one end (`wire/requests.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from swarmnode.errors import ConnectionLostError, HandshakeError, ProtocolError, UsageError
from swarmnode.identity import NodeId
from swarmnode.wire.constants import (
    COMMON_ENCODING,
    MAX_PONGS_WAITING,
    MAX_RECORD_PLAIN_BYTES,
    PROTOCOL_VERSION,
    ConnectionClass,
    FrameType,
    TrafficClass,
)
from swarmnode.wire.endpoint import Endpoint
from swarmnode.wire.events import Ended, Event, Opened, PongReceived
from swarmnode.wire.frames import Frame, split_frames_untrusted
from swarmnode.wire.handshake import AcceptorHandshake, DialerHandshake, Secrets
from swarmnode.wire.inbox import Inbox
from swarmnode.wire.messages import Bye, Experts, Message, Ping, Pong, Settings, encode_header
from swarmnode.wire.outbox import Outbox, Outgoing
from swarmnode.wire.records import RecordReader, RecordWriter
from swarmnode.wire.requests import Requests

MIN_WRITE_BYTES = 8 * 1024
"""Least `max_bytes` of data_to_send: over a message start with the longest header."""


class State(enum.Enum):
    """See the table above."""

    HELLO = enum.auto()
    MESSAGE_1 = enum.auto()
    MESSAGE_2 = enum.auto()
    MESSAGE_3 = enum.auto()
    SETTINGS = enum.auto()
    OPEN = enum.auto()
    CLOSED = enum.auto()


HANDSHAKE_STATES = frozenset((State.HELLO, State.MESSAGE_1, State.MESSAGE_2, State.MESSAGE_3))
NEXT_STATE = {
    State.HELLO: State.MESSAGE_1,
    State.MESSAGE_1: State.MESSAGE_3,
    State.MESSAGE_2: State.SETTINGS,
    State.MESSAGE_3: State.SETTINGS,
    State.SETTINGS: State.OPEN,
}


class Connection:
    """One side of one connection; see the head of this file."""

    def __init__(self, endpoint: Endpoint, handshake: DialerHandshake | AcceptorHandshake) -> None:
        """Use `dialer` or `acceptor`."""
        self._endpoint = endpoint
        self._handshake = handshake
        self._handshake_bytes = bytearray()
        self._clear = bytearray()
        self._reader: RecordReader | None = None
        self._writer: RecordWriter | None = None
        self.is_dialer = isinstance(handshake, DialerHandshake)
        self._outbox = Outbox()
        self._inbox = Inbox(endpoint.config.max_body_bytes)
        self._requests = Requests(
            self._inbox,
            self._outbox,
            is_dialer=self.is_dialer,
            max_served=endpoint.settings.max_requests,
        )
        self._pongs_waiting = 0
        self._peer_settings: Settings | None = None
        self.node_id: NodeId | None = None
        """The peer, once its identity is proven."""
        self.handshake_hash = b""
        self.state = State.MESSAGE_2 if self.is_dialer else State.HELLO
        if isinstance(handshake, DialerHandshake):
            self._clear += handshake.first_bytes

    @classmethod
    def dialer(
        cls, endpoint: Endpoint, expected: NodeId, connection_class: ConnectionClass = ConnectionClass.LATENCY
    ) -> Connection:
        """The side that opened the stream and wants to reach `expected` and nobody else."""
        handshake = DialerHandshake(
            endpoint.credentials, endpoint.network, connection_class, expected, endpoint.secret
        )
        return cls(endpoint, handshake)

    @classmethod
    def acceptor(cls, endpoint: Endpoint) -> Connection:
        """The side that was dialled."""
        return cls(endpoint, AcceptorHandshake(endpoint.credentials, endpoint.network, endpoint.secret))

    @property
    def connection_class(self) -> ConnectionClass | None:
        """What the connection is for; None before the hello."""
        return self._handshake.connection_class

    @property
    def settings(self) -> Settings:
        """What the peer told. Raises UsageError before OPEN."""
        if self._peer_settings is None:
            raise UsageError("the peer's settings have not come yet")
        return self._peer_settings

    @property
    def queued_bytes(self) -> int:
        """Bytes of messages that `data_to_send` has not taken yet."""
        return self._outbox.queued_bytes

    def reply_bytes(self, traffic_class: TrafficClass) -> int:
        """Bytes of bodies of the replies of a class that have not left, each counted whole until all of it has."""
        return self._requests.reply_bytes(traffic_class)

    @property
    def has_data_to_send(self) -> bool:
        """True when `data_to_send` would return something."""
        return bool(self._clear) or (self._writer is not None and self._outbox.n_items > 0)

    @property
    def oldest_incomplete(self) -> int:
        """Serial number of the peer's message that has been incomplete for longest; 0 if there is none."""
        return self._inbox.oldest_incomplete

    @property
    def can_request(self) -> bool:
        """True when the peer takes one more request now."""
        return self.n_requests_left > 0

    @property
    def n_requests_left(self) -> int:
        """How many more requests the peer takes now."""
        if self.state is not State.OPEN or self._peer_settings is None:
            return 0
        return max(0, self._peer_settings.max_requests - self._requests.n_asked)

    # --- bytes in ---------------------------------------------------------------------------------------------------

    def receive_data(self, data: bytes | bytearray | memoryview) -> list[Event]:
        """Take what came from the peer. Never raises for it: a peer's fault is a last event `Ended` with the error."""
        events: list[Event] = []
        if self.state is State.CLOSED:
            return events
        try:
            rest = self._receive_handshake(data) if self._reader is None else data
            if self._reader is not None:
                self._receive_records(rest, self._reader, events)
        except (HandshakeError, ProtocolError) as error:
            events.append(self._fail(error))
        return events

    def receive_eof(self) -> list[Event]:
        """The peer's side of the stream ended. Without a bye that is an error: something may have been cut off."""
        if self.state is State.CLOSED:
            return []
        reason = "the stream ended without a bye"
        if self.state in HANDSHAKE_STATES:  # what an acceptor closes for without an answer
            reason = (
                "the stream ended in the handshake: is the node full, or of another secret or version "
                f"(here: {PROTOCOL_VERSION})?"
            )
        self._shut()
        return [Ended("ended", reason, ConnectionLostError("the stream ended"))]

    def _receive_handshake(self, data: bytes | bytearray | memoryview) -> bytes:
        """Feed the handshake with messages of exactly the size it needs; returns what is behind it."""
        pending = self._handshake_bytes
        pending += data
        while self.state in HANDSHAKE_STATES and len(pending) >= self._handshake.needs_bytes:
            n_bytes = self._handshake.needs_bytes
            answer, secrets = self._handshake.receive_untrusted(bytes(pending[:n_bytes]))
            del pending[:n_bytes]
            if secrets is not None:
                self._authenticated(secrets)
            self._clear += answer
            self.state = NEXT_STATE[self.state]
        if self.state in HANDSHAKE_STATES:
            return b""
        rest = bytes(pending)
        pending.clear()
        return rest

    def _authenticated(self, secrets: Secrets) -> None:
        allowed = self._endpoint.allowed
        if not self.is_dialer and allowed is not None and secrets.node_id not in allowed:
            raise HandshakeError(f"{secrets.node_id.short} is not on the list of allowed nodes")
        self.node_id = secrets.node_id
        self.handshake_hash = secrets.handshake_hash
        self._reader = RecordReader(secrets.receiving)
        self._writer = RecordWriter(secrets.sending)
        self._put_notice(self._endpoint.settings)

    def _receive_records(
        self, data: bytes | bytearray | memoryview, reader: RecordReader, events: list[Event]
    ) -> None:
        reader.feed(data)
        while (record := reader.next_record_untrusted()) is not None:
            for frame in split_frames_untrusted(record):
                self._receive_frame(frame, events)
                if self.state is State.CLOSED:
                    return

    def _receive_frame(self, frame: Frame, events: list[Event]) -> None:
        if self.state is State.SETTINGS and frame.type is not FrameType.NOTICE:
            raise ProtocolError("bad_state", f"{frame.type.name} before settings")
        if frame.type is FrameType.NOTICE:
            self._receive_notice(self._inbox.start_untrusted(frame).message, events)
        else:
            self._requests.receive_untrusted(frame, events)

    def _receive_notice(self, message: Message, events: list[Event]) -> None:
        if isinstance(message, Bye):
            self._shut()
            events.append(Ended(message.code, message.reason, None))
            return
        if isinstance(message, Settings) is not (self.state is State.SETTINGS):
            raise ProtocolError("bad_state", f"{type(message).__name__} in state {self.state.name}")
        match message:
            case Settings():
                if PROTOCOL_VERSION not in message.versions:
                    raise ProtocolError("no_version", f"the peer speaks {message.versions}")
                if COMMON_ENCODING not in message.encodings:
                    raise ProtocolError("bad_field", f"encodings without {COMMON_ENCODING}")
                assert self.node_id is not None  # ours: SETTINGS is only reached through _authenticated
                self._peer_settings = message
                self._requests.opened(message)
                self.state = NEXT_STATE[self.state]
                events.append(Opened(self.node_id, message))
            case Ping():
                self._pongs_waiting += 1
                if self._pongs_waiting > MAX_PONGS_WAITING:
                    raise ProtocolError("flood", f"{self._pongs_waiting} pings are not answered yet")
                self._put_notice(Pong(message.nonce))
            case Pong():
                events.append(PongReceived(message.nonce))

    def _fail(self, error: HandshakeError | ProtocolError) -> Ended:
        may_answer = self.state in (State.SETTINGS, State.OPEN)
        self._shut()
        self._clear.clear()
        if isinstance(error, HandshakeError):
            return Ended("handshake", str(error), error)
        if may_answer and error.code != "bad_record":
            self._put_notice(Bye(error.code, printable(error.reason)))
        return Ended(error.code, error.reason, error)

    def _shut(self) -> None:
        self.state = State.CLOSED
        self._outbox.clear()
        self._inbox.clear()
        self._requests.clear()

    # --- messages out -----------------------------------------------------------------------------------------------

    def send_request(
        self, message: Message, parts: Sequence[memoryview] = (), traffic_class: TrafficClass | None = None
    ) -> int:
        """Queue a request; returns its id. `parts` are flat byte views and must not change until they have left.

        Raises UsageError when `can_request` is false, the message breaks a cap, or its rows are in an encoding that the
        peer's settings do not list.
        """
        if not self.can_request or message.frame is not FrameType.REQUEST:
            raise UsageError(f"no {type(message).__name__} can be asked now")
        if isinstance(message, Experts) and message.encoding not in self.settings.encodings:
            raise UsageError(f"the peer does not read {message.encoding} rows")
        traffic_class = message.traffic_class if traffic_class is None else traffic_class
        return self._requests.ask(message, parts, traffic_class)

    def send_reply(self, request_id: int, message: Message, parts: Sequence[memoryview] = ()) -> None:
        """Queue the one answer to a `RequestReceived`. Does nothing once the connection is closed.

        Raises UsageError, and queues nothing, if the message does not answer the request or breaks a cap.
        """
        if self.state is not State.CLOSED:
            self._requests.answer(request_id, message, parts)

    def cancel_request(self, request_id: int) -> None:
        """The reply to a request of ours is no longer wanted: no event will come for it."""
        self._requests.cancel(request_id)

    def send_ping(self, nonce: int) -> None:
        """Queue a ping; its pong comes as an event."""
        if self.state is State.OPEN:
            self._put_notice(Ping(nonce))

    def close(self, code: str = "done", reason: str = "") -> None:
        """Queue a bye as the last message and forget everything else that waits."""
        is_authenticated = self.state in (State.SETTINGS, State.OPEN)
        if self.state is not State.CLOSED:
            self._shut()
        if is_authenticated:
            self._put_notice(Bye(code, printable(reason)))

    def data_to_send(self, max_bytes: int) -> bytes | bytearray:
        """Bytes for the peer, about `max_bytes` at most, most urgent first; empty when nothing waits.

        What is returned must reach the peer whole and in order, or the connection is over.
        """
        out: list[bytearray] = []
        if self._clear:
            out.append(self._clear)
            self._clear = bytearray()
        room = max(max_bytes, MIN_WRITE_BYTES)
        while self._writer is not None and room >= MIN_WRITE_BYTES and self._outbox.n_items:
            plain, done = self._outbox.next_record(min(room, MAX_RECORD_PLAIN_BYTES))
            record = self._writer.seal(plain)
            room -= len(record)
            out.append(record)
            for item in done:
                self._left(item)
        return out[0] if len(out) == 1 else b"".join(out)

    def _left(self, item: Outgoing) -> None:
        if item.type is FrameType.REPLY:
            self._requests.reply_left(item)
        elif item.number == Pong.number and item.type is FrameType.NOTICE:
            self._pongs_waiting -= 1

    def _put_notice(self, message: Message) -> None:
        header = encode_header(message)
        self._outbox.put(
            Outgoing.message(FrameType.NOTICE, TrafficClass.CONTROL, 0, message.number, header, ())
        )


def printable(reason: str) -> str:
    """A reason as it may travel: no control characters, at most 128 characters (512 bytes)."""
    return "".join(char if char.isprintable() else "?" for char in reason[:128])
