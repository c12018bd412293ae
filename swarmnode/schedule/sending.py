"""Whether a layer's pairs are sent to those who hold their experts, or computed here. Pure.

`SendAlways` sends whatever has an owner. `SendAuto` (sending_auto.py) does what is expected to take less time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from swarmnode.config import DispatchConfig
from swarmnode.schedule.cost import CostModel
from swarmnode.schedule.dispatch import DispatchPlan, Routing, plan_pairs
from swarmnode.schedule.replicas import Replicas

I32: TypeAlias = npt.NDArray[np.int32]


class Planner(Protocol):
    """Decides for one pass. Compute thread, but for `ended`."""

    is_exploring: bool
    """Whether the last plan was made to learn from, and not because it is the best."""

    def fuses(self, routing: Routing, layer: int) -> bool:
        """Whether to compute a single row's layer here without looking at what the gate chooses."""
        ...

    def plan(self, routing: Routing, layer: int, ids: I32) -> DispatchPlan | None:
        """Who computes the pairs of a layer; None: all of them here."""
        ...

    def ended(self) -> None:
        """The pass is over, or was given up. Trio's thread, while the pass does not compute."""
        ...


class SendPolicy(Protocol):
    """Makes a planner for each pass, and is told what things took."""

    cost: CostModel
    n_passes: int
    """Passes under way; whoever runs them sets it."""

    def begin(self, n_sequences: int) -> Planner:
        """A pass with rows of so many sequences begins. Compute thread."""
        ...

    def computed(self, layer: int, experts: I32, seconds: float) -> None:
        """These pairs (one expert id each) were computed here in so many seconds. Compute thread."""
        ...

    def passed(self, seconds: float) -> None:
        """A pass took so long; what several at once took is divided. Trio's thread."""
        ...

    def here_s(self, layer: int, experts: I32) -> float:
        """Seconds that it would take here; infinity: a late share waits for its deadline. Trio's thread."""
        ...


class SendAlways:
    """Every pair goes to a worker that holds its expert."""

    def __init__(self, cost: CostModel, config: DispatchConfig) -> None:
        self.cost = cost
        self.n_passes = 0
        self.is_exploring = False
        self._replicas = Replicas(cost, config)

    def begin(self, n_sequences: int) -> Planner:
        """See SendPolicy."""
        return self

    def fuses(self, routing: Routing, layer: int) -> bool:
        """See Planner."""
        return layer not in routing.owners

    def plan(self, routing: Routing, layer: int, ids: I32) -> DispatchPlan | None:
        """See Planner."""
        if layer not in routing.owners:
            return None
        return plan_pairs(self._replicas.owners(routing, layer, ids), ids)

    def ended(self) -> None:
        """See Planner: nothing is explored."""

    def computed(self, layer: int, experts: I32, seconds: float) -> None:
        """See SendPolicy: nothing depends on it."""

    def passed(self, seconds: float) -> None:
        """See SendPolicy: nothing is explored."""

    def here_s(self, layer: int, experts: I32) -> float:
        """See SendPolicy: whoever sends always wants to see workers answer."""
        return math.inf


def send_always(config: DispatchConfig, now: Callable[[], float]) -> SendAlways:
    """The policy that needs to know nothing of the model."""
    return SendAlways(CostModel(config, 0, now), config)
