"""Memory for expert weights: segments of slots in stacked tensors, within a hard byte budget.

Experts of the same shape share segments whatever their layer, so a worker that holds a few experts of
many layers wastes nothing and one graph serves them all. A segment is one stacked tensor [ne0, ne1,
capacity] for each kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from swarmnode.compute.devices import Device
from swarmnode.compute.expert_graph import ExpertShape
from swarmnode.compute.ggml import api
from swarmnode.compute.layout import LayerLayout
from swarmnode.compute.tensors import (
    Arena,
    BytesLike,
    Tensor,
    allocate_on,
    allocation_bytes,
    bind_host_memory,
    byte_view,
)
from swarmnode.errors import BudgetError, DeviceError

_LARGEST_GROWTH = 16
"""Most slots in a segment that is made because one more expert came without a reservation."""


class Segment:
    """Stacked tensors of `capacity` experts of one shape; a slot is one index of them."""

    def __init__(self, layout: LayerLayout, capacity: int) -> None:
        self.layout = layout
        """Of a layer whose experts have this shape."""
        self.capacity = capacity
        self.arena = Arena(len(layout.tensors))
        self.kinds = layout.kinds
        self.slab_bytes = tuple(tensor.n_bytes for tensor in layout.tensors)
        self.tensors: list[Tensor] = [
            self.arena.new_tensor(tensor.ggml_type, (tensor.ne0, tensor.ne1, capacity))
            for tensor in layout.tensors
        ]
        self.free: list[int] = []
        """Slots without an expert; the last is handed out first."""
        self.allocated_bytes = 0
        self._backing: list[object] = []

    def allocate(self, device: Device) -> None:
        """Give the tensors memory of the device; DeviceError if it has none left."""
        for kind, tensor in zip(self.kinds, self.tensors, strict=True):
            self.allocated_bytes += allocate_on(device, self.arena, tensor, kind)[1]
        self.free = list(range(self.capacity))[::-1]

    def bind(self, stacked: Mapping[str, BytesLike]) -> None:
        """Point the tensors at host memory, which is kept and must not change; sizes were checked."""
        for kind, tensor in zip(self.kinds, self.tensors, strict=True):
            view = byte_view(stacked[kind], kind)
            bind_host_memory(self.arena, tensor, view.ctypes.data)
            self._backing.append(view)

    def write(self, slot: int, slabs: Mapping[str, BytesLike], n_slots: int = 1) -> None:
        """Copy the slabs of `n_slots` experts into slots from `slot` on; sizes were checked."""
        for kind, tensor, n_bytes in zip(self.kinds, self.tensors, self.slab_bytes, strict=True):
            address = byte_view(slabs[kind], kind).ctypes.data
            api.ggml_backend_tensor_set(tensor.pointer, address, slot * n_bytes, n_slots * n_bytes)

    def copy(self, slot: int, target: Segment, target_slot: int) -> None:
        """Copy the expert in a slot into one of another segment of its shape, a slab at a time."""
        for kind, tensor, n_bytes in zip(self.kinds, target.tensors, self.slab_bytes, strict=True):
            slab = byte_view(self.read(slot, kind), kind)
            api.ggml_backend_tensor_set(tensor.pointer, slab.ctypes.data, target_slot * n_bytes, n_bytes)

    def read(self, slot: int, kind: str) -> bytearray:
        """A copy of the slab in a slot, as the device holds it."""
        index = self.kinds.index(kind)
        n_bytes = self.slab_bytes[index]
        data = bytearray(n_bytes)
        address = byte_view(data, kind).ctypes.data
        api.ggml_backend_tensor_get(self.tensors[index].pointer, address, slot * n_bytes, n_bytes)
        return data


class SlotPool:
    """All allocated segments of a bank and the bytes they take."""

    def __init__(self, device: Device, budget_bytes: int | None) -> None:
        self._device = device
        self._budget_bytes = budget_bytes
        self._segments: dict[ExpertShape, list[Segment]] = {}
        self.used_bytes = 0
        """Bytes allocated for weights, free slots included."""

    @property
    def free_bytes(self) -> int:
        """Bytes of the slots without an expert."""
        every = [segment for segments in self._segments.values() for segment in segments]
        return sum(len(segment.free) * sum(segment.slab_bytes) for segment in every)

    def reserve(self, layout: LayerLayout, n_experts: int) -> None:
        """Make sure that `n_experts` more of this shape fit, in as few segments as possible.

        BudgetError if they do not, DeviceError if the device lacks memory; either way nothing is kept.
        """
        missing = n_experts - sum(len(segment.free) for segment in self._of(layout))
        if missing > 0:
            self._grow(layout, missing)

    def take(self, layout: LayerLayout) -> tuple[Segment, int]:
        """A free slot; a new segment if there is none. Errors as `reserve`."""
        segments = self._of(layout)
        if not any(segment.free for segment in segments):
            held = sum(segment.capacity for segment in segments)
            self._grow(layout, self._affordable(layout, min(max(1, held // 4), _LARGEST_GROWTH)))
        segment = next(segment for segment in self._of(layout) if segment.free)
        return segment, segment.free.pop()

    def give_back(self, segment: Segment, slot: int) -> bool:
        """Free a slot, and the segment with its last expert: then True."""
        segment.free.append(slot)
        if len(segment.free) < segment.capacity:
            return False
        self.free(segment)
        return True

    def free(self, segment: Segment) -> None:
        """Free the memory of a segment without experts."""
        self._of(segment.layout).remove(segment)
        self.used_bytes -= segment.allocated_bytes
        segment.arena.close()

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
        for segments in self._segments.values():
            for segment in segments:
                segment.arena.close()
        self._segments.clear()
        self.used_bytes = 0

    def _of(self, layout: LayerLayout) -> list[Segment]:
        return self._segments.setdefault(ExpertShape.of(layout), [])

    def _affordable(self, layout: LayerLayout, wanted: int) -> int:
        """As many of the wanted slots as the budget allows, but at least one (which may then be refused)."""
        if self._budget_bytes is None:
            return wanted
        return max(1, min(wanted, (self._budget_bytes - self.used_bytes) // layout.expert_bytes))

    def _grow(self, layout: LayerLayout, capacity: int) -> None:
        segment = Segment(layout, capacity)
        try:
            due = sum(allocation_bytes(self._device, tensor) for tensor in segment.tensors)
            if self._budget_bytes is not None and self.used_bytes + due > self._budget_bytes:
                raise BudgetError(
                    f"{capacity} more experts of layer {layout.layer} take {due} bytes; "
                    f"{self.used_bytes} of the budget of {self._budget_bytes} bytes are in use"
                )
            segment.allocate(self._device)
        except (BudgetError, DeviceError):
            segment.arena.close()
            raise
        self.used_bytes += segment.allocated_bytes
        self._of(layout).append(segment)
