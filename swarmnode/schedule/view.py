"""What the planner sees of the swarm: frozen, built by services/members.py, never a live object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from swarmnode.identity import NodeId


@dataclass(frozen=True)
class WorkerView:
    """One worker that may be sent rows now.

    `holdings` maps a layer to the ids of the routed experts held; `max_rows` is the widest batch (pairs of row and
    expert in one request) for which the worker's self-test kept the accuracy.
    """

    node_id: NodeId
    holdings: Mapping[int, frozenset[int]]
    max_rows: int

    @cached_property
    def table(self) -> npt.NDArray[np.bool_]:
        """`holdings` as bool [layers, experts], as large as the highest of each needs. Not to be written to."""
        n_expert = 1 + max((max(held) for held in self.holdings.values() if held), default=-1)
        table = np.zeros((1 + max(self.holdings, default=-1), n_expert), np.bool_)
        for layer, held in self.holdings.items():
            table[layer, list(held)] = True
        return table


@dataclass(frozen=True)
class SwarmView:
    """All workers that may be sent rows now, in a stable order."""

    workers: tuple[WorkerView, ...] = field(default=())
