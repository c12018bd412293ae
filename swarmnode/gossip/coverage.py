"""How many trustworthy replicas each expert has, kept up to date record by record. Pure.

What a record claims is weighed, not believed:

* a node has one record, so leaving and coming back counts once;
* nodes of one **site** (a /24, a /48, a relay) fail together and are easily invented together: the first replica of an
  expert counts whole, each further one `sibling_weight`, and only `max_siblings` nodes count at all;
* `fetching` counts half, for `claim_lapse_s` from when it was first seen here, whatever the record's own times say;
* a record that was not renewed when it should have been (`late`) counts nothing until it is: most of these nodes went
  without a word, long before their record expires;
* a suspect (an audit, a slice or a connection failed: told from outside) counts `suspect_weight`;
* what backbones say they found nobody for is subtracted (`MarketView`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from swarmnode.config import MarketConfig
from swarmnode.gossip.demand import Demand, even_demand
from swarmnode.gossip.priority import is_before
from swarmnode.gossip.shape import F32, MarketShape
from swarmnode.gossip.sites import is_local_site, site_of
from swarmnode.identity import NodeId
from swarmnode.weights.slices import ExpertRange

UNIT = 1024
"""Weights are whole numbers of 1/1024, so that adding and taking away leaves nothing behind."""

Units = npt.NDArray[np.int32]


class HoldingsLike(Protocol):
    """What coverage reads of `records.ModelHoldings`."""

    @property
    def model(self) -> bytes: ...
    @property
    def serving(self) -> tuple[ExpertRange, ...]: ...
    @property
    def fetching(self) -> tuple[ExpertRange, ...]: ...
    @property
    def seeds(self) -> bool: ...


class StateLike(Protocol):
    """What coverage reads of `records.OwnState`."""

    @property
    def addresses(self) -> tuple[str, ...]: ...
    @property
    def relays(self) -> tuple[NodeId, ...]: ...
    @property
    def models(self) -> Sequence[HoldingsLike]: ...
    @property
    def leaving(self) -> bool: ...


def _trusted(own_site: str) -> str | None:
    return own_site if is_local_site(own_site) else None


@dataclass
class _Member:
    """One node's part. `place`: its site as its addresses say; `site`: the one it is counted in. `fetching`: range ->
    when it was first seen here. `late_s`: when its record must be renewed.
    """

    place: str
    site: str
    weight: int
    serving: tuple[ExpertRange, ...]
    fetching: dict[ExpertRange, float] = field(default_factory=dict)
    late_s: float = math.inf
    late: bool = False


class Coverage:
    """Replicas of one model's experts in the records of all nodes but our own.

    `own_site`: where we are. Nodes of our own site count one by one if it is a local one (a LAN, one machine): there
    is no other way to have two replicas then, and who shares it is known.
    """

    def __init__(
        self, model: bytes, shape: MarketShape, own: NodeId, config: MarketConfig, own_site: str = "nowhere"
    ) -> None:
        self.shape = shape
        self._model = model
        self._own = own
        self._config = config
        self._trusted_site = _trusted(own_site)
        self._members: dict[NodeId, _Member] = {}
        self._sites: dict[str, dict[NodeId, _Member]] = {}
        self._suspects: set[NodeId] = set()
        self._claimants: dict[NodeId, _Member] = {}
        self._alarms: list[tuple[float, NodeId]] = []
        """When a node's claims lapse or its record is late."""
        self._units = np.zeros(shape.size, np.int32)
        self._holders = np.zeros(shape.size, np.int32)
        self._replicas: F32 | None = None

    @property
    def n_nodes(self) -> int:
        """Nodes that serve or fetch some of the model."""
        return len(self._members)

    @property
    def n_claiming(self) -> int:
        """Nodes that fetch some of the model."""
        return len(self._claimants)

    @property
    def replicas(self) -> F32:
        """f32 [size]: trustworthy replicas of each expert. Not to be changed by the caller."""
        if self._replicas is None:
            self._replicas = self._units.astype(np.float32) / np.float32(UNIT)
        return self._replicas

    @property
    def holders(self) -> npt.NDArray[np.int32]:
        """i32 [size]: nodes whose record says `serving`, each counted whole. Not to be changed by the caller."""
        return self._holders

    def update(self, node_id: NodeId, state: StateLike, now_s: float, ttl_s: float = math.inf) -> None:
        """The node's record is now this one; to be called for every newer one, whatever it says. `ttl_s`: the record's
        own (records are issued again after a third of it). Costs its own size and one pass over the model, not the
        table.
        """
        if node_id == self._own:
            return
        holdings = None if state.leaving else self._holdings(state)
        if holdings is None or not (holdings.serving or holdings.fetching):
            self.remove(node_id)
            return
        before = self._members.get(node_id)
        # in aligned pieces, so that neighbouring claims that a record merges keep the times they were seen
        claims = [
            piece
            for item in holdings.fetching
            if self.shape.holds(item)
            for piece in item.aligned(self._config.run_experts)
        ]
        place = site_of(state.addresses, state.relays)
        member = _Member(
            place=place,
            site=self._site_key(node_id, place),
            weight=self._weight(node_id),
            serving=tuple(item for item in holdings.serving if self.shape.holds(item)),
            fetching={item: _first_seen(before, item, now_s) for item in claims},
            late_s=now_s + ttl_s * self._config.late_share,
        )
        if before is not None and replace(before, late_s=member.late_s) == member:
            before.late_s = member.late_s
        else:
            self._replace(node_id, member)
        lapse_s = self._config.claim_lapse_s
        for alarm_s in {since_s + lapse_s for since_s in member.fetching.values()} | {member.late_s}:
            if alarm_s < math.inf:
                heapq.heappush(self._alarms, (alarm_s, node_id))
        self.advance(now_s)

    def remove(self, node_id: NodeId) -> None:
        """The node left, or its record expired."""
        if node_id in self._members:
            self._replace(node_id, None)

    def suspect(self, node_id: NodeId, suspected: bool) -> None:
        """From now on (with or without a record) the node's claims weigh little, or whole again."""
        if suspected:
            self._suspects.add(node_id)
        else:
            self._suspects.discard(node_id)
        member = self._members.get(node_id)
        if member is not None and member.weight != self._weight(node_id):
            self._replace(node_id, replace(member, weight=self._weight(node_id)))

    def move_to(self, own_site: str) -> None:
        """We are somewhere else: other nodes are of our own site now. What is known of them stays: when claims were
        seen, who is late, who is suspected.
        """
        trusted = _trusted(own_site)
        if trusted == self._trusted_site:
            return
        self._trusted_site = trusted
        moving = {
            node_id: member
            for node_id, member in self._members.items()
            if member.site != self._site_key(node_id, member.place)
        }
        for site in {member.site for member in moving.values()}:  # whole sites: all members are of one place
            self._units -= self._site_units(site)
            del self._sites[site]
        for node_id, member in moving.items():
            member.site = self._site_key(node_id, member.place)
            self._sites.setdefault(member.site, {})[node_id] = member
        for site in {member.site for member in moving.values()}:
            self._units += self._site_units(site)
        self._replicas = None

    def advance(self, now_s: float) -> None:
        """Claims that are too old, and records that were not renewed in time, count nothing from here on."""
        while self._alarms and self._alarms[0][0] <= now_s:
            _, node_id = heapq.heappop(self._alarms)
            member = self._members.get(node_id)
            if member is not None:
                lapsed_s = now_s - self._config.claim_lapse_s
                live = {item: since for item, since in member.fetching.items() if since > lapsed_s}
                late = member.late_s <= now_s
                if late != member.late or len(live) < len(member.fetching):
                    self._replace(node_id, replace(member, fetching=live, late=late))

    def settled(self, item: ExpertRange, since_s: float) -> F32:
        """f32 [count]: replicas of a range we claimed at `since_s`, with others' claims decided.

        A claim counts whole if it was seen before ours or its priority is higher (priority.is_before), else not.
        """
        counts = self.replicas[self.shape.slice_of(item)].copy()
        for node_id, member in self._claimants.items():
            for claim, seen_s in member.fetching.items():
                if claim.layer != item.layer or claim.stop <= item.first or claim.first >= item.stop:
                    continue
                ahead = seen_s < since_s or is_before(node_id.raw, self._own.raw, claim, item)
                first, stop = max(claim.first, item.first), min(claim.stop, item.stop)
                counts[first - item.first : stop - item.first] += (
                    member.weight / UNIT * (0.5 if ahead else -0.5)
                )
        settled: F32 = np.maximum(counts, 0)
        return settled

    def _holdings(self, state: StateLike) -> HoldingsLike | None:
        found = (entry for entry in state.models if entry.model == self._model and not entry.seeds)
        return next(found, None)

    def _site_key(self, node_id: NodeId, place: str) -> str:
        return f"node {node_id}" if place == self._trusted_site else place

    def _weight(self, node_id: NodeId) -> int:
        return round(UNIT * self._config.suspect_weight) if node_id in self._suspects else UNIT

    def _replace(self, node_id: NodeId, member: _Member | None) -> None:
        """Exchange a node's part and count its site (or both sites) anew."""
        before = self._members.get(node_id)
        for site in {entry.site for entry in (before, member) if entry is not None}:
            self._units -= self._site_units(site)
        if before is not None:
            self._count(before, -1)
            del self._members[node_id]
            self._claimants.pop(node_id, None)
            siblings = self._sites[before.site]
            del siblings[node_id]
            if not siblings:
                del self._sites[before.site]
        if member is not None:
            self._count(member, 1)
            self._members[node_id] = member
            self._sites.setdefault(member.site, {})[node_id] = member
            if member.fetching and not member.late:
                self._claimants[node_id] = member
        for site in {entry.site for entry in (before, member) if entry is not None}:
            self._units += self._site_units(site)
        self._replicas = None

    def _count(self, member: _Member, step: int) -> None:
        serving = np.zeros(self.shape.size, np.bool_)
        for item in member.serving:
            serving[self.shape.slice_of(item)] = True
        self._holders[serving] += step

    def _site_units(self, site: str) -> Units:
        """i32 [size]: what all members of a site count together."""
        total = np.zeros(self.shape.size, np.int32)
        siblings = self._sites.get(site, {})
        for member in self._counted(siblings):
            total += self._member_units(member)
        if len(siblings) > 1:
            over = np.maximum(total - UNIT, 0)
            total -= over
            total += (over * self._config.sibling_weight).astype(np.int32)
        return total

    def _counted(self, siblings: dict[NodeId, _Member]) -> Iterator[_Member]:
        """At most max_siblings, always the same ones of the same set."""
        if len(siblings) <= self._config.max_siblings:
            yield from siblings.values()
        else:
            for node_id in sorted(siblings)[: self._config.max_siblings]:
                yield siblings[node_id]

    def _member_units(self, member: _Member) -> Units:
        """i32 [size]: a range that is named twice counts once, `serving` before `fetching`."""
        units = np.zeros(self.shape.size, np.int32)
        if member.late:
            return units
        for item in member.fetching:
            units[self.shape.slice_of(item)] = member.weight // 2
        for item in member.serving:
            units[self.shape.slice_of(item)] = member.weight
        return units


