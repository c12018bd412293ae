"""Whether a layer is sent: where that is sooner; and replicas, and how much exploring may cost."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.config import DispatchConfig
from swarmnode.identity import NodeKey
from swarmnode.schedule.cost import CostModel
from swarmnode.schedule.dispatch import DispatchPlan, Routing, build_routing, plan_pairs, split_share
from swarmnode.schedule.residents import Residents
from swarmnode.schedule.sending import Planner, SendPolicy, send_always
from swarmnode.schedule.sending_auto import SendAuto
from swarmnode.schedule.view import SwarmView, WorkerView
from swarmnode.schedule.ways import count_here, count_pairs, count_way, within
from tests.calls import count_calls

N_EXPERT, K, N_LAYER, SIZE = 16, 4, 4, 6_000_000
NODES = [NodeKey.from_seed(bytes([number] * 32)).node_id for number in range(3)]
NO_EXPLORING = DispatchConfig(send="auto", explore_layers=10**9)
ROW = np.array([[0, 1, 2, 3]], np.int32)


def routing_of(*holders: set[int], n_layer: int = N_LAYER) -> Routing:
    """Each holds these experts of every layer."""
    views = [
        WorkerView(NODES[number], {layer: frozenset(held) for layer in range(n_layer)}, 512)
        for number, held in enumerate(holders)
    ]
    return build_routing(SwarmView(tuple(views)), N_EXPERT)


EVEN_ODD = routing_of(set(range(0, N_EXPERT, 2)), set(range(1, N_EXPERT, 2)))


@dataclass
class Bench:
    """A policy on a clock that stands still unless told to go on."""

    config: DispatchConfig = NO_EXPLORING
    budget: int | None = None
    now_s: float = 0.0
    max_steps: int = 1
    n_layer: int = N_LAYER
    residents: Residents = field(init=False)
    policy: SendAuto = field(init=False)

    def __post_init__(self) -> None:
        cost = CostModel(self.config, SIZE, lambda: self.now_s)
        self.residents = Residents(dict.fromkeys(range(self.n_layer), SIZE), N_EXPERT, self.budget)
        self.policy = SendAuto(
            cost, self.residents, self.config, self.n_layer, K, random.Random(1), self.max_steps
        )
        self.policy._layers_left = 1e9 if self.config is NO_EXPLORING else 0

    def learn(self, *, pair_s: float = 1e-4, cold_s: float = 0.003, workers_s: tuple[float, ...]) -> Bench:
        """As if so much had been measured."""
        cost = self.policy.cost
        for n_pairs in (1, 2, 4, 64):
            for _ in range(20):
                cost.local.add(n_pairs, 0, n_pairs * pair_s, self.now_s)
                cost.local.add(n_pairs, 1, n_pairs * pair_s + cold_s, self.now_s)
                for node, seconds in zip(NODES, workers_s, strict=False):
                    cost.worker(node).add(n_pairs, seconds, self.now_s)
        for _ in range(20):
            cost.add_cut(5e-4, self.now_s)
        return self

    def warm(self, *experts: int) -> Bench:
        for layer in range(self.n_layer):
            self.residents.computed(layer, np.array(experts, np.int32))
        return self

    def plan(
        self, ids: np.ndarray[tuple[int, int], np.dtype[np.int32]] = ROW, n_sequences: int = 1
    ) -> DispatchPlan | None:
        return self.policy.begin(n_sequences).plan(EVEN_ODD, 1, ids)


def n_remote(plan: DispatchPlan | None) -> int:
    return 0 if plan is None else sum(len(share.flat) for _, share in plan.remote)


@pytest.mark.parametrize("rtt_s", [0.003, 0.04])
def test_what_is_in_memory_does_not_wait_for_a_network(rtt_s: float) -> None:
    bench = Bench().learn(workers_s=(rtt_s, rtt_s)).warm(*range(N_EXPERT))
    assert bench.plan() is None
    assert bench.policy.begin(1).fuses(EVEN_ODD, 1)


def test_a_near_worker_is_sooner_than_a_disk_and_a_far_one_is_not() -> None:
    assert n_remote(Bench().learn(workers_s=(0.001, 0.001)).plan()) == K
    assert n_remote(Bench().learn(workers_s=(0.04, 0.04)).plan()) == 0


def test_what_is_in_memory_stays_and_the_rest_travels() -> None:
    bench = Bench().learn(workers_s=(0.001, 0.001)).warm(0, 1, 2)
    plan = bench.plan()
    assert plan is not None
    assert plan.local is not None
    assert plan.local.pair_expert.tolist() == [0, 1, 2]
    assert n_remote(plan) == 1


def test_a_slow_machine_sends_what_it_holds() -> None:
    bench = Bench().learn(pair_s=0.01, workers_s=(0.003, 0.003)).warm(*range(N_EXPERT))
    assert n_remote(bench.plan()) == K
    assert not bench.policy.begin(1).fuses(EVEN_ODD, 1)


def test_many_rows_are_weighed_like_one() -> None:
    ids = np.array([[row, row + 1, row + 2, row + 3] for row in range(12)], np.int32)
    assert Bench().learn(workers_s=(0.02, 0.02)).warm(*range(N_EXPERT)).plan(ids) is None
    assert n_remote(Bench().learn(workers_s=(0.02, 0.02)).plan(ids)) == ids.size, "15 reads of 3 ms"


def test_a_wait_counts_less_while_others_compute() -> None:
    bench = Bench().learn(pair_s=5e-4, workers_s=(0.004, 0.004)).warm(*range(N_EXPERT))
    assert n_remote(bench.plan()) == 0
    bench.policy.n_passes = 4
    assert n_remote(bench.plan()) == K


def test_a_pass_of_many_sequences_is_weighed_as_the_several_that_it_would_be() -> None:
    """Four passes take turns: each waits for a quarter of the pairs, and that is sooner than computing all here."""
    ids = np.repeat(ROW, 16, 0)
    sent = []
    for max_steps in (1, 4):
        bench = Bench(max_steps=max_steps).learn(pair_s=5e-4, workers_s=()).warm(*range(N_EXPERT))
        for node in NODES[:2]:
            bench.policy.cost.worker(node).add(32, 0.04, 0.0)
            bench.policy.cost.worker(node).add(8, 0.01, 0.0)
        sent.append(n_remote(bench.plan(ids, 16)))
        assert n_remote(bench.plan(ids)) == 0, "one sequence is never divided"
    assert sent == [0, ids.size]


def test_nobody_is_asked_where_nobody_holds_anything() -> None:
    planner = Bench().policy.begin(1)
    assert planner.fuses(Routing(), 0)
    assert planner.plan(Routing(), 0, ROW) is None


@given(
    ids=st.lists(st.permutations(range(8)), min_size=1, max_size=6),
    held=st.lists(st.sets(st.integers(0, 7)), min_size=1, max_size=3),
    warm=st.sets(st.integers(0, 7)),
)
def test_ways_count_every_pair_once(ids: list[list[int]], held: list[set[int]], warm: set[int]) -> None:
    chosen = np.array(ids, np.int32)[:, :K]
    owners = np.full(8, -1, np.int32)
    for number, experts in enumerate(held):
        owners[list(experts)] = number
    mask = np.isin(np.arange(8), list(warm))
    flat, is_here = owners[chosen].ravel(), mask[chosen].ravel()
    way = count_way(chosen, flat, is_here)
    assert count_here(chosen, is_here) == count_way(chosen, np.full_like(flat, -1), is_here)
    assert way.n_local + sum(way.remote.values()) == chosen.size
    assert way.n_cold <= len(set(chosen.ravel().tolist()) - warm)
    if len(chosen) == 1:
        twice = np.repeat(chosen, 2, 0)
        double = count_way(twice, np.tile(flat, 2), np.tile(is_here, 2))
        assert (2 * way.n_local, way.n_cold) == (double.n_local, double.n_cold), "experts are read once"
        assert {index: 2 * n for index, n in way.remote.items()} == double.remote


@given(
    n_rows=st.integers(1, 12),
    max_pairs=st.integers(1, 9),
    max_pieces=st.integers(0, 5),
    owned=st.lists(st.integers(-1, 2), min_size=8, max_size=8),
)
def test_what_is_expected_of_a_worker_is_what_it_gets(
    n_rows: int, max_pairs: int, max_pieces: int, owned: list[int]
) -> None:
    ids = np.array(
        [[row % 8, (row + 1) % 8, (row + 3) % 8, (row + 4) % 8] for row in range(n_rows)], np.int32
    )
    owners = np.array(owned, np.int32)[ids].ravel()
    taken = within(ids, owners, lambda index: (max_pairs, max_pieces))
    plan = plan_pairs(owners, ids)
    sent = (
        {index: split_share(share, ids, max_pairs, max_pieces) for index, share in plan.remote}
        if plan
        else {}
    )
    n_sent = {index: sum(len(piece.flat) for piece in pieces) for index, (pieces, _) in sent.items()}
    assert count_pairs(ids, taken) == {index: n for index, n in n_sent.items() if n}
    left = [place for _, rest in sent.values() if rest is not None for place in rest.flat.tolist()]
    assert sorted(left) == np.flatnonzero(taken != owners).tolist()


def test_what_a_worker_leaves_over_is_expected_here() -> None:
    """Of a prompt's 1,024 pairs a worker that takes one at a time gets 64, and takes longer for them than for all."""
    ids = np.array([[row % 4, 4 + row % 4, 8 + row % 4, 12 + row % 4] for row in range(512)], np.int32)
    sent = []
    for max_rows in (4096, 1):
        bench = Bench().learn(pair_s=1e-3, workers_s=()).warm(*range(N_EXPERT))
        for node in NODES[:2]:
            bench.policy.cost.worker(node).probed(0.01, 0.0)
            bench.policy.cost.worker(node).add(1024, 1.0, 0.0)
            bench.policy.cost.worker(node).add(64, 3.0, 0.0)
        views = tuple(replace(view, max_rows=max_rows) for view in EVEN_ODD.workers)
        sent.append(n_remote(bench.policy.begin(1).plan(replace(EVEN_ODD, workers=views), 1, ids)))
    assert sent == [2048, 0]


