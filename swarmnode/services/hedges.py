"""When a late share is asked for a second time, and of whom."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from swarmnode.config import DispatchConfig
from swarmnode.schedule.dispatch import LOCAL, Share
from swarmnode.schedule.sending import SendPolicy
from swarmnode.services.errands import Errand, Piece
from swarmnode.services.forward import RemoteLayer
from swarmnode.services.members import Members, Worker


class Hedges:
    """Of one layer. Trio's thread."""

    def __init__(
        self,
        layer: RemoteLayer,
        workers: tuple[Worker, ...],
        members: Members,
        policy: SendPolicy,
        config: DispatchConfig,
    ) -> None:
        self._config = config
        self._members = members
        self._layer = layer
        self._workers = workers
        self._policy = policy

    def at_s(self, errand: Errand) -> float:
        """When (on the clock of `begun_s`) it is late: at p95 of this worker's times for such shares.

        Or sooner, if its second holder would have done it several times over: by its own times a worker that grows
        slower by a little each time is never late. Infinity: too little is known, or it is not wanted.
        """
        if not self._config.hedges:
            return math.inf
        has_seconds = self._layer.call.layer in self._layer.routing.seconds
        if not has_seconds and math.isinf(self.here_s(errand.pieces[:1])):  # then it has until its deadline
            return math.inf
        now_s = self._policy.cost.now()
        after_s = errand.cost.late_after_s(errand.n_pairs, now_s, errand.patience.work_s)
        if after_s is None:
            return math.inf
        second = self._second(errand)
        if second is not None and self._policy.cost.worker(second.node_id).is_known:
            second_s = self._expect_s(second, errand.n_pairs, now_s)
            after_s = min(after_s, max(self._config.hedge_min_s, self._config.hedge_times * second_s))
        return errand.begun_s + after_s

    def local_at_s(self, errand: Errand, piece: Piece, here_s: float) -> float:
        """When a late piece is computed here if nobody else is asked: when the wait has taken as long as that will.

        `here_s`: of the whole errand.

        Whenever the answer comes, the two together take at most twice the better of both. With several passes under
        way all of them would wait for the compute thread. Infinity: when its deadline is over, as the policy wants to
        see workers answer, and there was nobody else to be asked.
        """
        if math.isinf(here_s) and len(piece.asked) > 1:
            cost = self._policy.cost
            here_s = cost.local.expect(errand.n_pairs, 0, cost.now())
        return errand.begun_s + here_s * max(1, self._policy.n_passes)

    def worker(self, piece: Piece, n_pairs: int, here_s: float) -> Worker | None:
        """Whom to ask for a piece, of those not asked yet; None: the local replica is sooner, or the only one.

        `n_pairs`: of all that is late and would be asked of it, which takes `here_s` here.
        """
        now_s = self._policy.cost.now()
        best, best_s = None, here_s
        for worker in self._holders(piece.share, piece.asked):
            seconds = self._expect_s(worker, n_pairs, now_s)
            if seconds < best_s:
                best, best_s = worker, seconds
        return best

    def here_s(self, pieces: Sequence[Piece]) -> float:
        """Seconds that they would take here; infinity: the policy wants to see workers answer."""
        layer = self._layer.call.layer
        return sum(self._policy.here_s(layer, piece.share.pair_expert) for piece in pieces)

    def _expect_s(self, worker: Worker, n_pairs: int, now_s: float) -> float:
        known = self._policy.cost.worker(worker.node_id)
        return known.expect(n_pairs, now_s) * (known.in_flight + 1)

    def _second(self, errand: Errand) -> Worker | None:
        """The other holder of the first pair's expert: found without looking at all workers."""
        routing, layer = self._layer.routing, self._layer.call.layer
        if layer not in routing.seconds:
            return None
        expert = errand.pieces[0].share.pair_expert[0]
        for index in (int(routing.seconds[layer][expert]), int(routing.owners[layer][expert])):
            if index != LOCAL and self._workers[index] is not errand.worker:
                return self._workers[index]
        return None

    def _holders(self, share: Share, asked: Collection[Worker]) -> list[Worker]:
        """Who else could compute all of it now.

        Not when it was planned: who has given something up since, or asked for a pause, would refuse, and rightly.
        """
        layer = self._layer.call.layer
        if layer not in self._layer.routing.seconds:
            return []
        wanted = set(share.pair_expert.tolist())
        return [
            worker
            for worker in self._workers
            if wanted <= worker.proven.get(layer, frozenset())
            and worker not in asked
            and len(share.flat) <= worker.max_rows
            and self._members.may_have_rows(worker)
        ]
