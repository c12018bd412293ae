"""What this backbone asks experts for: counted as it runs, told to the market every so often."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import trio

from swarmnode.config import MarketConfig
from swarmnode.gossip.demand import DemandCounter
from swarmnode.gossip.records import ModelDemand
from swarmnode.gossip.shape import MarketShape

Chosen: TypeAlias = Iterable[tuple[int, npt.NDArray[np.int32]]]
"""(layer, expert ids of any shape)"""


class DemandWatch:
    """Counts on trio's thread."""

    def __init__(self, shape: MarketShape, config: MarketConfig, now: Callable[[], float]) -> None:
        self._counter = DemandCounter(shape, config)
        self._config = config
        self._now = now
        self._n_passes = 0
        self._is_new = False
        self._counted_s = -math.inf
        """When something was counted last."""

    @property
    def counts(self) -> npt.NDArray[np.float64]:
        """f64 [n_layer, n_expert]: decayed pairs."""
        return self._counter.counts(self._now())

    def wants_pass(self) -> bool:
        """Whether the choices of the next pass shall be counted. Only some: it costs a copy a layer."""
        self._n_passes += 1
        return self._n_passes % self._config.count_every_pass == 0

    def count(self, chosen: Chosen, unmet: Chosen) -> None:
        """What the gate chose in a pass, and the pairs among it that no worker computed."""
        now_s = self._now()
        for layer, ids in chosen:
            self._counter.add(layer, ids, now_s)
            self._is_new, self._counted_s = True, now_s
        for layer, ids in unmet:
            self._counter.add_unmet(layer, ids, now_s)

    async def run(self, model: bytes, publish: Callable[[tuple[ModelDemand, ...]], None]) -> None:
        """Publish a sketch every `demand_interval_s` in which something was counted; and when nothing was for
        `unmet_half_life_s`, once more without what was unmet then: nobody can know any more.
        """
        has_unmet = False
        while True:
            await trio.sleep(self._config.demand_interval_s)
            is_over = has_unmet and self._now() - self._counted_s >= self._config.unmet_half_life_s
            if self._is_new or is_over:
                sketch = self._counter.sketch(self._now())
                if not self._is_new:
                    sketch = replace(sketch, unmet={})
                self._is_new, has_unmet = False, bool(sketch.unmet)
                publish((ModelDemand(model, sketch.encode()),))
