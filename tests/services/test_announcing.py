"""What a worker says it holds fits a message, whatever it holds."""

from __future__ import annotations

import pytest

from swarmnode.services.announcing import MAX_CAPACITY_BYTES, announceable, as_fields, device_text
from swarmnode.weights.slices import ExpertRange
from swarmnode.wire.constants import MAX_HEADER_BYTES, MAX_PAIRS, MAX_RANGES
from swarmnode.wire.messages import Announce, encode_header

MODEL = bytes(32)


def headers(ranges: tuple[ExpertRange, ...]) -> list[bytes]:
    device = device_text("ü" * 500)
    fields = as_fields(ranges)
    return [
        encode_header(Announce(MODEL, "fetching", fields, MAX_PAIRS, device, MAX_CAPACITY_BYTES, 2**32 - 1)),
    ]


def test_ranges_are_merged() -> None:
    pieces = [ExpertRange(1, 4, 4), ExpertRange(0, 0, 2), ExpertRange(1, 0, 4), ExpertRange(0, 2, 6)]
    assert announceable(pieces) == (ExpertRange(0, 0, 8), ExpertRange(1, 0, 8))


@pytest.mark.parametrize(("layer", "first"), [(0, 0), (40, 200), (1000, 60_000)])
def test_too_many_ranges_are_cut_to_the_longest_that_fit(layer: int, first: int) -> None:
    ranges = [ExpertRange(layer, first + 4 * n, 1 + n % 3) for n in range(1000)]
    chosen = announceable(ranges)
    assert all(len(header) <= MAX_HEADER_BYTES for header in headers(chosen))
    assert 300 < len(chosen) <= MAX_RANGES
    assert list(chosen) == sorted(chosen)
    assert min(item.count for item in chosen) >= 2


def test_as_many_ranges_as_a_message_may_have_are_kept() -> None:
    ranges = tuple(ExpertRange(n % 128, 2 * (n // 128), 1) for n in range(MAX_RANGES))
    assert announceable(ranges) == tuple(sorted(ranges))


def test_devices_are_named_in_what_a_message_takes() -> None:
    assert device_text("Radeon\x1b[31m\n") == "Radeon?[31m?"
    assert len(device_text("ü" * 500).encode()) == 128
