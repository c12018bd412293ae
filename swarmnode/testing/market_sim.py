"""The market at its real size, seeded and in virtual time: thousands of nodes that see one another late.

Each node decides with `gossip.volunteering.Volunteer`, the code that a real node runs. What is modelled is how it
sees others: a record published at t is known to each other node at t + a delay drawn from `MarketPlan.delays_s`,
newest version first (as the record table keeps it), which is what gossip does; what follows for its view is in
`market_views`.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from swarmnode.config import GossipConfig, MarketConfig
from swarmnode.gossip.decisions import Claim, Drop, Fetch, Withdraw
from swarmnode.gossip.demand import Demand, aggregate, even_demand
from swarmnode.gossip.rates import Pace
from swarmnode.gossip.shape import F32, MarketShape
from swarmnode.gossip.sketch import MAX_UNMET, SHARE_UNIT, DemandSketch
from swarmnode.gossip.volunteering import Volunteer
from swarmnode.testing.market_views import MarketViews, Rows, Snapshot, flat_of
from swarmnode.weights.slices import ExpertRange

DELAYS_S = {1: 0.03, 2: 0.14, 3: 0.30, 4: 0.31, 5: 0.16, 6: 0.05, 7: 0.01}
"""Share of the nodes that hear of a record after so many seconds. More than testing.gossip_sim gives (all of 1,000
within 3 s), on purpose: the market has to bear it, and with other delays all runs of docs/market.md were to be made
again.
"""


@dataclass(frozen=True)
class MarketPlan:
    """What a simulation is made of. Links have `slowest` to `fastest` bytes a second, evenly in the logarithm."""

    shape: MarketShape
    config: MarketConfig = field(default_factory=MarketConfig)
    seed: int = 1
    delays_s: dict[int, float] = field(default_factory=lambda: DELAYS_S)
    slowest_bytes_per_s: float = 0.6e6
    fastest_bytes_per_s: float = 6e6
    gossip: GossipConfig = field(default_factory=GossipConfig)
    """How often a node says something."""
    ttl_s: int = 600
    """Records are issued again after a third; one that was not counts nothing after `config.late_share`."""
    sync_s: int = 60
    """After a healed partition a node's record is on the other side within so long."""
    sketch_interval_s: int = 20
    n_backbones: int = 5
    max_rows: int = 0
    """Most nodes at a time; 0: as many as there are budgets in the first `join`."""


@dataclass
class SimNode:
    """One node. `fixed`: claims of a liar that never change; `lies`: nothing it says it serves is served."""

    number: int
    row: int
    node_id: bytes
    volunteer: Volunteer
    bytes_per_s: float
    lies: bool
    pace: Pace
    fixed: tuple[ExpertRange, ...] = ()
    alive: bool = True
    side: int = 0
    dirty: bool = False
    published_s: int = -1_000_000
    """When it said something last."""
    snapshots: list[Snapshot] = field(default_factory=list)
    downloads: dict[ExpertRange, float] = field(default_factory=dict)
    link_free_s: float = 0.0
    """When all downloads are done: they share the node's link."""


@dataclass(frozen=True)
class Figures:
    """Shares of all experts that honest living nodes serve: at least once, twice; the most replicas over the mean;
    experts downloaded (whole or not) by honest nodes so far.
    """

    at_s: int
    covered: float
    twice: float
    peak: float
    mean: float
    downloads: int


class _RowView:
    """volunteering.View of one node."""

    def __init__(self, sim: MarketSim, node: SimNode) -> None:
        self._sim = sim
        self._node = node

    @property
    def n_nodes(self) -> int:
        return int(self._sim.views.known[self._node.row])

    @property
    def n_claiming(self) -> int:
        return int(self._sim.views.claiming[self._node.row])

    @property
    def replicas(self) -> F32:
        return self._sim.believed(self._node)

    @property
    def demand(self) -> F32:
        return self._sim.demand.weight

    def settled(self, item: ExpertRange, since_s: float) -> F32:
        return self._sim.views.settled(self._node.number, self._node.row, item, since_s)


