"""Nodes that are gone without a word: their connection to us ended, and nothing new was heard of them since.

Their records stand for minutes yet, because nobody may end another's record. What this node shows of the swarm should
not count on them meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from swarmnode.gossip.records import Version
from swarmnode.gossip.table import RecordTable
from swarmnode.identity import NodeId
from swarmnode.net.peer import Peer
from swarmnode.services.connections import Connections

MAX_LOSSES = 4096
"""Kept until somebody asks; the latest ones."""


@dataclass(frozen=True)
class _Loss:
    since_s: float
    version: Version
    """Of its record then: a later one says that it lives."""


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
        self._losses: dict[NodeId, _Loss] = {}
        connections.subscribe(self._changed)

    def nodes(self) -> frozenset[NodeId]:
        """Who is lost now."""
        horizon_s = self._now() - self._lost_after_s
        self._losses = {node: loss for node, loss in self._losses.items() if not self._is_over(node, loss)}
        return frozenset(node for node, loss in self._losses.items() if loss.since_s <= horizon_s)

    def _is_over(self, node_id: NodeId, loss: _Loss) -> bool:
        record = self._table.get(node_id)
        return node_id in self._connections.connected or record is None or record.version != loss.version

    def _changed(self, peer: Peer, is_connected: bool) -> None:
        if is_connected:
            self._losses.pop(peer.node_id, None)
        else:
            record = self._table.get(peer.node_id)
            if record is not None:
                says_so = peer.ended is not None and peer.ended.code == "leaving"
                self._losses[peer.node_id] = _Loss(-math.inf if says_so else self._now(), record.version)
            if len(self._losses) > MAX_LOSSES:
                del self._losses[next(iter(self._losses))]
