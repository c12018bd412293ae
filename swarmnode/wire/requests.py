"""The requests of one connection, ours and the peer's, each until it has had its one end.

Ends are a reply, a refusal, or an ABORT after a CANCEL; an id is free again only then. Whether anything may come or be
sent at all is for the connection to say; which frame fits which request, and what is put in the outbox, is said here.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from swarmnode.errors import ProtocolError, UsageError
from swarmnode.wire.constants import UNKNOWN_REPLY_BUDGET, FrameType, TrafficClass
from swarmnode.wire.events import Event, ReplyReceived, RequestCancelled, RequestReceived
from swarmnode.wire.frames import Frame
from swarmnode.wire.inbox import Inbox, Incoming, is_own_id, next_id
from swarmnode.wire.messages import Message, Refused, Settings, encode_header
from swarmnode.wire.outbox import Outbox, Outgoing


class RequestState(enum.Enum):
    """A request of the peer's, until its reply has left."""

    RECEIVING = enum.auto()
    RUNNING = enum.auto()
    REPLYING = enum.auto()


@dataclass(slots=True)
class _Asked:
    """A request of ours, until its reply has come."""

    replies: tuple[type[Message], ...]
    outgoing: Outgoing
    is_cancelled: bool = False


@dataclass(slots=True)
class _Served:
    """A request of the peer's."""

    message: Message
    traffic_class: TrafficClass
    state: RequestState
    reply: Outgoing | None = None


