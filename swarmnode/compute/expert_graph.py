"""The graph of routed experts: up and gate mat-muls, activation, down mat-mul; and a bounded cache of
such graphs.

A graph depends on the experts' shape and on the number of rows, not on the layer: weights are swapped in
before each run, so 48 layers share one. Formula for a row n and an expert e (llama.cpp, build_moe_ffn):

    y = Down_e( silu(Gate_e n) * (Up_e n) )
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from swarmnode.compute import ggml
from swarmnode.compute.devices import Device
from swarmnode.compute.graph import Graph, GraphBuilder
from swarmnode.compute.layout import LayerLayout
from swarmnode.compute.tensors import Tensor
from swarmnode.errors import UnsupportedModelError

Activation = Literal["swiglu"]
"""How gate and up are joined. gpt-oss's clamped swiglu would be the next one."""

_F32_BYTES = 4


@dataclass(frozen=True)
class ExpertShape:
    """What experts must have in common to share a graph and the slots of one stacked tensor."""

    n_embd: int
    n_ff: int
    fused: bool
    types: tuple[int, ...]
    """ggml types in the layout's order: gate, up, down or gate_up, down."""
    activation: Activation = "swiglu"

    @staticmethod
    def of(layout: LayerLayout) -> ExpertShape:
        types = tuple(tensor.ggml_type for tensor in layout.tensors)
        return ExpertShape(layout.n_embd, layout.n_ff, layout.fused, types)

    def work_bytes(self, n_pairs: int) -> int:
        """About what a graph of so many (row, expert) pairs needs: rows in, hidden rows, rows out."""
        return n_pairs * (2 * self.n_embd + 3 * self.n_ff) * _F32_BYTES


@dataclass(frozen=True, eq=False)
class StackedExperts:
    """All experts of a layer, expert e in place e: what a graph needs to compute the whole layer by itself.

    Compared by identity: graphs are kept for the tensors that they were built with.
    """

    shape: ExpertShape
    tensors: Sequence[Tensor]
    """Stacked weights in the layout's order."""


