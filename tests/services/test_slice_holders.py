"""Whom slices are asked of: connected nodes whose records say so, and backbones of which nothing is known yet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from swarmnode.gossip.records import ModelHoldings, NodeRecord, OwnState, network_id, sign_record
from swarmnode.identity import NodeId, NodeKey
from swarmnode.net.address import PeerAddress
from swarmnode.net.peer import Peer
from swarmnode.services.connections import Connections
from swarmnode.services.fetch import Source
from swarmnode.services.gossip import GossipService
from swarmnode.services.slice_holders import SliceHolders
from swarmnode.weights.slices import ExpertRange

MODEL, OTHER = bytes(32), bytes([1]) * 32
KEY = NodeKey.from_seed(bytes([7]) * 32)
ITEM = ExpertRange(1, 4, 4)


def holders(record: NodeRecord | None, role: str = "worker", is_connected: bool = True) -> SliceHolders:
    peer = SimpleNamespace(node_id=KEY.node_id, settings=SimpleNamespace(roles=(role,)))
    connections = SimpleNamespace(connected={KEY.node_id: peer} if is_connected else {})
    table = {} if record is None else {KEY.node_id: record}
    gossip = SimpleNamespace(table=table)
    return SliceHolders(cast(GossipService, gossip), cast(Connections, connections))


def record_of(*models: ModelHoldings, addresses: tuple[str, ...] = ("192.0.2.1:7",)) -> NodeRecord:
    state = OwnState(addresses, (), ("worker",), 5, "cpu", models)
    return sign_record(KEY, network_id("test"), (1, 1), 600, 0, state)


def held(
    *serving: ExpertRange, fetching: tuple[ExpertRange, ...] = (), model: bytes = MODEL, seeds: bool = False
) -> ModelHoldings:
    return ModelHoldings(model, 2, 8, serving, fetching, 1, seeds)


def asked(found: SliceHolders) -> list[NodeId]:
    def source_of(peer: Peer) -> Source:
        return cast(Source, peer)

    return [source.node_id for source in found.sources(MODEL, source_of, ITEM)]


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        ((), False),
        ((held(ExpertRange(1, 4, 4)),), True),
        ((held(ExpertRange(1, 7, 1)),), True),
        ((held(ExpertRange(1, 0, 5)),), True),
        ((held(ExpertRange(1, 0, 4)),), False),
        ((held(ExpertRange(0, 4, 4)),), False),
        ((held(fetching=(ExpertRange(1, 4, 4),)),), False),
        ((held(ExpertRange(1, 4, 4), model=OTHER),), False),
        ((held(seeds=True),), True),
        ((held(seeds=True, model=OTHER),), False),
        ((held(ExpertRange(0, 0, 8), model=OTHER), held(ExpertRange(1, 4, 1))), True),
    ],
)
def test_who_says_to_serve_one_of_the_experts_is_asked(
    models: tuple[ModelHoldings, ...], expected: bool
) -> None:
    assert asked(holders(record_of(*models))) == ([KEY.node_id] if expected else [])
    assert asked(holders(record_of(*models), role="backbone")) == ([KEY.node_id] if expected else [])
    assert asked(holders(record_of(*models), is_connected=False)) == []


def test_a_backbone_is_asked_before_it_is_heard_of_and_a_worker_is_not() -> None:
    assert asked(holders(None, role="backbone")) == [KEY.node_id]
    assert asked(holders(None)) == []


def test_where_a_node_can_be_dialled() -> None:
    peer = cast(Peer, SimpleNamespace(node_id=KEY.node_id))
    assert holders(None).address_of(peer) is None
    assert holders(record_of(addresses=())).address_of(peer) is None
    expected = PeerAddress(KEY.node_id, "192.0.2.1", 7)
    assert holders(record_of(addresses=("x:0", "192.0.2.1:7"))).address_of(peer) == expected
