"""Which connected workers may be sent rows: announced, answering, not quarantined.

Attached is not serving: a worker gets rows only after it answered a probe correctly, and only while it has answered
something within `DispatchConfig.fresh_s`. A missed deadline takes it out at once, several layers in a row of which it
refused something do as well; after a pause a correct probe brings it back. Each pause is twice as long as the one
before, and a step shorter for each minute of good work (pasts.py). Pauses are the node's: a new connection or
announcement ends none.
The same holds for what it claims later: one of the new experts, drawn at random, has to be computed correctly before
any of them gets rows. Meanwhile the others go on.
"""

from __future__ import annotations

import enum
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from swarmnode.config import DispatchConfig
from swarmnode.counts import counted
from swarmnode.errors import RequestRefusedError
from swarmnode.identity import NodeId
from swarmnode.net.peer import Peer
from swarmnode.schedule.dispatch import Routing, build_routing, without
from swarmnode.schedule.view import SwarmView, WorkerView
from swarmnode.services.pasts import Past
from swarmnode.weights.slices import ExpertRange, holdings_of

Holdings: TypeAlias = Mapping[int, frozenset[int]]
"""Experts by layer."""

log = logging.getLogger(__name__)

HARMLESS_REFUSALS = frozenset({"busy", "overflow", "cancelled"})
"""Refusals that say nothing against a worker, unless nothing else comes: it works, just not on this, or not now."""

MAX_PASTS = 4096
"""Nodes that let us down of which that is remembered, connected or not."""
MAX_QUARANTINED = 16_384
"""Nodes in quarantine; of more the one longest in it is let out. A node is 100 bytes here."""


