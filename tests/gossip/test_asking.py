"""Whom a node asks for the records that its peers offer."""

from __future__ import annotations

import random

import pytest

from swarmnode.config import GossipConfig
from swarmnode.gossip.asking import Asking
from swarmnode.gossip.overlay import Overlay, Peer
from swarmnode.gossip.table import AGE_UNIT
from swarmnode.identity import NodeKey

CONFIG = GossipConfig()
A, B = (bytes([number]) * 16 for number in (1, 2))


class Asker:
    """Two peers, what is known, and what they were asked for."""

    def __init__(self) -> None:
        self.overlay = Overlay(CONFIG, random.Random(1))
        self.peers = [self.overlay.add(NodeKey.from_seed(bytes([i]) * 32).node_id, 0.0) for i in (1, 2)]
        self.known: set[bytes] = set()
        self.sent: list[tuple[int, bytes]] = []
        self.asking = Asking(CONFIG, self.overlay, self._hear, self._want)

    def offer(self, number: int, *ids: bytes, now_s: float = 0.0, age: int = 0) -> None:
        self.asking.offered(self.peers[number], [(record_id, age) for record_id in ids], now_s)

    def take_sent(self) -> list[tuple[int, bytes]]:
        sent, self.sent = self.sent, []
        return sent

    def _hear(self, peer: Peer, record_id: bytes, age: int, now_s: float) -> bool:
        return record_id in self.known

    def _want(self, peer: Peer, ids: bytes) -> None:
        self.sent.append((self.peers.index(peer), ids))


@pytest.fixture
def asker() -> Asker:
    return Asker()


def test_what_is_not_known_is_asked_for_at_one_peer_at_a_time(asker: Asker) -> None:
    asker.offer(0, A)
    asker.offer(1, A, B)
    assert asker.take_sent() == [(0, A), (1, B)]
    asker.asking.ask_all(CONFIG.patience_s)
    assert asker.take_sent() == [], "both owe an answer"
    assert asker.asking.take_wanted(asker.peers[1]) == {B: 0}
    asker.asking.answered(asker.peers[1], {}, CONFIG.patience_s)
    assert asker.take_sent() == [(1, A)], "the first one had its time"


def test_what_is_known_or_expired_is_not_asked_for(asker: Asker) -> None:
    asker.known.add(A)
    asker.offer(0, A)
    asker.offer(0, B, age=AGE_UNIT)
    assert asker.take_sent() == []
    assert asker.peers[0].offers == {}


def test_what_did_not_fit_is_asked_for_again(asker: Asker) -> None:
    asker.offer(0, A, B)
    missing = asker.asking.take_wanted(asker.peers[0])
    del missing[A]
    asker.asking.answered(asker.peers[0], missing, 0.0)
    assert asker.take_sent() == [(0, A + B), (0, B)]


@pytest.mark.parametrize("how", ["fails", "leaves", "is busy"])
def test_others_are_asked_for_what_a_peer_does_not_give(asker: Asker, how: str) -> None:
    asker.offer(0, A)
    asker.offer(1, A)
    assert asker.take_sent() == [(0, A)]
    if how == "fails":
        asker.asking.failed(asker.peers[0], 0.0)
    elif how == "leaves":
        asker.overlay.remove(asker.peers[0].node_id)
        asker.asking.left(asker.peers[0])
    else:
        asker.asking.refused(asker.peers[0])
        asker.peers[0].next_ask_s = 1.0
    asker.asking.ask_all(0.0)
    assert asker.take_sent() == [(1, A)]
