"""When a late share is asked for a second time, and of whom."""

from __future__ import annotations

import math

from swarmnode.config import DispatchConfig
from swarmnode.schedule.cost import WorkerCost
from swarmnode.schedule.dispatch import Share
from swarmnode.schedule.sending import SendPolicy
from swarmnode.services.forward import RemoteLayer
from swarmnode.services.members import Standing, Worker


class Hedges:
    """Of one layer. Trio's thread."""

    def __init__(
        self,
        layer: RemoteLayer,
        workers: tuple[Worker, ...],
        policy: SendPolicy,
        config: DispatchConfig,
    ) -> None:
        self._is_on = config.hedges
        self._layer = layer
        self._workers = workers
        self._policy = policy

    def at_s(self, share: Share, cost: WorkerCost, begun_s: float) -> float:
        """When (on the clock of `begun_s`) to ask elsewhere: at p95 of this worker's times for such requests.

        Where nobody else holds the share there is only the local copy. It is computed when the wait has taken as long
        as that will: whenever the answer comes, the two together take at most twice the better of both. With several
        passes under way all of them would wait for the compute thread.
        Infinity: not at all, because too little is known or there is nobody, or it is not wanted.
        """
        if not self._is_on:
            return math.inf
        after_s = cost.hedge_after_s(len(share.flat))
        if after_s is None:
            return math.inf
        if not self._holders(share, cost):
            after_s = max(after_s, self._here_s(share) * max(1, self._policy.n_passes))
        return begun_s + after_s

    def worker(self, share: Share, late: Worker) -> Worker | None:
        """Whom to ask, other than `late`; None: the local replica is sooner, or the only one."""
        cost = self._policy.cost
        n_pairs, now_s = len(share.flat), cost.now()
        best, best_s = None, self._here_s(share)
        for worker in self._holders(share, cost.worker(late.node_id)):
            known = cost.worker(worker.node_id)
            seconds = known.expect(n_pairs, now_s) * (known.in_flight + 1)
            if seconds < best_s:
                best, best_s = worker, seconds
        return best

    def _here_s(self, share: Share) -> float:
        return self._policy.here_s(self._layer.call.layer, share.pair_expert)

    def _holders(self, share: Share, late: WorkerCost) -> list[Worker]:
        """Who else could compute all of it now."""
        layer, views = self._layer.call.layer, self._layer.routing.workers
        if layer not in self._layer.routing.seconds:
            return []
        wanted = set(share.pair_expert.tolist())
        return [
            worker
            for worker, view in zip(self._workers, views, strict=True)
            if wanted <= view.holdings.get(layer, frozenset())
            and self._policy.cost.worker(worker.node_id) is not late
            and worker.standing is Standing.SERVING
            and len(share.flat) <= worker.max_rows
        ]
