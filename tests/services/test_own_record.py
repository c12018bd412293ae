"""What a node says of itself: where it can be reached, what it holds, that it leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import pytest

from swarmnode.gossip.records import MAX_ADDRESSES, ModelHoldings, OwnState, network_id, sign_record
from swarmnode.identity import NodeKey
from swarmnode.services.connections import Connections
from swarmnode.services.gossip import GossipService
from swarmnode.services.own_record import OwnRecord
from swarmnode.weights.slices import ExpertRange

KEY = NodeKey.from_seed(bytes(32))
HOLDINGS = ModelHoldings(bytes(32), 2, 8, (ExpertRange(0, 0, 4),), (), 512, False)


@dataclass
class FakeGossip:
    """Signs whatever it is given, as the core does: no record over its caps is published."""

    published: list[OwnState] = field(default_factory=list)

    def publish(self, state: OwnState) -> None:
        sign_record(KEY, network_id("test"), (1, 1), 600, 0, state)
        self.published.append(state)


class FakeConnections:
    def __init__(self) -> None:
        self.connected: dict[int, SimpleNamespace] = {}
        self._listeners: list[Callable[[object, bool], None]] = []

    def subscribe(self, listener: Callable[[object, bool], None]) -> None:
        self._listeners.append(listener)

    def enter(self, local_host: str | None) -> None:
        peer = SimpleNamespace(local_host=local_host)
        self.connected[len(self.connected)] = peer
        for listener in self._listeners:
            listener(peer, True)


def made(
    advertise: tuple[tuple[str, int], ...] = (), capacity_bytes: int = 5
) -> tuple[OwnRecord, FakeGossip, FakeConnections]:
    gossip, connections = FakeGossip(), FakeConnections()
    record = OwnRecord(
        cast(GossipService, gossip),
        cast(Connections, connections),
        ("worker",),
        capacity_bytes,
        "cpu",
        advertise,
    )
    return record, gossip, connections


@pytest.mark.parametrize(
    ("advertise", "listening", "met_on", "expected"),
    [
        ((), [], ["192.0.2.1"], ()),
        ((), [("192.0.2.1", 7)], [], ("192.0.2.1:7",)),
        ((), [("2001:db8::1", 7)], [], ("[2001:db8::1]:7",)),
        ((), [("0.0.0.0", 7)], [], ()),
        ((), [("0.0.0.0", 7)], ["192.0.2.1", None, "192.0.2.1"], ("192.0.2.1:7",)),
        ((), [("::", 7)], ["2001:db8::1", "192.0.2.1"], ("192.0.2.1:7", "[2001:db8::1]:7")),
        ((), [("0.0.0.0", 7), ("::", 7)], ["192.0.2.1"], ("192.0.2.1:7",)),
        ((), [("0.0.0.0", 7)], ["127.0.0.1"], ("127.0.0.1:7",)),
        ((), [("0.0.0.0", 7)], ["127.0.0.1", "192.168.1.5", "::1"], ("192.168.1.5:7",)),
        ((("example.org", 9),), [("192.168.1.5", 7)], [], ("example.org:9", "192.168.1.5:7")),
        ((("192.0.2.1", 7),), [("192.0.2.1", 7)], [], ("192.0.2.1:7",)),
    ],
)  # fmt: skip
def test_addresses(
    advertise: tuple[tuple[str, int], ...],
    listening: list[tuple[str, int]],
    met_on: list[str | None],
    expected: tuple[str, ...],
) -> None:
    record, gossip, connections = made(advertise)
    record.listening(listening)
    for host in met_on:
        connections.enter(host)
    assert record.addresses == expected
    assert gossip.published[-1].addresses == expected


def test_only_so_many_addresses_as_a_record_holds_those_of_the_operator_first() -> None:
    record, gossip, _connections = made((("example.org", 9),))
    record.listening([(f"192.0.2.{i}", 7) for i in range(20)])
    assert len(gossip.published[-1].addresses) == MAX_ADDRESSES
    assert gossip.published[-1].addresses[0] == "example.org:9"


def test_everything_that_changes_is_published_with_all_the_rest() -> None:
    record, gossip, _connections = made()
    record.listening([("192.0.2.1", 7)])
    record.holding((HOLDINGS,))
    assert gossip.published[-1] == OwnState(
        ("192.0.2.1:7",), (), ("worker",), 5, "cpu", (HOLDINGS,), leaving=False
    )


def test_who_leaves_holds_nothing_and_says_nothing_more() -> None:
    record, gossip, connections = made()
    record.listening([("0.0.0.0", 7)])
    record.holding((HOLDINGS,))
    record.leave()
    assert gossip.published[-1].leaving
    assert gossip.published[-1].models == ()
    n_published = len(gossip.published)
    connections.enter("192.0.2.9")
    assert len(gossip.published) == n_published
    record.holding((HOLDINGS,))
    assert gossip.published[-1].leaving


def test_any_budget_fits() -> None:
    record, gossip, _connections = made(capacity_bytes=2**60)
    record.publish()
    assert gossip.published[-1].capacity_bytes == 2**48


def test_where_every_address_is_listened_on() -> None:
    record, _, _ = made()
    assert record.listens_everywhere is None
    record.listening([("192.0.2.1", 7)])
    assert record.listens_everywhere is None
    record.listening([("192.0.2.1", 7), ("0.0.0.0", 8)])
    assert record.listens_everywhere == 8
