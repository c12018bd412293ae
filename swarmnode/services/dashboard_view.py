"""Looks at the services of a node, and says what the dashboard shows of them: docs/node-api.md has the fields.

What peers chose themselves (devices, addresses) is shown without characters that no line of text has. It stays hostile
all the same: the page never takes it for markup.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from swarmnode.config import DashboardConfig
from swarmnode.gossip.records import NodeRecord
from swarmnode.identity import NodeId
from swarmnode.services.dashboard_delta import State
from swarmnode.services.gossip_state import MOST_DIGIT, GossipState
from swarmnode.services.market_watch import Holder, MarketSnapshot
from swarmnode.services.members import Members, Standing, Worker
from swarmnode.services.throughput import Throughput
from swarmnode.weights.slices import ExpertRange
from swarmnode.wire.connection import printable

Fields = dict[str, Any]


@dataclass(frozen=True)
class _Line:
    """What a record says by itself; `node`: its id, as text."""

    node: str
    record: NodeRecord
    fields: Fields


class DashboardView:
    """`look` is called once a tick, on trio's thread. `n_waiting`: generations that wait for a slot."""

    def __init__(
        self,
        known: GossipState,
        members: Members,
        throughput: Throughput,
        n_waiting: Callable[[], int],
        config: DashboardConfig,
        *,
        has_chat: bool = False,
    ) -> None:
        """`has_chat`: the model has a chat template; without one it only continues a text."""
        self._known = known
        self._members = members
        self._throughput = throughput
        self._n_waiting = n_waiting
        self._config = config
        self._listed: list[NodeId] = []
        self._listed_s = -np.inf
        self._lines: dict[NodeId, _Line] = {}
        """Most records are those of the last look."""
        manifest, shape = known.market.manifest, known.market.shape
        self._model: Mapping[str, Any] = {
            "name": printable(manifest.name),
            "id": manifest.model_id.hex(),
            "n_expert": manifest.n_expert,
            "experts": shape.n_total,
            "bytes": sum(n_bytes * manifest.n_expert for n_bytes in shape.expert_bytes.values()),
            "chat": has_chat,
        }

    def history(self) -> Fields:
        """The curves so far (Throughput.history)."""
        return self._throughput.history()

    def look(self) -> State:
        """Everything now."""
        snapshot = self._known.market.snapshot()
        workers = {worker.node_id: worker for worker in self._members.workers}
        live = {
            record.node_id: record
            for record in self._known.gossip.table.live()
            if record.node_id != self._known.own
        }
        records = self._records(live)
        self._lines = {record.node_id: self._line(record) for record in records}
        nodes = {
            line.node: self._node(line, snapshot, workers.get(node_id))
            for node_id, line in self._lines.items()
        }
        nodes |= {f"http:{holder.holder_id}": _announced(holder) for holder in snapshot.announced_by}
        return {
            "model": self._model,
            "node": self._own(len(live)),
            "now": self._now(),
            "layers": _layers(snapshot),
            "nodes": nodes,
        }

    def _now(self) -> Fields:
        return {
            "n": self._throughput.n_samples,
            "tokens_per_s": self._throughput.tokens_per_s,
            "pairs_per_s": self._throughput.pairs_per_s,
            "waiting": self._n_waiting(),
        }

    def _own(self, n_known: int) -> Fields:
        known = self._known
        record = known.gossip.table.get(known.own)
        state = None if record is None else record.state
        models = known.models_of(record)
        serving = [item for entry in models for item in entry.serving if known.market.shape.holds(item)]
        dialled = known.reachability.dialled
        return {
            "id": str(known.own),
            "name": known.own.short,
            "roles": [] if state is None else list(state.roles),
            "device": "" if state is None else state.device,
            "addresses": list(known.record.addresses),
            "budget_bytes": 0 if state is None else state.capacity_bytes,
            "resident_bytes": known.config.dispatch.local_budget_bytes,
            "seeds": any(entry.seeds for entry in models),
            "serving": _count(serving),
            "serving_bytes": known.market.shape.range_bytes(serving),
            "fetching": _count(item for entry in models for item in entry.fetching),
            "holdings": _plain(serving),
            "connected": len(known.connections.connected),
            "neighbours": known.gossip.neighbours,
            "nodes_known": n_known,
            "dialled": dialled.n_all,
            "dialled_from_outside": dialled.n_from_outside,
            "key_conflict": known.gossip.own_conflict,
        }

    def _records(self, live: Mapping[NodeId, NodeRecord]) -> list[NodeRecord]:
        """Those that are told of: connected ones first, then those that are known longest."""
        known, most = self._known, self._config.max_nodes
        table, connected = known.gossip.table, known.connections.connected
        if len(live) <= most:
            return list(live.values())
        if known.now() - self._listed_s >= self._config.relist_s:

            def order(node_id: NodeId) -> tuple[bool, float]:
                return node_id not in connected, table.first_known_s(node_id) or 0.0

            self._listed, self._listed_s = heapq.nsmallest(most, live, key=order), known.now()
        return [live[node_id] for node_id in self._listed if node_id in live]

    def _line(self, record: NodeRecord) -> _Line:
        found = self._lines.get(record.node_id)
        if found is not None and found.record is record:
            return found
        models = self._known.models_of(record)
        ranges = [item for entry in models for item in entry.serving]
        fields = {
            "name": record.node_id.short,
            "roles": list(record.state.roles),
            "device": printable(record.state.device),
            "address": printable(record.state.addresses[0]) if record.state.addresses else "",
            "state": self._known.standing(record),
            "budget_bytes": record.state.capacity_bytes,
            "serving": _count(ranges),
            "fetching": _count(item for entry in models for item in entry.fetching),
            "ranges": _plain(ranges),
        }
        return _Line(str(record.node_id), record, fields)

    def _node(self, line: _Line, snapshot: MarketSnapshot, worker: Worker | None) -> Fields:
        node_id = line.record.node_id
        peer = self._known.connections.connected.get(node_id)
        rtt_s = None if peer is None else peer.rtt_s
        fields = line.fields | {
            "connected": peer is not None,
            "latency_ms": None if rtt_s is None else _latency_ms(rtt_s),
            "rows_per_s": self._throughput.pairs_per_s_of(node_id),
        }
        if node_id in snapshot.lost:
            fields["state"] = "lost"
        elif worker is not None:
            fields["device"] = printable(worker.device) or fields["device"]
            if worker.standing in (Standing.SUSPECT, Standing.QUARANTINED):
                fields["state"] = worker.standing.value
        return fields


