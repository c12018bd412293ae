"""The experts of a model as the market sees them: numbers in one row, and what each weighs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from swarmnode.errors import UsageError
from swarmnode.weights.manifest import Manifest
from swarmnode.weights.slices import ExpertRange

F32: TypeAlias = npt.NDArray[np.float32]
"""Where nothing else is said, one number an expert: [MarketShape.size]."""


@dataclass(frozen=True)
class MarketShape:
    """`n_layer`: the highest layer number + 1. `expert_bytes`: layer -> bytes of one expert, layers with routed experts
    only. Expert `e` of layer `l` has the flat number `l * n_expert + e`; arrays of the market are indexed by it.
    """

    n_layer: int
    n_expert: int
    expert_bytes: Mapping[int, int]

    def __post_init__(self) -> None:
        if not self.expert_bytes or self.n_expert < 1:
            raise UsageError("a model without routed experts has no market")
        if min(self.expert_bytes) < 0 or max(self.expert_bytes) >= self.n_layer:
            raise UsageError("a layer lies outside the model")
        if min(self.expert_bytes.values()) < 1:
            raise UsageError("an expert has no bytes")

    @classmethod
    def of(cls, manifest: Manifest) -> MarketShape:
        """The shape of a model; leading dense layers have no experts, so nothing is offered for them."""
        sizes = {number: layer.layout.expert_bytes for number, layer in manifest.layers.items()}
        return cls(max(sizes) + 1, manifest.n_expert, sizes)

    @property
    def size(self) -> int:
        """Length of a flat array: n_layer * n_expert."""
        return self.n_layer * self.n_expert

    @cached_property
    def exists(self) -> npt.NDArray[np.bool_]:
        """bool [size]: whether there is such an expert."""
        mask = np.zeros((self.n_layer, self.n_expert), np.bool_)
        mask[list(self.expert_bytes)] = True
        return mask.reshape(-1)

    @cached_property
    def n_total(self) -> int:
        """How many experts the model has."""
        return len(self.expert_bytes) * self.n_expert

    def holds(self, item: ExpertRange) -> bool:
        """Whether the model has all experts of this range."""
        return item.layer in self.expert_bytes and item.stop <= self.n_expert

    def slice_of(self, item: ExpertRange) -> slice:
        """Where a range lies in a flat array."""
        start = item.layer * self.n_expert + item.first
        return slice(start, start + item.count)

    def range_bytes(self, ranges: Iterable[ExpertRange]) -> int:
        """Bytes of these experts, exact for their layers. KeyError if a layer has no routed experts."""
        return sum(item.count * self.expert_bytes[item.layer] for item in ranges)