class Requests:
    """What is in flight between an inbox and an outbox."""

    def __init__(self, inbox: Inbox, outbox: Outbox, *, is_dialer: bool, max_served: int) -> None:
        """`max_served`: requests of the peer's at once, as our settings told it."""
        self._inbox = inbox
        self._outbox = outbox
        self._is_dialer = is_dialer
        self._max_served = max_served
        self._peer_max_body_bytes = 0
        self._asked: dict[int, _Asked] = {}
        self._served: dict[int, _Served] = {}
        self._reply_bytes = [0 for _ in TrafficClass]
        self._unknown_replies = 0
        self._last_id = -1 if is_dialer else 0

    @property
    def n_asked(self) -> int:
        """Requests of ours that have not had their end."""
        return len(self._asked)

    def reply_bytes(self, traffic_class: TrafficClass) -> int:
        """Bytes of bodies of the replies of a class that have not left, each counted whole until all of it has."""
        return self._reply_bytes[traffic_class]

    def opened(self, settings: Settings) -> None:
        """What the peer accepts. Nothing is received or sent before."""
        self._peer_max_body_bytes = settings.max_body_bytes

    def clear(self) -> None:
        """Forget everything."""
        self._asked.clear()
        self._served.clear()
        self._reply_bytes = [0 for _ in TrafficClass]

    # --- frames in --------------------------------------------------------------------------------------------------

    def receive_untrusted(self, frame: Frame, events: list[Event]) -> None:
        """Take any frame but a NOTICE; what it completes or ends is added to `events`. Raises ProtocolError."""
        match frame.type:
            case FrameType.REQUEST:
                self._receive_request(frame, events)
            case FrameType.REPLY:
                self._receive_reply(frame, events)
            case FrameType.DATA:
                item = self._inbox.data_untrusted(frame)
                if item.is_complete:
                    self._complete(item, events)
            case FrameType.CANCEL:
                self._receive_cancel(frame, events)
            case FrameType.ABORT:
                self._receive_abort(frame)

    def _receive_request(self, frame: Frame, events: list[Event]) -> None:
        request_id = frame.request_id
        if is_own_id(request_id, is_dialer=self._is_dialer) or request_id in self._served:
            raise ProtocolError("duplicate_id", f"request {request_id}")
        if len(self._served) >= self._max_served:
            raise ProtocolError("too_many_requests", f"more than {len(self._served)} at once")
        item = self._inbox.start_untrusted(frame)
        self._served[request_id] = _Served(item.message, item.traffic_class, RequestState.RECEIVING)
        if item.is_complete:
            self._complete(item, events)

    def _receive_reply(self, frame: Frame, events: list[Event]) -> None:
        asked = self._asked.get(frame.request_id)
        if asked is None:
            self._unknown_replies += 1
            if self._unknown_replies > UNKNOWN_REPLY_BUDGET:
                raise ProtocolError("unknown_reply", f"reply to {frame.request_id}, which is not in flight")
        elif not (asked.outgoing.has_left or asked.is_cancelled):
            raise ProtocolError("wrong_reply", f"a reply to {frame.request_id}, which is not all sent")
        item = self._inbox.start_untrusted(frame)
        if asked is not None and not isinstance(item.message, (Refused, *asked.replies)):
            raise ProtocolError("wrong_reply", f"{type(item.message).__name__} does not answer this request")
        if item.is_complete:
            self._complete(item, events)
        elif asked is None or asked.is_cancelled:
            self._inbox.unwant(frame.request_id)

    def _complete(self, item: Incoming, events: list[Event]) -> None:
        """A whole request or reply is here."""
        if item.type is FrameType.REQUEST:
            self._served[item.request_id].state = RequestState.RUNNING
            events.append(RequestReceived(item.request_id, item.message, item.view(), item.traffic_class))
            return
        asked = self._asked.pop(item.request_id, None)
        if asked is None or asked.is_cancelled:
            return
        events.append(ReplyReceived(item.request_id, item.message, item.view()))

    def _receive_cancel(self, frame: Frame, events: list[Event]) -> None:
        request_id = frame.request_id
        if is_own_id(request_id, is_dialer=self._is_dialer) or len(frame.content):
            raise ProtocolError("bad_frame", f"CANCEL of {request_id} with {len(frame.content)} bytes")
        served = self._served.get(request_id)
        if served is None:
            return  # our reply crossed it on the way
        if served.state is RequestState.RUNNING:
            events.append(RequestCancelled(request_id))
        elif served.state is RequestState.RECEIVING:
            self._inbox.drop(FrameType.REQUEST, request_id)
            self._put_reply(request_id, served, Refused("cancelled", "", 0), ())
        elif served.reply is not None:
            self._outbox.drop(served.reply)
            self._reply_bytes[served.reply.traffic_class] -= served.reply.body_bytes
            if served.reply.has_begun:
                del self._served[request_id]
                self._put_bare(FrameType.ABORT, request_id)
            else:
                self._put_reply(request_id, served, Refused("cancelled", "", 0), ())

    def _receive_abort(self, frame: Frame) -> None:
        asked = self._asked.get(frame.request_id)
        if asked is None or not asked.is_cancelled or len(frame.content):
            raise ProtocolError("bad_frame", f"ABORT of {frame.request_id}, which was not cancelled")
        if not self._inbox.drop(FrameType.REPLY, frame.request_id):
            raise ProtocolError("bad_frame", f"ABORT of {frame.request_id}, whose reply had not begun")
        del self._asked[frame.request_id]

    # --- messages out -----------------------------------------------------------------------------------------------

    def ask(self, message: Message, parts: Sequence[memoryview], traffic_class: TrafficClass) -> int:
        """Queue a request of ours; returns its id. Raises UsageError, and queues nothing, if it breaks a cap."""
        request_id = self._new_id()
        item = self._packed(FrameType.REQUEST, request_id, message, parts, traffic_class)
        self._asked[request_id] = _Asked(message.replies, item)
        self._outbox.put(item)
        return request_id

    def answer(self, request_id: int, message: Message, parts: Sequence[memoryview]) -> None:
        """Queue the reply to a request of the peer's. Raises UsageError, and queues nothing, if the request is not
        waiting for one, or the message does not answer it or breaks a cap.
        """
        served = self._served.get(request_id)
        if served is None or served.state is not RequestState.RUNNING:
            raise UsageError(f"request {request_id} is not waiting for a reply")
        if not isinstance(message, (Refused, *served.message.replies)):
            raise UsageError(f"{type(message).__name__} does not answer {type(served.message).__name__}")
        self._put_reply(request_id, served, message, parts)

    def cancel(self, request_id: int) -> None:
        """The reply to a request of ours is no longer wanted: no event will come for it."""
        asked = self._asked.get(request_id)
        if asked is None or asked.is_cancelled:
            return
        if not asked.outgoing.has_left:
            self._outbox.drop(asked.outgoing)
        if not asked.outgoing.has_begun:
            del self._asked[request_id]
            return
        asked.is_cancelled = True
        self._inbox.unwant(request_id)
        self._put_bare(FrameType.CANCEL, request_id)

    def reply_left(self, item: Outgoing) -> None:
        """All of a reply was taken from the outbox: its request has had its end."""
        self._served.pop(item.request_id, None)
        self._reply_bytes[item.traffic_class] -= item.body_bytes

    def _put_reply(
        self, request_id: int, served: _Served, message: Message, parts: Sequence[memoryview]
    ) -> None:
        traffic_class = max(served.traffic_class, message.traffic_class)
        item = self._packed(FrameType.REPLY, request_id, message, parts, traffic_class)
        served.state = RequestState.REPLYING
        served.reply = item
        self._reply_bytes[traffic_class] += item.body_bytes
        self._outbox.put(item)

    def _put_bare(self, frame: FrameType, request_id: int) -> None:
        # In front of everything: the receiver must know that a body ends early before the next one starts.
        self._outbox.put_first(Outgoing(frame, TrafficClass.CONTROL, request_id))

    def _packed(
        self,
        frame: FrameType,
        request_id: int,
        message: Message,
        parts: Sequence[memoryview],
        traffic_class: TrafficClass,
    ) -> Outgoing:
        """Check our own message as the peer will, and pack it."""
        item = Outgoing.message(
            frame, traffic_class, request_id, message.number, encode_header(message), parts
        )
        if item.body_bytes or message.body_cap_bytes:
            self._check_own_body(message, item.body_bytes, traffic_class)
        return item

    def _check_own_body(self, message: Message, body_bytes: int, traffic_class: TrafficClass) -> None:
        cap_bytes = min(message.body_cap_bytes, self._peer_max_body_bytes)
        if body_bytes > cap_bytes:
            raise UsageError(f"{type(message).__name__} of {body_bytes} bytes, the peer takes {cap_bytes}")
        if body_bytes and traffic_class is TrafficClass.CONTROL:
            raise UsageError("control messages have no body, so that nothing waits behind one")
        try:
            message.check_body_untrusted(body_bytes)
        except ProtocolError as error:
            raise UsageError(str(error)) from error

    def _new_id(self) -> int:
        self._last_id = next_id(self._last_id)
        while self._last_id in self._asked:
            self._last_id = next_id(self._last_id)
        return self._last_id
