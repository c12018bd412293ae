"""Frames: a 12-byte head and its content. A record holds whole frames, so a length is checked against its record.

head   u8 type | u8 traffic class | u16 flags = 0 | u32 request id | u32 length
start  u16 message number | u16 header bytes | u32 body bytes          (REQUEST, REPLY, NOTICE)
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from swarmnode.errors import ProtocolError
from swarmnode.wire.constants import (
    FRAME_HEADER,
    FRAME_HEADER_BYTES,
    MAX_HEADER_BYTES,
    MESSAGE_START,
    MESSAGE_START_BYTES,
    FrameType,
    TrafficClass,
)

_HEAD = struct.Struct(FRAME_HEADER)
_START = struct.Struct(MESSAGE_START)
_TYPES = {int(item): item for item in FrameType}
_CLASSES = {int(item): item for item in TrafficClass}


class Frame(NamedTuple):
    """A frame of a record; `content` is a view into the record."""

    type: FrameType
    traffic_class: TrafficClass
    request_id: int
    content: memoryview


class MessageStart(NamedTuple):
    """What a frame that starts a message says: who it is, how long its whole body is, the body's first bytes."""

    number: int
    header: memoryview
    body_bytes: int
    first: memoryview


def pack_head(frame: FrameType, traffic_class: TrafficClass, request_id: int, length: int) -> bytes:
    """The 12 bytes before `length` bytes of content."""
    return _HEAD.pack(frame, traffic_class, 0, request_id, length)


def pack_start(number: int, header_bytes: int, body_bytes: int) -> bytes:
    """The 8 bytes before the header of a message."""
    return _START.pack(number, header_bytes, body_bytes)


def split_frames_untrusted(record: bytes | memoryview) -> list[Frame]:
    """All frames of a record's plaintext. Raises ProtocolError `bad_frame`."""
    frames = []
    view = memoryview(record)
    offset, end = 0, len(record)
    while offset < end:
        if end - offset < FRAME_HEADER_BYTES:
            raise ProtocolError("bad_frame", f"{end - offset} bytes where a frame should begin")
        kind, traffic_class, flags, request_id, length = _HEAD.unpack_from(record, offset)
        offset += FRAME_HEADER_BYTES
        if kind not in _TYPES or traffic_class not in _CLASSES or flags:
            raise ProtocolError("bad_frame", f"type {kind}, class {traffic_class}, flags {flags}")
        if length > end - offset:
            raise ProtocolError(
                "bad_frame", f"a frame of {length} bytes in a record with {end - offset} left"
            )
        frames.append(
            Frame(_TYPES[kind], _CLASSES[traffic_class], request_id, view[offset : offset + length])
        )
        offset += length
    return frames


def parse_start_untrusted(content: memoryview) -> MessageStart:
    """The start of a message. Raises ProtocolError `bad_frame` or `bad_header`."""
    if len(content) < MESSAGE_START_BYTES:
        raise ProtocolError("bad_frame", f"a message that starts with {len(content)} bytes")
    number, header_bytes, body_bytes = _START.unpack_from(content)
    if header_bytes > MAX_HEADER_BYTES:
        raise ProtocolError("bad_header", f"{header_bytes} bytes, at most {MAX_HEADER_BYTES}")
    body = MESSAGE_START_BYTES + header_bytes
    if body > len(content):
        raise ProtocolError("bad_frame", "a header that ends behind its frame")
    if len(content) - body > body_bytes:
        raise ProtocolError("bad_frame", f"more body than the {body_bytes} bytes declared")
    return MessageStart(number, content[MESSAGE_START_BYTES:body], body_bytes, content[body:])