def test_a_worker_without_room_is_not_expected_to_do_anything() -> None:
    bench = Bench().learn(pair_s=0.01, workers_s=(0.003, 0.003)).warm(*range(N_EXPERT))
    for node in NODES[:2]:
        bench.policy.cost.worker(node).max_requests = 4
        bench.policy.cost.worker(node).n_requests = 4
    assert n_remote(bench.plan()) == 0
    bench.policy.cost.worker(NODES[0]).n_requests = 3
    plan = bench.plan()
    assert n_remote(plan) == K, "what is not taken is still unmet"


# -- exploring


def run(bench: Bench, took: Callable[[DispatchPlan | None], float], n_passes: int) -> tuple[int, float]:
    """Passes of which each layer takes what it takes; how many layers were sent, and the time."""
    n_sent, started_s = 0, bench.now_s
    for _ in range(n_passes):
        planner, began_s = bench.policy.begin(1), bench.now_s
        for layer in range(N_LAYER):
            plan = None
            if not planner.fuses(EVEN_ODD, layer):
                plan = planner.plan(EVEN_ODD, layer, ROW)
            n_sent += plan is not None
            spent_s = took(plan)
            bench.now_s += spent_s
            if plan is None:
                bench.policy.computed(layer, ROW.ravel(), spent_s)
            else:
                for index, share in plan.remote:
                    cost = bench.policy.cost.worker(EVEN_ODD.workers[index].node_id)
                    cost.add(len(share.flat), spent_s, bench.now_s)
        planner.ended()
        bench.policy.passed(bench.now_s - began_s)
    return n_sent, bench.now_s - started_s


