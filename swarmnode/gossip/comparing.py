"""Comparing all records with a peer, now and then: whom, when, and what comes of the differences. Pure.

`anti_entropy` has the hashes that are compared. What the peer has and we lack is heard as if it had told us of it; what
it lacks it is told.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

from swarmnode.config import GossipConfig
from swarmnode.gossip import anti_entropy, bodies
from swarmnode.gossip.overlay import Overlay, Peer
from swarmnode.gossip.rates import Dice
from swarmnode.gossip.table import RecordTable
from swarmnode.gossip.telling import Telling
from swarmnode.gossip.view import ALL, View
from swarmnode.identity import NodeId
from swarmnode.wire import constants as c
from swarmnode.wire.messages import GossipDifferences, GossipDigest, Message

Ask: TypeAlias = Callable[[Peer, GossipDigest, bytes], None]
"""(peer, message, body): ask the peer which buckets differ."""
HearOffers: TypeAlias = Callable[[Peer, list[bodies.Offer], float], None]
"""(peer, offers, now_s): the peer has these."""


class Comparing:
    """One comparison at a time with each peer: soon after it connected, when the last one did not get through, and
    with anybody every `sync_interval_s`.
    """

    def __init__(
        self,
        config: GossipConfig,
        overlay: Overlay,
        table: RecordTable,
        telling: Telling,
        own: NodeId,
        view: View,
        rng: Dice,
        ask: Ask,
        hear_offers: HearOffers,
    ) -> None:
        self._config = config
        self._overlay = overlay
        self._table = table
        self._telling = telling
        self._own = own
        self._view = view
        self._rng = rng
        self._ask = ask
        self._hear_offers = hear_offers
        self._sync_s = math.inf

    def joined(self, peer: Peer, now_s: float) -> None:
        """One more peer: it is compared with soon."""
        peer.sync_s = now_s + self._config.first_sync_s * self._rng.random()

    def compare_due(self, now_s: float) -> None:
        """Ask those whose turn it is."""
        if self._sync_s == math.inf:
            self._sync_s = now_s + self._config.sync_interval_s * self._rng.random()
        for peer in self._overlay:
            if peer.sync_s <= now_s:
                self._compare(peer)
        if now_s >= self._sync_s:
            self._sync_s = now_s + self._config.sync_interval_s
            chosen = self._overlay.any_peer()
            if chosen is not None:
                self._compare(chosen)

    def failed(self, peer: Peer, now_s: float) -> None:
        """It gave no answer, or refused."""
        peer.comparing = False
        peer.sync_s = now_s + self._config.request_timeout_s

    def answer_untrusted(
        self, peer: Peer, message: GossipDigest, body: bytes, now_s: float
    ) -> tuple[Message, bytes]:
        """The records of our buckets that differ from the peer's. Raises ProtocolError."""
        message.check_body_untrusted(len(body))
        view = View.of(message)
        if self._view not in (ALL, view):  # the asker would push what we do not want
            return GossipDifferences(0), b""
        n_buckets = len(body) // c.GOSSIP_ID_BYTES
        buckets = anti_entropy.in_buckets(self._ids_in(view, peer.node_id), n_buckets)
        numbers = anti_entropy.differing(buckets, body, message.salt)
        if not numbers:
            peer.sync_s = math.inf  # compared just now
        self._rng.shuffle(numbers)
        told = [(number, self._with_ages(buckets[number], now_s)) for number in numbers]
        packed, left = bodies.pack_buckets(told)
        return GossipDifferences(left), packed

    def receive_untrusted(
        self, peer: Peer, asked: bytes, reply: GossipDifferences, body: bytes | memoryview, now_s: float
    ) -> None:
        """The peer's answer to the body `asked`. Raises ProtocolError."""
        peer.comparing = False
        n_buckets = len(asked) // c.GOSSIP_ID_BYTES
        theirs = bodies.read_buckets_untrusted(body, n_buckets)
        if not theirs:
            peer.least_differing = math.inf
            return
        ours = anti_entropy.in_buckets(self._ids_in(self._view, self._own), n_buckets)
        n_lacking = n_differing = 0
        for bucket, offers in theirs.items():
            has = {record_id for record_id, _ in offers}
            lacking = set(ours[bucket]) - has
            n_lacking += len(lacking)
            n_differing += len(has.symmetric_difference(ours[bucket]))
            for record_id in lacking:
                self._telling.note(peer, record_id, now_s)
            self._hear_offers(peer, offers, now_s)
        self._telling.tell(peer, now_s)
        if reply.left or n_lacking > self._config.max_pending:
            self._repeat(peer, n_differing * (1.0 + reply.left / len(theirs)), now_s)
        else:
            peer.least_differing = math.inf

    def _repeat(self, peer: Peer, n_differing: float, now_s: float) -> None:
        """Once more soon, as long as about fewer records differ each time, else later and later, and then not at all.

        Full tables of a swarm that is larger than they are never become equal: they would be compared for ever.
        """
        config = self._config
        if n_differing < peer.least_differing:
            peer.least_differing = n_differing
            peer.repeat_s = 2 * config.have_interval_s
        else:
            peer.repeat_s = min(2 * peer.repeat_s, 2 * config.sync_interval_s)
        if peer.repeat_s <= config.sync_interval_s:
            peer.sync_s = now_s + peer.repeat_s

    def _compare(self, peer: Peer) -> None:
        if peer.comparing:
            return
        peer.comparing, peer.sync_s = True, math.inf
        ids = self._ids_in(self._view, self._own)
        n_buckets = anti_entropy.buckets_for(len(ids), self._config.bucket_records)
        salt = self._rng.randbytes(c.GOSSIP_SALT_BYTES)
        view = self._view
        message = GossipDigest(salt, view.scope, view.roles, view.models, view.layers)
        self._ask(peer, message, anti_entropy.digest(anti_entropy.in_buckets(ids, n_buckets), salt))

    def _ids_in(self, view: View, asker: NodeId) -> list[bytes]:
        """What is compared: records of the view, and those of the asker itself, which everybody has to hear of."""
        if view.scope == "all":
            return self._table.ids()
        return [r.id for r in self._table.records() if view.matches(r) or r.node_id == asker]

    def _with_ages(self, ids: list[bytes], now_s: float) -> list[bodies.Offer]:
        return [(record_id, self._table.age(record_id, now_s)) for record_id in ids]
