"""What a block needs to add its part of a layer to a graph."""

from __future__ import annotations

from collections.abc import Callable

from swarmnode.compute import ggml
from swarmnode.compute.columns import mul_column, mul_columns
from swarmnode.compute.graph import GraphBuilder
from swarmnode.compute.tensors import Tensor, WeightSet
from swarmnode.models.hparams import Hparams

INP_POS = "inp_pos"
KV_IDX = "kv_idx"
KQ_MASK = "kq_mask"


class LayerBuilder:
    """A graph under construction for `n_tokens` tokens of one slot, at one layer.

    `g`: the ops; `hparams`; `layer`; `n_tokens`; `n_out`: of how many tokens, the last ones, the layer's result
    is wanted; `n_kv`: how many cells of the KV cache attention looks at; `inputs`: those that the graph's layers
    share, by name. `keeps_columns(type)`: set if the tokens are of several slots, which must not change each other's
    last bits; whether mat-muls with such weights do not anyway. `tentative`: recurrent states are read and stay as
    they are, because the tokens may be taken back.
    """

    def __init__(
        self,
        g: GraphBuilder,
        weights: WeightSet,
        states: WeightSet,
        hparams: Hparams,
        *,
        slot: int,
        layer: int,
        n_tokens: int,
        n_out: int,
        n_kv: int,
        inputs: dict[str, Tensor],
        traced: list[tuple[str, str, int]] | None,
        keeps_columns: Callable[[int], bool] | None = None,
        tentative: bool = False,
    ) -> None:
        self.g = g
        self.hparams = hparams
        self.layer = layer
        self.n_tokens = n_tokens
        self.n_out = n_out
        self.n_kv = n_kv
        self.tentative = tentative
        self._weights = weights
        self._states = states
        self._slot = slot
        self._traced = traced
        self._inputs = inputs
        self._keeps_columns = keeps_columns

    # -- tensors

    def weight(self, name: str) -> Tensor:
        """This layer's weight `blk.N.<name>`."""
        return self._weights[f"blk.{self.layer}.{name}"]

    def has_weight(self, name: str) -> bool:
        return f"blk.{self.layer}.{name}" in self._weights

    def global_weight(self, name: str) -> Tensor:
        """A weight that belongs to no layer."""
        return self._weights[name]

    def has_global_weight(self, name: str) -> bool:
        return name in self._weights

    def state(self, name: str) -> Tensor:
        """This slot's and layer's state of that name."""
        return self._states[state_name(self._slot, self.layer, name)]

    # -- inputs that the backbone fills for layers that ask for them

    def inp_pos(self) -> Tensor:
        """Positions, i32 [4 * n_tokens]: the three equal streams of a text, then zeros."""
        return self._input(INP_POS, ggml.I32, 4 * self.n_tokens)

    def kv_idx(self) -> Tensor:
        """The KV cells of the tokens, i64 [n_tokens]."""
        return self._input(KV_IDX, ggml.I64, self.n_tokens)

    def kq_mask(self) -> Tensor:
        """0 where a token may look, -inf elsewhere, f16 [n_kv, n_tokens]."""
        return self._input(KQ_MASK, ggml.F16, self.n_kv, self.n_tokens)

    def _input(self, name: str, ggml_type: int, *ne: int) -> Tensor:
        if name not in self._inputs:
            self._inputs[name] = self.g.input(name, ggml_type, *ne)
        return self._inputs[name]

    # -- nodes that every block uses

    def cb(self, x: Tensor, name: str, layer: int | None = None) -> Tensor:
        """Name an intermediate, as llama.cpp's `cb`: a callback set on the model gets its values."""
        if self._traced is not None:
            layer = self.layer if layer is None else layer
            output = f"{name}-{layer}"
            self._traced.append((output, name, layer))
            self.g.output(output, self.g.cont(x))  # a copy, because a view's memory may be reused
        return x

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """x / rms(x) * weight over dimension 0."""
        return self.g.mul(self.g.rms_norm(x, self.hparams.norm_rms_eps), weight)

    def linear(self, name: str, x: Tensor) -> Tensor:
        """`blk.N.<name>.weight` times x."""
        return self.mul_mat(self.weight(f"{name}.weight"), x)

    def mul_mat(self, w: Tensor, x: Tensor) -> Tensor:
        """w [k, n], x f32 [k, T] -> f32 [n, T], each column the same bit by bit whatever T is (decision 0028)."""
        if x.ne[1] == 1:
            return mul_column(self.g, w, x)
        if w.is_repacked or self._keeps_columns is None or self._keeps_columns(w.type):
            return self.g.mul_mat(w, x)
        return mul_columns(self.g, w, x)

    def last_tokens(self, x: Tensor) -> Tensor:
        """The last `n_out` columns of x [n, n_tokens]: nobody asks for the others any more."""
        if self.n_out == self.n_tokens:
            return x
        stride = x.nb[1]
        return self.g.view(x, (x.ne[0], self.n_out), (stride,), (self.n_tokens - self.n_out) * stride)


def state_name(slot: int, layer: int, name: str) -> str:
    """The name under which a slot's state is kept."""
    return f"slot.{slot}.blk.{layer}.{name}"