@pytest.mark.parametrize("rtt_s", [0.002, 0.04, 0.2])
def test_exploring_costs_little_however_far_workers_are(rtt_s: float) -> None:
    bench = Bench(DispatchConfig(send="auto")).warm(*range(N_EXPERT))
    run(bench, lambda plan: 4e-4 if plan is None else rtt_s, 400)
    n_sent, spent_s = run(bench, lambda plan: 4e-4 if plan is None else rtt_s, 20_000)
    assert n_sent > 0, "or nobody would notice that it is near now"
    assert spent_s < 1.04 * 20_000 * N_LAYER * 4e-4


class LastLayer:
    """Dice that have the last layer of the next pass explored."""

    def random(self) -> float:
        return 0.99


@pytest.mark.parametrize("n_layer", [4, 48])
def test_few_passes_are_cut_for_exploring(n_layer: int) -> None:
    """However many layers they have: a cut costs at every layer, not only at the one that is explored."""
    bench = Bench(DispatchConfig(send="auto"), n_layer=n_layer).warm(*range(N_EXPERT))
    bench.learn(workers_s=(0.002, 0.002))
    routing = routing_of(set(range(0, N_EXPERT, 2)), set(range(1, N_EXPERT, 2)), n_layer=n_layer)
    n_passes, n_cut = 2000, 0
    for _ in range(n_passes):
        planner = bench.policy.begin(1)
        is_cut = False
        for layer in range(n_layer):
            if not planner.fuses(routing, layer):
                is_cut = True
                planner.plan(routing, layer, ROW)
            bench.now_s += 5e-4
        planner.ended()
        bench.policy.passed(n_layer * 5e-4)
        n_cut += is_cut
    assert 20 <= n_cut <= n_passes / 12


