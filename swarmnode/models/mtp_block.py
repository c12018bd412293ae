"""The graphs of a model's MTP block: entering tokens into its KV cache, and guessing one token more."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from swarmnode.compute import ggml
from swarmnode.compute.bank import ExpertBank
from swarmnode.compute.expert_graph import StackedExperts, add_routed_experts
from swarmnode.compute.graph import Graph, GraphBuilder, Workspace
from swarmnode.compute.row_table import RowTable
from swarmnode.compute.tensors import Tensor
from swarmnode.models.architecture import build_layer
from swarmnode.models.base import F32Array
from swarmnode.models.blocks.nextn import EMBEDDING
from swarmnode.models.graph_sources import GraphSources
from swarmnode.models.layer_builder import INP_POS, KQ_MASK, KV_IDX, LayerBuilder
from swarmnode.models.layer_graphs import AttentionInputs
from swarmnode.weights.expert_layers import tensor_name
from swarmnode.weights.index import ModelIndex

_EMBEDDING, _GIVEN = "embedding", "given"
"""Inputs, f32 [T, n_embd]: of the next tokens, and the hidden states."""
_HIDDEN, _LOGITS, _SQUARES = "hidden", "logits", "squares"
_MAX_NODES = 288
"""Tensors of a graph, views included; those for experts come on top."""


class MtpBlock:
    """Runs the block for one slot at a time. Its routed experts are computed here, in the same graph: nobody is asked
    (decision 0036).
    """

    def __init__(
        self,
        sources: GraphSources,
        index: ModelIndex,
        embeddings: RowTable,
        attention_inputs: AttentionInputs,
        n_kv_of: Callable[[int], int],
    ) -> None:
        """`embeddings`: the model's, if the block has none. `n_kv_of(n)`: cells that attention looks at for n tokens.

        ModelFileError, UnsupportedModelError for its experts; DeviceError without memory.
        """
        self._sources = sources
        self._layer = sources.hparams.n_layer
        self._attention_inputs = attention_inputs
        self._n_kv_of = n_kv_of
        self._embeddings = _own_embeddings(index, self._layer) or embeddings
        self._bank = ExpertBank(sources.device)
        self._experts = self._bind_experts(index)
        self._workspace = Workspace(sources.device)
        self._steps: dict[int, tuple[int, Graph]] = {}
        """By slot: the cells that it looks at, and the graph."""

    def _bind_experts(self, index: ModelIndex) -> StackedExperts:
        layout = index.mtp_experts(self._layer)
        stacked = {kind: index.data(tensor_name(self._layer, kind)) for kind in layout.kinds}
        self._bank.bind(layout, range(layout.n_expert), stacked)
        experts = self._bank.stacked(self._layer, 1)
        assert experts is not None, "all of them were bound, in order"
        return experts

    def fill(self, slot: int, cell: int, tokens: Sequence[int], hidden: F32Array) -> None:
        """Write K and V of `cell`.. for tokens T and the hidden states before each, f32 [T, n_embd]. DeviceError."""
        n = len(tokens)
        g = GraphBuilder(self._sources.device, _MAX_NODES)
        b = self._builder(g, slot, n, 0)
        self._sources.architecture.build_nextn_fill(b, self._input(b))
        graph = g.build(self._workspace)
        try:
            positions, cells, _ = self._attention_inputs(cell, n, 1)  # nothing looks at the mask
            self._write(graph, tokens, hidden, {INP_POS: positions, KV_IDX: cells})
            graph.compute()
        finally:
            graph.close()

    def step(self, slot: int, cell: int, token: int, hidden: F32Array) -> tuple[F32Array, F32Array] | None:
        """Write `cell` for a token and the hidden state before it, f32 [1, n_embd], and look at all up to it.

        Logits f32 [n_vocab] of the token behind it, and the block's own hidden state f32 [1, n_embd]; None if the
        numbers are not finite. DeviceError.
        """
        n_kv = self._n_kv_of(cell + 1)
        graph = self._step_graph(slot, n_kv)
        inputs = self._attention_inputs(cell, 1, n_kv)
        self._write(graph, [token], hidden, dict(zip((INP_POS, KV_IDX, KQ_MASK), inputs, strict=True)))
        graph.compute()
        logits: F32Array = graph.get(_LOGITS)[0]
        if not math.isfinite(graph.get(_SQUARES)[0, 0]) or not math.isfinite(logits[np.argmax(logits)]):
            return None
        return logits, graph.get(_HIDDEN)

    def close(self) -> None:
        """Free graphs and experts."""
        for _, graph in self._steps.values():
            graph.close()
        self._steps.clear()
        self._workspace.close()
        self._bank.close()

    def _write(
        self, graph: Graph, tokens: Sequence[int], hidden: F32Array, inputs: dict[str, np.ndarray]
    ) -> None:
        graph.set(_EMBEDDING, self._embeddings.rows(tokens))
        graph.set(_GIVEN, hidden)
        for name, values in inputs.items():
            graph.set(name, values)

    def _step_graph(self, slot: int, n_kv: int) -> Graph:
        kept = self._steps.get(slot)
        if kept is None or kept[0] != n_kv:
            if kept is not None:
                self._steps.pop(slot)[1].close()
            kept = self._steps[slot] = (n_kv, self._build_step(slot, n_kv))
        return kept[1]

    def _build_step(self, slot: int, n_kv: int) -> Graph:
        architecture = self._sources.architecture
        g = GraphBuilder(self._sources.device, _MAX_NODES + 3 * self._sources.hparams.n_expert_used)
        b = self._builder(g, slot, 1, n_kv)
        made = build_layer(architecture, b, self._input(b))
        routed = add_routed_experts(g, self._experts, made.rows, g.cont(made.ids), made.weights)
        x = g.add(g.add(routed, made.shared), made.residual)
        g.output(_SQUARES, g.sum_rows(g.mul(x, x)))
        hidden = architecture.build_nextn_hidden(b, x)
        g.output(_HIDDEN, hidden)
        g.output(_LOGITS, architecture.build_nextn_logits(b, hidden))
        return g.build()

    def _input(self, b: LayerBuilder) -> Tensor:
        n_embd = self._sources.hparams.n_embd
        embedding = b.g.input(_EMBEDDING, ggml.F32, n_embd, b.n_tokens)
        given = b.g.input(_GIVEN, ggml.F32, n_embd, b.n_tokens)
        return self._sources.architecture.build_nextn_input(b, embedding, given)

    def _builder(self, g: GraphBuilder, slot: int, n_tokens: int, n_kv: int) -> LayerBuilder:
        return LayerBuilder(
            g,
            self._sources.weights,
            self._sources.states.tensors,
            self._sources.hparams,
            slot=slot,
            layer=self._layer,
            n_tokens=n_tokens,
            n_out=n_tokens,
            n_kv=n_kv,
            inputs={},
            traced=None,
        )


def _own_embeddings(index: ModelIndex, layer: int) -> RowTable | None:
    ref = index.tensors.get(f"blk.{layer}.{EMBEDDING}")
    return None if ref is None else RowTable(ref.ggml_type, index.data(ref.name), ref.ne[1], ref.ne[0])