def _announced(holder: Holder) -> Fields:
    """A holder that announced itself over HTTP, with the fields of a node."""
    return {
        "name": holder.holder_id[:8],
        "roles": [],
        "device": "",
        "address": printable(holder.addresses[0]),
        "state": "announced",
        "budget_bytes": 0,
        "serving": _count(holder.ranges),
        "fetching": 0,
        "ranges": _plain(holder.ranges),
        "connected": False,
        "latency_ms": None,
        "rows_per_s": 0.0,
    }


def _layers(snapshot: MarketSnapshot) -> dict[str, str]:
    """Layer -> a digit an expert: nodes that have it by their own word, 9 for 9 and more."""
    digits = (np.minimum(snapshot.holders + snapshot.announced, MOST_DIGIT) + ord("0")).astype(np.uint8)
    shape = snapshot.shape
    return {
        str(layer): digits[shape.slice_of(ExpertRange(layer, 0, shape.n_expert))].tobytes().decode("ascii")
        for layer in sorted(shape.expert_bytes)
    }


def _latency_ms(rtt_s: float) -> float:
    """Two or three digits: more of them would change with every ping."""
    return round(rtt_s * 1e3, 1 if rtt_s < 0.01 else None)


def _count(ranges: Iterable[ExpertRange]) -> int:
    return sum(item.count for item in ranges)


def _plain(ranges: Iterable[ExpertRange]) -> list[list[int]]:
    return [[item.layer, item.first, item.count] for item in ranges]