def explore_last(rtt_s: float) -> tuple[Bench, Planner]:
    """With half a second to explore for: a pass whose last layer was just sent out, to learn from it."""
    bench = Bench(DispatchConfig(send="auto")).warm(*range(N_EXPERT))
    run(bench, lambda plan: 4e-4 if plan is None else rtt_s, 2000)
    bench.policy._rng, bench.policy._credit_s, bench.policy._layers_left = LastLayer(), 0.5, 0.0
    planner = bench.policy.begin(1)
    assert [planner.plan(EVEN_ODD, layer, ROW) is None for layer in range(N_LAYER)] == [True] * 3 + [False]
    return bench, planner


def test_what_follows_a_pass_is_not_the_time_of_what_it_explored() -> None:
    """The next decision may come hours later: behind the end of an answer, or when a pass was given up."""
    bench, planner = explore_last(0.002)
    bench.now_s += 0.002
    planner.ended()
    bench.now_s += 3600
    planner.ended()
    bench.policy.begin(1).plan(EVEN_ODD, 0, ROW)
    assert bench.policy._credit_s == pytest.approx(0.5 - 0.002 + 4e-4, abs=1e-4)


def test_what_was_explored_is_paid_for_though_another_pass_decides_meanwhile() -> None:
    bench, planner = explore_last(0.04)
    bench.policy.n_passes = 2
    bench.policy.begin(1).plan(EVEN_ODD, 0, ROW)
    bench.now_s += 0.04
    planner.ended()
    assert bench.policy._credit_s == pytest.approx(0.5 - 0.04 / 2 + 4e-4, abs=1e-4), "the other had its part"


def test_layers_that_nobody_holds_are_not_the_time_of_what_was_explored_before_them() -> None:
    bench, planner = explore_last(0.002)
    bench.now_s += 0.002
    assert planner.fuses(EVEN_ODD, N_LAYER)
    bench.now_s += 0.1
    planner.ended()
    assert bench.policy._credit_s == pytest.approx(0.5 - 0.002 + 4e-4, abs=1e-4)


def test_a_layer_that_nobody_holds_is_not_explored() -> None:
    _, planner = explore_last(0.002)
    assert planner.is_exploring
    assert planner.plan(EVEN_ODD, N_LAYER, ROW) is None
    assert not planner.is_exploring


def test_a_process_that_was_stopped_meanwhile_explores_again() -> None:
    bench, planner = explore_last(0.002)
    bench.now_s += 24 * 3600
    planner.ended()
    assert bench.policy._credit_s == -bench.config.max_deadline_s


