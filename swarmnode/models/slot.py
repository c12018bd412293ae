"""Where the sequences of a model stand."""

from __future__ import annotations

from weakref import WeakSet

from swarmnode.errors import NotFiniteError
from swarmnode.models.base import Checkpoint


class Slot:
    """Where one sequence stands."""

    __slots__ = ("checkpoints", "index", "n_past", "poisoned", "unfinished")

    def __init__(self, index: int) -> None:
        self.index = index
        self.n_past = 0
        self.unfinished = False
        """A pass began and did not end: some layers have seen tokens that others have not."""
        self.poisoned = False
        """A pass ended in numbers that are not finite: some may be in the KV cache."""
        self.checkpoints: WeakSet[Checkpoint] = WeakSet()
        """Those of which the KV cache still holds every token."""

    def begin(self) -> None:
        """A pass begins: from `n_past` on, cells are written."""
        self.unfinished = True
        for checkpoint in [kept for kept in self.checkpoints if kept.n_past > self.n_past]:
            self.checkpoints.discard(checkpoint)

    def poison(self) -> None:
        """A pass ended in numbers that are not finite."""
        self.poisoned = True
        self.checkpoints.clear()  # cells behind them may hold NaN, which no mask hides


def not_finite(first: int, last: int) -> NotFiniteError:
    """The error for NaN or infinity in layers first..last: mat-muls of quantised weights turn them into zeros, and the
    zeros into an answer that looks like one.
    """
    layers = f"layer {last}" if first == last else f"layers {first} to {last}"
    return NotFiniteError(
        f"the model's numbers are not finite in {layers}: the file is damaged (compare its checksum), or "
        "a layer before got a wrong answer from its experts"
    )
