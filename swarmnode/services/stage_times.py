"""How long the parts of passes take between the layers that are sent out."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import NamedTuple

_REMEMBERED = 0.9
"""What a stage leaves of the time of the one before."""
_MOST_STAGES = 4096


class Stage(NamedTuple):
    """A part of a pass: behind this layer (-1: from the beginning) to the next one that is sent out, or to the end."""

    n_rows: int
    layer: int


class StageTimes:
    """The longest lately of each stage: where it ends is decided while it runs, so its time may change at once."""

    def __init__(self) -> None:
        self._longest_s: OrderedDict[Stage, float] = OrderedDict()

    def expected_s(self, stage: Stage) -> float:
        """Seconds; infinity for one that never ran."""
        return self._longest_s.get(stage, math.inf)

    def add(self, stage: Stage, seconds: float) -> None:
        """It took so long. Of too many, those that did not run for longest are forgotten."""
        self._longest_s[stage] = max(seconds, _REMEMBERED * self._longest_s.get(stage, 0.0))
        self._longest_s.move_to_end(stage)
        if len(self._longest_s) > _MOST_STAGES:
            self._longest_s.popitem(last=False)
