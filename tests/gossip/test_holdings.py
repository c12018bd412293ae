"""Holdings: round trips, sizes, and hostile bytes."""

from __future__ import annotations

import random
from contextlib import suppress
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import ProtocolError, UsageError
from swarmnode.gossip.holdings import BITMAP, MAX_RANGES, RUNS, decode_untrusted, encode
from swarmnode.weights.slices import ExpertRange, merge_pairs
from tests.calls import count_lines

SETS = st.sets(st.tuples(st.integers(0, 5), st.integers(0, 30)), max_size=186)


@given(SETS)
def test_what_is_encoded_is_read(pairs: set[tuple[int, int]]) -> None:
    ranges = merge_pairs(pairs)
    assert decode_untrusted(encode(ranges, 6, 31), 6, 31) == ranges


@given(SETS)
def test_the_smaller_form_is_chosen(pairs: set[tuple[int, int]]) -> None:
    data = encode(merge_pairs(pairs), 6, 31)
    assert len(data) <= 1 + (6 * 31 + 7) // 8
    assert data[0] == RUNS or len(data) == 1 + (6 * 31 + 7) // 8


@pytest.mark.parametrize(
    ("n_experts", "aligned", "most_bytes"),
    [(8, True, 5), (500, True, 260), (3000, False, 1537), (12_288, True, 5), (0, True, 1)],
)
def test_sizes_of_a_large_model(n_experts: int, aligned: bool, most_bytes: int) -> None:
    rng = random.Random(1)
    run = 8 if aligned else 1
    starts = rng.sample(range(0, 48 * 256, run), n_experts // run)
    pairs = {divmod(start + i, 256) for start in starts for i in range(run)}
    data = encode(merge_pairs(pairs), 48, 256)
    assert len(data) <= most_bytes
    assert decode_untrusted(data, 48, 256) == merge_pairs(pairs)


def test_ranges_that_overlap_are_one() -> None:
    overlapping = [ExpertRange(0, 0, 8), ExpertRange(0, 4, 8), ExpertRange(0, 12, 1)]
    assert encode(overlapping, 1, 16) == encode([ExpertRange(0, 0, 13)], 1, 16)


@pytest.mark.parametrize("item", [ExpertRange(2, 0, 1), ExpertRange(0, 15, 2)])
def test_ranges_outside_the_model(item: ExpertRange) -> None:
    with pytest.raises(UsageError, match="outside"):
        encode([item], 2, 16)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x02",
        b"\x00\x01",
        b"\x00\x00\x00",
        b"\x00\x01\x01\x00\x01",
        b"\x00\x80",
        b"\x00\x80\x00\x01",
        b"\x00\x00\x21",
        b"\x00\xff\xff\xff\xff\x7f\x01",
        b"\x01",
        b"\x01\x00\x00\x00",
        b"\x01\x00\x00\x00\x00\x00",
    ],
)
def test_malformed(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="bad_gossip"):
        decode_untrusted(data, 2, 16)


def test_bits_behind_the_end() -> None:
    assert decode_untrusted(bytes([BITMAP, 0b0001_0000]), 1, 5) == (ExpertRange(0, 4, 1),)
    with pytest.raises(ProtocolError):
        decode_untrusted(bytes([BITMAP, 0b0010_0000]), 1, 5)


def test_the_number_of_ranges_is_bounded() -> None:
    everything = encode([ExpertRange(layer, 0, 1) for layer in range(1024)], 1024, 1)
    assert len(everything) == 4
    assert len(decode_untrusted(everything, 1024, 1)) == 1024
    for data, n_expert in ((everything, 1), (bytes([BITMAP]) + b"\x55" * 128, 1)):
        with pytest.raises(ProtocolError, match="bad_gossip"):
            decode_untrusted(data, 1024, n_expert, max_ranges=511)
    with pytest.raises(ProtocolError):
        decode_untrusted(bytes([BITMAP]) + b"\x55" * 4000, 32, 1000)
    assert MAX_RANGES < 32_000 // 2


@given(st.binary(max_size=4096), st.integers(1, 1024), st.integers(1, 65_536))
def test_any_bytes(data: bytes, n_layer: int, n_expert: int) -> None:
    ranges: tuple[ExpertRange, ...] = ()

    def read() -> None:
        nonlocal ranges
        with suppress(ProtocolError):
            ranges = decode_untrusted(data, n_layer, n_expert)

    n_lines = count_lines(read)
    assert len(ranges) <= MAX_RANGES
    assert all(item.layer < n_layer and item.stop <= n_expert for item in ranges)
    assert n_lines < 100 + 50 * min(len(data) * 8, MAX_RANGES), "whatever the bytes say of how much there is"


def test_the_worst_bytes_cost_lines_for_each_range() -> None:
    """Every second expert of a bitmap; runs of one; one run through as many layers as there may be."""
    for data, n_layer, n_expert in (
        (bytes([BITMAP]) + b"\x55" * 1024, 8, 1024),
        (bytes([RUNS]) + b"\x01\x01" * MAX_RANGES, 8, 1024),
        (encode([ExpertRange(layer, 0, 65_536) for layer in range(1024)], 1024, 65_536), 1024, 65_536),
    ):
        n = len(decode_untrusted(data, n_layer, n_expert))
        assert count_lines(partial(decode_untrusted, data, n_layer, n_expert)) < 100 + 50 * n
