"""Many nodes in virtual time: how far and how fast news goes, and what the network survives. All seeded.

The short forms run in `make test`; those marked `slow` are the sizes that docs/gossip.md names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from swarmnode.gossip.records import NodeRecord, OwnState
from swarmnode.gossip.view import View
from swarmnode.testing.gossip_sim import GossipSim, Net, SimNode, quick

from .samples import CONFIG, MODEL, holdings_of_layer

DAY_S = 86_400.0
YEAR_S = 365.25 * DAY_S


def publish_all(nodes: Iterable[SimNode], capacity_bytes: int = 0) -> None:
    for number, node in enumerate(nodes):
        address = f"10.{number >> 8 & 255}.{number & 255}.1:7000"
        models = (holdings_of_layer(number % 48),)
        node.publish(OwnState((address,), (), ("worker",), capacity_bytes, "cpu", models))


def agree(nodes: Iterable[SimNode]) -> bool:
    """All tables hold the same records."""
    return len({frozenset(node.table.ids()) for node in nodes}) == 1


def all_know(nodes: list[SimNode]) -> bool:
    """Every node's newest own record is in every table."""
    newest = {record.id for node in nodes for record in node.table.of(node.node_id)}
    return all(newest <= set(node.table.ids()) for node in nodes)


@pytest.mark.parametrize(
    ("n_nodes", "most_hops"), [(1000, 6), pytest.param(10_000, 8, marks=pytest.mark.slow)]
)
def test_an_update_reaches_everybody_in_few_hops(n_nodes: int, most_hops: int) -> None:
    sim = GossipSim(seed=3)
    nodes = sim.add(n_nodes)
    sim.run(12.0)
    for number in range(3):
        hops = sorted(sim.spread(nodes[number], OwnState(capacity_bytes=number), limit_s=30.0).values())
        reached = sum(n <= most_hops for n in hops)
        assert reached >= 0.999 * n_nodes, f"{reached} of {n_nodes} within {most_hops} hops"
    assert not sim.protocol_errors


@pytest.mark.parametrize(
    ("n_nodes", "publishers", "duration_s"),
    [(100, 40, 30.0), pytest.param(1000, 1000, 300.0, marks=pytest.mark.slow)],
)
def test_steady_traffic_is_bounded(n_nodes: int, publishers: int, duration_s: float) -> None:
    """5 records a second, as 1,000 nodes with a ttl of 600 s make: few nodes of a short ttl, or all of them."""
    per_s = 5.0
    config = replace(CONFIG, ttl_s=round(3 * publishers / per_s), issue_interval_s=1.0)
    sim = GossipSim(seed=4, config=config)
    nodes = sim.add(n_nodes)
    publish_all(nodes[:publishers])
    sim.run(20.0)
    sim.reset_traffic()
    sim.run(duration_s)
    assert all(len(node.live_ids()) == publishers for node in nodes)
    assert sim.bytes_per_node_and_s() < 6000


