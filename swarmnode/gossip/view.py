"""Which records a node wants to hear of: all, or for a small one those of a model, some layers, some roles. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from swarmnode.gossip.records import ModelHoldings, NodeRecord, Record
from swarmnode.wire.messages import GossipDigest, GossipLink


@dataclass(frozen=True, slots=True)
class View:
    """`some`: records of nodes with one of `roles`, or that hold experts of one of `models` (in one of `layers`, if any
    are named). A leave belongs to every view. Demand belongs to `all` only.
    """

    scope: str = "all"
    roles: tuple[str, ...] = ()
    models: tuple[bytes, ...] = ()
    layers: tuple[int, ...] = ()

    @classmethod
    def of(cls, message: GossipLink | GossipDigest) -> View:
        """The view that a message names."""
        return cls(message.scope, message.roles, message.models, message.layers)

    def matches(self, record: Record) -> bool:
        """Whether the record belongs to the view."""
        if self.scope == "all":
            return True
        if self.scope == "none" or not isinstance(record, NodeRecord):
            return False
        state = record.state
        if state.leaving or any(role in self.roles for role in state.roles):
            return True
        return any(item.model in self.models and self._has_layer(item) for item in state.models)

    def _has_layer(self, item: ModelHoldings) -> bool:
        if not self.layers:
            return True
        return any(held.layer in self.layers for held in item.serving + item.fetching)


ALL = View()
