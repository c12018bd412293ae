"""Memory for expert weights: slots in stacked tensors.

Experts of the same shape share segments whatever their layer, so a worker that holds a few experts of
many layers wastes nothing and one graph serves them all. A segment is one stacked tensor [ne0, ne1,
capacity] for each kind.
"""

from __future__ import annotations

from collections.abc import Mapping

from swarmnode.compute.devices import Device
from swarmnode.compute.ggml import api
from swarmnode.compute.layout import LayerLayout
from swarmnode.compute.tensors import (
    Arena,
    BytesLike,
    Tensor,
    allocate_on,
    bind_host_memory,
    byte_view,
)


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

    def close(self) -> None:
        """Free the tensors and their memory."""
        self.arena.close()