class MarketView:
    """What one node's decisions look at: coverage, corrected by what backbones found nobody for, and demand."""

    def __init__(self, coverage: Coverage) -> None:
        self._coverage = coverage
        self._demand = even_demand(coverage.shape)
        self._unmet = np.zeros(coverage.shape.size, np.float32)
        self._talked_away = np.zeros(coverage.shape.size, np.float32)

    @property
    def n_nodes(self) -> int:
        """Nodes that serve or fetch some of the model, besides us."""
        return self._coverage.n_nodes

    @property
    def n_claiming(self) -> int:
        """Nodes that fetch some of the model, besides us."""
        return self._coverage.n_claiming

    @property
    def replicas(self) -> F32:
        """f32 [size]: trustworthy replicas besides our own."""
        counts: F32 = self._coverage.replicas - self._away(slice(None))
        return counts

    @property
    def demand(self) -> F32:
        """f32 [size]: 1 is the average expert's."""
        return self._demand.weight

    def settled(self, item: ExpertRange, since_s: float) -> F32:
        """f32 [count]: see Coverage.settled."""
        away = self._away(self._coverage.shape.slice_of(item))
        counts: F32 = np.maximum(self._coverage.settled(item, since_s) - away, 0)
        return counts

    def set_demand(self, demand: Demand) -> None:
        """New sketches came in. Replicas that are served now and did not answer are not counted from here on; claims,
        and what is served later, are, until the next sketches tell.
        """
        self._demand = demand
        serving = np.minimum(self._coverage.replicas, self._coverage.holders)
        self._unmet = demand.unmet
        self._talked_away = (demand.unmet * serving).astype(np.float32)

    def _away(self, where: slice) -> F32:
        """What is not counted: never more than its share of what is there now, for who did not answer may be gone."""
        share: F32 = self._unmet[where] * self._coverage.replicas[where]
        return np.minimum(self._talked_away[where], share)


def _first_seen(before: _Member | None, item: ExpertRange, now_s: float) -> float:
    """When the claim that this one is (a rest of) was first seen."""
    if before is None:
        return now_s
    around = (
        since_s
        for claim, since_s in before.fetching.items()
        if claim.layer == item.layer and claim.first <= item.first and item.stop <= claim.stop
    )
    return min(around, default=now_s)
