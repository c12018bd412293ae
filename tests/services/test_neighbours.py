"""Whom a node keeps contact with, of all that it has heard of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import trio

from swarmnode.config import ContactConfig
from swarmnode.gossip.records import ModelHoldings, NodeRecord, OwnState, network_id, sign_record
from swarmnode.gossip.table import Change
from swarmnode.identity import NodeId, NodeKey
from swarmnode.net.address import PeerAddress
from swarmnode.services.gossip import GossipService, OnChange
from swarmnode.services.neighbours import Neighbours, addresses_of, choose_neighbours

CONFIG = ContactConfig(max_backbones=3, neighbours=4)
MODEL, OTHER = bytes(32), bytes([1]) * 32


def key_of(number: int) -> NodeKey:
    return NodeKey.from_seed(number.to_bytes(32, "big"))


OWN = key_of(0).node_id


def record_of(
    number: int, *, role: str = "worker", model: bytes = MODEL, addresses: tuple[str, ...] | None = None
) -> NodeRecord:
    places = (f"192.0.2.{number % 250}:7",) if addresses is None else addresses
    holdings = ModelHoldings(model, 2, 8, (), (), 1, seeds=role == "backbone")
    state = OwnState(places, (), (role,), 5, "cpu", (holdings,))
    return sign_record(key_of(number), network_id("test"), (1, 1), 600, 0, state)


def chosen(
    records: Iterable[NodeRecord], own: NodeId = OWN, models: frozenset[bytes] = frozenset([MODEL])
) -> list[NodeId]:
    return list(dict.fromkeys(a.node_id for a in choose_neighbours(records, own, models, CONFIG)))


def test_backbones_of_the_model_and_a_few_others() -> None:
    backbones = [record_of(n, role="backbone") for n in range(1, 10)]
    foreign = [record_of(n, role="backbone", model=OTHER) for n in range(10, 20)]
    workers = [record_of(n) for n in range(20, 60)]
    found = chosen([*workers, *foreign, *backbones])
    assert len(found) == 7
    assert len(set(found) & {record.node_id for record in backbones}) == 3
    assert set(found[:3]) <= {record.node_id for record in backbones}


def test_without_a_model_any_backbone_will_do() -> None:
    foreign = [record_of(n, role="backbone", model=OTHER) for n in range(1, 3)]
    workers = [record_of(n) for n in range(20, 60)]
    assert {record.node_id for record in foreign} <= set(chosen([*foreign, *workers], models=frozenset()))


def test_the_choice_does_not_depend_on_the_order_and_differs_from_node_to_node() -> None:
    records = [record_of(n) for n in range(1, 60)]
    assert chosen(records) == chosen(reversed(records))
    assert {tuple(chosen(records, key_of(n).node_id)) for n in range(1, 20)} != {tuple(chosen(records))}


def test_nobody_is_chosen_by_everybody() -> None:
    """All of 60 nodes together: every node is somebody's neighbour, so the graph does not hang on a few."""
    records = [record_of(n) for n in range(1, 61)]
    counts = dict.fromkeys((record.node_id for record in records), 0)
    for record in records:
        for node_id in chosen(records, record.node_id):
            counts[node_id] += 1
    assert max(counts.values()) <= 12
    assert sum(count == 0 for count in counts.values()) <= 4


def test_a_newcomer_changes_little() -> None:
    records = [record_of(n) for n in range(1, 60)]
    before, after = set(chosen(records)), set(chosen([*records, record_of(60)]))
    assert len(before & after) >= 3


def test_who_cannot_be_dialled_and_ourselves_are_left_out() -> None:
    silent = record_of(1, addresses=())
    assert chosen([silent, record_of(0), record_of(2)]) == [key_of(2).node_id]


def test_all_addresses_of_a_node_that_are_addresses() -> None:
    record = record_of(
        1, addresses=("192.0.2.1:7", "example.org:9", "x:0", "x:99999", "[2001:db8::1]:3", "a:b:3")
    )
    places = [(address.host, address.port) for address in addresses_of(record)]
    assert places[:2] == [("192.0.2.1", 7), ("example.org", 9)]
    assert ("2001:db8::1", 3) in places
    assert not any(port in (0, 99999) for _, port in places)
    assert {address.node_id for address in addresses_of(record)} == {record.node_id}


class FakeGossip:
    """A table and its listeners."""

    def __init__(self) -> None:
        self.records: list[NodeRecord] = []
        self._listeners: list[OnChange] = []

    @property
    def table(self) -> FakeGossip:
        return self

    def live(self) -> list[NodeRecord]:
        return self.records

    def subscribe(self, listener: OnChange) -> None:
        self._listeners.append(listener)

    def add(self, record: NodeRecord) -> None:
        self.records.append(record)
        for listener in self._listeners:
            listener(Change(record.node_id, record.kind, record))


async def test_they_are_chosen_anew_now_and_then_not_for_every_record() -> None:
    gossip = FakeGossip()
    wanted: list[set[NodeId]] = []

    def set_wanted(addresses: Iterable[PeerAddress]) -> None:
        wanted.append({address.node_id for address in addresses})

    neighbours = Neighbours(cast(GossipService, gossip), OWN, set_wanted, CONFIG)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(neighbours.run)
        await trio.sleep(100)
        assert wanted == []
        gossip.add(record_of(0))  # our own
        await trio.sleep(100)
        assert wanted == []
        gossip.add(record_of(1))
        await trio.sleep(0.1)
        assert wanted == [{key_of(1).node_id}]
        for number in range(2, 5):
            gossip.add(record_of(number))
            await trio.sleep(0.1)
        assert len(wanted) == 1
        await trio.sleep(CONFIG.choose_interval_s)
        assert wanted[1:] == [{key_of(n).node_id for n in range(1, 5)}]
        await trio.sleep(100)
        neighbours.hold([MODEL])
        await trio.sleep(10)
        neighbours.hold([MODEL])
        await trio.sleep(100)
        assert len(wanted) == 3, "the same models are no news"
        nursery.cancel_scope.cancel()
