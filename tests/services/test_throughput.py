"""Rates from counters: workers that come, go and start anew, and a bounded history."""

from __future__ import annotations

from dataclasses import replace

import trio

from swarmnode.config import Config, DashboardConfig
from swarmnode.services.throughput import Throughput
from swarmnode.testing.many_nodes import ManyNodes

CONFIG = replace(Config(), dashboard=replace(DashboardConfig(), n_samples=4, rate_samples=2))


def many() -> ManyNodes:
    return ManyNodes(2, 8, 0, config=CONFIG)


def sample(nodes: ManyNodes, seconds: float = 1.0) -> Throughput:
    nodes.now_s += seconds
    nodes.throughput.sample()
    return nodes.throughput


def test_tokens_and_pairs_a_second() -> None:
    nodes = many()
    nodes.connect(5, (), "cpu")
    (worker,) = nodes.members.workers
    nodes.n_tokens, worker.tally.pairs = 30, 100
    rates = sample(nodes, 2.0)
    assert (rates.tokens_per_s, rates.pairs_per_s) == (15.0, 50.0)
    assert rates.pairs_per_s_of(worker.node_id) == 50.0
    rates = sample(nodes)
    assert (rates.tokens_per_s, rates.pairs_per_s) == (0.0, 0.0)
    assert rates.pairs_per_s_of(worker.node_id) == 25.0  # the mean of two samples


def test_a_worker_that_comes_back_starts_anew_and_one_that_left_takes_nothing_away() -> None:
    nodes = many()
    nodes.connect(5, (), "cpu")
    (worker,) = nodes.members.workers
    worker.tally.pairs = 100
    sample(nodes)
    nodes.leave(5)
    assert sample(nodes).pairs_per_s == 0.0
    assert nodes.throughput.pairs_per_s_of(worker.node_id) == 0.0
    nodes.connect(5, (), "cpu")
    (again,) = nodes.members.workers
    again.tally.pairs = 7
    assert sample(nodes).pairs_per_s == 7.0
    again.tally.pairs = 3  # another connection of the same node, seen under one name
    assert sample(nodes).pairs_per_s == 3.0


def test_history_is_bounded_and_numbered() -> None:
    nodes = many()
    for count in range(6):
        nodes.n_tokens += count
        sample(nodes)
    history = nodes.throughput.history()
    assert history == {"n": 6, "step_s": 1.0, "tokens": [2.0, 3.0, 4.0, 5.0], "pairs": [0.0] * 4}


def test_no_time_is_no_sample() -> None:
    assert sample(many(), 0.0).n_samples == 0


async def test_it_samples_by_itself() -> None:
    nodes = many()
    rates = Throughput(nodes.members, lambda: nodes.n_tokens, trio.current_time, CONFIG.dashboard)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rates.run)
        await trio.sleep(10.5)
        assert rates.n_samples == 10
        nursery.cancel_scope.cancel()
