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
        "_pieces",
        "body_bytes",
        "has_begun",
        "least_bytes",
        "left_bytes",
        "number",
        "request_id",
        "traffic_class",
        "type",
    )

    def __init__(self, frame: FrameType, traffic_class: TrafficClass, request_id: int) -> None:
        """A bare frame."""
        self.type = frame
        self.traffic_class = traffic_class
        self.request_id = request_id
        self.number = 0
        self.body_bytes = 0
        self.left_bytes = 0
        """Bytes of start, header and body that have not left."""
        self.least_bytes = 0
        """The next frame holds at least so much, unless less is left: the first one holds start and header."""
        self.has_begun = False
        self._pieces: list[bytes | memoryview] = []

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
        item = cls(frame, traffic_class, request_id)
        item.number = number
        item.body_bytes = body_bytes = sum(map(len, parts))
        start = pack_start(number, len(header), body_bytes) + header
        item.left_bytes = len(start) + body_bytes
        item.least_bytes = len(start) + SMALL_FRAME_BYTES
        item._pieces = [start, *parts]
        return item

    @property
    def has_left(self) -> bool:
        """Nothing of it waits any more."""
        return self.has_begun and not self.left_bytes

    def next_frame(self, room: int, out: list[bytes | memoryview]) -> int:
        """Append the next frame, at most `room` bytes, to `out`; returns the length of its content."""
        n_bytes = min(self.left_bytes, room - FRAME_HEADER_BYTES)
        frame = FrameType.DATA if self.has_begun else self.type
        out.append(pack_head(frame, self.traffic_class, self.request_id, n_bytes))
        self.has_begun = True
        self.least_bytes = SMALL_FRAME_BYTES
        self.left_bytes -= n_bytes
        if self.left_bytes:
            self._take(n_bytes, out)
        else:
            out += self._pieces
            self._pieces = []
        return n_bytes

    def _take(self, n_bytes: int, out: list[bytes | memoryview]) -> None:
        """Move the first `n_bytes` of what is left to `out`."""
        done = 0
        for piece in self._pieces:
            if len(piece) > n_bytes:
                break
            out.append(piece)
            n_bytes -= len(piece)
            done += 1
        del self._pieces[:done]
        if n_bytes:
            rest = memoryview(self._pieces[0])
            out.append(rest[:n_bytes])
            self._pieces[0] = rest[n_bytes:]


class Outbox:
    """The queues of one connection."""

    def __init__(self) -> None:
        self._queues: tuple[deque[Outgoing], ...] = tuple(deque() for _ in TrafficClass)
        self.queued_bytes = 0
        """Bytes of headers and bodies that have not left yet."""
        self.n_items = 0
        """Messages and bare frames that have not left, or not all of them."""

    def put(self, item: Outgoing) -> None:
        """Queue behind everything of the same class."""
        self._queues[item.traffic_class].append(item)
        self.n_items += 1
        self.queued_bytes += item.left_bytes

    def put_first(self, item: Outgoing) -> None:
        """Queue before everything of the same class; only for frames that do not start a message."""
        self._queues[item.traffic_class].appendleft(item)
        self.n_items += 1
        self.queued_bytes += item.left_bytes

    def drop(self, item: Outgoing) -> None:
        """Forget what has not left of an item that is queued."""
        self._queues[item.traffic_class].remove(item)
        self.n_items -= 1
        self.queued_bytes -= item.left_bytes

    def clear(self) -> None:
        """Forget everything."""
        for queue in self._queues:
            queue.clear()
        self.queued_bytes = 0
        self.n_items = 0

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
                if out and room < FRAME_HEADER_BYTES + min(item.left_bytes, item.least_bytes):
                    return b"".join(out), done
                n_bytes = item.next_frame(room, out)
                self.queued_bytes -= n_bytes
                room -= FRAME_HEADER_BYTES + n_bytes
                if item.left_bytes:
                    return b"".join(out), done
                done.append(queue.popleft())
                self.n_items -= 1
        return b"".join(out), done
