"""Which connected workers may be sent rows: announced, answering, not quarantined.

Attached is not serving: a worker gets rows only after it answered a probe correctly, and only while it has answered
something within `DispatchConfig.fresh_s`. A missed deadline takes it out at once; a correct probe brings it back.
The same holds for what it claims later: one of the new experts, drawn at random, has to be computed correctly before
any of them gets rows. Meanwhile the others go on.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from swarmnode.config import DispatchConfig
from swarmnode.errors import RequestRefusedError
from swarmnode.identity import NodeId
from swarmnode.net.peer import Peer
from swarmnode.schedule.dispatch import Routing, build_routing
from swarmnode.schedule.view import SwarmView, WorkerView
from swarmnode.weights.slices import ExpertRange, holdings_of

Holdings: TypeAlias = Mapping[int, frozenset[int]]
"""Experts by layer."""

log = logging.getLogger(__name__)

HARMLESS_REFUSALS = frozenset({"busy", "overflow", "cancelled"})
"""Refusals that say nothing against a worker: it works, just not on this, or not now."""


class Standing(enum.Enum):
    """What the backbone thinks of a worker."""

    ATTACHED = "attached"
    """Announced, not yet probed."""
    SERVING = "serving"
    SUSPECT = "suspect"
    """Missed a deadline; gets no rows until a probe is answered."""
    QUARANTINED = "quarantined"
    """Computed wrong numbers; gets no rows for `DispatchConfig.quarantine_s`, reconnecting or not."""


@dataclass
class Tally:
    """What one worker did since it joined, for people to see. Pairs are (row, expert) pairs."""

    pairs: int = 0
    late: int = 0
    bad_replies: int = 0


@dataclass(eq=False)
class Worker:
    """A connected worker that has announced holdings of our model."""

    peer: Peer
    node_id: NodeId
    ranges: tuple[ExpertRange, ...]
    max_rows: int
    """Most pairs in one request: what the worker advertised, and what a body can carry."""
    device: str
    standing: Standing = Standing.ATTACHED
    since_s: float = 0.0
    """When it came to this standing."""
    answered_at_s: float = float("-inf")
    reason: str = ""
    tally: Tally = field(default_factory=Tally)
    holdings: Holdings = field(init=False)
    """What it claims to hold."""
    proven: Holdings = field(init=False, default_factory=dict)
    """Of these, what it may be sent rows for."""
    on_trial: Holdings = field(init=False, default_factory=dict)
    """What the probe under way (one at a time) proves: what was unproven when it began, and was claimed ever since."""

    def __post_init__(self) -> None:
        self.holdings = holdings_of(self.ranges)

    @property
    def unproven(self) -> Holdings:
        """What it claims and no probe has spoken for yet."""
        rest = {layer: held - self.proven.get(layer, frozenset()) for layer, held in self.holdings.items()}
        return {layer: held for layer, held in rest.items() if held}

    def update(self, ranges: tuple[ExpertRange, ...], max_rows: int, device: str) -> None:
        """It announced anew over the same connection: other holdings, the same node with the same past.

        What it gave up and claims again later has to be proven again: it may have been loaded anew.
        """
        self.ranges, self.max_rows, self.device = ranges, max_rows, device
        self.holdings = holdings_of(ranges)
        self.proven = _common(self.proven, self.holdings)
        self.on_trial = _common(self.on_trial, self.holdings)


class Members:
    """The backbone's table of workers. All methods are synchronous: nothing is ever held across a wait."""

    def __init__(self, n_expert: int, config: DispatchConfig, now: Callable[[], float]) -> None:
        self._n_expert = n_expert
        self._config = config
        self._now = now
        self._quarantined: dict[NodeId, tuple[float, str]] = {}
        """Until when, and why."""
        self._workers: dict[NodeId, Worker] = {}
        self._routing = Routing()
        self._routed: tuple[Worker, ...] = ()
        self._stale = False
        self.on_betrayal: Callable[[NodeId], None] | None = None
        """Told of every worker that is found to compute wrong numbers."""
        self.on_change: Callable[[Worker, bool], None] | None = None
        """Told of every change of standing, and (True) when a worker has left."""

    @property
    def workers(self) -> list[Worker]:
        """Everyone announced and connected, in the order of joining."""
        return list(self._workers.values())

    def get(self, node_id: NodeId) -> Worker | None:
        """The worker of that node, if it is connected and has announced."""
        return self._workers.get(node_id)

    def announce(self, peer: Peer, ranges: tuple[ExpertRange, ...], max_rows: int, device: str) -> Worker:
        """Add a worker, or replace what it announced before.

        Over the same connection it stays the same worker, until it says that it leaves: rows on their way to it, and
        what comes of them, count for it as before. Quarantine outlives both leaving and connections.
        """
        worker = self._workers.get(peer.node_id)
        if worker is not None and worker.peer is peer:
            self._stale |= worker in self._routed
            worker.update(ranges, max_rows, device)
            return worker
        self._stale |= worker in self._routed
        worker = Worker(peer, peer.node_id, ranges, max_rows, device, since_s=self._now())
        if self.is_quarantined(worker):
            worker.standing, worker.reason = Standing.QUARANTINED, self._quarantined[peer.node_id][1]
        self._workers[peer.node_id] = worker
        return worker

    def disconnected(self, peer: Peer) -> None:
        """Forget the worker behind this connection; a newer connection of the same node stays."""
        worker = self._workers.get(peer.node_id)
        if worker is not None and worker.peer is peer:
            del self._workers[peer.node_id]
            self._stale |= worker in self._routed
            if self.on_change is not None:
                self.on_change(worker, True)

    def leaving(self, peer: Peer) -> None:
        """The worker said that it goes: send it nothing more."""
        self.disconnected(peer)

    def answered(self, worker: Worker) -> None:
        """The worker answered, in time."""
        worker.answered_at_s = self._now()
        self._stale |= worker.standing is Standing.SERVING and worker not in self._routed

    def computed(self, worker: Worker, n_pairs: int) -> None:
        """The worker answered with rows, which are going to be used."""
        worker.tally.pairs += n_pairs
        self.answered(worker)

    def probe_begins(self, worker: Worker) -> Holdings:
        """The worker is about to be probed, with one of these experts: of what is unproven, if anything is."""
        worker.on_trial = worker.unproven
        return worker.on_trial or worker.holdings

    def probe_passed(self, worker: Worker) -> None:
        """The worker computed correctly what it was asked since `probe_begins`."""
        self.answered(worker)
        if self.is_quarantined(worker):
            return
        if worker.on_trial:
            worker.proven, worker.on_trial = _union(worker.proven, worker.on_trial), {}
            self._stale |= worker in self._routed
        if worker.standing is not Standing.SERVING:
            self._set(worker, Standing.SERVING, "")
            log.info("worker %s serves %d experts", worker.node_id.short, _count(worker.proven))

    def refused(self, worker: Worker, refusal: RequestRefusedError) -> None:
        """The worker said no: a miss, unless the reason says nothing against it."""
        if refusal.code in HARMLESS_REFUSALS:
            self.answered(worker)
        else:
            self.missed(worker, str(refusal))

    def missed(self, worker: Worker, reason: str) -> None:
        """The worker let a deadline pass or failed: no rows until it has answered a probe."""
        worker.tally.late += 1
        if worker.standing is Standing.SERVING:
            log.warning("worker %s is out of routing: %s", worker.node_id.short, reason)
            self._set(worker, Standing.SUSPECT, reason)

    def quarantine(self, worker: Worker, reason: str) -> None:
        """The worker's numbers are wrong: no rows for a while, whatever it does, whether it has reconnected or not."""
        log.warning("worker %s is quarantined: %s", worker.node_id.short, reason)
        worker.tally.bad_replies += 1
        if self.on_betrayal is not None:
            self.on_betrayal(worker.node_id)
        self._quarantined[worker.node_id] = (self._now() + self._config.quarantine_s, reason)
        known = self._workers.get(worker.node_id, worker)
        known.proven = known.on_trial = {}
        self._set(known, Standing.QUARANTINED, reason)

    def is_quarantined(self, worker: Worker) -> bool:
        """Whether its node computed wrong numbers within the last `DispatchConfig.quarantine_s`."""
        now_s = self._now()
        self._quarantined = {node: item for node, item in self._quarantined.items() if item[0] > now_s}
        return worker.node_id in self._quarantined

    def routing(self) -> tuple[Routing, tuple[Worker, ...]]:
        """Owners of all experts now, and the workers by index. Cheap when nothing changed."""
        horizon_s = self._now() - self._config.fresh_s
        if self._stale or any(worker.answered_at_s < horizon_s for worker in self._routed):
            self._rebuild(horizon_s)
        return self._routing, self._routed

    def _set(self, worker: Worker, standing: Standing, reason: str) -> None:
        self._stale |= Standing.SERVING in (worker.standing, standing)
        worker.standing, worker.reason, worker.since_s = standing, reason, self._now()
        if self.on_change is not None:
            self.on_change(worker, False)

    def _rebuild(self, horizon_s: float) -> None:
        self._routed = tuple(
            worker
            for worker in self._workers.values()
            if worker.standing is Standing.SERVING and worker.answered_at_s >= horizon_s
        )
        views = tuple(WorkerView(w.node_id, w.proven, w.max_rows) for w in self._routed)
        self._routing = build_routing(SwarmView(views), self._n_expert)
        self._stale = False


def _common(a: Holdings, b: Holdings) -> Holdings:
    return {layer: held for layer in a.keys() & b.keys() if (held := a[layer] & b[layer])}


def _union(a: Holdings, b: Holdings) -> Holdings:
    return {layer: a.get(layer, frozenset()) | b.get(layer, frozenset()) for layer in a.keys() | b.keys()}


def _count(holdings: Holdings) -> int:
    return sum(len(held) for held in holdings.values())
