"""Pairs are spread among holders so that the slowest share of a layer is done soonest."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.config import DispatchConfig
from swarmnode.schedule.cost import CostModel
from swarmnode.schedule.dispatch import LOCAL, Routing
from swarmnode.schedule.replicas import Replicas, Spread, spread
from tests.schedule.test_sending import NODES, routing_of

N_EXPERT = 16
ALL = set(range(N_EXPERT))
RTT_S, PAIR_S = 0.002, 0.001


def replicas(*workers: tuple[float, float]) -> Replicas:
    """Workers known by (seconds of a round trip, seconds a pair), from shares of 1 to 16 pairs."""
    config = DispatchConfig()
    cost = CostModel(config, 0, lambda: 0.0)
    for node, (rtt_s, pair_s) in zip(NODES, workers, strict=False):
        for n_pairs in (1, 2, 4, 8, 16) * 4:
            cost.worker(node).add(n_pairs, rtt_s + n_pairs * pair_s, 0.0)
            cost.worker(node).computed(n_pairs, n_pairs * pair_s, rtt_s + n_pairs * pair_s, 0.0)
    return Replicas(cost, config)


def loads(chosen: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Counter[int]:
    return Counter(chosen.tolist())


def row(*experts: int) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    return np.array([experts], np.int32)


def owned_by(routing: Routing, worker: int) -> list[int]:
    return np.flatnonzero(routing.owners[0] == worker).tolist()


BOTH = routing_of(ALL, ALL)
SAME = (RTT_S, PAIR_S)


@pytest.mark.parametrize("n_of_first", range(9))
def test_a_row_is_divided_evenly_whoever_owns_its_experts(n_of_first: int) -> None:
    ids = row(*owned_by(BOTH, 0)[:n_of_first], *owned_by(BOTH, 1)[: 8 - n_of_first])
    if n_of_first in (0, 8):  # one share less is worth some imbalance, but not all of it
        assert max(loads(replicas(SAME, SAME).owners(BOTH, 0, ids)).values()) < 8
    else:
        assert loads(replicas(SAME, SAME).owners(BOTH, 0, ids)) == {0: 4, 1: 4}


def test_only_what_both_hold_moves() -> None:
    routing = routing_of({0, 1, 2, 3, 4, 5, 6}, {6, 7})
    chosen = replicas(SAME, SAME).owners(routing, 0, row(0, 1, 2, 3, 4, 5, 6, 7))
    assert chosen.tolist() == [0, 0, 0, 0, 0, 0, 1, 1]


def test_what_nobody_holds_stays_here() -> None:
    routing = routing_of({0, 1, 2, 3}, {0, 1, 2, 3})
    chosen = replicas(SAME, SAME).owners(routing, 0, row(0, 1, 2, 3, 8, 9))
    assert chosen[4:].tolist() == [LOCAL, LOCAL]
    assert loads(chosen[:4]) == {0: 2, 1: 2}


def test_a_faster_worker_has_more_of_it() -> None:
    chosen = replicas((RTT_S, PAIR_S), (RTT_S, 1.2 * 3 * PAIR_S)).owners(BOTH, 0, row(*range(8)))
    assert loads(chosen)[0] > loads(chosen)[1]


def test_a_pair_does_not_go_far_to_save_less_than_the_way() -> None:
    """Both are asked, as each owns some; but 5 pairs here are done before one pair there."""
    routing = routing_of({0, 1, 2, 3, 4}, {0, 1, 2, 3, 4, 5})
    chosen = replicas((RTT_S, PAIR_S), (0.04, PAIR_S)).owners(routing, 0, row(0, 1, 2, 3, 4, 5))
    assert chosen.tolist() == [0, 0, 0, 0, 0, 1]


def test_rows_of_an_expert_stay_together() -> None:
    """Its weights are read once."""
    rng = np.random.default_rng(0)
    ids = np.array([rng.choice(N_EXPERT, 4, replace=False) for _ in range(32)], np.int32)
    chosen = replicas(SAME, SAME).owners(BOTH, 0, ids)
    for expert in range(N_EXPERT):
        assert len(set(chosen[ids.ravel() == expert].tolist())) <= 1
    shares = loads(chosen)
    assert max(shares.values()) <= 1.15 * min(shares.values())


def test_whoever_says_that_it_computes_for_nothing_is_judged_by_its_answers() -> None:
    """It is given more; that takes longer, and the other one is asked."""
    config = DispatchConfig()
    cost = CostModel(config, 0, lambda: 0.0)
    chooser = Replicas(cost, config)
    liar, honest = (cost.worker(node) for node in NODES[:2])
    for _ in range(50):
        shares = loads(chooser.owners(BOTH, 0, row(*range(8))))
        for worker, index, says in ((liar, 0, 0.0), (honest, 1, PAIR_S)):
            if n_pairs := shares[index]:
                took_s = RTT_S + n_pairs * (2 if worker is liar else 1) * PAIR_S
                worker.add(n_pairs, took_s, 0.0)
                worker.computed(n_pairs, n_pairs * says, took_s, 0.0)
    assert shares[1] >= 4


@pytest.mark.parametrize("says_s", [0.0, 1e6])
def test_what_a_worker_says_is_believed_within_what_its_answers_take(says_s: float) -> None:
    config = DispatchConfig()
    worker = CostModel(config, 0, lambda: 0.0).worker(NODES[0])
    worker.computed(4, says_s, 0.008, 0.0)
    assert 0.0002 < worker.pair_s(4) <= 0.002
    chosen = replicas(SAME, SAME)
    for node in NODES[:2]:
        for _ in range(50):
            chosen.costs(BOTH)[NODES.index(node)].computed(
                4, says_s if node == NODES[0] else 0.004, 0.006, 0.0
            )
    shares = loads(chosen.owners(BOTH, 0, row(*range(8))))
    assert 1 < shares[0] < 7, "equally fast, whatever one says"


def test_what_shares_took_counts_for_more_than_what_is_said_of_pairs() -> None:
    """A worker that is fast with two pairs, slow with more, and says that pairs cost it nothing."""
    config = DispatchConfig()
    cost = CostModel(config, 0, lambda: 0.0)
    chooser = Replicas(cost, config)
    took_s: list[float] = []
    for _ in range(100):
        shares = loads(chooser.owners(BOTH, 0, row(*range(4))))
        times = {0: 0.001 if shares[0] <= 2 else 0.02, 1: RTT_S + shares[1] * PAIR_S}
        took_s.append(max(times[index] for index in shares))
        for index, says_s in ((0, 0.0), (1, shares[1] * PAIR_S)):
            if n_pairs := shares[index]:
                worker = cost.worker(NODES[index])
                worker.add(n_pairs, times[index], 0.0)
                worker.computed(n_pairs, says_s, times[index], 0.0)
    alone_s = RTT_S + 4 * PAIR_S
    assert max(took_s[10:]) <= alone_s


PARTS = st.lists(
    st.tuples(st.integers(-1, 3), st.integers(-1, 3), st.integers(1, 5)).filter(
        lambda part: part[0] != part[1]
    ),
    min_size=1,
    max_size=6,
)


@given(PARTS, st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 1)), min_size=4, max_size=4))
def test_nothing_gets_slower_and_nobody_computes_what_he_lacks(
    made: list[tuple[int, int, int]], lines: list[tuple[float, float]]
) -> None:
    parts = [Spread(*part) for part in made if part[0] != LOCAL]

    def seconds(worker: int, n_pairs: int) -> float:
        return lines[worker][0] + n_pairs * lines[worker][1]

    def latest_s(workers: list[int]) -> float:
        shares: Counter[int] = Counter()
        for worker, part in zip(workers, parts, strict=True):
            shares[worker] += part.n_pairs
        return max((seconds(worker, n) for worker, n in shares.items()), default=0.0)

    before = [(part.worker, part.other) for part in parts]
    before_s = latest_s([worker for worker, _ in before])
    has_moved = spread(parts, seconds, 1.25)
    after = [part.worker for part in parts]
    assert all(worker in holders and worker != LOCAL for worker, holders in zip(after, before, strict=True))
    assert latest_s(after) <= before_s + 1e-9
    assert has_moved is (after != [worker for worker, _ in before])


@given(st.lists(st.sampled_from([(0, 1), (1, 0), (0, LOCAL), (1, LOCAL)]), min_size=1, max_size=16))
def test_two_equal_workers_are_as_even_as_holdings_allow(holders: list[tuple[int, int]]) -> None:
    """Against the best of all choices, found by counting: with pairs alone every level can be had."""
    parts = [Spread(*each, 1) for each in holders]
    spread(parts, lambda worker, n_pairs: float(n_pairs), 1.0)
    fixed = Counter(worker for worker, other in holders if other == LOCAL)
    n_free = sum(other != LOCAL for _, other in holders)
    best = min(max(fixed[0] + n, fixed[1] + n_free - n) for n in range(n_free + 1))
    assert max(Counter(part.worker for part in parts).values()) == best
