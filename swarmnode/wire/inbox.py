"""Puts frames together to messages. At most one message a traffic class is incomplete, so memory is bounded by
(number of classes) x (largest body), and it is only taken as the bytes arrive."""

from __future__ import annotations

from dataclasses import dataclass

from swarmnode.errors import ProtocolError
from swarmnode.wire.constants import MAX_REQUEST_ID, FrameType, TrafficClass
from swarmnode.wire.frames import Frame, parse_start_untrusted
from swarmnode.wire.messages import MESSAGES, Message, decode_header_untrusted

EMPTY = memoryview(b"")


@dataclass(slots=True)
class Incoming:
    """A message of which the start has come."""

    type: FrameType
    traffic_class: TrafficClass
    request_id: int
    message: Message
    body_bytes: int
    body: bytearray | memoryview
    """A view into the record if all came at once."""
    got_bytes: int
    serial: int
    """1, 2, 3 ... in the order of the starts."""
    is_unwanted: bool = False
    """Its bytes are counted and thrown away."""

    @property
    def is_complete(self) -> bool:
        """All of the body is here."""
        return self.got_bytes == self.body_bytes

    def view(self) -> memoryview:
        """The body, read-only."""
        body = self.body
        return body if type(body) is memoryview else memoryview(body).toreadonly()


class Inbox:
    """The incomplete messages of one connection."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._open: dict[TrafficClass, Incoming] = {}
        self._serial = 0

    @property
    def oldest_incomplete(self) -> int:
        """Serial number of the message that has been incomplete for longest; 0 if there is none."""
        return min((item.serial for item in self._open.values()), default=0)

    @property
    def held_bytes(self) -> int:
        """Body bytes of incomplete messages that are kept."""
        return sum(len(item.body) for item in self._open.values())

    def start_untrusted(self, frame: Frame) -> Incoming:
        """Take a REQUEST, REPLY or NOTICE frame; the message is complete or is kept here until it is.

        Raises ProtocolError. Whether the message may come now is for the connection to say.
        """
        if frame.traffic_class in self._open:
            raise ProtocolError("interleaved", f"two messages at once in class {frame.traffic_class.name}")
        start = parse_start_untrusted(frame.content)
        self._check_size(frame, start.number, start.body_bytes)
        message = decode_header_untrusted(start.number, start.header)
        message.check_body_untrusted(start.body_bytes)
        got_bytes = len(start.first)
        is_whole = got_bytes == start.body_bytes
        body = _kept(start.first) if is_whole else bytearray(start.first)
        self._serial += 1
        item = Incoming(
            frame.type,
            frame.traffic_class,
            frame.request_id,
            message,
            start.body_bytes,
            body,
            got_bytes,
            self._serial,
        )
        if not is_whole:
            self._open[frame.traffic_class] = item
        return item

    def data_untrusted(self, frame: Frame) -> Incoming:
        """Take a DATA frame; returns the message it belongs to. Raises ProtocolError `bad_frame`."""
        item = self._open.get(frame.traffic_class)
        if item is None or item.request_id != frame.request_id:
            raise ProtocolError("bad_frame", f"data for {frame.request_id}, which has no open body")
        n_bytes = len(frame.content)
        if not 1 <= n_bytes <= item.body_bytes - item.got_bytes:
            raise ProtocolError(
                "bad_frame", f"{n_bytes} bytes where {item.body_bytes - item.got_bytes} are left"
            )
        item.got_bytes += n_bytes
        if not item.is_unwanted:
            assert isinstance(item.body, bytearray)  # ours: a body in several frames is always collected
            item.body += frame.content
        if item.is_complete:
            del self._open[frame.traffic_class]
        return item

    def drop(self, frame_type: FrameType, request_id: int) -> bool:
        """Forget the incomplete message of this id; its sender will send no more of it. False if there is none."""
        for item in self._open.values():
            if item.type is frame_type and item.request_id == request_id:
                del self._open[item.traffic_class]
                return True
        return False

    def unwant(self, request_id: int) -> None:
        """Throw away the body of this incomplete reply as it goes on arriving."""
        for item in self._open.values():
            if item.type is FrameType.REPLY and item.request_id == request_id:
                item.is_unwanted = True
                item.body = bytearray()

    def clear(self) -> None:
        """Forget everything."""
        self._open.clear()

    def _check_size(self, frame: Frame, number: int, body_bytes: int) -> None:
        """Before the header is even read: is it a message that may start so, and may its body be that long?"""
        cls = MESSAGES.get(number)
        if cls is None or cls.frame is not frame.type:
            raise ProtocolError("bad_frame", f"message number {number} in a {frame.type.name} frame")
        cap_bytes = min(cls.body_cap_bytes, self._max_body_bytes)
        if body_bytes > cap_bytes:
            code = "too_large" if cap_bytes else "bad_body"
            raise ProtocolError(code, f"{cls.__name__} of {body_bytes} bytes, at most {cap_bytes}")
        if body_bytes and frame.traffic_class is TrafficClass.CONTROL:
            raise ProtocolError("bad_body", "a body in the control class")
        if (frame.request_id == 0) is not (frame.type is FrameType.NOTICE):
            raise ProtocolError("bad_frame", f"request id {frame.request_id} in a {frame.type.name} frame")


def _kept(content: memoryview) -> memoryview:
    """A body as it may be kept: a writable view is of memory that the next record uses again."""
    return content if content.readonly else memoryview(bytes(content))


def is_own_id(request_id: int, *, is_dialer: bool) -> bool:
    """Whether a request of this id was made by us: the dialer's are odd."""
    return (request_id % 2 == 1) is is_dialer


def next_id(last: int) -> int:
    """The id after `last` of the same side; wraps within u32 and never gives 0."""
    following = last + 2
    return following if following <= MAX_REQUEST_ID else (following & 1) or 2
