"""Where the sequences of a model stand."""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakSet

from swarmnode.errors import NotFiniteError
from swarmnode.models.base import Checkpoint, F32Array


@dataclass(eq=False)
class Tentative:
    """A pass whose tokens may be taken back: it has left the slot's recurrent states as they were."""

    n_tokens: int
    ids: list[int] = field(default_factory=list)
    hidden: F32Array | None = None
    """Tokens and their last hidden states, f32 [n_tokens, n_embd], for an MTP block."""
    inputs: dict[int, tuple[F32Array, ...]] = field(default_factory=dict)
    """What the core of each recurrent layer was given, f32 [n_tokens, ...] each, to take the states on with."""


class Slot:
    """Where one sequence stands."""

    __slots__ = ("checkpoints", "index", "n_past", "poisoned", "tentative", "unfinished")

    def __init__(self, index: int) -> None:
        self.index = index
        self.n_past = 0
        self.unfinished = False
        """A pass began and did not end: some layers have seen tokens that others have not."""
        self.poisoned = False
        """A pass ended in numbers that are not finite: some may be in the KV cache."""
        self.checkpoints: WeakSet[Checkpoint] = WeakSet()
        """Those of which the KV cache still holds every token."""
        self.tentative: Tentative | None = None
        """Set from the beginning of a pass whose tokens may be taken back until they are accepted."""

    def begin(self, n_tentative: int = 0) -> None:
        """A pass begins: from `n_past` on, cells are written. `n_tentative`: its tokens, if they may be taken back."""
        self.unfinished = True
        self.tentative = Tentative(n_tentative) if n_tentative else None
        self.forget_later()

    def forget_later(self) -> None:
        """Cells from `n_past` on are about to be written: checkpoints of later positions are void."""
        for checkpoint in [kept for kept in self.checkpoints if kept.n_past > self.n_past]:
            self.checkpoints.discard(checkpoint)

    def ran(self, n_tokens: int) -> None:
        """So many tokens went through all layers. The slot holds them, unless they may be taken back."""
        if self.tentative is None:
            self.n_past += n_tokens

    def stand(self, n_past: int) -> None:
        """It is there, whatever was under way."""
        self.n_past, self.unfinished, self.tentative = n_past, False, None

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
