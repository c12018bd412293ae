"""What peers offer that we do not have, and whom we ask for it: each id once at a time, as much as we may check.

The core hears (`hear` says whether a record is known) and sends; who is asked for what, and when another one, is
decided here. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from swarmnode.config import GossipConfig
from swarmnode.gossip.bodies import Offer
from swarmnode.gossip.overlay import Overlay, Peer
from swarmnode.gossip.rates import TokenBucket
from swarmnode.gossip.table import AGE_UNIT
from swarmnode.identity import NodeId
from swarmnode.wire import constants as c

Hear: TypeAlias = Callable[[Peer, bytes, int, float], bool]
"""(peer, id, age, now_s): a peer said how old it knows the record to be; whether we know it, too."""
Want: TypeAlias = Callable[[Peer, bytes], None]
"""(peer, ids): ask the peer for these records."""


class Asking:
    """Offers of all peers of an overlay, and the records that are under way."""

    def __init__(self, config: GossipConfig, overlay: Overlay, hear: Hear, want: Want) -> None:
        self._config = config
        self._overlay = overlay
        self._hear = hear
        self._want = want
        self._asked: dict[bytes, tuple[NodeId, float]] = {}
        """Whom we asked last for a record, and when."""
        self._askable: set[NodeId] = set()
        self._checks = TokenBucket(config.all_checks_per_s, config.all_checks_burst, -math.inf)

    def offered(self, peer: Peer, offers: Iterable[Offer], now_s: float) -> None:
        """A peer has these; those we lack are wanted, now or later."""
        room = self._most_offers() - len(peer.offers)
        for record_id, age in offers:
            if self._hear(peer, record_id, age, now_s) or age == AGE_UNIT or room <= 0:
                continue
            room -= record_id not in peer.offers
            peer.offers[record_id] = age
        self._ask_if_any(peer, now_s)

    def ask_all(self, now_s: float) -> None:
        """Ask everybody who has something, each for an even share."""
        if not self._askable:
            return
        share = max(1, int(self._checks.left(now_s)) // len(self._askable))
        for node_id in list(self._askable):
            peer = self._overlay.get(node_id)
            if peer is not None:
                self._ask(peer, now_s, share)

    def take_wanted(self, peer: Peer) -> dict[bytes, int]:
        """The peer answers: what it was asked for, with the ages it offered. Others may be asked."""
        offers = {record_id: peer.offers.get(record_id, 0) for record_id in peer.wanted or ()}
        for record_id in self._release(peer):
            peer.offers.pop(record_id, None)
        return offers

    def answered(self, peer: Peer, missing: Mapping[bytes, int], now_s: float) -> None:
        """`missing`: what did not fit into its answer, to be asked for again."""
        peer.offers.update(missing)
        self._ask_if_any(peer, now_s)

    def refused(self, peer: Peer) -> None:
        """It is busy: it is asked again, as others may be."""
        self._release(peer)

    def failed(self, peer: Peer, now_s: float) -> None:
        """It gave no answer: others are asked, and it only later."""
        self._release(peer)
        peer.next_ask_s = now_s + self._config.request_timeout_s
        self.ask_all(now_s)

    def joined(self) -> None:
        """One more peer makes the shares smaller. The latest ids go: the first ones are asked for first."""
        most = self._most_offers()
        for peer in self._overlay:
            while len(peer.offers) > most:
                peer.offers.popitem()

    def left(self, peer: Peer) -> None:
        """It is no peer any more: others may be asked for what it owes."""
        self._release(peer)
        self._askable.discard(peer.node_id)

    def _most_offers(self) -> int:
        """Ids that are kept of one peer: an even share of all."""
        share = max(c.MAX_GOSSIP_IDS, self._config.all_offers // len(self._overlay))
        return min(self._config.max_offers, share)

    def _ask_if_any(self, peer: Peer, now_s: float) -> None:
        if peer.offers:
            self._askable.add(peer.node_id)
            self._ask(peer, now_s)

    def _ask(self, peer: Peer, now_s: float, share: int = 0) -> None:
        """Want what the peer offers and nobody else was asked for just now, as many as we may check.

        Half of what we may check for all together goes to who comes first, the other half in even shares.
        """
        if peer.wanted is not None or now_s < peer.next_ask_s:
            return
        left = int(self._checks.left(now_s))
        most = min(left, max(share, left - self._config.all_checks_burst // 2))
        most = min(c.MAX_GOSSIP_WANTED, most, int(peer.checks.left(now_s)))
        patient_s = now_s - self._config.patience_s
        wanted: list[bytes] = []
        for record_id in list(peer.offers):
            if len(wanted) >= most:
                break
            if self._hear(peer, record_id, peer.offers[record_id], now_s):
                del peer.offers[record_id]
            elif record_id not in self._asked or self._asked[record_id][1] <= patient_s:
                wanted.append(record_id)
        if not peer.offers:
            self._askable.discard(peer.node_id)
        if not wanted:
            return
        peer.checks.take(len(wanted), now_s)
        self._checks.take(len(wanted), now_s)
        peer.wanted = tuple(wanted)
        for record_id in wanted:
            self._asked[record_id] = (peer.node_id, now_s)
        self._want(peer, b"".join(wanted))

    def _release(self, peer: Peer) -> tuple[bytes, ...]:
        """The peer's GossipWant is over, either way. What was wanted."""
        wanted, peer.wanted = peer.wanted or (), None
        for record_id in wanted:
            if record_id in self._asked and self._asked[record_id][0] == peer.node_id:
                del self._asked[record_id]
        return wanted
