"""Which holder of an expert is asked, where there are two. Pure.

Two decisions, one after the other. A worker that answers much later than the other holder is not asked (power of two
choices). Among those that are left the pairs of a layer are spread: it waits for the slowest share, so pairs go from
there to their other holder as long as the later of the two is done sooner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from swarmnode.config import DispatchConfig
from swarmnode.schedule.cost import CostModel, WorkerCost
from swarmnode.schedule.dispatch import LOCAL, Routing

I32: TypeAlias = npt.NDArray[np.int32]
F64: TypeAlias = npt.NDArray[np.float64]
Seconds: TypeAlias = Callable[[int, int], float]
"""Of a worker by index and a number of pairs: when such a share would be done."""


@dataclass(slots=True)
class Spread:
    """Pairs that stay together, as they read the same expert: who does them, who else could (or LOCAL), how many."""

    worker: int
    other: int
    n_pairs: int


class Replicas:
    """The better of two holders, by measured latency and by what else they have to do for the same layer."""

    def __init__(self, cost: CostModel, config: DispatchConfig) -> None:
        self._cost = cost
        self._margin = config.replica_margin
        self._routing = Routing()
        self._workers: list[WorkerCost] = []

    def costs(self, routing: Routing) -> list[WorkerCost]:
        """What is known of each worker of a routing, in its order."""
        if routing is not self._routing:
            self._workers = [self._cost.worker(view.node_id) for view in routing.workers]
            self._routing = routing
        return self._workers

    def owners(self, routing: Routing, layer: int, ids: I32) -> I32:
        """i32 [T * k]: the worker for each pair, or LOCAL. All pairs of an expert have the same."""
        owners = routing.owners[layer][ids].ravel()
        table = routing.seconds.get(layer)
        if table is None:
            return owners
        seconds = table[ids].ravel()
        present = set(owners.tolist())
        n_pairs = len(owners) // len(present)
        indices = present.union(seconds.tolist()) - {LOCAL}
        scores = self._scores(routing, indices, n_pairs)
        is_second = self._margin * scores[seconds] < scores[owners]
        chosen = np.where(is_second, seconds, owners)
        others = np.where(is_second, owners, seconds)
        return self._spread(ids, chosen, others, self._seconds(routing, scores, n_pairs))

    def _scores(self, routing: Routing, indices: set[int], n_pairs: int) -> F64:
        """Of the workers in question, for shares of the size at hand; the last entry is LOCAL's, which never wins.

        One size for all: by the share that each of them would have, whoever has little to do would win.
        """
        scores = np.full(len(routing.workers) + 1, np.inf)
        costs, now_s = self.costs(routing), self._cost.now()
        for index in indices:
            scores[index] = costs[index].score_s(n_pairs, now_s)
        return scores

    def _spread(self, ids: I32, chosen: I32, others: I32, seconds: Seconds) -> I32:
        if len(ids) > 1:
            return self._spread_rows(ids, chosen, others, seconds)
        # In Python: numpy's set operations cost 200 us with cold caches (see dispatch.py).
        parts = [
            Spread(worker, other, 1) for worker, other in zip(chosen.tolist(), others.tolist(), strict=True)
        ]
        if not spread(parts, seconds, self._margin):
            return chosen
        return np.array([part.worker for part in parts], np.int32)

    def _spread_rows(self, ids: I32, chosen: I32, others: I32, seconds: Seconds) -> I32:
        _, first, part_of, counts = np.unique(
            ids.ravel(), return_index=True, return_inverse=True, return_counts=True
        )
        holders = zip(chosen[first].tolist(), others[first].tolist(), counts.tolist(), strict=True)
        parts = [Spread(*of_expert) for of_expert in holders]
        if not spread(parts, seconds, self._margin):
            return chosen
        return np.array([part.worker for part in parts], np.int32)[part_of.ravel()]

    def _seconds(self, routing: Routing, scores: F64, n_pairs: int) -> Seconds:
        """When a worker would have done a share: a line through what one of `n_pairs` takes, as steep as its pairs.

        Those who are no more than the margin slower than the fastest begin where it does: nobody is preferred for
        what may be chance. How steep the line is, is the worker's word; what shares of that size took stands above it.
        """
        costs, fastest_s, now_s = self.costs(routing), scores.min(), self._cost.now()
        lines: dict[int, tuple[float, float]] = {}
        found: dict[tuple[int, int], float] = {}

        def seconds(index: int, n: int) -> float:
            known = found.get((index, n))
            if known is None:
                took_s = costs[index].took_s(n, now_s) * (costs[index].in_flight + 1)
                known = found[index, n] = max(along(index, n), took_s / self._margin)
            return known

        def along(index: int, n: int) -> float:
            line = lines.get(index)
            if line is None:
                pair_s = costs[index].pair_s(n_pairs) * (costs[index].in_flight + 1)
                score_s = scores[index]
                at_s = fastest_s if score_s < self._margin * fastest_s else score_s
                line = lines[index] = max(0.0, float(at_s) - n_pairs * pair_s), pair_s
            return line[0] + n * line[1]

        return seconds


def spread(parts: list[Spread], seconds: Seconds, margin: float) -> bool:
    """Move parts from the slowest worker to their other holder while that makes the later of the two sooner.

    Whoever has nothing of the layer yet is only asked if that is `margin` times sooner: one more share costs its own.
    True if anything was moved.
    """
    if all(part.other == LOCAL for part in parts):
        return False
    loads: dict[int, int] = {}
    for part in parts:
        if part.worker != LOCAL:
            loads[part.worker] = loads.get(part.worker, 0) + part.n_pairs
    has_moved = False
    for _ in (
        parts
    ):  # each move makes the slowest sooner, so there is an end, but nothing waits for the last of them
        if not loads:
            break
        slowest = max(loads, key=lambda worker: seconds(worker, loads[worker]))
        moved = _to_move(parts, slowest, loads, seconds, margin)
        if moved is None:
            break
        moved.worker, moved.other = moved.other, moved.worker
        loads[moved.worker] = loads.get(moved.worker, 0) + moved.n_pairs
        loads[slowest] -= moved.n_pairs
        if not loads[slowest]:
            del loads[slowest]
        has_moved = True
    return has_moved


def _to_move(
    parts: list[Spread], slowest: int, loads: dict[int, int], seconds: Seconds, margin: float
) -> Spread | None:
    """The part of the slowest worker's that its other holder has done soonest, if that is sooner at all."""
    best, best_s = None, seconds(slowest, loads[slowest])
    for part in parts:
        if part.worker != slowest or part.other == LOCAL:
            continue
        load = loads.get(part.other)
        done_s = (
            seconds(part.other, part.n_pairs) * margin
            if load is None
            else seconds(part.other, load + part.n_pairs)
        )
        if done_s < best_s:
            best, best_s = part, done_s
    return best
