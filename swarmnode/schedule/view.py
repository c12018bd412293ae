"""What the planner sees of the swarm: frozen, built by services/members.py, never a live object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class SwarmView:
    """All workers that may be sent rows now, in a stable order."""

    workers: tuple[WorkerView, ...] = field(default=())
