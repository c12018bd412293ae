"""The market as a whole, in the simulator: what must hold at 600 nodes, and (slow) at the real size.

The figures: `python -m benchmarks.market`.
"""

from __future__ import annotations

import copy
from functools import cache

import numpy as np
import pytest

from benchmarks.market import by_demand, skewed
from swarmnode.gossip.coverage import Coverage
from swarmnode.gossip.records import ModelHoldings, OwnState
from swarmnode.gossip.shape import MarketShape
from swarmnode.testing import market_runs as runs
from swarmnode.testing.market_gossip import GossipMarket
from swarmnode.testing.market_sim import MarketPlan, MarketSim
from tests.gossip.market import CONFIG, MODEL, even_shape, node_id

SETTLE_S = 300


@cache
def _settled(name: str) -> MarketSim:
    size = SIZES[name]
    return runs.cold_start(size, MarketPlan(size.shape), SETTLE_S)


SIZES = {"600 nodes": runs.slots_of_20(), "real size": runs.real_size()}
sizes = pytest.mark.parametrize("name", ["600 nodes", pytest.param("real size", marks=pytest.mark.slow)])


@sizes
def test_a_cold_simultaneous_start(name: str) -> None:
    sim, size = _settled(name), SIZES[name]
    figures = sim.figures()
    assert figures.covered >= 0.999
    assert figures.twice >= 0.98
    assert figures.peak <= 10
    assert figures.downloads <= 1.3 * size.n_slots
    assert all(node.volunteer.occupied_bytes <= size.budgets_bytes[node.number] for node in sim.nodes)


@sizes
def test_churn_of_a_tenth_a_minute(name: str) -> None:
    """Half of those who go crash: their records count for minutes more."""
    sim, size = copy.deepcopy(_settled(name)), SIZES[name]
    minutes = 4 if name == "600 nodes" else 10
    figures = runs.churn(sim, size.budgets_bytes, minutes, per_minute=0.10, crashing=0.5)
    assert min(entry.covered for entry in figures) >= 0.995


@pytest.mark.slow
@pytest.mark.parametrize(("crashing", "least"), [(0.0, 0.995), (0.5, 0.995), (1.0, 0.99)])
def test_half_an_hour_of_churn_and_crashes(crashing: float, least: float) -> None:
    """When all who go crash, one node in seven of a view is a dead one."""
    sim, size = copy.deepcopy(_settled("600 nodes")), SIZES["600 nodes"]
    figures = runs.churn(sim, size.budgets_bytes, 30, 0.10, crashing)
    assert min(entry.covered for entry in figures) >= least


@sizes
def test_a_healed_partition_is_not_downloaded_again(name: str) -> None:
    """Longer than records count: each half believes that the other one is gone, and fills its own holes."""
    size = SIZES[name]
    sim = runs.cold_start(size, MarketPlan(size.shape, ttl_s=120), 200)
    result = runs.partition(sim, parted_s=300, after_s=2 * sim.plan.sync_s)
    assert min(result.halves_covered) >= 0.995
    assert result.wrong_views == 0, "all see the same within two anti-entropy periods"
    assert result.after.downloads - result.parted.downloads <= 0.02 * size.n_slots
    assert result.after.covered >= 0.999


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("600 nodes", "same"),
        *(
            pytest.param(name, kind, marks=pytest.mark.slow)
            for name, kind in (
                ("600 nodes", "alike"),
                ("600 nodes", "all"),
                ("real size", "alike"),
                ("real size", "all"),
                ("real size", "same"),
            )
        ),
    ],
)
def test_a_tenth_of_liars(name: str, kind: str) -> None:
    """Coverage as served: nothing a liar says counts."""
    size = SIZES[name]
    sim = runs.with_liars(size, MarketPlan(size.shape), 0.10, kind, 600)
    assert sim.figures().covered >= 0.99


def test_hot_experts_get_more_replicas() -> None:
    size = runs.slots_of_20(150, n_layer=3)
    demand = skewed(size.shape)
    sim = runs.cold_start(size, MarketPlan(size.shape), SETTLE_S, demand)
    assert sim.figures().covered >= 0.999
    assert sim.figures().twice >= 0.98
    tenths = [float(part) for part in by_demand(sim, demand).split()]
    assert tenths[-1] > 2 * tenths[0]


def test_the_same_seed_gives_the_same_market() -> None:
    size = runs.slots_of_20(60)
    first, second = (runs.cold_start(size, MarketPlan(size.shape, seed=5), 120) for _ in range(2))
    assert first.figures() == second.figures()
    np.testing.assert_array_equal(first.served, second.served)


def test_the_simulators_views_are_those_of_real_coverage() -> None:
    """What a node of the simulator believes, counted by `Coverage` from the same records."""
    size = runs.slots_of_20(40)
    sim = runs.cold_start(size, MarketPlan(size.shape), 30)
    sim.run(1)
    observer = sim.nodes[7]
    counted = Coverage(MODEL, size.shape, node_id(7), CONFIG)
    for node in sim.nodes:
        version = sim.views._seen[observer.row, node.number]
        if node is observer or version < 0:
            continue
        snapshot = node.snapshots[version]
        served = np.zeros(size.shape.size, np.bool_)
        served[snapshot.serving] = True
        serving = runs.ranges_of_flat(np.flatnonzero(served), size.shape)
        holdings = ModelHoldings(
            MODEL, size.shape.n_layer, size.shape.n_expert, serving, tuple(snapshot.claims), 512, False
        )
        state = OwnState(addresses=(f"8.8.{node.number}.1:1",), models=(holdings,))
        counted.update(node_id(node.number), state, float(sim.now_s))
    np.testing.assert_array_equal(counted.replicas, sim.believed(observer))
    assert counted.n_nodes == sim.views.known[observer.row]


def test_over_real_gossip() -> None:
    """40 nodes with cores, tables and records: four replicas of everything after a cold start, and healing."""
    shape = MarketShape(3, 32, dict.fromkeys(range(3), 10))
    market = GossipMarket(shape, [10 * 10] * 40, seed=3)
    market.run(120)
    counts = market.replicas()
    assert counts.min() >= 2
    assert counts.max() <= 8
    assert market.n_downloaded <= 1.1 * 400


def test_three_of_eight_killed_over_real_gossip() -> None:
    shape = even_shape(3, 16)
    market = GossipMarket(shape, [160] * 8, seed=4)
    market.run(120)
    assert market.replicas().min() >= 2
    market.kill(market.traders[:3])
    market.run(900)
    assert market.replicas().min() >= 1
