"""The three steps of a layer, and what they hand on.

Only the middle one, the core, looks at what a slot keeps. The others treat every row by itself, so the rows of several
slots may go through them together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from swarmnode.compute.tensors import Tensor


class Projected(NamedTuple):
    """What the first step of a layer makes of T rows; all f32."""

    into: tuple[Tensor, ...]
    """For the core, with the sizes of StepShapes.into and then T. Each row is contiguous."""
    kept: Tensor
    """For the last step: [n, T]."""


@dataclass(frozen=True)
class StepShapes:
    """Sizes, for one row and in ggml's order, of what the steps of a layer hand on; all f32."""

    into: tuple[tuple[int, ...], ...]
    """Of each input of the core."""
    out: tuple[int, ...]
    """Of the core's output."""
    kept: tuple[int, ...]
    """Of what skips the core: one size."""
