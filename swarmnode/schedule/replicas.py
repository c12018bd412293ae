"""Which of two holders of an expert is asked. Pure."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from swarmnode.config import DispatchConfig
from swarmnode.schedule.cost import CostModel, WorkerCost
from swarmnode.schedule.dispatch import LOCAL, Routing

I32: TypeAlias = npt.NDArray[np.int32]


class Replicas:
    """The better of two holders: by measured latency, times requests under way and one (power of two choices)."""

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
        """i32 [T * k]: the worker for each pair, or LOCAL."""
        owners = routing.owners[layer][ids].ravel()
        table = routing.seconds.get(layer)
        if table is None:
            return owners
        seconds = table[ids].ravel()
        scores = self._scores(routing, owners, seconds)
        return np.where(self._margin * scores[seconds] < scores[owners], seconds, owners)

    def _scores(self, routing: Routing, owners: I32, seconds: I32) -> npt.NDArray[np.float64]:
        """Of the workers in question, for shares of the size at hand; the last entry is LOCAL's, which never wins.

        One size for all: by the share that each of them would have, whoever has little to do would win.
        """
        scores = np.full(len(routing.workers) + 1, np.inf)
        costs, now_s = self.costs(routing), self._cost.now()
        present = set(owners.tolist())
        n_pairs = len(owners) // len(present)
        for index in present.union(seconds.tolist()):
            if index != LOCAL:
                scores[index] = costs[index].score_s(n_pairs, now_s)
        return scores
