"""Which connected workers may be sent rows: announced, answering, not quarantined.

Attached is not serving: a worker gets rows only after it answered a probe correctly, and only while it has answered
something within `DispatchConfig.fresh_s`. A missed deadline takes it out at once; a correct probe brings it back.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from swarmnode.config import DispatchConfig
from swarmnode.identity import NodeId
from swarmnode.net.peer import Peer
from swarmnode.schedule.dispatch import Routing, build_routing
from swarmnode.schedule.view import SwarmView, WorkerView

log = logging.getLogger(__name__)


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
    """What one worker did since it connected. Pairs are (row, expert) pairs."""

    requests: int = 0
    pairs: int = 0
    late: int = 0
    bad_replies: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    wait_s: float = 0.0


@dataclass(eq=False)
class Worker:
    """A connected worker that has announced holdings of our model."""

    peer: Peer
    node_id: NodeId
    holdings: Mapping[int, frozenset[int]]
    max_rows: int
    device: str
    standing: Standing = Standing.ATTACHED
    answered_at_s: float = 0.0
    reason: str = ""
    tally: Tally = field(default_factory=Tally)


class Members:
    """The backbone's table of workers. All methods are synchronous: nothing is ever held across a wait."""

    def __init__(self, n_expert: int, config: DispatchConfig, now: Callable[[], float]) -> None:
        self._n_expert = n_expert
        self._fresh_s = config.fresh_s
        self._quarantine_s = config.quarantine_s
        self._now = now
        self._quarantined: dict[NodeId, tuple[float, str]] = {}
        """Until when, and why."""
        self._workers: dict[NodeId, Worker] = {}
        self._routing = Routing()
        self._routed: tuple[Worker, ...] = ()
        self._stale = False

    @property
    def workers(self) -> list[Worker]:
        """Everyone announced and connected, in the order of joining."""
        return list(self._workers.values())

    def announce(
        self, peer: Peer, holdings: Mapping[int, frozenset[int]], max_rows: int, device: str
    ) -> Worker:
        """Add a worker, or replace what it announced before. Quarantine outlives announcements and connections."""
        old = self._workers.get(peer.node_id)
        worker = Worker(peer, peer.node_id, holdings, max_rows, device)
        if old is not None:
            worker.tally = old.tally
        now_s = self._now()
        self._quarantined = {node: item for node, item in self._quarantined.items() if item[0] > now_s}
        if peer.node_id in self._quarantined:
            worker.standing, worker.reason = Standing.QUARANTINED, self._quarantined[peer.node_id][1]
        self._workers[peer.node_id] = worker
        self._stale = True
        return worker

    def disconnected(self, peer: Peer) -> None:
        """Forget the worker behind this connection; a newer connection of the same node stays."""
        worker = self._workers.get(peer.node_id)
        if worker is not None and worker.peer is peer:
            del self._workers[peer.node_id]
            self._stale = True
            log.info("worker %s left", worker.node_id.short)

    def leaving(self, peer: Peer) -> None:
        """The worker said that it goes: send it nothing more."""
        self.disconnected(peer)

    def answered(self, worker: Worker) -> None:
        """The worker answered work in time."""
        worker.answered_at_s = self._now()

    def probe_passed(self, worker: Worker) -> None:
        """The worker computed a probe correctly."""
        worker.answered_at_s = self._now()
        if worker.standing in (Standing.ATTACHED, Standing.SUSPECT):
            log.info("worker %s serves %d experts", worker.node_id.short, _count(worker.holdings))
            worker.standing, worker.reason = Standing.SERVING, ""
            self._stale = True

    def missed(self, worker: Worker, reason: str) -> None:
        """The worker let a deadline pass or failed: no rows until it has answered a probe."""
        worker.tally.late += 1
        if worker.standing is Standing.SERVING:
            log.warning("worker %s is out of routing: %s", worker.node_id.short, reason)
            worker.standing, worker.reason = Standing.SUSPECT, reason
            self._stale = True

    def quarantine(self, worker: Worker, reason: str) -> None:
        """The worker's numbers are wrong: no rows for a while, whatever it does."""
        log.warning("worker %s is quarantined: %s", worker.node_id.short, reason)
        worker.tally.bad_replies += 1
        worker.standing, worker.reason = Standing.QUARANTINED, reason
        self._quarantined[worker.node_id] = (self._now() + self._quarantine_s, reason)
        self._stale = True

    def routing(self) -> tuple[Routing, tuple[Worker, ...]]:
        """Owners of all experts now, and the workers by index. Cheap when nothing changed."""
        horizon_s = self._now() - self._fresh_s
        if self._stale or any(worker.answered_at_s < horizon_s for worker in self._routed):
            self._rebuild(horizon_s)
        return self._routing, self._routed

    def _rebuild(self, horizon_s: float) -> None:
        self._routed = tuple(
            worker
            for worker in self._workers.values()
            if worker.standing is Standing.SERVING and worker.answered_at_s >= horizon_s
        )
        views = tuple(WorkerView(w.node_id, w.holdings, w.max_rows) for w in self._routed)
        self._routing = build_routing(SwarmView(views), self._n_expert)
        # A worker that went stale without a miss may come back by answering: look again next time.
        self._stale = any(
            worker.standing is Standing.SERVING and worker not in self._routed
            for worker in self._workers.values()
        )


def _count(holdings: Mapping[int, frozenset[int]]) -> int:
    return sum(len(experts) for experts in holdings.values())
