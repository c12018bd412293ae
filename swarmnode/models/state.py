"""The memory of the sequences: KV caches and recurrent states, allocated once for all slots.

Each slot also has two buffers in which a layer's graph leaves its residual and shared-expert output for the next
layer's graph, so that neither crosses between host and device while the routed experts are computed. Where the
tokens of several slots go through a graph together, it has others (batch_buffers).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from swarmnode.compute import ggml
from swarmnode.compute.devices import Device
from swarmnode.compute.tensors import Tensor, WeightSet
from swarmnode.counts import counted
from swarmnode.errors import DeviceError
from swarmnode.models.architecture import Architecture
from swarmnode.models.base import F32Array
from swarmnode.models.batch_buffers import allocate_batch, batch_sizes, n_bytes_of
from swarmnode.models.hparams import Hparams
from swarmnode.models.layer_builder import state_name


@dataclass(frozen=True)
class SlotBytes:
    """What one slot keeps between tokens. `cache`: K and V of every token of its context; `recurrent`: states and
    convolutions, whatever the context."""

    cache: int
    recurrent: int

    @property
    def total(self) -> int:
        return self.cache + self.recurrent


def n_cells(n_ctx: int, kv_pad: int) -> int:
    """Cells of a KV cache for so many tokens: whole steps of the sizes that graphs are kept for."""
    return -(-n_ctx // kv_pad) * kv_pad


def slot_bytes(architecture: Architecture, hparams: Hparams, n_cells: int) -> SlotBytes:
    """Of a slot whose KV cache has so many cells."""
    cache = recurrent = 0
    for layer in range(hparams.n_layer + hparams.n_mtp):
        for ggml_type, ne in architecture.layer_states(hparams, layer, n_cells).values():
            n_bytes = ggml.row_bytes(ggml_type, ne[0]) * math.prod(ne[1:])
            if hparams.recurrent[layer]:
                recurrent += n_bytes
            else:
                cache += n_bytes
    return SlotBytes(cache, recurrent)


class SlotStates:
    """States of `n_slots` sequences of up to `n_ctx` tokens. DeviceError if the device has not the memory."""

    def __init__(
        self,
        device: Device,
        architecture: Architecture,
        hparams: Hparams,
        *,
        n_slots: int,
        n_ctx: int,
        n_ubatch: int,
    ) -> None:
        between = batch_sizes(architecture, hparams, n_slots=n_slots, n_cells=n_ctx)
        _check_memory(device, architecture, hparams, n_slots, n_ctx, n_bytes_of(between))
        self.tensors = WeightSet(device)
        self._recurrent: list[list[str]] = [[] for _ in range(n_slots)]
        self._caches: list[list[str]] = [[] for _ in range(n_slots)]
        try:
            for slot in range(n_slots):
                self._allocate(slot, architecture, hparams, n_ctx)
                for name in ("residual", "shared"):
                    self.tensors.state(_buffer_name(slot, name), ggml.F32, (hparams.n_embd, n_ubatch))
            self.batch = allocate_batch(self.tensors, between) if between else None
            """For one token of each of several slots; None if there is only one."""
        except BaseException:
            self.tensors.close()
            raise

    def _allocate(self, slot: int, architecture: Architecture, hparams: Hparams, n_ctx: int) -> None:
        for layer in range(hparams.n_layer + hparams.n_mtp):
            for name, (ggml_type, ne) in architecture.layer_states(hparams, layer, n_ctx).items():
                full_name = state_name(slot, layer, name)
                self.tensors.state(full_name, ggml_type, ne)
                kind = self._recurrent if hparams.recurrent[layer] else self._caches
                kind[slot].append(full_name)

    @property
    def n_bytes(self) -> int:
        """Memory of all slots and of the buffers between graphs."""
        return self.tensors.allocated_bytes

    def residual(self, slot: int) -> Tensor:
        """f32 [n_embd, n_ubatch]"""
        return self.tensors[_buffer_name(slot, "residual")]

    def shared(self, slot: int) -> Tensor:
        """f32 [n_embd, n_ubatch]"""
        return self.tensors[_buffer_name(slot, "shared")]

    def clear(self, slot: int, *, with_cache: bool = False) -> None:
        """Zero the recurrent states. KV cells need no clearing, as the mask hides those not written since, unless
        they hold NaN or infinity, which a weight of 0 does not hide: `with_cache`.
        """
        for name in self._recurrent[slot]:
            self.tensors.clear(name)
        if with_cache:
            for name in self._caches[slot]:
                self.tensors.clear(name)

    @property
    def recurrent_bytes(self) -> int:
        """Bytes that `read_recurrent` gives."""
        return sum(self.tensors[name].n_bytes for name in self._recurrent[0])

    def read_recurrent(self, slot: int) -> tuple[F32Array, ...]:
        """Copies of the recurrent and convolution states, f32, layer by layer."""
        return tuple(self.tensors.read(name) for name in self._recurrent[slot])

    def write_recurrent(self, slot: int, values: Sequence[F32Array]) -> None:
        """Set what `read_recurrent` gave."""
        for name, state in zip(self._recurrent[slot], values, strict=True):
            self.tensors.write(name, state)

    def close(self) -> None:
        """Free the memory."""
        self.tensors.close()


def _check_memory(
    device: Device, architecture: Architecture, hparams: Hparams, n_slots: int, n_ctx: int, n_bytes: int
) -> None:
    """DeviceError for states and `n_bytes` of buffers larger than the device's memory, which the system may promise all
    the same.
    """
    n_bytes += n_slots * slot_bytes(architecture, hparams, n_ctx).total
    available = device.info.memory_total_bytes
    if 0 < available < n_bytes:
        raise DeviceError(
            f"the states of {counted(n_slots, 'sequence')} of {counted(n_ctx, 'token')} take {n_bytes} bytes of "
            f"memory, but {device.info.name} has {available}: ask for a shorter context or fewer sequences"
        )


def _buffer_name(slot: int, name: str) -> str:
    return f"slot.{slot}.{name}"
