"""Which experts of a model a node holds, as few bytes: runs or a bitmap, the smaller. Pure.

Experts are counted through all layers, `layer * n_expert + expert`, so that a whole layer, or a whole model, is one
run. The first byte says which form follows:

    0 | (gap, length) of each run, as unsigned LEB128 varints; the gap counts from the end of the run before
    1 | ceil(n_layer * n_expert / 8) bytes, the lowest bit of a byte first
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from swarmnode.errors import ProtocolError, UsageError
from swarmnode.weights.slices import ExpertRange

RUNS = 0
BITMAP = 1
MAX_RANGES = 4096
"""Ranges that one record may become in memory: 3,000 experts chosen at random among 12,288 are 2,270 ranges."""
_MAX_VARINT_BYTES = 4
"""1,024 layers of 65,536 experts are 2**26."""

Span = tuple[int, int]
"""First flat index, and the one behind the last."""


def encode(ranges: Iterable[ExpertRange], n_layer: int, n_expert: int) -> bytes:
    """The bytes of these experts, which may overlap. `n_layer` is the highest layer's number + 1.

    Raises UsageError if one is outside the model.
    """
    spans = _merged(ranges, n_layer, n_expert)
    runs = bytearray([RUNS])
    end = 0
    for start, stop in spans:
        _append_varint(runs, start - end)
        _append_varint(runs, stop - start)
        end = stop
    bitmap_bytes = (n_layer * n_expert + 7) // 8
    if len(runs) <= 1 + bitmap_bytes:
        return bytes(runs)
    bits = np.zeros(8 * bitmap_bytes, np.uint8)
    for start, stop in spans:
        bits[start:stop] = 1
    return bytes([BITMAP]) + np.packbits(bits, bitorder="little").tobytes()


def decode_untrusted(
    data: bytes, n_layer: int, n_expert: int, max_ranges: int = MAX_RANGES
) -> tuple[ExpertRange, ...]:
    """The fewest ranges that hold these experts, in order.

    Raises ProtocolError `bad_gossip`: an unknown form, truncated or trailing bytes, runs that touch, are empty or end
    outside the model, over `max_ranges` ranges. Time is bounded by len(data) + max_ranges.
    """
    if not data:
        raise _bad("holdings without a form")
    total = n_layer * n_expert
    if data[0] == RUNS:
        spans = _read_runs(data, total, max_ranges)
    elif data[0] == BITMAP:
        spans = _read_bitmap(data, total, max_ranges)
    else:
        raise _bad(f"holdings of form {data[0]}")
    found: list[ExpertRange] = []
    for start, stop in spans:
        found.extend(_split(start, stop, n_expert))
        if len(found) > max_ranges:
            raise _bad(f"holdings of more than {max_ranges} ranges")
    return tuple(found)


def _bad(reason: str) -> ProtocolError:
    return ProtocolError("bad_gossip", reason)


def _merged(ranges: Iterable[ExpertRange], n_layer: int, n_expert: int) -> list[Span]:
    spans: list[Span] = []
    for item in sorted(ranges):
        if item.layer >= n_layer or item.stop > n_expert:
            raise UsageError(f"{item}: outside of {n_layer} layers of {n_expert} experts")
        start, stop = item.layer * n_expert + item.first, item.layer * n_expert + item.stop
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(stop, spans[-1][1]))
        else:
            spans.append((start, stop))
    return spans


def _append_varint(out: bytearray, value: int) -> None:
    while value > 0x7F:
        out.append(0x80 | value & 0x7F)
        value >>= 7
    out.append(value)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at `at`, and where the next one begins."""
    value = 0
    for i in range(_MAX_VARINT_BYTES):
        if at + i >= len(data):
            raise _bad("holdings that end inside a number")
        byte = data[at + i]
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            if byte == 0 and i:
                raise _bad("a number in holdings with leading zeros")
            return value, at + i + 1
    raise _bad("a number in holdings that is too long")


def _read_runs(data: bytes, total: int, max_runs: int) -> list[Span]:
    spans: list[Span] = []
    at, end = 1, 0
    while at < len(data):
        gap, at = _read_varint(data, at)
        length, at = _read_varint(data, at)
        if length == 0 or (gap == 0 and spans):
            raise _bad("an empty run, or two that touch")
        start, end = end + gap, end + gap + length
        if end > total or len(spans) == max_runs:
            raise _bad("runs behind the model's end, or too many")
        spans.append((start, end))
    return spans


def _read_bitmap(data: bytes, total: int, max_runs: int) -> list[Span]:
    if len(data) != 1 + (total + 7) // 8:
        raise _bad(f"a bitmap of {len(data) - 1} bytes for {total} experts")
    bits = np.unpackbits(np.frombuffer(data, np.uint8, offset=1), bitorder="little")
    if bits[total:].any():
        raise _bad("a bitmap with bits behind the model's end")
    edges = np.flatnonzero(np.diff(np.concatenate(([0], bits[:total], [0])).astype(np.int8)))
    if len(edges) > 2 * max_runs:
        raise _bad("a bitmap of too many runs")
    numbers = edges.tolist()
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _split(start: int, stop: int, n_expert: int) -> Iterator[ExpertRange]:
    """A run through several layers as a range of each."""
    while start < stop:
        layer, first = divmod(start, n_expert)
        count = min(stop - start, n_expert - first)
        yield ExpertRange(layer, first, count)
        start += count
