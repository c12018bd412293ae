"""The market as this node sees it, for people and tools: what is held, fetched, wanted and scarce.

Fed by gossip, record by record. Holders that do not gossip may announce themselves (over HTTP, api/node_routes): with a
lease, and weighing little, because nobody signs for them. They are this node's knowledge only and are not passed on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from swarmnode.config import Config, MarketConfig
from swarmnode.errors import UsageError
from swarmnode.gossip.coverage import Coverage, MarketView
from swarmnode.gossip.demand import Demand
from swarmnode.gossip.records import DEMAND, ModelHoldings, NodeRecord, OwnState
from swarmnode.gossip.scarcity import scarcity
from swarmnode.gossip.shape import F32, MarketShape
from swarmnode.gossip.sites import site_of
from swarmnode.gossip.table import Change, RecordTable
from swarmnode.gossip.votes import DemandVotes
from swarmnode.identity import NodeId
from swarmnode.schedule.placement import choose_scarcest
from swarmnode.weights.manifest import Manifest
from swarmnode.weights.slices import ExpertRange, holdings_of, ranges_of
from swarmnode.wire.constants import MAX_RANGES

_OUTSIDE = "name announced"
"""The site from which holders are looked at that announce themselves: none of them is a neighbour of it."""
_FINENESS = 10
"""Replicas are compared in tenths when a range is chosen: the weight of a holder that announces itself."""

I32 = npt.NDArray[np.int32]


class GossipLike(Protocol):
    """What is used of services.gossip.GossipService."""

    @property
    def table(self) -> RecordTable: ...
    def subscribe(self, on_change: Callable[[Change], None]) -> object: ...


@dataclass(frozen=True)
class Holder:
    """A holder that announced itself. `holder_id`: 16 hex digits, the same for the same addresses."""

    holder_id: str
    addresses: tuple[str, ...]
    ranges: tuple[ExpertRange, ...]
    until_s: float


@dataclass(frozen=True)
class MarketSnapshot:
    """One moment. Arrays are flat, [size] (gossip.shape), and copies.

    `replicas` f32: trustworthy replicas (gossip.coverage), holders that announced themselves among them. Nodes counted
    whole, i32: `holders` serve an expert by their records, `fetching` fetch it (without lost ones), `announced` said so
    over HTTP. `scarcity` f32: gossip.scarcity.scarcity. `n_nodes`: nodes that serve or fetch, `lost` ones among them:
    gone, though their records stand.
    """

    shape: MarketShape
    replicas: F32
    holders: I32
    fetching: I32
    announced: I32
    scarcity: F32
    demand: Demand
    n_nodes: int
    n_sketches: int
    announced_by: tuple[Holder, ...]
    lost: frozenset[NodeId]


class MarketWatch:
    """Touched on trio's thread only; a snapshot may go anywhere."""

    def __init__(
        self,
        manifest: Manifest,
        own: NodeId,
        gossip: GossipLike,
        config: Config,
        now: Callable[[], float],
        lost: Callable[[], frozenset[NodeId]] = frozenset,
    ) -> None:
        """`now`: monotonic, in seconds. `lost`: nodes that are gone, though their records stand (lost_nodes.py)."""
        self.manifest = manifest
        self.shape = MarketShape.of(manifest)
        self._own = own
        self._gossip = gossip
        self._market = config.market
        self._limits = config.node_api
        self._now = now
        self._lost_now = lost
        self._lost: frozenset[NodeId] = frozenset()
        self._coverage = Coverage(manifest.model_id, self.shape, own, config.market)
        self._view = MarketView(self._coverage)
        self._serving = _Counts(self.shape)
        self._fetching = _Counts(self.shape)
        self._votes = DemandVotes(gossip.table, manifest.model_id, self.shape, config.market, own.raw)
        self._is_demand_new = True
        weighed = replace(config.market, suspect_weight=config.node_api.holder_weight)
        self._outside = Coverage(manifest.model_id, self.shape, own, weighed, _OUTSIDE)
        self._holders: dict[str, Holder] = {}
        gossip.subscribe(self._heard)

    # -- reading

    def snapshot(self) -> MarketSnapshot:
        """Everything now."""
        now_s = self._now()
        self._lapse(now_s)
        self._look_for_lost()
        self._coverage.advance(now_s)
        if self._is_demand_new:
            self._count_demand()
        replicas = self._view.replicas + self._outside.replicas
        worth = np.where(self.shape.exists, scarcity(replicas, self._votes.demand.weight, self._market), 0)
        return MarketSnapshot(
            shape=self.shape,
            replicas=replicas,
            holders=self._serving.counts.copy(),
            fetching=self._fetching.counts.copy(),
            announced=self._outside.holders.copy(),
            scarcity=worth.astype(np.float32),
            demand=self._votes.demand,
            n_nodes=self._coverage.n_nodes,
            n_sketches=self._votes.n_sketches,
            announced_by=tuple(self._holders.values()),
            lost=self._lost,
        )

    # -- holders that do not gossip

    def announce(
        self, addresses: tuple[str, ...], ranges: Iterable[ExpertRange], lease_s: float
    ) -> Holder | None:
        """Count a holder for `lease_s` seconds, in place of what it said before; None if there are too many.

        `addresses` (`host:port`) tell which one it is. UsageError for a range that is not in this model.
        """
        now_s = self._now()
        self._lapse(now_s)
        merged = self.checked(ranges)
        holder_id = holder_id_of(addresses)
        if holder_id not in self._holders and len(self._holders) >= self._limits.max_holders:
            return None
        holder = Holder(holder_id, addresses, merged, now_s + lease_s)
        holdings = ModelHoldings(
            self.manifest.model_id, self.shape.n_layer, self.shape.n_expert, merged, (), 1, seeds=False
        )
        node = _stand_in(holder_id)
        self._outside.suspect(node, True)
        self._outside.update(node, OwnState(addresses, models=(holdings,)), now_s)
        self._holders[holder_id] = holder
        return holder

    def withdraw(self, holder_id: str) -> bool:
        """Count it no longer; False if it is not known."""
        if self._holders.pop(holder_id, None) is None:
            return False
        node = _stand_in(holder_id)
        self._outside.remove(node)
        self._outside.suspect(node, False)
        return True

    def _lapse(self, now_s: float) -> None:
        for holder in [holder for holder in self._holders.values() if holder.until_s <= now_s]:
            self.withdraw(holder.holder_id)

    def checked(self, ranges: Iterable[ExpertRange]) -> tuple[ExpertRange, ...]:
        """The ranges, merged. UsageError for one that is not in this model."""
        ranges = tuple(ranges)
        for item in ranges:
            if not self.shape.holds(item):
                raise UsageError(f"{item}: not in this model")
        return ranges_of(holdings_of(ranges))

    # -- news

    def _heard(self, change: Change) -> None:
        if self._gossip.table.demand(change.node_id) is not None:
            self._is_demand_new = True  # its site may be another
        if change.kind == DEMAND:
            self._is_demand_new = True
        elif not isinstance(change.record, NodeRecord):
            self._coverage.remove(change.node_id)
            self._count(change.node_id, None)
        elif change.node_id == self._own:
            self._coverage.move_to(site_of(change.record.state.addresses, change.record.state.relays))
        else:
            self._coverage.update(change.node_id, change.record.state, self._now(), change.record.ttl_s)
            self._count(change.node_id, change.record)

    def _count(self, node_id: NodeId, record: NodeRecord | None) -> None:
        """Nodes counted whole: those that are there."""
        entries = [] if record is None or node_id in self._lost else self._models(record)
        self._serving.set(node_id, [item for entry in entries for item in entry.serving])
        self._fetching.set(node_id, [item for entry in entries for item in entry.fetching])

    def _look_for_lost(self) -> None:
        lost = self._lost_now()
        for node_id in lost ^ self._lost:
            self._coverage.suspect(node_id, node_id in lost)
        changed, self._lost = lost ^ self._lost, lost
        for node_id in changed:
            self._count(node_id, self._gossip.table.get(node_id))

    def _models(self, record: NodeRecord) -> list[ModelHoldings]:
        return [entry for entry in record.state.models if entry.model == self.manifest.model_id]

    def _count_demand(self) -> None:
        self._is_demand_new = False
        if self._votes.renew():
            self._view.set_demand(self._votes.demand)


