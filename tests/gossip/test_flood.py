"""Invented nodes and forged records by the thousand: the bounds hold, and the honest stay."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from swarmnode.config import GossipConfig
from swarmnode.gossip.records import NODE, NodeRecord, OwnState, network_id, record_key, sign_record
from swarmnode.identity import NodeId, NodeKey
from swarmnode.testing.gossip_sim import NETWORK, GossipSim, Net

from .samples import CONFIG, table_of
from .test_simulation import publish_all


def sybils(numbers: range, config: GossipConfig) -> list[NodeRecord]:
    """Records of nodes that nobody has met, each well signed."""
    records = []
    for number in numbers:
        key = NodeKey.from_seed(b"sybil" + number.to_bytes(27, "big"))
        state = OwnState((invented_address(number),), roles=("worker",))
        records.append(sign_record(key, network_id(NETWORK), (1, 1), config.ttl_s, 0, state))
    return records


def invented_address(number: int) -> str:
    return f"{11 + number % 180}.{number >> 8 & 255}.{number & 255}.9:7000"


def forged(record: NodeRecord) -> NodeRecord:
    """The same with a bit of its signature flipped."""
    data = record.data[:-1] + bytes([record.data[-1] ^ 1])
    return replace(record, data=data, digest=hashlib.sha256(data).digest())


FLOODED = replace(CONFIG, max_records=600, max_per_prefix=100, max_passed=2000, max_gone=500)


@pytest.mark.parametrize("n_sybils", [3000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_flood_of_invented_nodes_leaves_the_honest_ones(n_sybils: int) -> None:
    sim = GossipSim(seed=11, config=FLOODED, net=Net(connections=8))
    nodes = sim.add(30)
    publish_all(nodes)
    sim.run(20.0)
    unbounded = replace(FLOODED, max_records=10**6, max_per_prefix=10**6, max_pending=10**6)
    attacker = sim.add(1, config=unbounded)[0]
    for start in range(0, n_sybils, 500):
        for record in sybils(range(start, start + 500), FLOODED):
            attacker.table.offer(record, sim.now_s)
            attacker.core._telling.spread(record, None, sim.now_s)
        sim.run(5.0)
        assert all(len(node.table) <= FLOODED.max_records for node in nodes)
    honest = {node.node_id for node in nodes}
    assert sum(len(honest - node.live_ids()) for node in nodes) == 0
    assert max(len(node.table) for node in nodes) > 300, "the flood did arrive"
    assert not sim.protocol_errors


def test_forged_records_cost_their_sender_the_connection() -> None:
    sim = GossipSim(seed=12, net=Net(connections=8))
    nodes = sim.add(30)
    publish_all(nodes)
    sim.run(20.0)
    forger = sim.add(1)[0]
    n_peers = len(forger.peers)
    for record in sybils(range(2000), CONFIG):
        forger.table.offer(forged(record), sim.now_s)
    sim.run(90.0)
    assert len(sim.protocol_errors) >= n_peers
    assert {error.code for error in sim.protocol_errors} == {"bad_gossip"}
    assert all(len(node.live_ids()) == 30 for node in nodes)


@pytest.mark.parametrize("n_sybils", [20_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_one_table_under_a_hundred_thousand_records(n_sybils: int) -> None:
    """Without signatures: 1,000 honest nodes, then the flood, over 64 connections of one attacker."""
    config = replace(CONFIG, max_records=n_sybils // 6, max_passed=n_sybils // 3)
    table = table_of(config)
    honest = [replace(record, network=table._network) for record in sybils(range(1000), config)]
    for number, record in enumerate(honest):
        table.offer(record, 1000.0 + number / 100, honest[number % 8].node_id)
    for number in range(n_sybils):
        raw = hashlib.sha256(number.to_bytes(4, "big")).digest()
        fake = replace(
            honest[0],
            node_id=NodeId(raw),
            data=record_key(NodeId(raw), NODE) + honest[0].data[33:],
            digest=raw[::-1],
            state=OwnState((invented_address(number),)),
        )
        table.offer(fake, 1100.0 + number / 1000, honest[number % 64].node_id)
    assert len(table) == config.max_records
    assert {record.node_id for record in honest} <= {record.node_id for record in table.live()}
    assert len(table._passed) <= config.max_passed
