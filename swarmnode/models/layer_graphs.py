"""Builds the graph of each layer and keeps those of single tokens: building one takes longer than running one.

A graph computes everything of a layer but its routed experts. It starts with the sum that ends the layer before,
because llama.cpp adds (routed + shared) + residual in this order and only the routed part comes from outside.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from swarmnode.compute import ggml
from swarmnode.compute.devices import Device
from swarmnode.compute.graph import Graph, GraphBuilder, Workspace
from swarmnode.compute.tensors import Tensor, WeightSet
from swarmnode.models.architecture import Architecture
from swarmnode.models.base import Callback
from swarmnode.models.hparams import Hparams
from swarmnode.models.layer_builder import LayerBuilder
from swarmnode.models.state import SlotStates

INPUT = "input"
"""f32 [T, n_embd]: embeddings for layer 0, else the routed output of the layer before."""
ROWS, IDS, WEIGHTS, LOGITS = "rows", "ids", "weights", "logits"
"""ROWS: what the routed experts of a layer get; in the graph of the logits, what the last layer gave."""

_MAX_NODES = 192
_MAX_TRACED_NODES = 512


class LayerGraph:
    """A built graph of one layer, or of the logits."""

    __slots__ = ("_graph", "_traced", "is_cached", "n_kv", "uses_kv")

    def __init__(
        self, graph: Graph, *, uses_kv: bool, n_kv: int, is_cached: bool, traced: list[tuple[str, str, int]]
    ) -> None:
        self._graph = graph
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

    def compute(self) -> None:
        """Run it. DeviceError if the device fails."""
        self._graph.compute()

    def read(self, name: str) -> npt.NDArray[Any]:
        """A copy of an output."""
        view = self._graph.outputs.get(name)
        return self._graph.get(name) if view is None else view.copy()

    def report(self, callback: Callback) -> None:
        """Give every named intermediate to the callback."""
        for output, name, layer in self._traced:
            callback(name, layer, self._graph.get(output))

    def close(self) -> None:
        self._graph.close()


class LayerGraphs:
    """Graphs of all layers and slots: those of one token are kept, others are built in shared memory."""

    def __init__(
        self,
        device: Device,
        architecture: Architecture,
        hparams: Hparams,
        weights: WeightSet,
        states: SlotStates,
        n_slots: int,
    ) -> None:
        self._device = device
        self._architecture = architecture
        self._hparams = hparams
        self._weights = weights
        self._states = states
        # One for each slot and layer, and one for the logits: bounded, as a longer context replaces the graph.
        self._decode: list[list[LayerGraph | None]] = [[None] * (hparams.n_layer + 1) for _ in range(n_slots)]
        self._workspace = Workspace(device)
        self.traces = False
        """Whether graphs keep their named intermediates; such graphs are not cached."""

    def layer(self, slot: int, layer: int, *, n_tokens: int, n_out: int, n_kv: int) -> LayerGraph:
        """The graph of one layer, or of the logits if `layer` is n_layer (then n_tokens = n_out).

        Unless `is_cached`, it must be closed before the next one is asked for.
        """
        if n_tokens > 1 or self.traces:
            return self._build(slot, layer, n_tokens, n_out, n_kv)
        kept = self._decode[slot][layer]
        if kept is not None:
            if kept.n_kv == n_kv or not kept.uses_kv:
                return kept
            kept.close()
        built = self._build(slot, layer, 1, 1, n_kv)
        self._decode[slot][layer] = built
        return built

    def close(self) -> None:
        """Free all graphs."""
        for graphs in self._decode:
            for graph in graphs:
                if graph is not None:
                    graph.close()
            graphs[:] = [None] * len(graphs)
        self._workspace.close()

    def _build(self, slot: int, layer: int, n_tokens: int, n_out: int, n_kv: int) -> LayerGraph:
        is_cached = n_tokens == 1 and not self.traces
        g = GraphBuilder(self._device, _MAX_TRACED_NODES if self.traces else _MAX_NODES)
        traced: list[tuple[str, str, int]] = []
        is_logits = layer == self._hparams.n_layer
        b = LayerBuilder(
            g,
            self._weights,
            self._states.tensors,
            self._hparams,
            slot=slot,
            layer=-1 if is_logits else layer,
            n_tokens=n_tokens,
            n_out=n_out,
            n_kv=n_kv,
            traced=traced if self.traces else None,
        )
        x = self._layer_input(b, slot, layer)
        if is_logits:
            g.output(ROWS, x)
            g.output(LOGITS, self._architecture.build_logits(b, x))
        else:
            self._add_layer(b, slot, x)
        graph = g.build(None if is_cached else self._workspace)
        return LayerGraph(graph, uses_kv=b.uses_kv, n_kv=n_kv, is_cached=is_cached, traced=traced)

    def _layer_input(self, b: LayerBuilder, slot: int, layer: int) -> Tensor:
        given = b.g.input(INPUT, ggml.F32, self._hparams.n_embd, b.n_tokens)
        if layer == 0:
            return b.cb(given, "model.input_embed", -1)
        shared = _first_columns(b.g, self._states.shared(slot), b.n_tokens)
        residual = _first_columns(b.g, self._states.residual(slot), b.n_tokens)
        out = b.cb(b.g.add(given, shared), "ffn_out", layer - 1)
        return b.cb(b.g.add(out, residual), "l_out", layer - 1)

    def _add_layer(self, b: LayerBuilder, slot: int, x: Tensor) -> None:
        g = b.g
        out = self._architecture.build_layer(b, x)
        g.output(ROWS, out.rows)
        g.output(IDS, g.cont(out.ids))
        g.output(WEIGHTS, out.weights)
        # Behind everything that reads them: x, which every output needs, was made from the old values.
        g.expand(g.cpy(out.residual, _first_columns(g, self._states.residual(slot), b.n_out)))
        g.expand(g.cpy(out.shared, _first_columns(g, self._states.shared(slot), b.n_out)))


def _first_columns(g: GraphBuilder, buffer: Tensor, n: int) -> Tensor:
    """The first n columns of a state f32 [n_embd, n_ubatch]."""
    return g.view(buffer, (buffer.ne[0], n), (buffer.nb[1],), 0)


def attention_inputs(n_past: int, n_tokens: int, n_kv: int) -> tuple[npt.NDArray[Any], ...]:
    """For tokens at n_past..: positions i32 [4 T], cells i64 [T], mask f16 [T, n_kv] (0: may look, else -inf)."""
    if n_tokens == 1:  # the same in fewer steps, for each token of an answer
        row = np.full((1, n_kv), -np.inf, np.float16)
        row[0, : n_past + 1] = 0
        return np.array([n_past, n_past, n_past, 0], np.int32), np.array([n_past], np.int64), row
    cells = np.arange(n_past, n_past + n_tokens, dtype=np.int64)
    positions = np.zeros((4, n_tokens), np.int32)
    positions[:3] = cells
    allowed = np.arange(n_kv) <= cells[:, None]
    mask = np.where(allowed, np.float16(0), np.float16(-np.inf))
    return positions.ravel(), cells, mask
