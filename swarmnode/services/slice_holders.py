"""Who of the connected nodes may have a slice: what their records say, and every backbone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from swarmnode.gossip.records import NodeRecord
from swarmnode.net.address import PeerAddress
from swarmnode.net.peer import Peer
from swarmnode.services.connections import Connections
from swarmnode.services.fetch import Source
from swarmnode.services.gossip import GossipService
from swarmnode.services.neighbours import addresses_of
from swarmnode.weights.slices import ExpertRange


class SliceHolders:
    """Looks at connections and records at the moment of asking."""

    def __init__(self, gossip: GossipService, connections: Connections) -> None:
        self._gossip = gossip
        self._connections = connections

    def sources(
        self, model: bytes, source_of: Callable[[Peer], Source], item: ExpertRange
    ) -> Sequence[Source]:
        """Connected nodes that may hold experts of `item`; `source_of` makes a source of a connection.

        A backbone without a record (gossip has not brought it yet) is asked, too: it refuses if it has another model.
        """
        found = []
        for node_id, peer in self._connections.connected.items():
            record = self._gossip.table.get(node_id)
            if _may_hold(record, model, item) if record is not None else "backbone" in peer.settings.roles:
                found.append(source_of(peer))
        return found

    def address_of(self, peer: Peer) -> PeerAddress | None:
        """Where the node of this connection says it can be dialled, None if nowhere."""
        record = self._gossip.table.get(peer.node_id)
        addresses = [] if record is None else addresses_of(record)
        return addresses[0] if addresses else None


def _may_hold(record: NodeRecord, model: bytes, item: ExpertRange) -> bool:
    for holdings in record.state.models:
        if holdings.model == model:
            return holdings.seeds or any(
                held.layer == item.layer and held.first < item.stop and item.first < held.stop
                for held in holdings.serving
            )
    return False
