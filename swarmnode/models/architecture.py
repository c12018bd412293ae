"""What a file of one architecture provides; `models.backbone` does everything that they share."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Protocol

from swarmnode.compute.tensors import Tensor
from swarmnode.models.blocks.moe import LayerOutput
from swarmnode.models.blocks.steps import Projected, StepShapes
from swarmnode.models.hparams import Hparams
from swarmnode.models.layer_builder import LayerBuilder
from swarmnode.models.weight_spec import WeightSpec
from swarmnode.weights.index import ModelIndex


class Architecture(Protocol):
    """Members in this order in every file (docs/models.md, "Adding an architecture")."""

    name: str
    """`general.architecture`"""

    def read_hparams(self, index: ModelIndex, *, with_mtp: bool = False) -> Hparams:
        """Read and check the metadata, of an MTP block, too, if it is to be used. ModelFileError or
        UnsupportedModelError naming the key.
        """
        ...

    def weights(self, hparams: Hparams, present: Container[str]) -> dict[str, WeightSpec]:
        """All dense weights by GGUF name; `present`: the names that the file has."""
        ...

    def layer_states(
        self, hparams: Hparams, layer: int, n_ctx: int
    ) -> Mapping[str, tuple[int, tuple[int, ...]]]:
        """Name -> (ggml type, sizes) of what a slot keeps for a layer."""
        ...

    def step_shapes(self, hparams: Hparams, layer: int) -> StepShapes:
        """What the steps below hand on."""
        ...

    def build_pre(self, b: LayerBuilder, x: Tensor) -> Projected:
        """x f32 [n_embd, T] -> what attention needs of every row; row by row."""
        ...

    def build_core(self, b: LayerBuilder, into: Sequence[Tensor]) -> Tensor:
        """The only step that reads and writes a slot's state: T new tokens of one slot, in order."""
        ...

    def build_post(self, b: LayerBuilder, x: Tensor, out: Tensor, kept: Tensor) -> LayerOutput:
        """The core's output, what `build_pre` kept, and its x -> the rest of the layer but for its routed experts, for
        the last `n_out` rows; row by row.
        """
        ...

    def build_hidden(self, b: LayerBuilder, x: Tensor) -> Tensor:
        """x f32 [n_embd, T] behind the last layer -> the last hidden state, of the same sizes."""
        ...

    def build_logits(self, b: LayerBuilder, hidden: Tensor) -> Tensor:
        """What `build_hidden` gave -> logits f32 [n_vocab, T]."""
        ...

    # -- the MTP block (b.layer is n_layer), if hparams.n_mtp says that there is one; between `build_nextn_input` and
    # -- `build_nextn_hidden` it is a layer of the steps above

    def build_nextn_input(self, b: LayerBuilder, embedding: Tensor, hidden: Tensor) -> Tensor:
        """Embeddings of the next tokens and hidden states, f32 [n_embd, T] each -> x f32 [n_embd, T]."""
        ...

    def build_nextn_fill(self, b: LayerBuilder, x: Tensor) -> None:
        """Write into the slot's state what later tokens will look at, and nothing else."""
        ...

    def build_nextn_hidden(self, b: LayerBuilder, x: Tensor) -> Tensor:
        """x f32 [n_embd, T] behind the block -> its hidden state, of the same sizes."""
        ...

    def build_nextn_logits(self, b: LayerBuilder, hidden: Tensor) -> Tensor:
        """What `build_nextn_hidden` gave -> logits f32 [n_vocab, T]."""
        ...


def into_name(layer: int, place: int) -> str:
    """The output that keeps an input of a recurrent layer's core."""
    return f"into {layer} {place}"


def build_layer(architecture: Architecture, b: LayerBuilder, x: Tensor) -> LayerOutput:
    """One layer of one slot but for its routed experts: the three steps in one graph. x f32 [n_embd, T].

    What the core of a recurrent layer is given is an output (`into_name`) if the tokens are tentative.
    """
    projected = architecture.build_pre(b, x)
    if b.tentative and b.hparams.recurrent[b.layer]:
        for place, tensor in enumerate(projected.into):
            b.g.output(into_name(b.layer, place), b.g.cont(tensor))
    return architecture.build_post(b, x, architecture.build_core(b, projected.into), projected.kept)
