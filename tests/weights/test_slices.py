"""Ranges of experts."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import UsageError
from swarmnode.weights.slices import (
    ExpertRange,
    holdings_of,
    merge_pairs,
    overlapping,
    parse_span,
    ranges_of,
)

RANGES = st.lists(
    st.builds(ExpertRange, st.integers(0, 3), st.integers(0, 20), st.integers(1, 5)), max_size=6
)
PAIRS = st.sets(st.tuples(st.integers(0, 4), st.integers(0, 20)))


@given(PAIRS)
def test_ranges_hold_exactly_the_pairs_and_never_touch(pairs: set[tuple[int, int]]) -> None:
    ranges = merge_pairs(pairs)
    assert [(item.layer, e) for item in ranges for e in item.experts] == sorted(pairs)
    for before, after in pairwise(ranges):
        assert before.layer < after.layer or before.stop < after.first


@given(PAIRS)
def test_holdings_and_ranges_are_inverse(pairs: set[tuple[int, int]]) -> None:
    holdings = holdings_of(merge_pairs(pairs))
    assert ranges_of(holdings) == merge_pairs(pairs)
    assert {(layer, expert) for layer, held in holdings.items() for expert in held} == pairs


@given(RANGES)
def test_overlaps_are_found_without_looking_at_experts(ranges: list[ExpertRange]) -> None:
    pairs = [(item.layer, expert) for item in ranges for expert in item.experts]
    found = overlapping(ranges)
    assert (found is not None) == (len(set(pairs)) < len(pairs))
    assert found is None or found in ranges


@given(st.integers(0, 50), st.integers(1, 50), st.integers(1, 9))
def test_pieces_are_the_same_experts(first: int, count: int, most: int) -> None:
    pieces = ExpertRange(3, first, count).pieces(most)
    assert [expert for piece in pieces for expert in piece.experts] == list(range(first, first + count))
    assert all(piece.count == most for piece in pieces[:-1])
    assert 1 <= pieces[-1].count <= most


def test_overlapping_ranges_merge() -> None:
    ranges = [ExpertRange(1, 0, 4), ExpertRange(1, 2, 4), ExpertRange(0, 7, 1)]
    assert ranges_of(holdings_of(ranges)) == (ExpertRange(0, 7, 1), ExpertRange(1, 0, 6))


@pytest.mark.parametrize(("text", "expected"), [("0:2", range(2)), (" 3:16 ", range(3, 16))])
def test_spans_are_half_open(text: str, expected: range) -> None:
    assert parse_span(text) == expected


@pytest.mark.parametrize("text", ["", "3", "2:2", "5:2", "-1:3", "a:b", "1:2:3", "0:99999999999999", "0x1:2"])
def test_wrong_spans_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="first:stop"):
        parse_span(text)


@pytest.mark.parametrize("numbers", [(-1, 0, 1), (0, -1, 1), (0, 0, 0), (0, 0, -5)])
def test_impossible_ranges_cannot_be_made(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(UsageError, match="no range"):
        ExpertRange(*numbers)


@given(st.builds(ExpertRange, st.integers(0, 3), st.integers(0, 50), st.integers(1, 40)), st.integers(1, 9))
def test_aligned_pieces_cross_no_multiple_of_the_run(item: ExpertRange, run: int) -> None:
    pieces = item.aligned(run)
    assert ranges_of(holdings_of(pieces)) == (item,)
    assert overlapping(pieces) is None
    assert all(piece.first // run == (piece.stop - 1) // run for piece in pieces)
