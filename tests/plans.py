"""Plans of layers that are sent wherever anybody holds them."""

from __future__ import annotations

from swarmnode.schedule.dispatch import I32, DispatchPlan, Routing, plan_pairs


def plan_layer(routing: Routing, layer: int, ids: I32) -> DispatchPlan | None:
    """Every pair to its owner; None when all are local. `ids` i32 [T, k]: the experts that were chosen for each row."""
    owners = routing.owners.get(layer)
    return None if owners is None else plan_pairs(owners[ids].ravel(), ids)
