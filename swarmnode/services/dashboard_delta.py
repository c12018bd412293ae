"""What the dashboard shows, as JSON values, and what changed between two moments of it. Pure.

A state has the sections `model`, `node`, `now` (fields), `layers` (layer -> replicas, a digit an expert) and `nodes`
(id -> fields). A state is never changed once it is made, so it may be shared and looked at on any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

State: TypeAlias = Mapping[str, Mapping[str, Any]]
Delta: TypeAlias = dict[str, Any]

FLAT = ("model", "node", "now", "layers")
"""Sections whose fields are compared one by one. They always have the same fields."""


def delta_of(before: State, after: State) -> Delta:
    """Changed fields of each section, `nodes` with the changed fields of each node (all of a new one), and `gone`: ids
    of nodes that are not there any more. What did not change is left out; {} if nothing did.
    """
    delta: Delta = {name: changed_fields(before[name], after[name]) for name in FLAT}
    old, new = before["nodes"], after["nodes"]
    nodes = {node: changed_fields(old.get(node, {}), fields) for node, fields in new.items()}
    delta["nodes"] = {node: fields for node, fields in nodes.items() if fields}
    delta["gone"] = [node for node in old if node not in new]
    return {name: value for name, value in delta.items() if value}


def changed_fields(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `after` that `before` does not have, or has otherwise."""
    if before is after:
        return {}
    return {name: value for name, value in after.items() if name not in before or before[name] != value}
