"""How large the numbers of a layer's experts are, so that a reply with much larger ones is looked at before it is used.

One row of 3e38 makes a pass end in infinities, and one of 1e5 in an answer about nothing. Only numbers that were
computed here are learned from. Belongs to the compute thread.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from swarmnode.wire.tensors import MAX_F16

F32: TypeAlias = npt.NDArray[np.float32]

MANY_TIMES = 16.0
"""Larger than the largest number known by this factor is suspicious. An honest outlier costs the computing of one row,
once: then it is known. Above MAX_F16 it does so for every reply, whatever is known: hardly a model has such numbers."""


class Magnitudes:
    """The largest number known of each layer. What is known of others goes for a layer of which nothing is yet."""

    def __init__(self) -> None:
        self._largest: dict[int, float] = {}
        self._largest_of_all = 0.0

    def knows(self, layer: int) -> bool:
        """Whether anything was computed here of that layer."""
        return layer in self._largest

    def learn(self, layer: int, rows: F32) -> None:
        """Rows [R, n_embd] that were computed here."""
        largest = _largest(rows)
        if np.isfinite(largest):
            self._largest[layer] = max(largest, self._largest.get(layer, 0.0))
            self._largest_of_all = max(largest, self._largest_of_all)

    def suspicious_row(self, layer: int, rows: F32) -> int | None:
        """Of a reply's rows f32 [R, n_embd] (finite) that with the largest number, if it is suspiciously large."""
        bound = min(MANY_TIMES * self._largest.get(layer, self._largest_of_all), MAX_F16)
        if _largest(rows) <= bound:
            return None
        return int(np.maximum(rows.max(1), -rows.min(1)).argmax())


def _largest(rows: F32) -> float:
    return max(float(rows.max()), -float(rows.min()))
