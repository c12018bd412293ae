"""The graphs for one token of each of several slots: one before and one behind the cores of a layer, and the cores.

None of them depends on which slots are together. Those for all rows depend on how many there are; the core of a slot
has its column in the buffers, and is kept as long as the slot's attention looks at as many cells. All that they hand on
is in BatchBuffers, so that they share the memory that they compute in (SharedWorkspace): the delta net's op alone
writes as much as a layer's state.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Literal

from swarmnode.compute.columns import keeps_columns
from swarmnode.compute.graph import Graph, GraphBuilder, SharedWorkspace
from swarmnode.compute.tensors import Tensor
from swarmnode.models.batch_buffers import BatchBuffers
from swarmnode.models.blocks.moe import LayerOutput
from swarmnode.models.graph_sources import GraphSources
from swarmnode.models.layer_builder import INP_POS, KQ_MASK, KV_IDX, LayerBuilder

Step = Literal["pre", "post", "logits"]

_PRE_NODES, _CORE_NODES, _POST_NODES, _LOGITS_NODES = 56, 32, 80, 24
"""Tensors of a graph, views included; qwen35moe has 41, 26, 63 and 16. Each takes 0.4 KB while the graph is kept."""
_KEPT_WIDTHS = 8
"""Numbers of rows for which the graphs of all layers are kept, 60 KB a layer: sequences come and go one by one."""
_F32_BYTES, _F16_BYTES, _I64_BYTES = 4, 2, 8


class BatchGraphs:
    """Builds, keeps and runs them."""

    def __init__(
        self,
        sources: GraphSources,
        buffers: BatchBuffers,
    ) -> None:
        self._sources = sources
        self._buffers = buffers
        self._n_slots = buffers.columns.ne[0]
        self._kept_columns: dict[int, bool] = {}
        """By weight type: whether mat-muls keep the bits of each column (columns.py); tried out when it is met."""
        # Two, so that a dense graph of more rows does not make the cores stale.
        self._dense_memory, self._core_memory = (
            SharedWorkspace(sources.device) if sources.device.is_host else None for _ in range(2)
        )
        self._dense: OrderedDict[tuple[Step, int, int], Graph] = OrderedDict()
        """By (step, layer, rows), the most recently used last."""
        self._cores: dict[tuple[int, int], tuple[int, Graph]] = {}
        """By (slot, layer): the cells that it looks at, and the graph."""

    @property
    def n_bytes(self) -> int:
        """Memory of the kept graphs, and what they compute in."""
        graphs = [*self._dense.values(), *(graph for _, graph in self._cores.values())]
        shared = [memory.n_bytes for memory in (self._dense_memory, self._core_memory) if memory is not None]
        return sum(shared) + sum(graph.n_bytes for graph in graphs)

    def close(self) -> None:
        """Free all graphs."""
        for graph in (*self._dense.values(), *(graph for _, graph in self._cores.values())):
            graph.close()
        self._dense.clear()
        self._cores.clear()
        for memory in (self._dense_memory, self._core_memory):
            if memory is not None:
                memory.close()

    # -- running

    def run_dense(self, step: Step, layer: int, n_rows: int) -> None:
        """Run what is before or behind the cores of a layer, or the logits (layer: n_layer), for so many rows.

        DeviceError.
        """
        key = (step, layer, n_rows)
        kept = self._dense.get(key)
        if kept is None or kept.is_stale:
            kept = self._keep_dense(key)
        else:
            self._dense.move_to_end(key)
        kept.compute()

    def run_core(self, slot: int, layer: int, n_kv: int) -> None:
        """Run the core of a slot. DeviceError."""
        n_kv = 0 if self._sources.hparams.recurrent[layer] else n_kv
        kept = self._cores.get((slot, layer))
        if kept is None or kept[0] != n_kv or kept[1].is_stale:
            if kept is not None:
                kept[1].close()
                del self._cores[slot, layer]
            kept = (n_kv, self._build_core(slot, layer, n_kv))
            self._cores[slot, layer] = kept
        kept[1].compute()

    # -- building

    def _keep_dense(self, key: tuple[Step, int, int]) -> Graph:
        stale = self._dense.pop(key, None)
        if stale is not None:
            stale.close()
        while len(self._dense) >= _KEPT_WIDTHS * (2 * self._sources.hparams.n_layer + 1):
            self._dense.popitem(last=False)[1].close()
        step, layer, n_rows = key
        if step == "logits":
            graph = self._build_logits(n_rows)
        else:
            graph = self._build_pre(layer, n_rows) if step == "pre" else self._build_post(layer, n_rows)
        self._dense[key] = graph
        return graph

    def _keeps_columns(self, ggml_type: int) -> bool:
        if ggml_type not in self._kept_columns:
            self._kept_columns[ggml_type] = keeps_columns(self._sources.device, ggml_type)
        return self._kept_columns[ggml_type]

    def _builder(
        self,
        g: GraphBuilder,
        layer: int,
        n_tokens: int,
        *,
        slot: int = -1,
        n_kv: int = 0,
        inputs: dict[str, Tensor] | None = None,
    ) -> LayerBuilder:
        """For graphs of all rows without a slot, so that they cannot name a state."""
        return LayerBuilder(
            g,
            self._sources.weights,
            self._sources.states.tensors,
            self._sources.hparams,
            slot=slot,
            layer=layer,
            n_tokens=n_tokens,
            n_out=n_tokens,
            n_kv=n_kv,
            inputs={} if inputs is None else inputs,
            traced=None,
            keeps_columns=self._keeps_columns,
        )

    def _layer_input(self, b: LayerBuilder, layer: int) -> Tensor:
        """What a layer starts from, f32 [n_embd, T]: embeddings, or the sum that ends the layer before."""
        g, n = b.g, b.n_tokens
        given = _first(g, self._buffers.given, n)
        if layer == 0:
            return given
        total = g.add(given, _first(g, self._buffers.shared, n))
        return g.add(total, _first(g, self._buffers.residual, n))

    def _build_pre(self, layer: int, n_rows: int) -> Graph:
        """`given` -> x, what the cores need (in the columns of the rows' slots), and what is kept for `_build_post`."""
        g, buffers = GraphBuilder(self._sources.device, _PRE_NODES), self._buffers
        positions = g.view(buffers.positions, (4 * n_rows,), (), 0)
        b = self._builder(g, layer, n_rows, inputs={INP_POS: positions})
        x = self._layer_input(b, layer)
        g.expand(g.cpy(x, _first(g, buffers.x, n_rows)))
        made = self._sources.architecture.build_pre(b, x)
        shapes = self._sources.architecture.step_shapes(self._sources.hparams, layer)
        columns = _first(g, buffers.columns, n_rows)
        for tensor, ne, buffer in zip(made.into, shapes.into, buffers.into, strict=False):
            n = math.prod(ne)
            rows = tensor if tensor.ne[:2] == (n, n_rows) else g.reshape(tensor, n, n_rows)
            g.expand(g.set_rows(_columns(g, buffer, n, self._n_slots), rows, columns))
        g.expand(g.cpy(made.kept, _columns(g, buffers.kept, shapes.kept[0], n_rows)))
        return g.build(self._dense_memory)

    def _build_logits(self, n_rows: int) -> Graph:
        """`given` behind the last layer -> logits, and what they are made of."""
        g, buffers = GraphBuilder(self._sources.device, _LOGITS_NODES), self._buffers
        b = self._builder(g, -1, n_rows)
        x = self._layer_input(b, self._sources.hparams.n_layer)
        g.expand(g.cpy(g.sum_rows(g.mul(x, x)), _first(g, buffers.squares, n_rows)))
        hidden = self._sources.architecture.build_hidden(b, x)
        if buffers.hidden is not None:
            g.expand(g.cpy(hidden, _first(g, buffers.hidden, n_rows)))
        g.expand(g.cpy(self._sources.architecture.build_logits(b, hidden), _first(g, buffers.logits, n_rows)))
        return g.build(self._dense_memory)

    def _build_post(self, layer: int, n_rows: int) -> Graph:
        """x, what the cores gave and what was kept -> what the experts need, residual and shared expert."""
        g, buffers = GraphBuilder(self._sources.device, _POST_NODES), self._buffers
        shapes = self._sources.architecture.step_shapes(self._sources.hparams, layer)
        outs = _columns(g, buffers.out, math.prod(shapes.out), self._n_slots)
        out = g.reshape(g.get_rows(outs, _first(g, buffers.columns, n_rows)), *shapes.out, n_rows)
        x = _first(g, buffers.x, n_rows)
        kept = _columns(g, buffers.kept, shapes.kept[0], n_rows)
        made = self._sources.architecture.build_post(self._builder(g, layer, n_rows), x, out, kept)
        self._store(g, made, n_rows)
        return g.build(self._dense_memory)

    def _store(self, g: GraphBuilder, made: LayerOutput, n: int) -> None:
        buffers = self._buffers
        squares = g.add(g.sum_rows(g.mul(made.rows, made.rows)), g.sum_rows(made.weights))
        for tensor, buffer in (
            (made.rows, buffers.rows),
            (made.ids, buffers.ids),
            (made.weights, buffers.weights),
            (squares, buffers.squares),
            (made.residual, buffers.residual),
            (made.shared, buffers.shared),
        ):
            g.expand(g.cpy(tensor, _first(g, buffer, n)))

    def _build_core(self, slot: int, layer: int, n_kv: int) -> Graph:
        g, buffers = GraphBuilder(self._sources.device, _CORE_NODES), self._buffers
        inputs: dict[str, Tensor] = {}
        if n_kv:
            row_bytes = buffers.masks.ne[0] * _F16_BYTES
            inputs[KV_IDX] = g.view(buffers.cells, (1,), (), slot * _I64_BYTES)
            inputs[KQ_MASK] = g.view(buffers.masks, (n_kv, 1), (n_kv * _F16_BYTES,), slot * row_bytes)
        b = self._builder(g, layer, 1, slot=slot, n_kv=n_kv, inputs=inputs)
        shapes = self._sources.architecture.step_shapes(self._sources.hparams, layer)
        into = []
        for ne, buffer in zip(shapes.into, buffers.into, strict=False):
            column = _columns(g, buffer, math.prod(ne), 1, slot)
            into.append(column if len(ne) == 1 else g.reshape(column, *ne, 1))
        out = self._sources.architecture.build_core(b, into)
        g.expand(g.cpy(out, _columns(g, buffers.out, math.prod(shapes.out), 1, slot)))
        return g.build(self._core_memory)


def _first(g: GraphBuilder, buffer: Tensor, n: int) -> Tensor:
    """The first n columns of a buffer [m, n_slots], or elements of one [n_slots]."""
    if buffer.n_dims == 1:
        return g.view(buffer, (n,), (), 0)
    return g.view(buffer, (buffer.ne[0], n), (buffer.nb[1],), 0)


def _columns(g: GraphBuilder, buffer: Tensor, n_values: int, n: int, first: int = 0) -> Tensor:
    """n columns of n_values of a flat f32 buffer, from column `first` on."""
    stride = n_values * _F32_BYTES
    return g.view(buffer, (n_values, n), (stride,), first * stride)
