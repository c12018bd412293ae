"""Replicas as one node counts them: what claims are worth."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.gossip.coverage import Coverage, MarketView
from swarmnode.gossip.demand import Demand
from swarmnode.gossip.records import OwnState
from swarmnode.weights.slices import ExpertRange
from tests.gossip.market import CONFIG, MODEL, even_shape, node_id, state

OWN = node_id(1000)
RUN = ExpertRange(1, 4, 4)
SHAPE = even_shape()


def coverage(own_site: str = "198.51.100.0/24") -> Coverage:
    return Coverage(MODEL, SHAPE, OWN, CONFIG, own_site)


def at(counted: Coverage, item: ExpertRange = RUN) -> list[float]:
    return [float(value) for value in counted.replicas[SHAPE.slice_of(item)]]


def test_serving_counts_whole_fetching_half() -> None:
    counted = coverage()
    counted.update(node_id(1), state((RUN,), address="8.8.8.8:1"), 0.0)
    counted.update(node_id(2), state((), (ExpertRange(1, 6, 4),), address="9.9.9.9:1"), 0.0)
    assert at(counted) == [1, 1, 1.5, 1.5]
    assert counted.holders.sum() == 4
    assert counted.n_nodes == 2


def test_an_expert_both_served_and_fetched_counts_once() -> None:
    counted = coverage()
    counted.update(node_id(1), state((RUN, RUN), (RUN,), address="8.8.8.8:1"), 0.0)
    assert at(counted) == [1] * 4
    assert counted.holders.max() == 1


def test_seeds_leaving_and_other_models_count_nothing() -> None:
    counted = coverage()
    counted.update(node_id(1), state((RUN,), seeds=True), 0.0)
    counted.update(node_id(2), state((RUN,), leaving=True), 0.0)
    counted.update(node_id(3), OwnState(), 0.0)
    counted.update(node_id(4), state((ExpertRange(7, 0, 4), ExpertRange(0, 14, 4))), 0.0)
    assert not counted.replicas.any()


def test_our_own_record_counts_nothing() -> None:
    counted = coverage()
    counted.update(OWN, state((RUN,)), 0.0)
    assert not counted.replicas.any()


def test_leaving_and_coming_back_counts_once() -> None:
    """cases.md 7."""
    counted = coverage()
    here = state((RUN,), address="8.8.8.8:1")
    for now_s in (0.0, 0.7, 1.4):
        counted.update(node_id(1), here, now_s)
        assert at(counted) == [1] * 4
        counted.update(node_id(1), state((RUN,), address="8.8.8.8:1", leaving=True), now_s + 0.3)
        assert at(counted) == [0] * 4
    counted.update(node_id(1), here, 2.0)
    counted.update(node_id(1), state((RUN,), address="9.9.9.9:1"), 2.1)  # from another address
    assert at(counted) == [1] * 4
    assert counted.holders.max() == 1


def test_nodes_of_one_site_count_little_more_than_one() -> None:
    counted = coverage()
    for number in range(5):
        counted.update(node_id(number), state((RUN,), address=f"8.8.8.{number}:1"), 0.0)
    assert at(counted) == [1 + 4 * CONFIG.sibling_weight] * 4
    assert counted.holders.max() == 5
    counted.remove(node_id(3))
    assert at(counted) == [1 + 3 * CONFIG.sibling_weight] * 4


def test_a_flood_of_one_site_is_bounded() -> None:
    counted = coverage()
    for number in range(150):
        counted.update(node_id(number), state((RUN,), address=f"8.8.8.{number % 250}:1"), 0.0)
    assert max(at(counted)) <= 1 + CONFIG.max_siblings * CONFIG.sibling_weight


def test_nodes_of_our_own_network_count_one_by_one() -> None:
    counted = coverage("192.168.1.0/24")
    for number in range(3):
        counted.update(node_id(number), state((RUN,), address=f"192.168.1.{number}:1"), 0.0)
    assert at(counted) == [3] * 4
    elsewhere = coverage("8.8.8.0/24")
    for number in range(3):
        elsewhere.update(node_id(number), state((RUN,), address=f"192.168.1.{number}:1"), 0.0)
    assert max(at(elsewhere)) < 1.2


def test_who_moves_knows_what_it_knew_of_others() -> None:
    """Late records stay late, claims grow no younger, suspects are suspects, wherever we are."""
    home, late_s = "192.168.1.0/24", 600 * CONFIG.late_share
    for places in ([home], ["10.0.0.0/24", home], [home, "198.51.100.0/24"]):
        counted = coverage()
        claimed = ExpertRange(2, 0, 4)
        counted.update(node_id(1), state((RUN,), address="192.168.1.1:1"), 0.0, 600)
        counted.update(node_id(2), state((), (claimed,), address="192.168.1.2:1"), 10.0)
        counted.update(node_id(3), state((RUN,), address="192.168.1.3:1"), 200.0, 600)
        counted.suspect(node_id(3), True)
        counted.advance(late_s)
        for place in places:
            counted.move_to(place)
        assert at(counted) == pytest.approx([CONFIG.suspect_weight] * 4, abs=0.001)
        assert counted.holders.max() == 2
        assert counted.settled(claimed, 11.0).tolist() == [1] * 4, "it was seen before ours"
        assert at(counted, claimed) == [0.5] * 4
        counted.advance(10.0 + CONFIG.claim_lapse_s)
        assert at(counted, claimed) == [0] * 4
        counted.advance(200.0 + late_s)
        assert not counted.replicas.any()
        counted.suspect(node_id(3), False)
        counted.update(node_id(1), state((RUN,), address="192.168.1.1:1"), 480.0, 600)
        assert at(counted) == [1] * 4


def test_claims_lapse_by_our_clock() -> None:
    counted = coverage()
    counted.update(node_id(1), state((), (RUN,)), 10.0)
    counted.advance(10.0 + CONFIG.claim_lapse_s - 1)
    assert at(counted) == [0.5] * 4
    counted.advance(10.0 + CONFIG.claim_lapse_s)
    assert at(counted) == [0] * 4
    counted.update(node_id(1), state((RUN,)), 400.0)
    assert at(counted) == [1] * 4


def test_a_claim_that_is_repeated_or_shrinks_is_not_young_again() -> None:
    counted = coverage()
    counted.update(node_id(1), state((), (ExpertRange(1, 0, 8),)), 0.0)
    counted.update(node_id(1), state((ExpertRange(1, 0, 5),), (ExpertRange(1, 5, 3),)), 200.0)
    counted.update(
        node_id(1), state((ExpertRange(1, 0, 5),), (ExpertRange(1, 5, 3), ExpertRange(2, 0, 4))), 290.0
    )
    counted.advance(CONFIG.claim_lapse_s)
    assert at(counted) == [1, 0, 0, 0]
    assert at(counted, ExpertRange(2, 0, 4)) == [0.5] * 4


def test_a_record_that_is_not_renewed_counts_nothing_until_it_is() -> None:
    counted = coverage()
    late_s = 600 * CONFIG.late_share
    counted.update(node_id(1), state((RUN,)), 0.0, 600)
    counted.update(node_id(1), state((RUN,)), 200.0, 600)
    counted.advance(late_s + 1)
    assert at(counted) == [1] * 4
    counted.advance(200.0 + late_s)
    assert at(counted) == [0] * 4
    assert counted.holders.max() == 1  # as its record says
    counted.update(node_id(1), state((RUN,)), 500.0, 600)
    assert at(counted) == [1] * 4


def test_suspects_weigh_little_until_they_are_cleared() -> None:
    counted = coverage()
    counted.suspect(node_id(1), True)
    counted.update(node_id(1), state((RUN,)), 0.0)
    assert at(counted) == pytest.approx([CONFIG.suspect_weight] * 4, abs=0.001)
    counted.suspect(node_id(1), False)
    assert at(counted) == [1] * 4
    counted.suspect(node_id(1), True)
    counted.remove(node_id(1))
    assert not counted.replicas.any()


ranges = st.builds(ExpertRange, st.integers(0, 2), st.integers(0, 12), st.integers(1, 4))
states = st.builds(
    lambda serving, fetching, address: state(tuple(serving), tuple(fetching), address),
    st.lists(ranges, max_size=4),
    st.lists(ranges, max_size=2),
    st.sampled_from(["", "8.8.8.8:1", "8.8.8.9:1", "9.9.9.9:1", "192.168.0.2:1"]),
)
steps = st.lists(st.tuples(st.integers(0, 5), st.one_of(states, st.none(), st.booleans())), max_size=30)


@given(steps, st.randoms(use_true_random=False))
def test_record_by_record_is_the_same_as_all_at_once(
    taken: list[tuple[int, OwnState | bool | None]], order: object
) -> None:
    counted = coverage()
    last: dict[int, OwnState] = {}
    suspects: dict[int, bool] = {}
    for number, event in taken:
        if isinstance(event, OwnState):
            counted.update(node_id(number), event, 0.0)
            last[number] = event
        elif event is None:
            counted.remove(node_id(number))
            last.pop(number, None)
        else:
            counted.suspect(node_id(number), event)
            suspects[number] = event
    fresh = coverage()
    for number, suspected in suspects.items():
        fresh.suspect(node_id(number), suspected)
    for number in sorted(last, reverse=True):
        fresh.update(node_id(number), last[number], 0.0)
    np.testing.assert_array_equal(counted.replicas, fresh.replicas)
    np.testing.assert_array_equal(counted.holders, fresh.holders)
    assert counted.n_nodes == fresh.n_nodes
    for number in last:
        counted.remove(node_id(number))
    assert not counted.replicas.any()
    assert not counted.holders.any()


@given(steps, st.lists(st.sampled_from(["nowhere", "192.168.0.0/24", "8.8.8.0/24"]), max_size=4))
def test_wherever_we_were_before_it_is_the_same_here(
    taken: list[tuple[int, OwnState | bool | None]], sites: list[str]
) -> None:
    moved, fresh = coverage(), coverage(sites[-1] if sites else "198.51.100.0/24")
    for place, (number, event) in enumerate(taken):
        if place < len(sites):
            moved.move_to(sites[place])
        for counted in (moved, fresh):
            if isinstance(event, OwnState):
                counted.update(node_id(number), event, 0.0)
            elif event is None:
                counted.remove(node_id(number))
            else:
                counted.suspect(node_id(number), event)
    for site in sites[len(taken) :]:
        moved.move_to(site)
    np.testing.assert_array_equal(moved.replicas, fresh.replicas)
    for number in range(6):
        moved.remove(node_id(number))
    assert not moved.replicas.any()


def test_claims_seen_before_ours_are_ahead_later_ones_by_hash() -> None:
    early, late = coverage(), coverage()
    early.update(node_id(1), state((), (RUN,)), 5.0)
    assert early.settled(RUN, 6.0).tolist() == [1] * 4
    late.update(node_id(1), state((), (RUN,)), 7.0)
    first = late.settled(RUN, 6.0).tolist()
    other = Coverage(MODEL, SHAPE, node_id(1), CONFIG)
    other.update(OWN, state((), (RUN,)), 7.0)
    assert sorted([first[0], float(other.settled(RUN, 6.0)[0])]) == [
        0,
        1,
    ]  # one of the two is before the other


def test_what_backbones_found_nobody_for_is_not_believed() -> None:
    counted = coverage()
    counted.update(node_id(1), state((RUN,), address="8.8.8.8:1"), 0.0)
    view = MarketView(counted)
    unmet = np.zeros(SHAPE.size, np.float32)
    unmet[SHAPE.slice_of(RUN)] = 1.0
    view.set_demand(Demand(np.ones(SHAPE.size, np.float32), unmet, 1.0))
    assert view.replicas[SHAPE.slice_of(RUN)].tolist() == pytest.approx([0] * 4)
    counted.update(node_id(2), state((), (RUN,), address="9.9.9.9:1"), 1.0)
    assert view.replicas[SHAPE.slice_of(RUN)].tolist() == pytest.approx([0.5] * 4)
    assert view.settled(RUN, 0.5).min() <= view.replicas[SHAPE.slice_of(RUN)].max() + 0.5


def test_who_is_gone_is_not_talked_away_once_more() -> None:
    counted = coverage()
    for number, address in ((1, "8.8.8.8:1"), (2, "9.9.9.9:1")):
        counted.update(node_id(number), state((RUN,), address=address), 0.0)
    view = MarketView(counted)
    view.set_demand(Demand(np.ones(SHAPE.size, np.float32), np.full(SHAPE.size, 0.5, np.float32), 1.0))
    assert view.replicas[SHAPE.slice_of(RUN)].tolist() == pytest.approx([1] * 4)
    counted.remove(node_id(1))
    assert view.replicas[SHAPE.slice_of(RUN)].tolist() == pytest.approx([0.5] * 4)
