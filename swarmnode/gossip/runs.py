"""The aligned runs a model is taken in, and the scarcest of a sample of them. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from swarmnode.config import MarketConfig
from swarmnode.gossip.shape import F32, MarketShape
from swarmnode.weights.slices import ExpertRange

Bools = npt.NDArray[np.bool_]


class Runs:
    """All aligned runs of a model, of `run_experts`, doubled until the budget holds at most `max_runs`."""

    def __init__(self, shape: MarketShape, budget_bytes: int, config: MarketConfig) -> None:
        self._shape = shape
        self.run = config.run_experts
        n_experts = max(0, budget_bytes) // min(shape.expert_bytes.values())
        while n_experts > config.max_runs * self.run and self.run < shape.n_expert:
            self.run *= 2
        firsts = np.arange(0, shape.n_expert, self.run)
        layers = np.array(sorted(shape.expert_bytes))
        starts = (layers[:, None] * shape.n_expert + firsts).reshape(-1)
        places = np.arange(self.run)
        inside = np.tile(firsts[:, None] + places < shape.n_expert, (len(layers), 1))
        self._inside: Bools = inside
        self._flat = np.where(inside, starts[:, None] + places, starts[:, None])
        """[runs, run]: flat numbers; a last run of a layer that is shorter repeats its first, masked by `_inside`."""
        self._bytes = np.repeat(np.array([shape.expert_bytes[int(layer)] for layer in layers]), len(firsts))

    @property
    def count(self) -> int:
        return len(self._flat)

    def scarcest(
        self,
        values: F32,
        free: Bools,
        order: npt.NDArray[np.uint32],
        n_sample: int,
        room_bytes: int,
        most: int,
    ) -> list[tuple[float, ExpertRange]]:
        """(mean value, range) of at most `most` ranges with the highest `values` (f32 [size]) among the `free` experts
        (bool [size]) of `n_sample` runs, which fit into `room_bytes` together.

        The sample is the first by `order` (u32 [runs]) of the runs with a free expert that fits; equal values are taken
        in that order. A run that does not fit whole gives its best neighbouring experts.
        """
        usable = (free[self._flat] & self._inside).any(axis=1) & (self._bytes <= room_bytes)
        candidates = np.flatnonzero(usable)
        if len(candidates) > n_sample:
            nearest = np.argpartition(order[candidates], n_sample)[:n_sample]
            candidates = candidates[nearest]
        mask = free[self._flat[candidates]] & self._inside[candidates]
        sums = np.where(mask, values[self._flat[candidates]], 0.0).sum(axis=1)
        means = sums / np.maximum(mask.sum(axis=1), 1)
        ranked = np.lexsort((order[candidates], -means))
        picked: list[tuple[float, ExpertRange]] = []
        for place in ranked:
            if len(picked) == most:
                break
            fits = int(room_bytes // self._bytes[candidates[place]])
            if fits > 0:
                value, item = self._best_window(int(candidates[place]), mask[place], values, fits)
                picked.append((value, item))
                room_bytes -= item.count * int(self._bytes[candidates[place]])
        return picked

    def _best_window(self, run: int, mask: Bools, values: F32, fits: int) -> tuple[float, ExpertRange]:
        """At most `fits` neighbouring free experts of a run: as many as there are, of those the scarcest."""
        flat = self._flat[run]
        best: tuple[int, float, int] = (0, 0.0, 0)
        start = 0
        while start < len(mask):
            stop = start
            while stop < len(mask) and mask[stop]:
                stop += 1
            count = min(fits, stop - start)
            for first in range(start, stop - count + 1 if count > 0 else start):
                mean = float(values[flat[first : first + count]].mean())
                best = max(best, (count, mean, -first))
            start = max(stop, start + 1)
        count, mean, first = best[0], best[1], -best[2]
        layer, expert = divmod(int(flat[first]), self._shape.n_expert)
        return mean, ExpertRange(layer, expert, count)
