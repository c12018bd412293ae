"""A backbone's demand, small enough for a record: its most wanted experts, and those it found nobody for. Pure.

All integers are little-endian:

    u8 version = 1 | u32 pairs per 1,024 s | list of hot experts | list of unmet experts
    list: u8 entries | entries by flat number (layer * n_expert + expert): varint gap to the one before | u16 share

Shares are in 1/65535: of all pairs for a hot expert, of this expert's own pairs for an unmet one. There is one encoding
of a sketch; others are refused.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from swarmnode.errors import ProtocolError

MAX_HOT = 64
MAX_UNMET = 128
SHARE_UNIT = 65535
MAX_SKETCH_BYTES = 5 + 2 + (MAX_HOT + MAX_UNMET) * 6
"""1.2 KB: a gap takes at most 4 bytes; at the real size (12,288 experts) 1 or 2, so 0.7 KB."""

_VERSION = 1
_RATE_UNIT = 1024
_MAX_RATE = 2**32 - 1


@dataclass(frozen=True)
class DemandSketch:
    """`per_s`: pairs a second. `hot`: flat expert number -> share of all pairs in 1/65535, of the most wanted (at most
    MAX_HOT). `unmet`: flat expert number -> share of its own pairs that no worker computed (at most MAX_UNMET).
    """

    per_s: float
    hot: Mapping[int, int]
    unmet: Mapping[int, int]

    def encode(self) -> bytes:
        """The canonical bytes, at most MAX_SKETCH_BYTES."""
        rate = min(_MAX_RATE, round(self.per_s * _RATE_UNIT))
        return struct.pack("<BI", _VERSION, rate) + _encode_list(self.hot) + _encode_list(self.unmet)

    @staticmethod
    def is_silent(data: bytes) -> bool:
        """Whether bytes of a sketch, which may be anything, name no pairs; decodes nothing."""
        return not any(data[1:5])

    @classmethod
    def decode_untrusted(cls, data: bytes, size: int) -> DemandSketch:
        """A sketch from a record about a model with flat expert numbers below `size` (n_layer * n_expert).

        ProtocolError (`bad_gossip`) if it is too long, not canonical, names a higher number, or its hot experts' shares
        are more than the whole.
        """
        if len(data) > MAX_SKETCH_BYTES:
            raise _malformed(f"{len(data)} bytes")
        reader = _Reader(data)
        if reader.u8() != _VERSION:
            raise _malformed("of another version")
        per_s = reader.u32() / _RATE_UNIT
        hot = _decode_list(reader, MAX_HOT, size)
        unmet = _decode_list(reader, MAX_UNMET, size)
        reader.end()
        if sum(hot.values()) > SHARE_UNIT:
            raise _malformed("shares of more than the whole")
        return cls(per_s, hot, unmet)


def _malformed(reason: str) -> ProtocolError:
    return ProtocolError("bad_gossip", f"a sketch: {reason}")


def _encode_list(entries: Mapping[int, int]) -> bytes:
    data = bytearray([len(entries)])
    after = 0
    for flat in sorted(entries):
        data += _varint(flat - after) + struct.pack("<H", entries[flat])
        after = flat + 1
    return bytes(data)


def _decode_list(reader: _Reader, most: int, size: int) -> dict[int, int]:
    n_entries = reader.u8()
    if n_entries > most:
        raise _malformed(f"{n_entries} entries")
    entries: dict[int, int] = {}
    after = 0
    for _ in range(n_entries):
        flat = after + reader.varint()
        share = reader.u16()
        if flat >= size:
            raise _malformed("an expert that the model does not have")
        if share == 0:
            raise _malformed("a share of nothing")
        entries[flat] = share
        after = flat + 1
    return entries


def _varint(value: int) -> bytes:
    data = bytearray()
    while value >= 0x80:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)


class _Reader:
    """Takes integers off the front; ProtocolError where bytes are missing or left over."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def u8(self) -> int:
        return self._take(1)[0]

    def u16(self) -> int:
        return int.from_bytes(self._take(2), "little")

    def u32(self) -> int:
        return int.from_bytes(self._take(4), "little")

    def varint(self) -> int:
        """At most 4 bytes, the shortest form."""
        value = 0
        for place in range(4):
            byte = self.u8()
            value |= (byte & 0x7F) << (7 * place)
            if byte < 0x80:
                if byte == 0 and place > 0:
                    raise _malformed("a number in a longer form than needed")
                return value
        raise _malformed("a number that is too long")

    def end(self) -> None:
        if self._at != len(self._data):
            raise _malformed("bytes are left over")

    def _take(self, count: int) -> bytes:
        if self._at + count > len(self._data):
            raise _malformed("ends too early")
        self._at += count
        return self._data[self._at - count : self._at]