@pytest.mark.parametrize("rtt_s", [0.0002, 0.001])
def test_a_worker_that_is_fast_is_found_and_one_that_becomes_slow_is_left(rtt_s: float) -> None:
    bench = Bench(DispatchConfig(send="auto", cut_s=0.0)).warm(*range(N_EXPERT))
    times = {"rtt": rtt_s}

    def took(plan: DispatchPlan | None) -> float:
        return 0.005 if plan is None else times["rtt"]

    run(bench, took, 200)
    n_sent, spent_s = run(bench, took, 1000)
    assert n_sent > 0.9 * 1000 * N_LAYER
    assert spent_s < 1.1 * 1000 * N_LAYER * rtt_s
    times["rtt"] = 0.08
    run(bench, took, 200)
    n_sent, spent_s = run(bench, took, 1000)
    assert n_sent < 0.05 * 1000 * N_LAYER
    assert spent_s < 1.05 * 1000 * N_LAYER * 0.005
    times["rtt"] = rtt_s
    run(bench, took, 2000)
    assert run(bench, took, 100)[0] > 0.9 * 100 * N_LAYER, "it is near again"


def test_equal_dice_give_equal_decisions() -> None:
    config = DispatchConfig(send="auto")
    took = [0.0004, 0.002]
    runs = [
        run(Bench(config).warm(*range(N_EXPERT)), lambda plan: took[plan is not None], 500) for _ in range(2)
    ]
    assert runs[0] == runs[1]


# -- replicas


BOTH = routing_of(set(range(N_EXPERT)), set(range(N_EXPERT)))


def owners_chosen(policy: SendPolicy, ids: np.ndarray[tuple[int, int], np.dtype[np.int32]] = ROW) -> set[int]:
    plan = policy.begin(1).plan(BOTH, 0, ids)
    assert plan is not None
    return {index for index, _ in plan.remote}


@pytest.mark.parametrize("n_rows", [1, 8])
def test_of_two_holders_the_slow_one_is_avoided(n_rows: int) -> None:
    policy = send_always(DispatchConfig(), lambda: 0.0)
    ids = np.repeat(ROW, n_rows, 0)
    assert owners_chosen(policy, ids) == {0, 1}, "nothing is known yet"
    for _ in range(5):
        policy.cost.worker(NODES[0]).add(1, 0.001, 0.0)
        policy.cost.worker(NODES[1]).add(1, 0.01, 0.0)
    assert owners_chosen(policy, ids) == {0}
    policy.cost.worker(NODES[0]).in_flight = 20
    assert owners_chosen(policy, ids) == {1}, "the fast one has too much to do"


def test_holders_are_compared_by_shares_of_the_size_at_hand() -> None:
    policy = send_always(DispatchConfig(), lambda: 0.0)
    for node, large_s in zip(NODES, (0.03, 0.003), strict=False):
        policy.cost.worker(node).add(1, 0.003, 0.0)
        policy.cost.worker(node).add(16, large_s, 0.0)
    assert owners_chosen(policy) == {0, 1}
    assert owners_chosen(policy, np.repeat(ROW, 8, 0)) == {1}


def test_nearly_equal_holders_keep_what_they_own() -> None:
    policy = send_always(DispatchConfig(), lambda: 0.0)
    for node, took_s in zip(NODES, (0.010, 0.011), strict=False):
        policy.cost.worker(node).add(1, took_s, 0.0)
    assert owners_chosen(policy) == {0, 1}


def test_an_expert_with_one_holder_has_no_second() -> None:
    routing = routing_of({0, 1}, {1, 2})
    assert routing.seconds[0].tolist()[:4] == [-1, 1 - routing.owners[0][1], -1, -1]
    assert routing_of({0}, {1}).seconds == {}


def test_deciding_takes_few_calls() -> None:
    """They take about 20 us (docs/decisions/0030): what numpy does in them is nothing for a row's few pairs."""
    bench = Bench(replace(NO_EXPLORING)).learn(workers_s=(0.01, 0.01)).warm(*range(N_EXPERT))
    planner = bench.policy.begin(1)
    n_calls = count_calls(lambda: planner.plan(EVEN_ODD, 1, ROW))
    assert n_calls < 150
