"""What waits to be sent, by traffic class: strict order between classes, first come first served within one.

One message of a class is on its way at a time; a higher class cuts in between its frames. Bodies are held by reference
and read when their frame is built, so a body must stay unchanged until its message has left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from swarmnode.wire.constants import (
    FRAME_HEADER_BYTES,
    FrameType,
    TrafficClass,
)
from swarmnode.wire.frames import pack_head, pack_start

SMALL_FRAME_BYTES = 256
"""A frame with less body than this is not worth starting at the end of a record."""


class Outgoing:
    """One message, or one bare CANCEL or ABORT, and how much of it has left."""

    __slots__ = (
        "_parts",
        "body_bytes",
        "has_begun",
        "left_bytes",
        "number",
        "request_id",
        "start",
        "traffic_class",
        "type",
    )

    def __init__(
        self,
        frame: FrameType,
        traffic_class: TrafficClass,
        request_id: int,
        start: bytes = b"",
        parts: Sequence[memoryview] = (),
        number: int = 0,
    ) -> None:
        self.type = frame
        self.number = number
        self.traffic_class = traffic_class
        self.request_id = request_id
        self.start = start
        """What the first frame holds before the body: message start and header."""
        self._parts = deque(parts)
        self.body_bytes = sum(len(part) for part in parts)
        self.left_bytes = self.body_bytes
        self.has_begun = False

    @classmethod
    def message(
        cls,
        frame: FrameType,
        traffic_class: TrafficClass,
        request_id: int,
        number: int,
        header: bytes,
        parts: Sequence[memoryview],
    ) -> Outgoing:
        """A message with its header packed and its body by reference."""
        body_bytes = sum(len(part) for part in parts)
        start = pack_start(number, len(header), body_bytes) + header
        return cls(frame, traffic_class, request_id, start, parts, number)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of start and body that have not left."""
        return self.left_bytes if self.has_begun else self.left_bytes + len(self.start)

    @property
    def has_left(self) -> bool:
        """Nothing of it waits any more."""
        return self.has_begun and not self.left_bytes

    @property
    def least_frame_bytes(self) -> int:
        """The smallest next frame worth building."""
        start_bytes = 0 if self.has_begun else len(self.start)
        return FRAME_HEADER_BYTES + start_bytes + min(self.left_bytes, SMALL_FRAME_BYTES)

    def next_frame(self, room: int, out: list[bytes | memoryview]) -> int:
        """Append the next frame, at most `room` bytes, to `out`; returns its length. `room` must hold the start."""
        frame = FrameType.DATA if self.has_begun else self.type
        before = FRAME_HEADER_BYTES + (0 if self.has_begun else len(self.start))
        n_body = min(self.left_bytes, room - before)
        out.append(
            pack_head(frame, self.traffic_class, self.request_id, before - FRAME_HEADER_BYTES + n_body)
        )
        if not self.has_begun:
            out.append(self.start)
            self.has_begun = True
        self._take_body(n_body, out)
        return before + n_body

    def _take_body(self, n_bytes: int, out: list[bytes | memoryview]) -> None:
        self.left_bytes -= n_bytes
        while n_bytes:
            part = self._parts[0]
            if len(part) <= n_bytes:
                out.append(part)
                n_bytes -= len(part)
                self._parts.popleft()
            else:
                out.append(part[:n_bytes])
                self._parts[0] = part[n_bytes:]
                n_bytes = 0


class Outbox:
    """The queues of one connection."""

    def __init__(self) -> None:
        self._queues: tuple[deque[Outgoing], ...] = tuple(deque() for _ in TrafficClass)
        self.queued_bytes = 0
        """Bytes of starts and bodies that have not left yet."""

    def __bool__(self) -> bool:
        return any(self._queues)

    def put(self, item: Outgoing) -> None:
        """Queue behind everything of the same class."""
        self._queues[item.traffic_class].append(item)
        self.queued_bytes += item.waiting_bytes

    def put_first(self, item: Outgoing) -> None:
        """Queue before everything of the same class; only for frames that do not start a message."""
        self._queues[item.traffic_class].appendleft(item)
        self.queued_bytes += item.waiting_bytes

    def drop(self, item: Outgoing) -> None:
        """Forget what has not left of an item that is queued."""
        self._queues[item.traffic_class].remove(item)
        self.queued_bytes -= item.waiting_bytes

    def clear(self) -> None:
        """Forget everything."""
        for queue in self._queues:
            queue.clear()
        self.queued_bytes = 0

    def next_record(self, max_bytes: int) -> tuple[bytes, list[Outgoing]]:
        """Plaintext of the next record, at most `max_bytes`, and the items that are complete with it.

        Empty when nothing waits. `max_bytes` is over 4 KiB + 20, so that any start fits into an empty record.
        """
        out: list[bytes | memoryview] = []
        done: list[Outgoing] = []
        room = max_bytes
        for queue in self._queues:
            while queue:
                item = queue[0]
                if out and room < item.least_frame_bytes:
                    return b"".join(out), done
                waiting_bytes = item.waiting_bytes
                room -= item.next_frame(room, out)
                self.queued_bytes -= waiting_bytes - item.waiting_bytes
                if item.left_bytes:
                    return b"".join(out), done
                done.append(queue.popleft())
        return b"".join(out), done
