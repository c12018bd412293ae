"""Who is gone without a word, and whether anybody ever dialled us."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarmnode.config import ContactConfig
from swarmnode.identity import NodeId
from swarmnode.net.peer import Peer
from swarmnode.services.connections import Connections
from swarmnode.services.lost_nodes import LostNodes
from swarmnode.services.reachability import Dialled, Reachability, is_from_outside
from swarmnode.weights.slices import ExpertRange
from swarmnode.wire.events import Ended
from tests.services.market_news import OWN, News, key_of, manifest_of, node

MODEL = manifest_of(1, 4).model_id
HELD = (ExpertRange(0, 0, 4),)


def peer_of(node_id: NodeId, *, is_dialer: bool = False, remote: str = "203.0.113.9:1") -> Peer:
    fake: Any = SimpleNamespace(
        node_id=node_id, is_dialer=is_dialer, remote=remote, ended=None, close=lambda *_: None
    )
    return cast(Peer, fake)


class World:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.news = News(MODEL, 1, 4)
        self.connections = Connections(OWN.node_id, ContactConfig(), lambda: self.now_s)
        self.lost = LostNodes(self.connections, self.news.table, 15.0, lambda: self.now_s)


def test_a_connection_that_broke_makes_a_node_lost_after_a_while() -> None:
    world = World()
    peer = peer_of(node(1))
    world.news.says(key_of(1), "203.0.113.1:1", HELD)
    world.connections.enter(peer)
    assert world.lost.nodes() == frozenset()
    world.connections.leave(peer)
    world.now_s = 14.9
    assert world.lost.nodes() == frozenset()
    world.now_s = 15.0
    assert world.lost.nodes() == {node(1)}


def test_who_says_that_it_leaves_is_lost_at_once() -> None:
    world = World()
    peer = peer_of(node(1))
    world.news.says(key_of(1), "203.0.113.1:1", HELD)
    world.connections.enter(peer)
    cast(Any, peer).ended = Ended("leaving", "", None)
    world.connections.leave(peer)
    assert world.lost.nodes() == {node(1)}


def test_a_newer_record_or_a_new_connection_says_that_it_lives() -> None:
    world = World()
    for number in (1, 2):
        peer = peer_of(node(number))
        world.news.says(key_of(number), f"203.0.113.{number}:1", HELD)
        world.connections.enter(peer)
        world.connections.leave(peer)
    world.now_s = 20
    assert world.lost.nodes() == {node(1), node(2)}
    world.news.says(key_of(1), "203.0.113.1:1", HELD, now_s=20, age=9)
    assert world.lost.nodes() == {node(1), node(2)}, "it was said before, and came late"
    world.news.says(key_of(1), "203.0.113.1:1", HELD, now_s=20, age=4)
    assert world.lost.nodes() == {node(2)}
    world.connections.enter(peer_of(node(2)))
    assert world.lost.nodes() == frozenset()


def test_nodes_without_a_record_and_expired_ones_are_not_lost() -> None:
    world = World()
    for number in (1, 2):
        peer = peer_of(node(number))
        world.connections.enter(peer)
        if number == 2:
            world.news.says(key_of(2), "203.0.113.2:1", HELD)
        world.connections.leave(peer)
    world.news.expires(10_000)
    world.now_s = 10_000
    assert world.lost.nodes() == frozenset()


def test_who_dialled_us() -> None:
    now_s = 5.0
    connections = Connections(OWN.node_id, ContactConfig(), lambda: now_s)
    reachability = Reachability(connections, lambda: now_s)
    assert reachability.dialled == Dialled(0, 0, None)
    connections.enter(peer_of(node(1), is_dialer=True))
    assert reachability.dialled.n_all == 0
    inner = peer_of(node(2), remote="192.168.1.7:5000")
    connections.enter(inner)
    connections.leave(inner)
    connections.enter(peer_of(node(3), remote="8.8.8.8:5000"))
    assert reachability.dialled == Dialled(2, 1, 5.0)


@pytest.mark.parametrize(
    ("remote", "outside"),
    [
        ("8.8.8.8:1", True),
        ("[2606:4700::1111]:1", True),
        ("127.0.0.1:1", False),
        ("10.0.0.1:1", False),
        ("[::1]:1", False),
        ("backbone:1", False),
        ("nonsense", False),
        ("", False),
    ],
)
def test_addresses_of_the_internet(remote: str, outside: bool) -> None:
    assert is_from_outside(remote) is outside
