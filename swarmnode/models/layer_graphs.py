"""Builds the graphs of a pass and keeps those of single tokens: building one takes longer than running one.

A graph reaches from one cut to the next: it starts with the sum that ends a layer, because llama.cpp adds
(routed + shared) + residual in this order and only the routed part comes from outside; it goes on through layers whose
experts are all in this process; and it ends at the routed experts of the next layer, or at the logits. Where nobody
else has experts one graph is a whole token: every stop costs as much Python as ggml needs for a small layer.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import numpy as np
import numpy.typing as npt

from swarmnode.compute import ggml
from swarmnode.compute.expert_graph import StackedExperts, add_routed_experts
from swarmnode.compute.graph import Graph, GraphBuilder, Workspace
from swarmnode.compute.tensors import Tensor
from swarmnode.models.architecture import build_layer
from swarmnode.models.base import Callback, Stacked
from swarmnode.models.blocks.attention import QUERIES_AT_ONCE
from swarmnode.models.graph_sources import GraphSources
from swarmnode.models.layer_builder import LayerBuilder

INPUT = "input"
"""f32 [T, n_embd]: embeddings for layer 0, else the routed output of the layer before."""
ROWS, IDS, WEIGHTS, HIDDEN, LOGITS = "rows", "ids", "weights", "hidden", "logits"
"""ROWS: what the routed experts of the layer at the cut get. HIDDEN: f32 [T, n_embd], what the logits are made of; an
output if the model has an MTP block."""
_SQUARES = "squares"
"""f32 [T, 1], finite if and only if what comes out for the token is (and less than 1e19): one number to look at."""

_MAX_NODES = 224
_MAX_EXPERT_NODES = 32
_MAX_TRACED_NODES = 512
_NODES_A_PIECE = 5
"""... and in attention, for each piece of QUERIES_AT_ONCE tokens: views of them and their mask, and joining them."""
_KEPT_PASSES = 2
"""Passes of which a slot keeps the graphs, wherever they were cut: cuts move whenever a worker comes or goes, and old
graphs, 100 KB a layer, must not pile up."""


class LayerGraph:
    """A built graph from one cut to the next."""

    __slots__ = ("_graph", "_traced", "is_cached", "n_kv", "uses_kv", "whole")

    def __init__(
        self,
        graph: Graph,
        whole: tuple[StackedExperts, ...],
        *,
        uses_kv: bool,
        n_kv: int,
        is_cached: bool,
        traced: list[tuple[str, str, int]],
    ) -> None:
        self._graph = graph
        self.whole = whole
        """The routed experts that it computes itself."""
        self._traced = traced
        self.uses_kv = uses_kv
        """Whether it wants the inputs of layer_builder: positions, cells and mask."""
        self.n_kv = n_kv
        self.is_cached = is_cached

    def write(self, name: str, values: npt.NDArray[Any]) -> None:
        """Set an input; the shape was checked by the caller."""
        view = self._graph.inputs.get(name)
        if view is None:
            self._graph.set(name, values)
        else:
            view[...] = values

    @property
    def n_layers(self) -> int:
        """Layers that it takes part in; the logits count as one, so that the graphs of a pass have n_layer + 1."""
        return len(self.whole) + 1

    def compute(self) -> None:
        """Run it. DeviceError if the device fails."""
        self._graph.compute()

    def read(self, name: str) -> npt.NDArray[Any]:
        """A copy of an output."""
        view = self._graph.outputs.get(name)
        return self._graph.get(name) if view is None else view.copy()

    def is_finite(self) -> bool:
        """Whether what it computed is."""
        squares = self.read(_SQUARES)
        return math.isfinite(squares[0, 0]) if len(squares) == 1 else bool(np.isfinite(squares).all())

    def report(self, callback: Callback) -> None:
        """Give every named intermediate to the callback."""
        for output, name, layer in self._traced:
            callback(name, layer, self._graph.get(output))

    def close(self) -> None:
        self._graph.close()


class LayerGraphs:
    """Graphs of all slots: those of one token are kept, others are built in shared memory."""

    def __init__(
        self,
        sources: GraphSources,
        n_slots: int,
    ) -> None:
        self._sources = sources
        self._decode: list[OrderedDict[tuple[int, int], LayerGraph]] = [OrderedDict() for _ in range(n_slots)]
        """For each slot by (first layer, cut), the most recently used last."""
        self._workspace = Workspace(sources.device)
        self.traces = False
        """Whether graphs keep their named intermediates; such graphs are not cached."""

    def get(
        self,
        slot: int,
        first: int,
        whole: tuple[StackedExperts, ...],
        *,
        n_tokens: int,
        n_out: int,
        n_logits: int,
        n_kv: int,
        tentative: bool = False,
    ) -> LayerGraph:
        """The graph from layer `first` to the next cut, len(whole) layers on; the logits if that is behind the last.

        `whole`: the routed experts of the layers before the cut. `n_out` of `n_tokens` are left at the cut, and the
        last `n_logits` of these get logits (a single token always does). If they are `tentative` the recurrent states
        stay as they are. Unless `is_cached`, it must be closed before the next one is asked for.
        """
        if n_tokens > 1 or self.traces or tentative:
            return self._build(slot, first, whole, n_tokens, n_out, n_logits, n_kv, tentative)
        graphs, key = self._decode[slot], (first, first + len(whole))
        kept = graphs.get(key)
        if kept is not None:
            if kept.whole == whole and (kept.n_kv == n_kv or not kept.uses_kv):
                graphs.move_to_end(key)
                return kept
            graphs.pop(key).close()
        self._make_room(graphs, len(whole) + 1)
        graphs[key] = self._build(slot, first, whole, 1, 1, 1, n_kv, False)
        return graphs[key]

    def _make_room(self, graphs: OrderedDict[tuple[int, int], LayerGraph], n_layers: int) -> None:
        """Close the graphs of a slot that were not used for the longest time, for one of so many layers."""
        n_kept = n_layers + sum(graph.n_layers for graph in graphs.values())
        while n_kept > _KEPT_PASSES * (self._sources.hparams.n_layer + 1):
            oldest = graphs.popitem(last=False)[1]
            n_kept -= oldest.n_layers
            oldest.close()

    def close(self) -> None:
        """Free all graphs."""
        for graphs in self._decode:
            for graph in graphs.values():
                graph.close()
            graphs.clear()
        self._workspace.close()

    def _build(
        self,
        slot: int,
        first: int,
        whole: tuple[StackedExperts, ...],
        n_tokens: int,
        n_out: int,
        n_logits: int,
        n_kv: int,
        tentative: bool,
    ) -> LayerGraph:
        is_cached = n_tokens == 1 and not self.traces and not tentative
        n_layer, cut = self._sources.hparams.n_layer, first + len(whole)
        max_nodes = _MAX_TRACED_NODES if self.traces else _MAX_NODES
        max_nodes += len(whole) * (_MAX_NODES + _MAX_EXPERT_NODES + 3 * self._sources.hparams.n_expert_used)
        max_nodes += (len(whole) + 1) * _NODES_A_PIECE * -(-n_tokens // QUERIES_AT_ONCE)
        g = GraphBuilder(self._sources.device, max_nodes)
        kv_inputs: dict[str, Tensor] = {}
        traced: list[tuple[str, str, int]] = []

        def builder(layer: int) -> LayerBuilder:
            return LayerBuilder(
                g,
                self._sources.weights,
                self._sources.states.tensors,
                self._sources.hparams,
                slot=slot,
                layer=layer,
                n_tokens=n_tokens,
                n_out=n_out,
                n_kv=n_kv,
                inputs=kv_inputs,
                traced=traced if self.traces else None,
                tentative=tentative,
            )

        x = self._input(builder(first), slot)
        for layer, experts in enumerate(whole, first):
            x = self._add_whole_layer(builder(layer), x, experts)
        if cut == n_layer:
            g.output(_SQUARES, g.sum_rows(g.mul(x, x)))
            self._add_logits(builder(-1), x, n_logits)
        else:
            self._add_cut_layer(builder(cut), slot, x)
        graph = g.build(None if is_cached else self._workspace)
        return LayerGraph(
            graph, whole, uses_kv=bool(kv_inputs), n_kv=n_kv, is_cached=is_cached, traced=traced
        )

    def _input(self, b: LayerBuilder, slot: int) -> Tensor:
        """What layer `b.layer` starts from, f32 [n_embd, T]: embeddings, or the sum that ends the layer before."""
        given = b.g.input(INPUT, ggml.F32, self._sources.hparams.n_embd, b.n_tokens)
        if b.layer == 0:
            return b.cb(given, "model.input_embed", -1)
        shared = _first_columns(b.g, self._sources.states.shared(slot), b.n_tokens)
        residual = _first_columns(b.g, self._sources.states.residual(slot), b.n_tokens)
        return _layer_output(b, given, shared, residual, b.layer - 1)

    def _add_whole_layer(self, b: LayerBuilder, x: Tensor, experts: StackedExperts) -> Tensor:
        out = build_layer(self._sources.architecture, b, x)
        b.g.output(ids_name(b.layer), b.g.cont(out.ids))
        routed = add_routed_experts(b.g, experts, out.rows, out.ids, out.weights)
        return _layer_output(b, routed, out.shared, out.residual, b.layer)

    def _add_logits(self, b: LayerBuilder, x: Tensor, n_logits: int) -> None:
        hidden = self._sources.architecture.build_hidden(b, x)
        if self._sources.hparams.n_mtp:
            b.g.output(HIDDEN, hidden)
        if n_logits:
            stride, n = hidden.nb[1], hidden.ne[1]
            last = b.g.view(hidden, (hidden.ne[0], n_logits), (stride,), (n - n_logits) * stride)
            b.g.output(LOGITS, self._sources.architecture.build_logits(b, hidden if n_logits == n else last))

    def _add_cut_layer(self, b: LayerBuilder, slot: int, x: Tensor) -> None:
        g = b.g
        out = build_layer(self._sources.architecture, b, x)
        g.output(ROWS, out.rows)
        g.output(IDS, g.cont(out.ids))
        g.output(WEIGHTS, out.weights)
        g.output(_SQUARES, g.add(g.sum_rows(g.mul(out.rows, out.rows)), g.sum_rows(out.weights)))
        # Behind everything that reads them: x, which every output needs, was made from the old values.
        g.expand(g.cpy(out.residual, _first_columns(g, self._sources.states.residual(slot), b.n_out)))
        g.expand(g.cpy(out.shared, _first_columns(g, self._sources.states.shared(slot), b.n_out)))


def ids_name(layer: int) -> str:
    """The output that tells what the gate of a layer before the cut chose, i32 [T, n_expert_used]."""
    return f"{IDS} {layer}"


def whole_layers(first: int, n_layer: int, stacked: Stacked) -> tuple[StackedExperts, ...]:
    """The routed experts of the layers from `first` up to the next that has to be cut."""
    whole = []
    for layer in range(first, n_layer):
        experts = stacked(layer)
        if experts is None:
            break
        whole.append(experts)
    return tuple(whole)


def _layer_output(b: LayerBuilder, routed: Tensor, shared: Tensor, residual: Tensor, layer: int) -> Tensor:
    out = b.cb(b.g.add(routed, shared), "ffn_out", layer)
    return b.cb(b.g.add(out, residual), "l_out", layer)


def _first_columns(g: GraphBuilder, buffer: Tensor, n: int) -> Tensor:
    """The first n columns of a state f32 [n_embd, n_ubatch]."""
    return g.view(buffer, (buffer.ne[0], n), (buffer.nb[1],), 0)


class AttentionInputs:
    """What attention has to know of the tokens at n_past.., for contexts of up to `n_cells` KV cells."""

    def __init__(self, n_cells: int) -> None:
        self._n_cells = n_cells
        row = np.full(2 * n_cells, -np.inf, np.float16)
        row[:n_cells] = 0
        self._mask_row = row
        """Every mask of one token is a part of this row: an answer needs one a token."""

    def __call__(self, n_past: int, n_tokens: int, n_kv: int) -> tuple[npt.NDArray[Any], ...]:
        """Positions i32 [4 T], cells i64 [T], mask f16 [T, n_kv] (0: may look, else -inf)."""
        if n_tokens == 1:  # the same in fewer steps
            mask = self.mask(n_past, n_kv)[None]
            return np.array([n_past, n_past, n_past, 0], np.int32), np.array([n_past], np.int64), mask
        cells = np.arange(n_past, n_past + n_tokens, dtype=np.int64)
        positions = np.zeros((4, n_tokens), np.int32)
        positions[:3] = cells
        allowed = np.arange(n_kv) <= cells[:, None]
        return positions.ravel(), cells, np.where(allowed, np.float16(0), np.float16(-np.inf))

    def mask(self, n_past: int, n_kv: int) -> npt.NDArray[np.float16]:
        """The mask of one token, f16 [n_kv]."""
        start = self._n_cells - n_past - 1
        return self._mask_row[start : start + n_kv]