def choose_ranges(
    snapshot: MarketSnapshot, held: tuple[ExpertRange, ...], budget_bytes: int, seed: bytes
) -> tuple[ExpertRange, ...]:
    """The scarcest experts that fit beside `held` into a budget, by the real bytes of each; may run on any thread.

    `seed` breaks ties: two that ask at one moment with different ones do not want the same.
    """
    shape = snapshot.shape
    tenths = np.rint(snapshot.replicas * _FINENESS).astype(np.int32).reshape(shape.n_layer, shape.n_expert)
    counts: Mapping[int, I32] = {layer: tenths[layer] for layer in shape.expert_bytes}
    return choose_scarcest(counts, held, shape.expert_bytes, budget_bytes, seed, MAX_RANGES)


def scarcest_runs(
    snapshot: MarketSnapshot, config: MarketConfig, most: int
) -> list[tuple[float, ExpertRange]]:
    """The aligned runs (of MarketConfig.run_experts) that are scarcest on average, with that scarcity; worst first."""
    shape, run = snapshot.shape, config.run_experts
    layers = sorted(shape.expert_bytes)
    starts = np.arange(0, shape.n_expert, run)
    counts = np.minimum(run, shape.n_expert - starts)
    worth = snapshot.scarcity.reshape(shape.n_layer, shape.n_expert)[layers]
    means = (np.add.reduceat(worth, starts, axis=1) / counts).reshape(-1)
    found = []
    for place in np.argsort(-means, kind="stable")[:most].tolist():
        layer, number = divmod(place, len(starts))
        item = ExpertRange(layers[layer], int(starts[number]), int(counts[number]))
        found.append((float(means[place]), item))
    return found


def holder_id_of(addresses: Iterable[str]) -> str:
    """The same for the same addresses, in any order."""
    return hashlib.sha256("\0".join(sorted(addresses)).encode()).hexdigest()[:16]


def _stand_in(holder_id: str) -> NodeId:
    """A node id for somebody who has none; nobody has its private key."""
    return NodeId(hashlib.sha256(b"announced " + holder_id.encode()).digest())


class _Counts:
    """How many nodes named each expert."""

    def __init__(self, shape: MarketShape) -> None:
        self._shape = shape
        self._ranges: dict[NodeId, list[ExpertRange]] = {}
        self.counts: I32 = np.zeros(shape.size, np.int32)

    def set(self, node_id: NodeId, ranges: list[ExpertRange]) -> None:
        """The node names these now; what the model does not have is left out."""
        for item in self._ranges.pop(node_id, ()):
            self.counts[self._shape.slice_of(item)] -= 1
        named = [item for item in ranges if self._shape.holds(item)]
        if named:
            self._ranges[node_id] = named
            for item in named:
                self.counts[self._shape.slice_of(item)] += 1