class ExpertGraph:
    """One built graph and the three (or two) mat-muls whose weights are swapped."""

    def __init__(self, graph: Graph, products: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        self._graph = graph
        self._products = products
        self._weights = weights
        self.n_bytes = graph.n_bytes

    def write_rows(self, rows: npt.NDArray[np.float32], pair_row: npt.NDArray[np.int32]) -> None:
        """Set the input x of a pairs graph to rows[pair_row] (f32[P, E]), without a copy where memory is shared."""
        view = self._graph.inputs.get("x")
        if view is None:
            self._graph.set("x", rows[pair_row][:, None, :])
        else:
            # The indices were checked; mode "raise" would make numpy buffer the output.
            np.take(rows, pair_row, axis=0, out=view[:, 0], mode="clip")

    def run(self, weights: Sequence[Tensor], **inputs: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Compute with these stacked weights (layout order) and inputs that were not set by `write_rows`.

        The result is valid until the next run, and may be overwritten.
        """
        graph = self._graph
        if weights is not self._weights:
            for product, tensor in zip(self._products, weights, strict=True):
                graph.replace_source(product, 0, tensor)
            self._weights = weights
        for name, values in inputs.items():
            view = graph.inputs.get(name)
            if view is None:
                graph.set(name, values)
            else:
                view[...] = values
        graph.compute()
        output = graph.outputs.get("y")
        return graph.get("y") if output is None else output

    def close(self) -> None:
        self._graph.close()


def build_pairs(device: Device, shape: ExpertShape, weights: Sequence[Tensor], n_pairs: int) -> ExpertGraph:
    """Inputs x f32[P, 1, E], ids i32[P, 1] -> y f32[P, E], row p through expert ids[p]."""
    builder = GraphBuilder(device, 32)
    x = builder.input("x", ggml.F32, shape.n_embd, 1, n_pairs, keep=False)
    ids = builder.input("ids", ggml.I32, 1, n_pairs)
    y, products = _expert_rows(builder, shape, weights, x, ids)
    builder.output("y", builder.reshape(y, shape.n_embd, n_pairs))
    return ExpertGraph(builder.build(), products, weights)


def build_moe(
    device: Device, shape: ExpertShape, weights: Sequence[Tensor], n_rows: int, n_used: int
) -> ExpertGraph:
    """Inputs x f32[T, 1, E], ids i32[T, k], p f32[T, k, 1] -> y f32[T, E], summed in the order of k."""
    builder = GraphBuilder(device, 32 + 3 * n_used)
    x = builder.input("x", ggml.F32, shape.n_embd, 1, n_rows, keep=False)
    ids = builder.input("ids", ggml.I32, n_used, n_rows)
    p = builder.input("p", ggml.F32, 1, n_used, n_rows)
    y, products = _expert_rows(builder, shape, weights, x, ids)
    builder.output("y", _sum_over_k(builder, y, p))
    return ExpertGraph(builder.build(), products, weights)


def add_routed_experts(
    builder: GraphBuilder, experts: StackedExperts, rows: Tensor, ids: Tensor, weights: Tensor
) -> Tensor:
    """Add a layer's routed experts to a graph: bit-equal to the graph of `build_moe`.

    rows f32 [n_embd, T], ids i32 [k, T] (only 0..n_expert-1, no row names one twice), weights f32 [k, T]: the sum
    over k of weight times expert row, f32 [n_embd, T].
    """
    n_embd, n_rows = rows.ne[:2]
    x = builder.reshape(rows, n_embd, 1, n_rows)
    y, _ = _expert_rows(builder, experts.shape, experts.tensors, x, ids)
    return _sum_over_k(builder, y, builder.reshape(weights, 1, *weights.ne[:2]))


def _sum_over_k(builder: GraphBuilder, y: Tensor, p: Tensor) -> Tensor:
    """y f32 [n_embd, k, T], p f32 [1, k, T] -> f32 [n_embd, T], in the order of k."""
    weighted = builder.mul(y, p)
    n_embd, n_used, n_rows = weighted.ne[:3]
    _, nb1, nb2, _ = weighted.nb
    total = builder.view(weighted, (n_embd, n_rows), (nb2,), 0)
    for k in range(1, n_used):
        total = builder.add(total, builder.view(weighted, (n_embd, n_rows), (nb2,), k * nb1))
    return total


def _expert_rows(
    builder: GraphBuilder, shape: ExpertShape, weights: Sequence[Tensor], x: Tensor, ids: Tensor
) -> tuple[Tensor, list[Tensor]]:
    if shape.fused:
        gate_up = builder.mul_mat_id(weights[0], x, ids)
        _, nb1, nb2, _ = gate_up.nb
        size = (shape.n_ff, gate_up.ne[1], gate_up.ne[2])
        gate = builder.view(gate_up, size, (nb1, nb2), 0)
        up = builder.view(gate_up, size, (nb1, nb2), shape.n_ff * _F32_BYTES)
        products = [gate_up]
    else:
        up = builder.mul_mat_id(weights[1], x, ids)
        gate = builder.mul_mat_id(weights[0], x, ids)
        products = [gate, up]
    down = builder.mul_mat_id(weights[-1], _activate(builder, shape.activation, gate, up), ids)
    return down, [*products, down]


def _activate(builder: GraphBuilder, activation: Activation, gate: Tensor, up: Tensor) -> Tensor:
    if activation == "swiglu":
        return builder.swiglu_split(gate, up)
    raise UnsupportedModelError(f"experts with activation {activation!r}")


class GraphCache:
    """Built graphs by (form, shape, sizes), least recently used dropped first.

    Holds at most `max_bytes`, or one larger graph alone: room is made before a graph is built.
    """

    def __init__(self, device: Device, max_bytes: int) -> None:
        self._device = device
        self._max_bytes = max_bytes
        self._graphs: OrderedDict[tuple[object, ...], ExpertGraph] = OrderedDict()
        self.n_bytes = 0
        """Memory of all cached graphs."""

    def pairs(self, shape: ExpertShape, weights: Sequence[Tensor], n_pairs: int) -> ExpertGraph:
        """The graph of `build_pairs`."""
        key = ("pairs", shape, n_pairs)
        graph = self._find(key)
        if graph is None:
            self._make_room(shape.work_bytes(n_pairs))
            graph = self._keep(key, build_pairs(self._device, shape, weights, n_pairs))
        return graph

    def moe(self, shape: ExpertShape, weights: Sequence[Tensor], n_rows: int, n_used: int) -> ExpertGraph:
        """The graph of `build_moe`.

        Single rows have a graph for each set of weights: swapping them takes longer than all else around ggml.
        """
        key = (id(weights), n_used) if n_rows == 1 else ("moe", shape, n_rows, n_used)
        graph = self._find(
            key
        )  # which keeps the weights it last ran with, so that no other list gets their id
        if graph is None:
            self._make_room(shape.work_bytes(n_rows * n_used))
            graph = self._keep(key, build_moe(self._device, shape, weights, n_rows, n_used))
        return graph

    def clear(self) -> None:
        """Close every graph."""
        while self._graphs:
            self._drop_oldest()

    def _find(self, key: tuple[object, ...]) -> ExpertGraph | None:
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
        return graph

    def _keep(self, key: tuple[object, ...], graph: ExpertGraph) -> ExpertGraph:
        self._graphs[key] = graph
        self.n_bytes += graph.n_bytes
        while self.n_bytes > self._max_bytes and len(self._graphs) > 1:
            self._drop_oldest()
        return graph

    def _make_room(self, n_bytes: int) -> None:
        while self._graphs and self.n_bytes + n_bytes > self._max_bytes:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, graph = self._graphs.popitem(last=False)
        self.n_bytes -= graph.n_bytes
        graph.close()
