"""Which routed experts of this process count as in memory: the most wanted ones, within a budget. Pure.

Counted by layer as the gate chooses, and placed anew after each prompt: what a prompt chose is what its answer will
choose, and a ranking that was made once gains little (anchors: 3 % against 24 %). Older counts fade with every placing.

Without a budget there is nothing to place: whatever was computed here once is taken to be in memory from then on. Where
that is wrong, because the file is larger than memory, calls take longer, which the cost model learns.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Mask: TypeAlias = npt.NDArray[np.bool_]
I32: TypeAlias = npt.NDArray[np.int32]

FORGET = 0.5
"""What each placing leaves of the counts before it."""
STAY = 1.25
"""An expert that is in memory stays unless another was wanted so many times as often: moving it reads 6 MB."""


@dataclass(frozen=True)
class Placing:
    """What to bring into memory and what may go; (layer, expert)."""

    masks: Mapping[int, Mask]
    """bool [n_expert] by layer: what is in memory afterwards."""
    enter: tuple[tuple[int, int], ...]
    leave: tuple[tuple[int, int], ...]


class Residents:
    """Counts, and what is in memory. Any thread may read `masks` and `cold_share`: they are replaced as a whole."""

    def __init__(self, expert_bytes: Mapping[int, int], n_expert: int, budget_bytes: int | None) -> None:
        """`expert_bytes`: of one expert, by layer; `budget_bytes`: of all that may be in memory, None: no limit."""
        self._layers = sorted(expert_bytes)
        self._row = {layer: row for row, layer in enumerate(self._layers)}
        self._bytes = np.array([expert_bytes[layer] for layer in self._layers], np.int64)
        self.n_expert = n_expert
        self.budget_bytes = budget_bytes
        self._lock = threading.Lock()
        """What is computed is told from either thread."""
        self._counts = np.zeros((len(self._layers), n_expert))
        self.masks: Mapping[int, Mask] = {
            layer: _frozen(np.zeros(n_expert, np.bool_)) for layer in self._layers
        }
        self.cold_share: Mapping[int, float] = dict.fromkeys(self._layers, 1.0)
        """By layer: of the pairs that the gate chooses, the part whose experts are not in memory."""

    @property
    def mean_expert_bytes(self) -> int:
        """Of one expert, over all layers."""
        return int(self._bytes.mean())

    def count(self, layer: int, experts: I32) -> None:
        """The gate chose these experts of a layer (any shape; repetitions count)."""
        row = self._row.get(layer)
        if row is not None:
            self._counts[row] += np.bincount(experts.ravel(), minlength=self.n_expert)[: self.n_expert]

    def computed(self, layer: int, experts: I32) -> None:
        """These experts were computed here: without a budget they count as in memory from now on."""
        if self.budget_bytes is not None:
            return
        mask = self.masks.get(layer)
        if mask is None or mask[experts].all():
            return
        with self._lock:
            grown = self.masks[layer].copy()
            grown[experts] = True
            self.masks = {**self.masks, layer: _frozen(grown)}
            share = 0.0 if grown.all() else float(1 - grown.mean())
            self.cold_share = {**self.cold_share, layer: share}

    def n_cold(self, layer: int, experts: I32) -> int:
        """How many distinct ones of these are not in memory."""
        mask = self.masks.get(layer)
        if mask is None:
            return 0
        return len(set(experts[~mask[experts]].tolist()))

    def place(self) -> Placing | None:
        """The hottest experts that fit the budget; None if there is no budget. `publish` makes it so."""
        if self.budget_bytes is None:
            return None
        before = np.stack([self.masks[layer] for layer in self._layers])
        heat = self._counts / self._bytes[:, None]
        heat = np.where(before, STAY * heat + 1e-30, heat)
        after = self._hottest(heat)
        self._counts *= FORGET
        return Placing(
            {layer: _frozen(after[row].copy()) for row, layer in enumerate(self._layers)},
            self._named(after & ~before),
            self._named(before & ~after),
        )

    def publish(self, placing: Placing) -> None:
        """It is in memory now."""
        self.masks = placing.masks
        self.cold_share = {layer: self._cold_share(row, placing) for row, layer in enumerate(self._layers)}

    def _hottest(self, heat: npt.NDArray[np.float64]) -> Mask:
        chosen = np.zeros(heat.shape, np.bool_)
        left_bytes = self.budget_bytes or 0
        order = np.argsort(-heat, axis=None, kind="stable")
        sizes = np.repeat(self._bytes, self.n_expert)[order]
        wanted = heat.ravel()[order] > 0
        fits = wanted & (
            np.cumsum(sizes) <= left_bytes
        )  # of layers of equal sizes this is all there is to it
        chosen.ravel()[order[fits]] = True
        left_bytes -= int(sizes[fits].sum())
        for position in np.flatnonzero(wanted & ~fits & (sizes <= left_bytes)).tolist():
            if sizes[position] <= left_bytes:
                chosen.ravel()[order[position]] = True
                left_bytes -= int(sizes[position])
            if left_bytes < int(self._bytes.min()):
                break
        return chosen

    def _named(self, cells: Mask) -> tuple[tuple[int, int], ...]:
        return tuple((self._layers[row], expert) for row, expert in np.argwhere(cells).tolist())

    def _cold_share(self, row: int, placing: Placing) -> float:
        counts = self._counts[row]
        total = float(counts.sum())
        mask = placing.masks[self._layers[row]]
        if mask.all():
            return 0.0
        return float(counts[~mask].sum()) / total if total else float(1 - mask.mean())


def _frozen(mask: Mask) -> Mask:
    mask.flags.writeable = False
    return mask
