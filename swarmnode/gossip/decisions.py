"""What a node decides in the market, and what it looks at for that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from swarmnode.gossip.shape import F32
from swarmnode.weights.slices import ExpertRange


class View(Protocol):
    """What a decision looks at (coverage.MarketView). Replicas and demand are flat f32 [size]; our own claims and
    replicas are not among them.
    """

    @property
    def n_nodes(self) -> int: ...
    @property
    def n_claiming(self) -> int: ...
    @property
    def replicas(self) -> F32: ...
    @property
    def demand(self) -> F32: ...
    def settled(self, item: ExpertRange, since_s: float) -> F32: ...


@dataclass(frozen=True)
class Claim:
    """Publish `item` as `fetching` (it is in `Volunteer.fetching` already)."""

    item: ExpertRange


@dataclass(frozen=True)
class Withdraw:
    """Publish `item` no longer: others were before us."""

    item: ExpertRange


@dataclass(frozen=True)
class Fetch:
    """Download `item`, test it, then call `served` or `failed`."""

    item: ExpertRange


@dataclass(frozen=True)
class Drop:
    """Publish `item` no longer, then free its memory and disk, then call `freed`."""

    item: ExpertRange


Decision: TypeAlias = Claim | Withdraw | Fetch | Drop
