"""The swarm as gossip knows it, as plain JSON values: a part of GET /api/swarm, and what `swarmnode status` prints."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from swarmnode.config import Config
from swarmnode.gossip.records import ModelHoldings, NodeRecord
from swarmnode.identity import NodeId
from swarmnode.services.connections import Connections
from swarmnode.services.gossip import GossipService
from swarmnode.services.market_watch import MarketSnapshot, MarketWatch, scarcest_runs
from swarmnode.services.own_record import OwnRecord
from swarmnode.services.reachability import Reachability
from swarmnode.weights.slices import ExpertRange

MOST_DIGIT = 9
"""Replicas are told as one digit an expert."""


@dataclass(frozen=True)
class GossipState:
    """Looks at the services of a node at the moment of asking. `now`: monotonic, in seconds."""

    own: NodeId
    gossip: GossipService
    connections: Connections
    record: OwnRecord
    reachability: Reachability
    market: MarketWatch
    config: Config
    now: Callable[[], float]

    def as_dict(self) -> dict[str, Any]:
        """`own`, `nodes`, `coverage`, `scarcest`: docs/node-api.md."""
        snapshot = self.market.snapshot()
        others = [record for record in self.gossip.table.live() if record.node_id != self.own]
        return {
            "own": self._own(),
            "nodes_known": len(others),
            "roles": Counter(role for record in others for role in record.state.roles),
            "nodes": [self._node(record, snapshot) for record in self._listed(others)],
            "nodes_serving_or_fetching": snapshot.n_nodes,
            "coverage": [_layer(snapshot, layer) for layer in sorted(snapshot.shape.expert_bytes)],
            "scarcest": [
                _run(snapshot, item, worth)
                for worth, item in scarcest_runs(snapshot, self.config.market, self.config.node_api.scarcest)
            ],
        }

    def _own(self) -> dict[str, Any]:
        dialled = self.reachability.dialled
        own = self.gossip.table.get(self.own)
        return {
            "node": str(self.own),
            "name": self.own.short,
            "roles": [] if own is None else list(own.state.roles),
            "device": "" if own is None else own.state.device,
            "state": "" if own is None else self.standing(own),
            "addresses": list(self.record.addresses),
            "listens_everywhere": self.record.listens_everywhere,
            "serving": _count(self._ranges(own, "serving")),
            "fetching": _count(self._ranges(own, "fetching")),
            "holdings": [[item.layer, item.first, item.count] for item in self._ranges(own, "serving")],
            "seeds": any(entry.seeds for entry in self.models_of(own)),
            "incarnation": self.gossip.incarnation,
            "key_conflict": self.gossip.own_conflict,
            "connected": len(self.connections.connected),
            "neighbours": self.gossip.neighbours,
            "dialled_by_others": dialled.n_all,
            "dialled_from_outside": dialled.n_from_outside,
            "last_dialled_s_ago": None if dialled.last_s is None else round(self.now() - dialled.last_s, 1),
        }

    def _listed(self, others: list[NodeRecord]) -> list[NodeRecord]:
        """Connected nodes first, then those that are known longest."""
        connected = self.connections.connected

        def order(record: NodeRecord) -> tuple[bool, float]:
            return record.node_id not in connected, -self._known_s(record.node_id)

        return heapq.nsmallest(self.config.node_api.max_nodes, others, key=order)

    def _node(self, record: NodeRecord, snapshot: MarketSnapshot) -> dict[str, Any]:
        state = record.state
        return {
            "node": str(record.node_id),
            "name": record.node_id.short,
            "roles": list(state.roles),
            "device": state.device,
            "addresses": list(state.addresses),
            "state": "lost" if record.node_id in snapshot.lost else self.standing(record),
            "serving": _count(self._ranges(record, "serving")),
            "fetching": _count(self._ranges(record, "fetching")),
            "capacity_bytes": state.capacity_bytes,
            "connected": record.node_id in self.connections.connected,
            "known_s": round(self._known_s(record.node_id), 1),
        }

    def _known_s(self, node_id: NodeId) -> float:
        """For how long the node is known without a gap."""
        since_s = self.gossip.table.first_known_s(node_id)
        return 0.0 if since_s is None else self.now() - since_s

    def models_of(self, record: NodeRecord | None) -> list[ModelHoldings]:
        """What a record says of our model."""
        model = self.market.manifest.model_id
        return [] if record is None else [entry for entry in record.state.models if entry.model == model]

    def _ranges(self, record: NodeRecord | None, which: str) -> tuple[ExpertRange, ...]:
        return tuple(item for entry in self.models_of(record) for item in getattr(entry, which))

    def standing(self, record: NodeRecord) -> str:
        """One word for what a node does for our model, by its record."""
        if record.leaving:
            return "leaving"
        models = self.models_of(record)
        if any(entry.seeds for entry in models):
            return "seeding"
        if any(entry.serving for entry in models):
            return "serving"
        if any(entry.fetching for entry in models):
            return "fetching"
        if models:
            return "paused" if any(entry.max_rows == 0 for entry in models) else "idle"
        return "other model" if record.state.models else "idle"


def _count(ranges: Iterable[ExpertRange]) -> int:
    return sum(item.count for item in ranges)


def _layer(snapshot: MarketSnapshot, layer: int) -> dict[str, Any]:
    """`replicas`: a digit an expert, nodes that serve it by their own word, 9 for 9 and more."""
    where = snapshot.shape.slice_of(ExpertRange(layer, 0, snapshot.shape.n_expert))
    holders = snapshot.holders[where] + snapshot.announced[where]
    return {
        "layer": layer,
        "covered": int((holders >= 1).sum()),
        "twice": int((holders >= 2).sum()),
        "fetching": int((snapshot.fetching[where] >= 1).sum()),
        "replicas": "".join(map(str, np.minimum(holders, MOST_DIGIT).tolist())),
    }


def _run(snapshot: MarketSnapshot, item: ExpertRange, worth: float) -> dict[str, Any]:
    where = snapshot.shape.slice_of(item)
    return {
        "layer": item.layer,
        "first": item.first,
        "count": item.count,
        "replicas": round(float(snapshot.replicas[where].mean()), 2),
        "demand": round(float(snapshot.demand.weight[where].mean()), 2),
        "scarcity": round(worth, 2),
    }
