"""Where the experts of one layer are: which of them are held, in which segment and slot."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from swarmnode.compute.bank_checks import extremes
from swarmnode.compute.combine import Ids
from swarmnode.compute.expert_graph import ExpertShape, StackedExperts
from swarmnode.compute.layout import LayerLayout
from swarmnode.compute.slots import Segment
from swarmnode.errors import DeviceError, UsageError

ABSENT = -1
"""In place of a segment or a slot: the expert is not held."""


class HeldLayer:
    """Where the experts of one layer are."""

    def __init__(self, layout: LayerLayout) -> None:
        self.layout = layout
        self.shape = ExpertShape.of(layout)
        self.segments: list[Segment | None] = []
        self.segment_of: npt.NDArray[np.int32] = np.full(layout.n_expert, ABSENT, np.int32)
        """Index into `segments` for each expert, or ABSENT."""
        self.slot_of: Ids = np.full(layout.n_expert, ABSENT, np.int32)
        self.only_segment: int | None = None
        """Index of the segment that holds every expert of the layer, if there is one: nothing is looked up then."""
        self.slots_are_ids = False
        """Whether expert e of that segment is in slot e, as in a bound layer."""
        self.stacked: StackedExperts | None = None
        """That segment, if `slots_are_ids`."""

    def refresh(self) -> None:
        """Experts came or went."""
        homes = set(self.segment_of.tolist())
        self.only_segment = homes.pop() if len(homes) == 1 and ABSENT not in homes else None
        in_order = self.slot_of.tolist() == list(range(self.layout.n_expert))
        self.slots_are_ids = in_order and self.only_segment is not None
        if self.only_segment is None or not in_order:
            self.stacked = None
        elif self.stacked is None or self.stacked.tensors is not self.segment(self.only_segment).tensors:
            self.stacked = StackedExperts(self.shape, self.segment(self.only_segment).tensors)

    def slots(self, experts: Ids) -> Ids:
        """Slots of these (held) experts, in their shape."""
        return experts if self.slots_are_ids else self.slot_of[experts]

    def common_segment(self, experts: Ids) -> int | None:
        """Index of the segment that holds all of these (held) experts; None if they are in several."""
        if self.only_segment is not None:
            return self.only_segment
        homes = self.segment_of[experts].reshape(-1)
        first = int(homes[0])
        return first if (homes == first).all() else None

    def place(self, expert: int, segment: Segment, slot: int) -> None:
        """An expert is in this slot now; `refresh` has to follow."""
        if segment not in self.segments:
            if None in self.segments:
                self.segments[self.segments.index(None)] = segment
            else:
                self.segments.append(segment)
        self.segment_of[expert] = self.segments.index(segment)
        self.slot_of[expert] = slot

    def segment(self, index: int) -> Segment:
        """By its index; DeviceError if it was freed."""
        segment = self.segments[index]
        if segment is None:
            raise DeviceError(f"layer {self.layout.layer}: an expert points to memory that was freed")
        return segment

    def held(self) -> frozenset[int]:
        """The experts that are."""
        return frozenset(np.flatnonzero(self.segment_of != ABSENT).tolist())

    def check_ids(self, ids: Ids) -> None:
        """UsageError unless all of these experts (any shape) are held."""
        if ids.size == 0:
            return
        lowest, highest = extremes(ids)
        if lowest < 0 or highest >= self.layout.n_expert:
            raise UsageError(f"layer {self.layout.layer} has experts 0..{self.layout.n_expert - 1} only")
        if self.only_segment is not None:
            return
        missing = self.segment_of[ids] == ABSENT
        if missing.any():
            raise UsageError(f"layer {self.layout.layer}: expert {int(ids[missing][0])} is not held")
