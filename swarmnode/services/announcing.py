"""Which holdings fit a message: its ranges are counted, and its header is at most 4 KiB."""

from __future__ import annotations

from collections.abc import Iterable

from swarmnode.weights.slices import ExpertRange, holdings_of, ranges_of
from swarmnode.wire.connection import printable
from swarmnode.wire.constants import MAX_HEADER_BYTES, MAX_RANGES
from swarmnode.wire.messages import Ranges3

MAX_CAPACITY_BYTES = 2**48
"""Most bytes that a budget in a message may be."""

_OTHER_BYTES = 512
"""For everything beside the ranges in the header of Announce."""
_DEVICE_BYTES = 128


def announceable(ranges: Iterable[ExpertRange]) -> tuple[ExpertRange, ...]:
    """The ranges merged, in order; if they do not fit a message, the longest that do."""
    merged = ranges_of(holdings_of(ranges))
    chosen: list[ExpertRange] = []
    left_bytes = MAX_HEADER_BYTES - _OTHER_BYTES
    for item in sorted(merged, key=lambda item: -item.count):
        left_bytes -= _encoded_bytes(item)
        if left_bytes < 0 or len(chosen) == MAX_RANGES:
            break
        chosen.append(item)
    return tuple(sorted(chosen))


def as_fields(ranges: Iterable[ExpertRange]) -> Ranges3:
    """As messages carry them."""
    return tuple((item.layer, item.first, item.count) for item in ranges)


def device_text(description: str) -> str:
    """A device's description as Announce carries it: 128 bytes without control characters."""
    return printable(description).encode()[:_DEVICE_BYTES].decode(errors="ignore")


def _encoded_bytes(item: ExpertRange) -> int:
    """Of [layer, first, count] in msgpack."""
    return 1 + sum(_integer_bytes(number) for number in (item.layer, item.first, item.count))


def _integer_bytes(number: int) -> int:
    if number < 128:
        return 1
    return 2 if number < 256 else 3 if number < 65_536 else 5
