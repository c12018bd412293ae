"""What peers are told: ids of new records, gathered for a moment, and one GossipHave at a time to each. Pure.

The other side of `asking`: that decides whom to ask for what peers have told us.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from swarmnode.config import GossipConfig
from swarmnode.gossip.bodies import Offer
from swarmnode.gossip.overlay import Overlay, Peer
from swarmnode.gossip.records import Record
from swarmnode.gossip.table import AGE_UNIT, RecordTable
from swarmnode.identity import NodeId
from swarmnode.wire import constants as c

Have: TypeAlias = Callable[[Peer, list[Offer]], None]
"""(peer, offers): tell the peer that we have these."""


class Telling:
    """What is pending for all peers of an overlay."""

    def __init__(self, config: GossipConfig, overlay: Overlay, table: RecordTable, have: Have) -> None:
        self._config = config
        self._overlay = overlay
        self._table = table
        self._have = have
        self._tellable: set[NodeId] = set()

    def spread(self, record: Record, source: NodeId | None, now_s: float) -> None:
        """All neighbours but `source` are to hear of the record, if it belongs to what they want to hear of."""
        for peer in self._overlay:
            if peer.node_id != source:
                self.push(peer, record, now_s)

    def push(self, peer: Peer, record: Record, now_s: float) -> None:
        """The peer is to hear of the record, if it is a neighbour and wants to."""
        if peer.linked and peer.view.matches(record):
            self.note(peer, record.id, now_s)

    def note(self, peer: Peer, record_id: bytes, now_s: float) -> None:
        """The peer is to hear of this record, neighbour or not."""
        if not peer.pending:
            self._tellable.add(peer.node_id)
            peer.tell_s = max(now_s + self._config.have_wait_s, peer.told_s + self._config.have_interval_s)
        peer.pending[record_id] = None
        if len(peer.pending) > self._config.max_pending:
            del peer.pending[next(iter(peer.pending))]

    def knows(self, peer: Peer, offers: Iterable[Offer]) -> None:
        """The peer has these: it need not be told."""
        for record_id, _ in offers:
            peer.pending.pop(record_id, None)
        if not peer.pending:
            self._tellable.discard(peer.node_id)

    def tell_due(self, now_s: float) -> None:
        """Tell everybody whose news have waited long enough."""
        for node_id in list(self._tellable):
            peer = self._overlay.get(node_id)
            if peer is not None and now_s >= peer.tell_s:
                self.tell(peer, now_s)

    def tell(self, peer: Peer, now_s: float) -> None:
        """Send what is pending, unless the last GossipHave is still under way."""
        if peer.telling is not None or not peer.pending:
            return
        offers: list[Offer] = []
        for record_id in list(peer.pending)[: c.MAX_GOSSIP_IDS]:
            del peer.pending[record_id]
            age = self._table.age(record_id, now_s)
            if age < AGE_UNIT:  # else it was replaced meanwhile
                offers.append((record_id, age))
        if not peer.pending:
            self._tellable.discard(peer.node_id)
        if offers:
            peer.told_s = now_s
            peer.tell_s = now_s + self._config.have_interval_s
            peer.telling = [record_id for record_id, _ in offers]
            self._have(peer, offers)

    def answered(self, peer: Peer) -> None:
        """It took the GossipHave."""
        peer.telling = None

    def failed(self, peer: Peer, now_s: float) -> None:
        """It gave no answer, or refused: it is told again."""
        again, peer.telling = peer.telling or [], None
        for record_id in again:
            self.note(peer, record_id, now_s)

    def left(self, peer: Peer) -> None:
        """It is no peer any more."""
        self._tellable.discard(peer.node_id)
