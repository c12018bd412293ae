"""The registry of connected nodes: one connection each, the same at both ends; an old end removes no new entry."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import cast

import pytest

from swarmnode.config import ContactConfig
from swarmnode.identity import NodeId, NodeKey
from swarmnode.net.peer import Peer
from swarmnode.services.connections import Connections
from swarmnode.wire.constants import ConnectionClass

LOW, HIGH = sorted(NodeKey.from_seed(bytes([number]) * 32).node_id for number in (1, 2))
CONFIG = ContactConfig(simultaneous_s=10.0)


@dataclass(eq=False)
class FakePeer:
    """As much of a connection as the registry looks at."""

    node_id: NodeId
    is_dialer: bool
    connection_class: ConnectionClass = ConnectionClass.LATENCY
    ended: str | None = None
    closed: list[str] = field(default_factory=list)

    def close(self, code: str) -> None:
        self.closed.append(code)
        self.ended = code


class Registry:
    """Connections with a clock and a log of changes."""

    def __init__(self, own: NodeId) -> None:
        self.now_s = 0.0
        self.changes: list[tuple[FakePeer, bool]] = []
        self.connections = Connections(own, CONFIG, lambda: self.now_s)
        self.connections.subscribe(lambda peer, entered: self.changes.append((cast(FakePeer, peer), entered)))

    def enter(self, peer: FakePeer) -> bool:
        return self.connections.enter(cast(Peer, peer))

    def leave(self, peer: FakePeer) -> None:
        self.connections.leave(cast(Peer, peer))

    @property
    def kept(self) -> list[FakePeer]:
        return [cast(FakePeer, peer) for peer in self.connections.connected.values()]


@pytest.mark.parametrize(
    ("low_sees_own_first", "high_sees_own_first"), list(product([True, False], repeat=2))
)
def test_of_two_dials_that_cross_both_ends_keep_that_of_the_lower_id(
    low_sees_own_first: bool, high_sees_own_first: bool
) -> None:
    low, high = Registry(LOW), Registry(HIGH)
    lows, highs = (FakePeer(HIGH, True), FakePeer(HIGH, False)), (FakePeer(LOW, True), FakePeer(LOW, False))
    for registry, (dialled, accepted), own_first in (
        (low, lows, low_sees_own_first),
        (high, highs, high_sees_own_first),
    ):
        for peer in (dialled, accepted) if own_first else (accepted, dialled):
            registry.enter(peer)
    assert low.kept == [lows[0]]
    assert high.kept == [highs[1]]
    assert lows[1].closed == highs[0].closed == ["replaced"]


def test_the_end_of_the_old_connection_leaves_the_new_one_alone() -> None:
    registry = Registry(LOW)
    old, new = FakePeer(HIGH, False), FakePeer(HIGH, False)
    assert registry.enter(old)
    assert registry.enter(new)
    assert old.closed == ["replaced"]
    registry.leave(old)
    assert registry.kept == [new]
    assert registry.changes == [(old, True), (old, False), (new, True)]
    registry.leave(new)
    registry.leave(new)
    assert registry.kept == []
    assert registry.changes[3:] == [(new, False)]


def test_later_a_new_connection_means_that_the_peer_has_lost_the_old_one() -> None:
    """Also against the rule for dials that cross."""
    registry = Registry(LOW)
    mine, theirs = FakePeer(HIGH, True), FakePeer(HIGH, False)
    registry.enter(mine)
    registry.now_s = CONFIG.simultaneous_s
    assert registry.enter(theirs)
    assert registry.kept == [theirs]


def test_a_connection_that_has_ended_loses_against_any() -> None:
    registry = Registry(LOW)
    mine, theirs = FakePeer(HIGH, True, ended="dead"), FakePeer(HIGH, False)
    registry.enter(mine)
    assert registry.enter(theirs)
    assert registry.kept == [theirs]


def test_entering_twice_changes_nothing() -> None:
    registry = Registry(LOW)
    peer = FakePeer(HIGH, True)
    assert registry.enter(peer)
    assert registry.enter(peer)
    assert peer.closed == []


async def test_bulk_connections_are_not_on_the_books() -> None:
    registry, attended = Registry(LOW), list[Peer]()

    async def on_peer(peer: Peer) -> None:
        attended.append(peer)

    bulk = cast(Peer, FakePeer(HIGH, False, ConnectionClass.BULK))
    await registry.connections.attended(on_peer)(bulk)
    assert attended == [bulk]
    assert registry.changes == []
