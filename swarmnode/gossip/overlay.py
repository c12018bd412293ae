"""Peers, and which of them are neighbours: a random graph of about eight links a node over the connections there are.

A link is mutual: both sides tell each other of new records. Each node makes links until it has enough, accepts many
more than it makes, and now and then replaces one at random. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from swarmnode.config import GossipConfig
from swarmnode.gossip.rates import Dice, TokenBucket
from swarmnode.gossip.view import ALL, View
from swarmnode.identity import NodeId


class Peer:
    """A node with an open connection, and what is under way with it."""

    __slots__ = (
        "checks",
        "comparing",
        "least_differing",
        "linked",
        "linking",
        "next_ask_s",
        "next_link_s",
        "node_id",
        "offers",
        "ours",
        "pending",
        "repeat_s",
        "sync_s",
        "tell_s",
        "telling",
        "told_s",
        "view",
        "wanted",
        "work",
    )

    def __init__(self, node_id: NodeId, config: GossipConfig, now_s: float) -> None:
        self.node_id = node_id
        self.linked = False
        self.ours = False
        """We asked for the link."""
        self.linking = False
        self.next_link_s = -math.inf
        self.view = ALL
        """What it wants to hear of."""
        self.pending: dict[bytes, None] = {}
        """Ids to tell it, oldest first."""
        self.tell_s = math.inf
        """When they are told."""
        self.told_s = -math.inf
        self.telling: list[bytes] | None = None
        """Ids of the GossipHave under way."""
        self.offers: dict[bytes, int] = {}
        """Ids (and ages) it has and we do not."""
        self.wanted: tuple[bytes, ...] | None = None
        """Ids of the GossipWant under way."""
        self.next_ask_s = -math.inf
        """Not asked for records before this: it owes an answer."""
        self.comparing = False
        self.sync_s = math.inf
        """When to compare all records with it; infinite: not specially."""
        self.repeat_s = 0.0
        """How long a comparison that is repeated waits."""
        self.least_differing = math.inf
        """The fewest records, about, that differed in a comparison since the last one that needed no repeating."""
        self.checks = TokenBucket(config.checks_per_s, config.checks_burst, now_s)
        self.work = TokenBucket(config.work_per_s, config.work_burst, now_s)


class Overlay:
    """The peers, and decisions about links."""

    def __init__(self, config: GossipConfig, rng: Dice) -> None:
        self._config = config
        self._rng = rng
        self._peers: dict[NodeId, Peer] = {}
        self._rotate_s = math.inf

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers.values())

    def get(self, node_id: NodeId) -> Peer | None:
        """The peer, while it is connected."""
        return self._peers.get(node_id)

    def add(self, node_id: NodeId, now_s: float) -> Peer:
        """A connection opened."""
        peer = self._peers[node_id] = Peer(node_id, self._config, now_s)
        return peer

    def remove(self, node_id: NodeId) -> Peer | None:
        """A connection closed."""
        return self._peers.pop(node_id, None)

    def neighbours(self) -> list[Peer]:
        """Peers with a link."""
        return [peer for peer in self._peers.values() if peer.linked]

    def any_peer(self) -> Peer | None:
        """One at random."""
        peers = list(self._peers.values())
        return self._rng.choice(peers) if peers else None

    def accept(self, peer: Peer, view: View) -> bool:
        """A peer asks for a link (or changes its view)."""
        n_linked = sum(other.linked for other in self._peers.values())
        if not peer.linked and n_linked >= self._config.max_neighbours:
            return False
        peer.linked, peer.view = True, view
        return True

    def missing(self, now_s: float) -> list[Peer]:
        """Peers to ask for a link now: half of those that are missing, so that links made by others count too."""
        busy = sum(peer.linked or peer.linking for peer in self._peers.values())
        n_missing = self._config.neighbours - busy
        if n_missing <= 0:
            return []
        free = [p for p in self._peers.values() if not (p.linked or p.linking) and p.next_link_s <= now_s]
        self._rng.shuffle(free)
        return free[: (n_missing + 1) // 2]

    def surplus(self, now_s: float) -> Peer | None:
        """A neighbour to let go now, so that another takes its place: one of our own choice, every `rotate_s`."""
        if now_s < self._rotate_s and self._rotate_s != math.inf:
            return None
        first = self._rotate_s == math.inf
        self._rotate_s = now_s + self._config.rotate_s * (0.5 + self._rng.random())
        if first:
            return None
        linked = self.neighbours()
        ours = [peer for peer in linked if peer.ours]
        if len(linked) < self._config.neighbours or len(linked) == len(self._peers) or not ours:
            return None
        return self._rng.choice(ours)