class MarketSim:
    """Call `join`, `run`, `figures` and the things that befall a swarm in any order."""

    def __init__(self, plan: MarketPlan, demand: Demand | None = None) -> None:
        self.plan = plan
        self.shape = plan.shape
        self.now_s = 0
        self.demand = demand or even_demand(plan.shape)
        self.rng = np.random.default_rng(plan.seed)
        self.nodes: list[SimNode] = []
        self.n_downloaded = 0
        self.served = np.zeros(self.shape.size, np.int32)
        self.parted = False
        self._delay_values = np.array(list(plan.delays_s), np.int8)
        thousandths = [round(1000 * share) for share in plan.delays_s.values()]
        self._delay_table = np.repeat(self._delay_values, thousandths)
        self._arrivals: dict[int, list[tuple[int, int, Rows]]] = defaultdict(list)
        self._free_rows: list[int] = []
        self._reserve(plan.max_rows)

    def _reserve(self, n_rows: int) -> None:
        self.views = MarketViews(self.shape, self.plan.config, n_rows)
        self._alive_rows = np.zeros(n_rows, np.bool_)
        self._sides = np.zeros(n_rows, np.int8)
        self._free_rows = list(range(n_rows))

    # ---- what befalls the swarm ----------------------------------------------------------------------------

    def join(
        self,
        budgets_bytes: Iterable[int],
        lies: bool = False,
        fixed: Sequence[tuple[ExpertRange, ...]] = (),
        contact: SimNode | None = None,
    ) -> list[SimNode]:
        """Nodes that start now with nothing; from `contact` they have its whole view at once."""
        budgets = list(budgets_bytes)
        if not len(self._alive_rows):
            self._reserve(len(budgets))
        joined = []
        told = self.plan.gossip
        for place, budget_bytes in enumerate(budgets):
            number, row = len(self.nodes), self._free_rows.pop(0)
            node_id = hashlib.sha256(f"{self.plan.seed}:{number}".encode()).digest()
            low, high = np.log(self.plan.slowest_bytes_per_s), np.log(self.plan.fastest_bytes_per_s)
            node = SimNode(
                number,
                row,
                node_id,
                Volunteer(node_id, self.shape, budget_bytes, self.plan.config),
                float(np.exp(self.rng.uniform(low, high))),
                lies,
                Pace(told.issue_interval_s, told.issue_burst, told.have_interval_s),
                fixed=fixed[place] if fixed else (),
                dirty=bool(fixed),
            )
            self.nodes.append(node)
            self.views.add(node_id, node.snapshots)
            self._alive_rows[row] = True
            self._sides[row] = 0
            self.views.begin(row, None if contact is None else (contact.number, contact.row))
            joined.append(node)
        return joined

    def leave(self, nodes: Iterable[SimNode], crash: bool) -> None:
        """Nodes go, with a signed leave that travels as any record, or without: later their record is late."""
        for node in nodes:
            if not node.alive:
                continue
            for item in node.volunteer.serving:
                self._count(node, item, -1)
            node.alive = False
            node.downloads.clear()
            rows = self._reachable(node)
            if crash:
                self._arrivals[self._late_s(node)].append((node.number, -1, rows))
            else:
                self._publish(node, leaving=True)
            self._alive_rows[node.row] = False
            self._free_rows.append(node.row)

    def part(self) -> None:
        """From here on two halves hear nothing of each other; records of the other half become late."""
        self.parted = True
        for node in self.living():
            node.side = node.number % 2
            self._sides[node.row] = node.side
        for node in self.living():
            other = np.flatnonzero(self._alive_rows & (self._sides != node.side))
            self._arrivals[self._late_s(node)].append((node.number, -1, other))

    def heal(self) -> None:
        """All hear of all again, within `sync_s`."""
        self.parted = False
        for node in self.living():
            other = np.flatnonzero(self._alive_rows & (self._sides != node.side))
            at_s = self.now_s + self.rng.integers(1, self.plan.sync_s + 1, len(other))
            for when in np.unique(at_s):
                batch = (node.number, len(node.snapshots) - 1, other[at_s == when])
                self._arrivals[int(when)].append(batch)

    def _late_s(self, node: SimNode) -> int:
        """When the record of a node of which nothing more is heard counts nothing: it was issued some time ago."""
        age_s = min(self.now_s - node.published_s, self.rng.uniform(0, self.plan.ttl_s / 3))
        return self.now_s + int(self.plan.config.late_share * self.plan.ttl_s - age_s)

    def living(self) -> list[SimNode]:
        return [node for node in self.nodes if node.alive]

    # ---- time ----------------------------------------------------------------------------------------------

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self._second()

    def figures(self) -> Figures:
        counts = self.served[self.shape.exists]
        mean = float(counts.mean())
        return Figures(
            self.now_s,
            float((counts >= 1).mean()),
            float((counts >= 2).mean()),
            float(counts.max()) / mean if mean else 0.0,
            mean,
            self.n_downloaded,
        )

    def believed(self, node: SimNode) -> F32:
        """f32 [size]: replicas as this node sees them, besides its own."""
        return self.views.replicas(node.row, slice(None))

    def seen(self, rows: Rows, node: SimNode) -> Rows:
        """The versions of a node's record that these rows know, -1: none."""
        return self.views.seen(rows, node.number)

    def _second(self) -> None:
        self.now_s += 1
        for number, version, rows in self._arrivals.pop(self.now_s, ()):
            self._arrive(number, version, rows)
        if self.now_s % self.plan.sketch_interval_s == 0:
            self._sketches()
        for node in self.nodes:
            if not node.alive:
                continue
            self._finish_downloads(node)
            if not node.fixed and node.volunteer.next_s <= self.now_s:
                self._decide(node)
            if node.dirty and node.pace.next_s <= self.now_s:
                self._publish(node)

    def _decide(self, node: SimNode) -> None:
        for decision in node.volunteer.decide(_RowView(self, node), self.now_s):
            match decision:
                case Claim() | Withdraw():
                    node.dirty = True
                case Drop(item):
                    node.dirty = True
                    self._count(node, item, -1)
                    node.volunteer.freed(item)
                case Fetch(item):
                    wait_s = self.shape.range_bytes([item]) / node.bytes_per_s
                    node.link_free_s = max(node.link_free_s, self.now_s) + wait_s
                    node.downloads[item] = node.link_free_s
                    self.n_downloaded += 0 if node.lies else item.count

    def _finish_downloads(self, node: SimNode) -> None:
        for item in [item for item, done_s in node.downloads.items() if done_s <= self.now_s]:
            del node.downloads[item]
            node.volunteer.served(item)
            self._count(node, item, 1)
            node.dirty = True

    def _count(self, node: SimNode, item: ExpertRange, step: int) -> None:
        if not node.lies:
            self.served[self.shape.slice_of(item)] += step

    # ---- records -------------------------------------------------------------------------------------------

    def _publish(self, node: SimNode, leaving: bool = False) -> None:
        version = len(node.snapshots)
        delays = self._delay_table[self.rng.integers(0, len(self._delay_table), len(self._alive_rows))]
        serving = () if leaving else (node.fixed or node.volunteer.serving)
        claims = {} if leaving else self.views.claims(node.number, node.volunteer.fetching)
        flat_serving, flat_claims = flat_of(serving, self.shape), flat_of(claims, self.shape)
        node.snapshots.append(Snapshot(self.now_s, flat_serving, flat_claims, claims, delays))
        if version >= 6:
            node.snapshots[version - 6].delays_s = None
        node.dirty, node.published_s = False, self.now_s
        node.pace.happened(self.now_s)
        node.volunteer.published(self.now_s)
        rows = self._reachable(node)
        for delay in self._delay_values:
            batch = rows[delays[rows] == delay]
            if len(batch):
                self._arrivals[self.now_s + int(delay)].append((node.number, version, batch))

    def _reachable(self, node: SimNode) -> Rows:
        rows = self._alive_rows.copy()
        rows[node.row] = False
        if self.parted:
            rows &= self._sides == node.side
        return np.flatnonzero(rows)

    def _arrive(self, number: int, version: int, rows: Rows) -> None:
        node = self.nodes[number]
        if version < 0 and node.alive and not self.parted:
            return  # healed before it was late
        self.views.hear(number, version, rows[self._alive_rows[rows]])

    def _sketches(self) -> None:
        """Backbones say what they found nobody for; all views take it into account."""
        votes = [(str(number), self._sketch()) for number in range(self.plan.n_backbones)]
        self.views.talk_away(aggregate(votes, self.shape).unmet)

    def _sketch(self) -> DemandSketch:
        holes = np.flatnonzero(self.shape.exists & (self.served == 0) & (self.demand.weight > 0))
        order = np.argsort(-self.demand.weight[holes], kind="stable")[:MAX_UNMET]
        return DemandSketch(1.0, {}, dict.fromkeys(map(int, holes[order]), SHARE_UNIT))
