"""Which architectures can be run, and opening a model of one of them."""

from __future__ import annotations

from collections.abc import Mapping

from swarmnode.compute.devices import Device
from swarmnode.config import ModelsConfig
from swarmnode.errors import UnsupportedModelError
from swarmnode.models.architecture import Architecture
from swarmnode.models.backbone import Backbone
from swarmnode.models.base import Model
from swarmnode.models.qwen35moe import Qwen35Moe
from swarmnode.models.state import SlotBytes, n_cells, slot_bytes
from swarmnode.weights.index import ModelIndex

ARCHITECTURES: Mapping[str, Architecture] = {
    architecture.name: architecture for architecture in (Qwen35Moe(),)
}
"""By the GGUF key `general.architecture`."""


def open_model(
    index: ModelIndex, device: Device, n_ctx: int, n_slots: int, config: ModelsConfig | None = None
) -> Model:
    """Load the dense part of a model; the index must stay open as long as the model.

    On the CPU device only weights that are repacked are copied. Raises UnsupportedModelError (architecture, tensor
    types, variants), ModelFileError (metadata and tensors that contradict each other), UsageError (`n_ctx` above what
    the model was trained for, `n_slots` out of range), DeviceError (no memory for weights or states).
    """
    config = config or ModelsConfig()
    return Backbone(index, device, _architecture_of(index), n_ctx=n_ctx, n_slots=n_slots, config=config)


def state_of_slot(index: ModelIndex, n_ctx: int, config: ModelsConfig | None = None) -> SlotBytes:
    """What a slot of `n_ctx` tokens will take beside the weights; nothing is loaded. UnsupportedModelError,
    ModelFileError."""
    config = config or ModelsConfig()
    architecture = _architecture_of(index)
    hparams = architecture.read_hparams(index, with_mtp=config.mtp and index.n_mtp > 0)
    return slot_bytes(architecture, hparams, n_cells(n_ctx, config.kv_pad))


def _architecture_of(index: ModelIndex) -> Architecture:
    architecture = ARCHITECTURES.get(index.architecture)
    if architecture is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModelError(
            f"{index.paths[0]}: architecture {index.architecture!r} is not supported; supported: {known}"
        )
    return architecture
