"""Nodes that are gone without a word: their connection to us ended, and they have said nothing since.

What they said before may arrive later, by others. Their records stand for minutes yet, because nobody may end
another's record. What this node shows of the swarm should not count on them meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from swarmnode.gossip.table import RecordTable
from swarmnode.identity import NodeId
from swarmnode.net.peer import Peer
from swarmnode.services.connections import Connections

MAX_LOSSES = 4096
"""Kept until somebody asks; the latest ones."""


class LostNodes:
    """`lost_after_s`: how long a node may be away before it counts as lost; it may only be changing networks.

    One that said on the connection that it leaves is lost at once: its last record may have been cut off.
    """

    def __init__(
        self, connections: Connections, table: RecordTable, lost_after_s: float, now: Callable[[], float]
    ) -> None:
        self._connections = connections
        self._table = table
        self._lost_after_s = lost_after_s
        self._now = now
        self._losses: dict[NodeId, tuple[float, float]] = {}
        """When the connection ended; since when the node counts as away."""
        connections.subscribe(self._changed)

    def nodes(self) -> frozenset[NodeId]:
        """Who is lost now."""
        horizon_s = self._now() - self._lost_after_s
        self._losses = {
            node: times for node, times in self._losses.items() if not self._is_over(node, times[0])
        }
        return frozenset(node for node, (_, away_s) in self._losses.items() if away_s <= horizon_s)

    def _is_over(self, node_id: NodeId, ended_s: float) -> bool:
        issued_s = self._table.issued_s(node_id)
        return node_id in self._connections.connected or issued_s is None or issued_s > ended_s

    def _changed(self, peer: Peer, is_connected: bool) -> None:
        if is_connected:
            self._losses.pop(peer.node_id, None)
        elif self._table.get(peer.node_id) is not None:
            now_s = self._now()
            says_so = peer.ended is not None and peer.ended.code == "leaving"
            self._losses[peer.node_id] = (now_s, -math.inf if says_so else now_s)
            if len(self._losses) > MAX_LOSSES:
                del self._losses[next(iter(self._losses))]
