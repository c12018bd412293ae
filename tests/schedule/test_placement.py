"""What a joining worker is offered: scarce, within the budget, not what a neighbour was just offered."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarmnode.schedule.placement import choose_scarcest, replica_counts
from swarmnode.weights.slices import ExpertRange, holdings_of

SIZES = {0: 100, 1: 130}


def counts_of(*held: dict[int, frozenset[int]]) -> dict[tuple[int, int], int]:
    return replica_counts(16, (0, 1), held)


def bytes_of(ranges: list[ExpertRange]) -> int:
    return sum(SIZES[item.layer] * item.count for item in ranges)


@given(budget=st.integers(0, 6000), seed=st.binary(min_size=1, max_size=8))
def test_never_over_budget_and_never_wasteful(budget: int, seed: bytes) -> None:
    ranges = choose_scarcest(counts_of(), SIZES, budget, seed)
    total = bytes_of(ranges)
    assert total <= budget
    everything = 16 * 100 + 16 * 130
    assert total == everything or budget - total < max(SIZES.values()), "room for another expert was left"


@given(seed=st.binary(min_size=1, max_size=8))
def test_uncovered_experts_come_first(seed: bytes) -> None:
    held = holdings_of([ExpertRange(0, 0, 16), ExpertRange(1, 0, 8)])
    ranges = choose_scarcest(counts_of(held), SIZES, 8 * 130, seed)
    assert holdings_of(ranges) == {1: frozenset(range(8, 16))}


def test_two_asking_in_turn_do_not_overlap_while_there_is_uncovered() -> None:
    first = choose_scarcest(counts_of(), SIZES, 1500, b"a")
    second = choose_scarcest(counts_of(holdings_of(first)), SIZES, 1500, b"b")
    one, two = holdings_of(first), holdings_of(second)
    assert not any(one.get(layer, frozenset()) & two.get(layer, frozenset()) for layer in (0, 1))


def test_different_nodes_start_at_different_places() -> None:
    starts = {tuple(choose_scarcest(counts_of(), SIZES, 400, bytes([node]))) for node in range(16)}
    assert len(starts) > 4


def test_a_budget_below_one_expert_gets_nothing() -> None:
    assert choose_scarcest(counts_of(), SIZES, 99, b"x") == []


def test_a_partly_covered_run_is_cut_at_the_border() -> None:
    held = holdings_of([ExpertRange(0, 0, 2), ExpertRange(0, 4, 12), ExpertRange(1, 0, 16)])
    ranges = choose_scarcest(counts_of(held), SIZES, 200, b"x")
    assert ranges == [ExpertRange(0, 2, 2)]


def test_dense_layers_are_never_offered() -> None:
    """Only layers that are given have counts, so a layer without routed experts cannot be chosen."""
    counts = replica_counts(16, (1,), [holdings_of([ExpertRange(0, 0, 16)])])
    assert {layer for layer, _ in counts} == {1}
