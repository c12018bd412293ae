"""Splitting the pairs of a layer over workers: nothing lost, nothing twice, order kept."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.config import DispatchConfig
from swarmnode.identity import NodeKey
from swarmnode.schedule.dispatch import (
    LOCAL,
    DispatchPlan,
    Routing,
    Share,
    build_routing,
    merge_shares,
    split_share,
    without,
)
from swarmnode.schedule.view import SwarmView, WorkerView
from tests.plans import plan_layer

N_EXPERT = 16
KEYS = [NodeKey.generate() for _ in range(4)]


def worker(number: int, holdings: dict[int, set[int]]) -> WorkerView:
    held = {layer: frozenset(experts) for layer, experts in holdings.items()}
    return WorkerView(KEYS[number].node_id, held, max_rows=512)


def random_ids(seed: int, n_rows: int, k: int) -> npt.NDArray[np.int32]:
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(N_EXPERT)[:k] for _ in range(n_rows)]).astype(np.int32)


def all_shares(plan: DispatchPlan) -> list[Share]:
    return [share for _, share in plan.remote] + ([plan.local] if plan.local is not None else [])


def test_without_workers_everything_is_local() -> None:
    routing = build_routing(SwarmView(), N_EXPERT)
    assert plan_layer(routing, 0, random_ids(0, 3, 4)) is None


def test_a_layer_whose_chosen_experts_nobody_holds_is_local() -> None:
    routing = build_routing(SwarmView((worker(0, {0: {15}}),)), N_EXPERT)
    ids = np.array([[0, 1, 2, 3]], np.int32)
    assert plan_layer(routing, 0, ids) is None
    assert plan_layer(routing, 1, ids) is None


@given(
    seed=st.integers(0, 1000),
    n_rows=st.integers(1, 20),
    k=st.integers(1, 8),
    held=st.lists(st.sets(st.integers(0, N_EXPERT - 1)), min_size=1, max_size=4),
)
def test_every_pair_goes_to_exactly_one_owner_that_holds_it(
    seed: int, n_rows: int, k: int, held: list[set[int]]
) -> None:
    view = SwarmView(tuple(worker(number, {3: experts}) for number, experts in enumerate(held)))
    routing = build_routing(view, N_EXPERT)
    ids = random_ids(seed, n_rows, k)
    plan = plan_layer(routing, 3, ids)
    if plan is None:
        assert not set().union(*held) & set(ids.ravel().tolist())
        return
    covered = np.sort(np.concatenate([share.flat for share in all_shares(plan)]))
    assert np.array_equal(covered, np.arange(ids.size))
    for index, share in plan.remote:
        assert set(share.pair_expert.tolist()) <= held[index]
    for share in all_shares(plan):
        assert np.array_equal(share.rows[share.pair_row], share.flat // k)
        assert np.array_equal(share.pair_expert, ids.ravel()[share.flat])
        assert np.all(np.diff(share.flat) > 0), "k order within a row"
        assert np.all(np.diff(share.rows) > 0), "rows are distinct"


def test_replicas_share_the_work() -> None:
    experts = set(range(N_EXPERT))
    routing = build_routing(SwarmView((worker(0, {0: experts}), worker(1, {0: experts}))), N_EXPERT)
    counts = np.bincount(routing.owners[0])
    assert counts.tolist() == [8, 8]


def test_a_rare_expert_is_given_before_common_ones() -> None:
    """Worker 1 alone holds 0; it must not be given all the common ones as well."""
    view = SwarmView((worker(0, {0: {1, 2, 3}}), worker(1, {0: {0, 1, 2, 3}})))
    owners = build_routing(view, N_EXPERT).owners[0]
    assert owners[0] == 1
    assert sorted(owners[1:4].tolist()) == [0, 0, 1]
    assert set(owners[4:].tolist()) == {LOCAL}


def test_equal_views_give_equal_routings() -> None:
    view = SwarmView((worker(0, {0: {1, 2}, 1: {3}}), worker(1, {0: {2, 5}})))
    first, second = build_routing(view, N_EXPERT), build_routing(view, N_EXPERT)
    assert all(np.array_equal(first.owners[layer], second.owners[layer]) for layer in first.owners)


def plainly_routed(view: SwarmView, n_expert: int) -> dict[int, npt.NDArray[np.int32]]:
    """The rule of `build_routing`, one expert after the other."""
    holders: dict[tuple[int, int], list[int]] = {}
    for index, item in enumerate(view.workers):
        for layer, experts in item.holdings.items():
            for expert in experts:
                if 0 <= expert < n_expert:
                    holders.setdefault((layer, expert), []).append(index)
    owners: dict[int, npt.NDArray[np.int32]] = {}
    given = [0] * len(view.workers)
    for (layer, expert), candidates in sorted(holders.items(), key=lambda item: (len(item[1]), item[0])):
        owner = min(candidates, key=lambda index: (given[index], index))
        given[owner] += 1
        owners.setdefault(layer, np.full(n_expert, LOCAL, np.int32))[expert] = owner
    return owners


@given(
    n_workers=st.integers(0, 40),
    seed=st.integers(0, 1000),
    share=st.sampled_from([0.05, 0.3, 0.7, 1.0]),
    run=st.sampled_from([1, 4]),
)
def test_routing_is_that_of_the_plain_rule(n_workers: int, seed: int, share: float, run: int) -> None:
    rng = np.random.default_rng(seed)
    held = np.repeat(rng.random((n_workers, 3, (N_EXPERT + 4) // run)) < share, run, axis=2)
    workers = [
        WorkerView(
            KEYS[0].node_id,
            {layer: frozenset(np.flatnonzero(row).tolist()) for layer, row in enumerate(rows)},
            1,
        )
        for rows in held
    ]
    view = SwarmView(tuple(workers))
    owners, plain = build_routing(view, N_EXPERT).owners, plainly_routed(view, N_EXPERT)
    assert owners.keys() == plain.keys()
    assert all(np.array_equal(owners[layer], plain[layer]) for layer in plain)


def test_what_is_lost_becomes_local_and_the_rest_stays() -> None:
    view = SwarmView((worker(0, {0: {1, 2}, 1: {3}}), worker(1, {0: {5}, 2: {7}})))
    routing = build_routing(view, N_EXPERT)
    left = without(routing, {0: {0: frozenset({2})}, 1: {}})
    assert left.owners.keys() == {0}
    assert np.flatnonzero(left.owners[0] != LOCAL).tolist() == [2]
    assert np.flatnonzero(routing.owners[0] != LOCAL).tolist() == [1, 2, 5], (
        "whoever has the old one keeps it"
    )


def test_ids_outside_the_model_are_ignored() -> None:
    routing = build_routing(SwarmView((worker(0, {0: {N_EXPERT, 500}}),)), N_EXPERT)
    assert routing.owners == {}


@pytest.mark.parametrize("max_pairs", [1, 3, 4, 5, 16, 1000])
def test_pieces_are_small_enough_and_complete(max_pairs: int) -> None:
    ids = random_ids(1, 10, 4)
    share = Share(np.arange(40), np.arange(10), np.repeat(np.arange(10), 4).astype(np.int32), ids.ravel())
    pieces, rest = split_share(share, ids, max_pairs, 40)
    assert rest is None
    assert all(0 < len(piece.flat) <= max_pairs for piece in pieces)
    assert np.array_equal(np.concatenate([piece.flat for piece in pieces]), share.flat)
    if max_pairs >= 4:
        rows = np.concatenate([piece.rows for piece in pieces])
        assert len(rows) == len(set(rows.tolist())), "no row is cut in two"


@pytest.mark.parametrize(
    ("max_pairs", "max_pieces", "n_sent"), [(1, 3, 3), (6, 2, 8), (1000, 0, 0), (40, 1, 40)]
)
def test_pieces_are_few_and_the_rest_is_left(max_pairs: int, max_pieces: int, n_sent: int) -> None:
    ids = random_ids(1, 10, 4)
    share = Share(np.arange(40), np.arange(10), np.repeat(np.arange(10), 4).astype(np.int32), ids.ravel())
    pieces, rest = split_share(share, ids, max_pairs, max_pieces)
    assert len(pieces) <= max_pieces
    assert sum(len(piece.flat) for piece in pieces) == n_sent
    parts = pieces if rest is None else [*pieces, rest]
    assert np.array_equal(np.concatenate([part.flat for part in parts]), share.flat)
    assert np.array_equal(np.concatenate([part.pair_expert for part in parts]), ids.ravel())


@pytest.mark.parametrize(("n_workers", "n_pieces"), [(1, 64), (4, 64), (8, 32), (200, 1), (4096, 1)])
def test_many_workers_do_not_get_many_pieces_each(n_workers: int, n_pieces: int) -> None:
    assert DispatchConfig().pieces_each(n_workers) == n_pieces


def test_failed_shares_merge_to_one() -> None:
    ids = random_ids(2, 5, 4)
    view = SwarmView((worker(0, {0: set(range(8))}), worker(1, {0: set(range(8, 16))})))
    plan = plan_layer(build_routing(view, N_EXPERT), 0, ids)
    assert plan is not None
    merged = merge_shares([share for _, share in plan.remote], ids)
    assert np.array_equal(merged.flat, np.arange(20))
    assert np.array_equal(merged.pair_expert, ids.ravel())


def test_an_empty_routing_is_the_default() -> None:
    assert plan_layer(Routing(), 0, random_ids(0, 1, 4)) is None
