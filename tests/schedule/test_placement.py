"""What a joining worker is offered: scarce, within the budget, not what a neighbour was just offered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.schedule.placement import choose_scarcest
from swarmnode.weights.slices import ExpertRange, holdings_of

SIZES = {0: 100, 1: 130}
EVERYTHING = 16 * 100 + 16 * 130
MAX_RANGES = 512


def replica_counts(
    n_expert: int, layers: Sequence[int], holdings: Iterable[Iterable[ExpertRange]]
) -> dict[int, npt.NDArray[np.int32]]:
    """How many of `holdings` contain each expert of `layers`."""
    counts = {layer: np.zeros(n_expert, np.int32) for layer in layers}
    for ranges in holdings:
        for item in ranges:
            counts[item.layer][item.first : item.stop] += 1
    return counts


def choose(
    held_by_others: Iterable[ExpertRange],
    budget: int,
    seed: bytes = b"x",
    held: tuple[ExpertRange, ...] = (),
    max_ranges: int = MAX_RANGES,
) -> tuple[ExpertRange, ...]:
    counts = replica_counts(16, (0, 1), [held_by_others])
    return choose_scarcest(counts, held, SIZES, budget, seed, max_ranges)


def bytes_of(ranges: Iterable[ExpertRange]) -> int:
    return sum(SIZES[item.layer] * item.count for item in ranges)


@given(budget=st.integers(0, 6000), seed=st.binary(min_size=1, max_size=8))
def test_never_over_budget_and_never_wasteful(budget: int, seed: bytes) -> None:
    total = bytes_of(choose((), budget, seed))
    assert total <= budget
    assert total == EVERYTHING or budget - total < max(SIZES.values()), "room for another expert was left"


@given(seed=st.binary(min_size=1, max_size=8))
def test_uncovered_experts_come_first(seed: bytes) -> None:
    ranges = choose([ExpertRange(0, 0, 16), ExpertRange(1, 0, 8)], 8 * 130, seed)
    assert holdings_of(ranges) == {1: frozenset(range(8, 16))}


@given(
    budget=st.integers(0, 6000),
    first=st.integers(0, 15),
    count=st.integers(1, 16),
    seed=st.binary(min_size=1, max_size=8),
)
def test_what_is_held_is_not_offered_and_counts_against_the_budget(
    budget: int, first: int, count: int, seed: bytes
) -> None:
    held = ExpertRange(0, first, min(count, 16 - first))
    ranges = choose((), budget, seed, (held,))
    assert not set(held.experts) & holdings_of(ranges).get(0, frozenset())
    assert not ranges or bytes_of([*ranges, held]) <= budget


def test_two_asking_in_turn_do_not_overlap_while_there_is_uncovered() -> None:
    first = choose((), 1500, b"a")
    one, two = holdings_of(first), holdings_of(choose(first, 1500, b"b"))
    assert not any(one.get(layer, frozenset()) & two.get(layer, frozenset()) for layer in (0, 1))


def test_different_nodes_start_at_different_places() -> None:
    assert len({choose((), 400, bytes([node])) for node in range(16)}) > 4


def test_a_budget_below_one_expert_gets_nothing() -> None:
    assert choose((), 99) == ()


def test_a_partly_covered_run_is_cut_at_the_border() -> None:
    others = [ExpertRange(0, 0, 2), ExpertRange(0, 4, 12), ExpertRange(1, 0, 16)]
    assert choose(others, 200) == (ExpertRange(0, 2, 2),)


def test_neighbouring_runs_are_one_range_and_their_number_is_bounded() -> None:
    assert choose((), EVERYTHING) == (ExpertRange(0, 0, 16), ExpertRange(1, 0, 16))
    assert len(choose((), EVERYTHING // 2, max_ranges=2)) == 2


def test_large_budgets_at_the_real_size_fit_a_message() -> None:
    """48 layers of 256 experts of 5.5 MB, every third run held by somebody: 20 GB in at most 512 ranges."""
    layers = range(48)
    others = [ExpertRange(layer, first, 4) for layer in layers for first in range(0, 256, 12)]
    counts = replica_counts(256, layers, [others])
    sizes = dict.fromkeys(layers, 5_500_000)
    for budget in (300_000_000, 4_000_000_000, 20_000_000_000, 100_000_000_000):
        ranges = choose_scarcest(counts, (), sizes, budget, b"node", MAX_RANGES)
        n_experts = sum(item.count for item in ranges)
        wanted = min(budget // 5_500_000, 48 * 256)
        assert len(ranges) <= MAX_RANGES
        assert 0.9 * wanted <= n_experts <= wanted