class Standing(enum.Enum):
    """What the backbone thinks of a worker."""

    ATTACHED = "attached"
    """Announced, not yet probed."""
    SERVING = "serving"
    SUSPECT = "suspect"
    """Let requests down; gets no rows until its pause is over and a probe is answered."""
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
    pauses: bool = False
    """It is connected, and offers nothing for a while."""
    lacks: str = ""
    """Then: what keeps it from holding anything; "" if it holds something, and pauses."""
    past: Past = field(default_factory=Past)
    """Shared by all connections of the node."""
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
        self._quarantined: OrderedDict[NodeId, tuple[float, str]] = OrderedDict()
        """Until when, and why; in the order of ending."""
        self._pasts: OrderedDict[NodeId, Past] = OrderedDict()
        """In the order of ending."""
        self._workers: dict[NodeId, Worker] = {}
        self._routing = Routing()
        self._routed: dict[Worker, int] = {}
        """Those of `_order` that may be sent rows, with their index there."""
        self._order: tuple[Worker, ...] = ()
        """The workers of the routing."""
        self._views: dict[Worker, WorkerView] = {}
        self._lost: set[Worker] = set()
        """Those of `_routed` that may be sent rows for less than the routing says, or for nothing."""
        self._gained = False
        """Some may be sent rows for more than the routing says."""
        self._wakes_s = math.inf
        """When the first of those that asked for a pause is back."""
        self._built_s = -math.inf
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
            if (worker.ranges, worker.max_rows) != (ranges, max_rows):
                before = worker.proven
                worker.update(ranges, max_rows, device)
                if worker.proven != before:
                    self._lose(worker)
            return worker
        if worker is not None:
            self._lose(worker)
        past = self._past(peer.node_id) if worker is None else worker.past
        worker = Worker(peer, peer.node_id, ranges, max_rows, device, since_s=self._now(), past=past)
        if past.is_suspect:
            worker.standing, worker.reason = Standing.SUSPECT, past.reason
        if (reason := self._quarantine_reason(peer.node_id)) is not None:
            worker.standing, worker.reason = Standing.QUARANTINED, reason
        self._workers[peer.node_id] = worker
        return worker

    def disconnected(self, peer: Peer) -> None:
        """Forget the worker behind this connection; a newer connection of the same node stays."""
        worker = self._workers.get(peer.node_id)
        if worker is not None and worker.peer is peer:
            del self._workers[peer.node_id]
            self._lose(worker)
            if self.on_change is not None:
                self.on_change(worker, True)

    def leaving(self, peer: Peer, *, pauses: bool = False, lacks: str = "") -> None:
        """The worker said that it goes, or (`pauses`) offers nothing for a while: send it nothing more. `lacks`: what
        keeps it from holding anything."""
        worker = self._workers.get(peer.node_id)
        if worker is not None and worker.peer is peer:
            worker.pauses, worker.lacks = pauses, lacks
        self.disconnected(peer)

    def answered(self, worker: Worker) -> None:
        """The worker answered, in time."""
        worker.answered_at_s = self._now()
        self._gained |= worker.standing is Standing.SERVING and worker not in self._routed

    def computed(self, worker: Worker, n_pairs: int, *, is_whole: bool) -> None:
        """The worker answered with rows of a layer, which are going to be used: called once a layer.

        `is_whole`: it did all that it was asked for.
        """
        worker.tally.pairs += n_pairs
        if is_whole:
            worker.past.worked(self._now(), self._config)
        self.answered(worker)

    def may_probe(self, worker: Worker) -> bool:
        """Whether a probe could change anything now: no quarantine, and no pause after letting us down."""
        if self.is_quarantined(worker):
            return False
        return worker.standing is Standing.SERVING or worker.past.until_s <= self._now()

    def probe_begins(self, worker: Worker) -> Holdings:
        """The worker is about to be probed, with one of these experts: of what is unproven, if anything is."""
        worker.on_trial = worker.unproven
        return worker.on_trial or worker.holdings

    def probe_passed(self, worker: Worker) -> None:
        """The worker computed correctly what it was asked since `probe_begins`.

        That proves what it holds, and ends no pause.
        """
        self.answered(worker)
        if self.is_quarantined(worker):
            return
        if worker.on_trial:
            worker.proven, worker.on_trial = _union(worker.proven, worker.on_trial), {}
            self._gained = True
        if worker.standing is not Standing.SERVING and self.may_probe(worker):
            worker.past.is_suspect = False
            self._set(worker, Standing.SERVING, "")
            log.info("worker %s serves %d experts", worker.node_id.short, _count(worker.proven))

    def probe_failed(self, worker: Worker, reason: str) -> None:
        """The worker did not answer a probe: no rows until it has answered one. The prober makes the pauses."""
        worker.tally.late += 1
        self._suspect(worker, reason)

    def probe_refused(self, worker: Worker, refusal: RequestRefusedError) -> None:
        """The worker said no to a probe: a failure, unless the reason says nothing against it and it worked lately."""
        is_fresh = worker.answered_at_s >= self._now() - self._config.fresh_s
        if refusal.code not in HARMLESS_REFUSALS or not is_fresh:
            self.probe_failed(worker, str(refusal))

    def refused(self, worker: Worker, refusal: RequestRefusedError, *, again: bool = False) -> None:
        """The worker said no to work: a miss, unless the reason says nothing against it and it is not always so.

        It gets no rows before it wants to be asked again. `again`: of a layer of which it let something down before,
        which counts once.
        """
        if refusal.code not in HARMLESS_REFUSALS:
            self.missed(worker, str(refusal))
            return
        past = self._past_of(worker)
        if not again and past.was_in_vain(self._now()) and past.in_vain >= self._config.refusals_in_a_row:
            past.pause(self._now(), self._config)
            self._suspect(worker, f"{counted(past.in_vain, 'refused layer')} in a row, the last: {refusal}")
        if refusal.retry_after_ms:
            past.until_s = max(past.until_s, self._now() + refusal.retry_after_ms / 1e3)
            self._wakes_s = min(self._wakes_s, past.until_s)
            self._lose(self._workers.get(worker.node_id, worker))

    def missed(self, worker: Worker, reason: str) -> None:
        """The worker let work's deadline pass or failed: no rows until a pause is over and it has answered a probe."""
        worker.tally.late += 1
        past = self._past_of(worker)
        if past.was_in_vain(self._now()):
            past.pause(self._now(), self._config)
        self._suspect(worker, reason)

    def _suspect(self, worker: Worker, reason: str) -> None:
        """Take the node out, whichever of its connections let us down."""
        known = self._workers.get(worker.node_id, worker)
        if known.standing in (Standing.SUSPECT, Standing.QUARANTINED):
            return
        past = self._past_of(worker)
        past.is_suspect, past.reason = True, reason
        if known.standing is Standing.SERVING:
            pause_s = max(past.until_s - self._now(), 0)
            log.warning("worker %s is out of routing for %.0f s: %s", known.node_id.short, pause_s, reason)
        self._set(known, Standing.SUSPECT, reason)

    def _past_of(self, worker: Worker) -> Past:
        """What is held against the worker's node; about to change, and remembered from now on."""
        past = self._pasts.setdefault(worker.node_id, worker.past)
        past.ends_s = self._now() + self._config.quarantine_s
        self._pasts.move_to_end(worker.node_id)
        if len(self._pasts) > MAX_PASTS:
            self._pasts.popitem(last=False)
        worker.past = self._workers.get(worker.node_id, worker).past = past
        return past

    def _past(self, node_id: NodeId) -> Past:
        """What is remembered of a node."""
        now_s = self._now()
        while self._pasts and next(iter(self._pasts.values())).ends_s <= now_s:
            self._pasts.popitem(last=False)
        return self._pasts.get(node_id) or Past()

    def quarantine(self, worker: Worker, reason: str) -> None:
        """The worker's numbers are wrong: no rows for a while, whatever it does, whether it has reconnected or not."""
        log.warning("worker %s is quarantined: %s", worker.node_id.short, reason)
        worker.tally.bad_replies += 1
        if self.on_betrayal is not None:
            self.on_betrayal(worker.node_id)
        self._quarantined[worker.node_id] = (self._now() + self._config.quarantine_s, reason)
        self._quarantined.move_to_end(worker.node_id)
        if len(self._quarantined) > MAX_QUARANTINED:
            self._quarantined.popitem(last=False)
        known = self._workers.get(worker.node_id, worker)
        known.proven = known.on_trial = {}
        self._set(known, Standing.QUARANTINED, reason)

    def is_quarantined(self, worker: Worker) -> bool:
        """Whether its node computed wrong numbers within the last `DispatchConfig.quarantine_s`."""
        return self._quarantine_reason(worker.node_id) is not None

    def _quarantine_reason(self, node_id: NodeId) -> str | None:
        now_s = self._now()
        while self._quarantined and next(iter(self._quarantined.values()))[0] <= now_s:
            self._quarantined.popitem(last=False)
        item = self._quarantined.get(node_id)
        return None if item is None else item[1]

    # -- routing

    def routing(self) -> tuple[Routing, tuple[Worker, ...]]:
        """Owners of all experts now, and the workers by index. Cheap when nothing changed.

        What is lost is local at once; a new routing, which takes longer, is made at most every
        `DispatchConfig.rebuild_s`.
        """
        now_s = self._now()
        horizon_s = now_s - self._config.fresh_s
        self._lost.update(worker for worker in self._routed if worker.answered_at_s < horizon_s)
        if self._lost or self._gained or now_s >= self._wakes_s:
            if now_s >= self._built_s + self._config.rebuild_s:
                self._rebuild()
            elif self._lost:
                self._take_out()
        return self._routing, self._order

    def _lose(self, worker: Worker) -> None:
        if worker in self._routed:
            self._lost.add(worker)

    def _set(self, worker: Worker, standing: Standing, reason: str) -> None:
        self._lose(worker)
        self._gained |= standing is Standing.SERVING
        worker.standing, worker.reason, worker.since_s = standing, reason, self._now()
        if self.on_change is not None:
            self.on_change(worker, False)

    def may_have_rows(self, worker: Worker) -> bool:
        """Whether it may be sent any now: of what it has `proven`."""
        now_s = self._now()
        return (
            worker.standing is Standing.SERVING
            and worker.past.until_s <= now_s
            and worker.answered_at_s >= now_s - self._config.fresh_s
            and self._workers.get(worker.node_id) is worker
        )

    def _take_out(self) -> None:
        left: dict[int, Holdings] = {}
        for worker in self._lost:
            if self.may_have_rows(worker):
                left[self._routed[worker]] = worker.proven
            else:
                left[self._routed.pop(worker)] = {}
        self._routing = without(self._routing, left)
        self._lost.clear()
        self._gained = True  # others may hold the same

    def _rebuild(self) -> None:
        now_s = self._now()
        self._order = tuple(worker for worker in self._workers.values() if self.may_have_rows(worker))
        self._routed = {worker: index for index, worker in enumerate(self._order)}
        self._views = {worker: self._view(worker) for worker in self._order}
        self._routing = build_routing(SwarmView(tuple(self._views.values())), self._n_expert)
        self._lost.clear()
        self._gained = False
        self._wakes_s = min(
            (
                worker.past.until_s
                for worker in self._workers.values()
                if worker.standing is Standing.SERVING and worker.past.until_s > now_s
            ),
            default=math.inf,
        )
        self._built_s = now_s

    def _view(self, worker: Worker) -> WorkerView:
        """The same as before if nothing changed: it keeps a table of all experts."""
        view = self._views.get(worker)
        if view is not None and (view.holdings, view.max_rows) == (worker.proven, worker.max_rows):
            return view
        return WorkerView(worker.node_id, worker.proven, worker.max_rows)


def _common(a: Holdings, b: Holdings) -> Holdings:
    return {layer: held for layer in a.keys() & b.keys() if (held := a[layer] & b[layer])}


def _union(a: Holdings, b: Holdings) -> Holdings:
    return {layer: a.get(layer, frozenset()) | b.get(layer, frozenset()) for layer in a.keys() | b.keys()}


def _count(holdings: Holdings) -> int:
    return sum(len(held) for held in holdings.values())
