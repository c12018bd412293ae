"""What a file of one architecture provides; `models.backbone` does everything that they share."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Protocol

from swarmnode.compute.tensors import Tensor
from swarmnode.models.blocks.moe import LayerOutput
from swarmnode.models.hparams import Hparams
from swarmnode.models.layer_builder import LayerBuilder
from swarmnode.models.weight_spec import WeightSpec
from swarmnode.weights.index import ModelIndex


class Architecture(Protocol):
    """Members in this order in every file (docs/models.md, "Adding an architecture")."""

    name: str
    """`general.architecture`"""

    def read_hparams(self, index: ModelIndex) -> Hparams:
        """Read and check the metadata. ModelFileError or UnsupportedModelError naming the key."""
        ...

    def weights(self, hparams: Hparams, present: Container[str]) -> dict[str, WeightSpec]:
        """All dense weights by GGUF name; `present`: the names that the file has."""
        ...

    def layer_states(
        self, hparams: Hparams, layer: int, n_ctx: int
    ) -> Mapping[str, tuple[int, tuple[int, ...]]]:
        """Name -> (ggml type, sizes) of what a slot keeps for a layer."""
        ...

    def build_layer(self, b: LayerBuilder, x: Tensor) -> LayerOutput:
        """One layer but for its routed experts. x f32 [n_embd, T]."""
        ...

    def build_logits(self, b: LayerBuilder, x: Tensor) -> Tensor:
        """x f32 [n_embd, T] behind the last layer -> logits f32 [n_vocab, T]."""
        ...