@pytest.mark.parametrize(
    ("n_nodes", "close"),
    [(80, True), (80, False), pytest.param(1000, True, marks=pytest.mark.slow)],
)
def test_a_healed_partition_converges_within_two_comparisons(n_nodes: int, close: bool) -> None:
    sim = GossipSim(seed=5)
    nodes = sim.add(n_nodes)
    publish_all(nodes)
    sim.run(40.0)
    assert agree(nodes)
    left, right = nodes[: n_nodes // 2], nodes[n_nodes // 2 :]
    sim.partition(left, close=close)
    publish_all(left, 1)
    publish_all(right, 2)
    late = sim.add(1)[0]
    publish_all([late], 3)
    nodes = [*nodes, late]
    sim.run(45.0)
    assert not agree(nodes)
    sim.heal()
    limit_s = 2 * CONFIG.sync_interval_s
    assert sim.run_until(lambda: all_know(nodes), limit_s) <= limit_s
    assert all(len(node.live_ids()) == n_nodes + 1 for node in nodes)


def test_a_partition_longer_than_a_ttl_heals_too() -> None:
    config = replace(CONFIG, ttl_s=60)
    sim = GossipSim(seed=6, config=config)
    nodes = sim.add(60)
    publish_all(nodes)
    sim.run(20.0)
    sim.partition(nodes[:30])
    sim.run(100.0)
    assert {len(node.live_ids()) for node in nodes} == {30}
    sim.heal()
    took_s = sim.run_until(lambda: all(len(node.live_ids()) == 60 for node in nodes), 120.0)
    assert took_s <= 2 * config.sync_interval_s


OFFSETS = (0.0, DAY_S, -DAY_S, 10 * YEAR_S, -10 * YEAR_S, -100 * YEAR_S)


@pytest.mark.parametrize("offsets", [OFFSETS, (0.0,)], ids=["off", "right"])
def test_clocks_change_nothing(offsets: tuple[float, ...]) -> None:
    """With clocks off by up to a century: everybody known, the dead gone in time, the living never lost."""
    sim = GossipSim(seed=7, config=replace(CONFIG, ttl_s=60))
    nodes = [sim.add(1, wall_offset_s=offsets[number % len(offsets)])[0] for number in range(60)]
    publish_all(nodes)
    sim.run(15.0)
    assert all(len(node.live_ids()) == 60 for node in nodes)
    for node in nodes[:10]:
        sim.kill(node)
    for node in nodes[10:20]:  # clocks that jump while running, both ways
        node.wall_offset_s = -node.wall_offset_s if node.wall_offset_s else 3 * YEAR_S
    rest = {node.node_id for node in nodes[10:]}
    for _ in range(20):
        sim.run(5.0)
        assert all(node.live_ids() >= rest for node in nodes[10:])
    assert all(node.live_ids() == rest for node in nodes[10:])


def test_thirty_per_cent_loss() -> None:
    """Cases 9: a healthy swarm that looks empty."""
    sim = GossipSim(seed=8, net=Net(loss=0.3))
    nodes = sim.add(80)
    publish_all(nodes)
    assert sim.run_until(lambda: all(len(node.live_ids()) == 80 for node in nodes), 300.0, 5.0) < 300.0
    for number in range(3):
        assert len(sim.spread(nodes[number], OwnState(capacity_bytes=9), limit_s=120.0)) == 80
    for _ in range(2):
        sim.run(100.0)
        assert all(len(node.live_ids()) == 80 for node in nodes)


def test_churn_of_ten_per_cent_a_minute() -> None:
    sim = GossipSim(seed=9, config=replace(CONFIG, ttl_s=90))
    publish_all(sim.add(60))
    sim.run(15.0)
    missing = 0
    for minute in range(4):
        for node in sim.rng.sample(sim.alive(), 6):
            (sim.leave if minute % 2 else sim.kill)(node)
        publish_all(sim.add(6), minute)
        sim.run(60.0)
        living = {node.node_id for node in sim.alive()}
        missing += sum(len(living - node.live_ids()) for node in sim.alive())
    assert missing == 0
    sim.run(90.0 + 2.0)
    living = {node.node_id for node in sim.alive()}
    assert all(node.live_ids() == living for node in sim.alive()), (
        "the dead are gone within a ttl, everywhere"
    )


def test_old_records_from_a_recorder_bring_nobody_back() -> None:
    """Somebody kept everything that was ever said, and says it again, as if it were new."""
    config = replace(CONFIG, ttl_s=60)
    sim = GossipSim(seed=10, config=config)
    nodes = sim.add(40)
    publish_all(nodes)
    sim.run(10.0)
    kept: list[NodeRecord] = list(nodes[0].table.live())
    for node in nodes[:5]:
        sim.kill(node)
    for node in nodes[5:10]:
        sim.leave(node)
    sim.run(75.0)
    living = {node.node_id for node in nodes[10:]}
    assert all(node.live_ids() == living for node in nodes[10:])
    recorder = sim.add(1)[0]
    news = sim.add(5)
    heard = {node.node_id: 0 for node in news}
    for _ in range(20):
        for record in kept:
            recorder.table._gone.clear()
            recorder.table.offer(record, sim.now_s)
        sim.run(5.0)
        assert all(node.live_ids() <= living for node in nodes[10:]), "who was there is not fooled"
        for node in news:
            heard[node.node_id] += not node.live_ids() <= living
    assert all(node.live_ids() <= living for node in news), "newcomers are, for one ttl"
    assert max(heard.values()) <= 60 // 5 + 2


def test_a_neighbour_that_swallows_everything_costs_nobody_else() -> None:
    sim = GossipSim(seed=14, config=replace(quick(CONFIG, 10), max_pending=50))
    nodes = sim.add(30)
    publish_all(nodes)
    sim.run(20.0)
    mute = nodes[0]
    sim.partition([mute], close=False)
    for number in range(6):
        publish_all(nodes[1:], number)
        sim.run(6.0)
    sim.run(10.0)
    living = {node.node_id for node in nodes[1:]}
    assert all(node.live_ids() >= living for node in nodes[1:])
    for node in nodes[1:]:
        peer = node.core._overlay.get(mute.node_id)
        assert peer is None or len(peer.pending) <= 50


def test_a_swarm_that_is_larger_than_its_tables_comes_to_rest() -> None:
    """Full tables hold other records each, and always more of them than a neighbour may be told at once: they are not
    compared without end. Nor is fetched again what was evicted, as long as its ids are remembered.
    """
    config = replace(CONFIG, max_records=20, max_passed=40, max_pending=3, ttl_s=3600)
    sim = GossipSim(seed=15, config=config)
    nodes = sim.add(60)
    publish_all(nodes)
    sim.run(120.0)
    assert all(len(node.table) == config.max_records for node in nodes)
    sim.reset_traffic()
    minutes = 3
    sim.run(60.0 * minutes)
    assert len(nodes) * minutes <= sim.traffic.messages["GossipDigest"] <= 3 * len(nodes) * minutes
    assert sim.traffic.messages["GossipWant"] <= len(nodes)


def test_phones_with_a_view_keep_few_records() -> None:
    sim = GossipSim(seed=15)
    nodes = sim.add(150)
    publish_all(nodes)
    view = View("some", ("backbone",), (MODEL,), (3,))
    phones = sim.add(10, view=view, config=replace(CONFIG, neighbours=3))
    publish_all(phones)
    sim.run(30.0)
    wanted = {node.node_id for number, node in enumerate(nodes) if number % 48 == 3}
    for phone in phones:
        assert phone.live_ids() - {other.node_id for other in phones} == wanted
    assert all(len(node.live_ids()) == 160 for node in nodes)


def test_one_seed_is_one_run() -> None:
    def run() -> tuple[int, dict[str, int]]:
        sim = GossipSim(seed=16, net=Net(loss=0.1))
        publish_all(sim.add(40))
        sim.run(30.0)
        return sim.traffic.bytes, dict(sim.traffic.messages)

    assert run() == run()


def test_a_simultaneous_start() -> None:
    """Nobody knows anybody, all start at once."""
    sim = GossipSim(seed=17)
    nodes = sim.add(150)
    publish_all(nodes)
    took_s = sim.run_until(lambda: all(len(node.live_ids()) == 150 for node in nodes), 30.0)
    assert took_s <= 15.0
