"""All the slots of a bank, within a hard byte budget.

On the CPU they are ranges (slot_range.py): every expert of a shape in one tensor, memory for those that are held.
Where that is not to be had - GPUs, Windows, address space that counts - they are segments, which grow as experts come
and are emptied by copying experts about.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain

from swarmnode.compute.devices import Device
from swarmnode.compute.expert_graph import ExpertShape
from swarmnode.compute.layout import LayerLayout
from swarmnode.compute.slot_range import SlotRange, can_reserve
from swarmnode.compute.slots import Segment
from swarmnode.compute.tensors import allocation_bytes
from swarmnode.errors import BudgetError, DeviceError

log = logging.getLogger(__name__)

_LARGEST_GROWTH = 16
"""Most slots in a segment that is made because one more expert came without a reservation."""


class SlotPool:
    """All memory of a bank's own, and the bytes it takes.

    Without a budget nothing says how large a range would have to be: then all are segments.
    """

    def __init__(self, device: Device, budget_bytes: int | None, slots_per_range: int) -> None:
        self._device = device
        self._budget_bytes = budget_bytes
        self._segments: dict[ExpertShape, list[Segment]] = {}
        self._ranges: dict[ExpertShape, list[SlotRange]] = {}
        has_ranges = budget_bytes is not None and device.is_host and can_reserve()
        self._slots_per_range = slots_per_range if has_ranges else 0
        self.used_bytes = 0
        """Bytes allocated for weights: segments with their free slots, and the taken slots of ranges."""

    @property
    def free_bytes(self) -> int:
        """Those of them that are in slots without an expert."""
        every = [segment for segments in self._segments.values() for segment in segments]
        return sum(len(segment.free) * sum(segment.slab_bytes) for segment in every)

    def reserve(self, layout: LayerLayout, n_experts: int) -> None:
        """Make sure that `n_experts` more of this shape fit, in as few tensors as possible.

        In segments they are paid for from now on; in a range, when they are there. BudgetError if they do not fit,
        DeviceError if the device lacks memory; either way nothing is kept.
        """
        missing = n_experts - sum(len(segment.free) for segment in self._of(layout))
        if missing > 0:
            self._check_budget(layout, missing, missing * layout.expert_bytes)
            missing -= self._room_in_ranges(layout, missing)
        if missing > 0:
            self._grow(layout, missing)

    def take(self, layout: LayerLayout, near: Sequence[Segment | None] = ()) -> tuple[Segment, int]:
        """A free slot, in one of the segments of `near` if they have any; more memory if there is none.

        Errors as `reserve`.
        """
        home = self._with_room(layout, near) or self._more_room(layout)
        if isinstance(home, SlotRange):
            self._check_budget(layout, 1, layout.expert_bytes)
            self.used_bytes += layout.expert_bytes
        return home, home.free.pop()

    def give_back(self, segment: Segment, slot: int) -> bool:
        """Free a slot, and a segment with its last expert: then True. A range's memory is free at once."""
        if isinstance(segment, SlotRange):
            segment.release(slot)
            self.used_bytes -= segment.layout.expert_bytes
            return False
        segment.free.append(slot)
        if len(segment.free) < segment.capacity:
            return False
        self.free(segment)
        return True

    def free(self, segment: Segment) -> None:
        """Free the memory of a segment without experts."""
        self._of(segment.layout).remove(segment)
        self.used_bytes -= segment.allocated_bytes
        segment.close()

    def to_empty(self) -> Segment | None:
        """The segment to empty next: the free slots elsewhere take its experts. None if none can be.

        What is missing for that is allocated, within the budget; the segment frees more than that. Asked again while
        it is emptied, by a move at a time, it names the same one: that depends on capacities, and free slots stay as
        many. At the end no shape has a segment's worth of free slots, and none at all where the budget had room.
        """
        for segments in self._segments.values():
            n_free = sum(len(segment.free) for segment in segments)
            fitting = [segment for segment in segments if segment.capacity <= n_free]
            if fitting:
                return max(fitting, key=lambda segment: (segment.capacity, len(segment.free)))
            if n_free:
                source = min(segments, key=lambda segment: (segment.capacity, -len(segment.free)))
                with suppress(BudgetError, DeviceError):
                    self._grow(source.layout, source.capacity - n_free)
                    return source
        return None

    def take_outside(self, source: Segment) -> tuple[Segment, int]:
        """A free slot of another segment of the same shape, of the fullest one; `to_empty` says that there is one."""
        others = [segment for segment in self._of(source.layout) if segment.free and segment is not source]
        target = min(others, key=lambda segment: len(segment.free))
        return target, target.free.pop()

    def close(self) -> None:
        """Free everything."""
        of_a_shape: Iterable[Sequence[Segment]] = (*self._segments.values(), *self._ranges.values())
        for segment in chain.from_iterable(of_a_shape):
            segment.close()
        self._segments.clear()
        self._ranges.clear()
        self.used_bytes = 0

    def _of(self, layout: LayerLayout) -> list[Segment]:
        return self._segments.setdefault(ExpertShape.of(layout), [])

    def _ranges_of(self, layout: LayerLayout) -> list[SlotRange]:
        return self._ranges.setdefault(ExpertShape.of(layout), [])

    def _with_room(self, layout: LayerLayout, near: Sequence[Segment | None]) -> Segment | None:
        """Slots that are paid for come first."""
        every = (*self._of(layout), *self._ranges_of(layout))
        free = [segment for segment in every if segment.free]
        return min(
            free, key=lambda segment: (isinstance(segment, SlotRange), segment not in near), default=None
        )

    def _more_room(self, layout: LayerLayout) -> Segment:
        if self._room_in_ranges(layout, 1):
            return self._ranges_of(layout)[-1]
        held = sum(segment.capacity for segment in self._of(layout))
        return self._grow(layout, self._affordable(layout, min(max(1, held // 4), _LARGEST_GROWTH)))

    def _room_in_ranges(self, layout: LayerLayout, n_wanted: int) -> int:
        """Free slots in ranges, up to `n_wanted`: another range is made while they are fewer and the system lets us."""
        ranges = self._ranges_of(layout)
        n_free = sum(len(segment.free) for segment in ranges)
        while n_free < n_wanted and self._slots_per_range and self._budget_bytes is not None:
            n_slots = self._budget_bytes // layout.expert_bytes - sum(r.capacity for r in ranges)
            if n_slots < 1:
                break
            try:
                ranges.append(SlotRange(layout, min(n_slots, self._slots_per_range)))
            except DeviceError as error:
                log.info("experts are kept in segments from now on: %s", error)
                self._slots_per_range = 0
                break
            n_free += ranges[-1].capacity
        return min(n_free, n_wanted)

    def _check_budget(self, layout: LayerLayout, n_experts: int, due_bytes: int) -> None:
        if self._budget_bytes is not None and self.used_bytes + due_bytes > self._budget_bytes:
            raise BudgetError(
                f"{n_experts} more experts of layer {layout.layer} take {due_bytes} bytes; "
                f"{self.used_bytes} of the budget of {self._budget_bytes} bytes are in use"
            )

    def _affordable(self, layout: LayerLayout, wanted: int) -> int:
        """As many of the wanted slots as the budget allows, but at least one (which may then be refused)."""
        if self._budget_bytes is None:
            return wanted
        return max(1, min(wanted, (self._budget_bytes - self.used_bytes) // layout.expert_bytes))

    def _grow(self, layout: LayerLayout, capacity: int) -> Segment:
        segment = Segment(layout, capacity)
        try:
            due = sum(allocation_bytes(self._device, tensor) for tensor in segment.tensors)
            self._check_budget(layout, capacity, due)
            segment.allocate(self._device)
        except (BudgetError, DeviceError):
            segment.close()
            raise
        self.used_bytes += segment.allocated_bytes
        self._of(layout).append(segment)
        return segment
