"""The bank: routed experts held by this process, and their computation on any (row, expert) pairs.

A backbone binds whole layers from its mapped GGUF without copying; a worker fills slots with the slices
it fetched, in any number and order, and drops them again, within a byte budget. Every argument is checked
before ggml sees it, because ggml aborts the process on a bad id or shape.

Rows come out the same bit by bit in whatever company they are computed (on the CPU): a pair's result
depends on its row and its expert only, so batches may be cut and joined at will.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from swarmnode.compute.bank_checks import (
    check_array,
    check_layout,
    check_new_experts,
    check_pairs,
    check_rows,
    check_slabs,
    slabs_at,
)
from swarmnode.compute.combine import Ids, PairSum, Rows, combine_top_k
from swarmnode.compute.devices import Device
from swarmnode.compute.expert_graph import ExpertShape, GraphCache, StackedExperts
from swarmnode.compute.held_layer import ABSENT, HeldLayer
from swarmnode.compute.layout import LayerLayout
from swarmnode.compute.slot_pool import SlotPool
from swarmnode.compute.slots import Segment
from swarmnode.compute.tensors import BytesLike
from swarmnode.config import ComputeConfig
from swarmnode.errors import DeviceError, UsageError

_F32, _I32 = np.dtype(np.float32), np.dtype(np.int32)


class ExpertBank:
    """Experts by (layer, expert) on one device. Use it from the compute thread; `holdings` from anywhere.

    `budget_bytes` bounds the memory taken for weights (None: no bound); bound memory of a mapped file
    does not count. `max_rows` bounds the pairs in one graph and with them the work memory.
    """

    def __init__(
        self,
        device: Device,
        *,
        budget_bytes: int | None = None,
        max_rows: int | None = None,
        config: ComputeConfig | None = None,
    ) -> None:
        config = config or ComputeConfig()
        self.device = device
        self._pool = SlotPool(device, budget_bytes, config.slots_per_range)
        self._graphs = GraphCache(device, config.graph_cache_bytes)
        self._layers: dict[int, HeldLayer] = {}
        self._bound: list[Segment] = []
        self._max_rows = config.max_rows
        self._holdings: Mapping[int, frozenset[int]] = MappingProxyType({})
        self.limit_rows(config.max_rows if max_rows is None else max_rows)

    # -- what it holds

    @property
    def holdings(self) -> Mapping[int, frozenset[int]]:
        """Layer -> experts that can be computed now: a snapshot that later changes do not touch."""
        return self._holdings

    @property
    def used_bytes(self) -> int:
        """Bytes taken for weights on the device, with those of free slots that cannot be given back one by one. From
        anywhere.
        """
        return self._pool.used_bytes

    @property
    def free_bytes(self) -> int:
        """Those of them that are in slots without an expert. Compute thread."""
        return self._pool.free_bytes

    @property
    def graph_bytes(self) -> int:
        """Bytes of the cached graphs, beside the weights; at most config.graph_cache_bytes or one graph."""
        return self._graphs.n_bytes

    @property
    def max_rows(self) -> int:
        """Most (row, expert) pairs computed in one graph; larger calls are cut."""
        return self._max_rows

    def limit_rows(self, max_rows: int) -> None:
        """Cut batches at this many pairs from now on (the self-test's widest good batch); UsageError if <
        1.
        """
        if max_rows < 1:
            raise UsageError("max_rows must be at least 1")
        self._max_rows = max_rows

    def layout(self, layer: int) -> LayerLayout:
        """The layout of a layer of which it holds experts; UsageError otherwise."""
        return self._layer(layer).layout

    def stacked(self, layer: int, n_pairs: int) -> StackedExperts | None:
        """All experts of a layer for a graph of the caller's own, with so many pairs; None where `moe` has to do it.

        The layer is not held as a whole and in order, or the graph would be wider than `max_rows`.
        """
        place = self._layers.get(layer)
        return None if place is None or n_pairs > self._max_rows else place.stacked

    # -- filling

    def bind(self, layout: LayerLayout, experts: Sequence[int], stacked: Mapping[str, BytesLike]) -> None:
        """Hold these experts from stacked tensors: slab i of `stacked[kind]` belongs to experts[i].

        On the CPU nothing is copied and nothing counts against the budget: the memory (a mapped GGUF) is
        kept and must not change. Other devices get a copy. UsageError for wrong sizes or experts held
        already; BudgetError, DeviceError.
        """
        layer = self._check_new(layout, experts)
        check_slabs(layout, stacked, len(experts))
        if self.device.is_host:
            segment = Segment(layout, len(experts))
            segment.bind(stacked)
            self._bound.append(segment)
            for slot, expert in enumerate(experts):
                layer.place(expert, segment, slot)
        else:
            self._pool.reserve(layout, len(experts))
            for index, expert in enumerate(experts):
                self._fill(layer, expert, slabs_at(layout, stacked, index))
        self._publish(layer)

    def reserve(self, layout: LayerLayout, n_experts: int) -> None:
        """Make sure that `n_experts` more experts of this shape fit, and where memory is allocated ahead, do it at
        once: one graph for all of them.

        Without it `add` makes room as it is needed, on other devices than the CPU bit by bit. On the CPU a reservation
        takes nothing, and holds until experts of other shapes are added. BudgetError if they do not fit; DeviceError
        without memory.
        """
        self._check_layout(layout)
        if n_experts < 0:
            raise UsageError("cannot reserve a negative number of experts")
        self._pool.reserve(layout, n_experts)

    def add(self, layout: LayerLayout, expert: int, slabs: Mapping[str, BytesLike]) -> None:
        """Hold one more expert: a copy of its slabs, by kind.

        UsageError for wrong sizes or an expert held already; BudgetError if it does not fit; DeviceError.
        """
        layer = self._check_new(layout, [expert])
        check_slabs(layout, slabs, 1)
        self._fill(layer, expert, slabs)
        self._publish(layer)

    def remove(self, layer: int, expert: int) -> None:
        """Drop an expert. On the CPU its memory is free at once; elsewhere with the last expert of its segment, or by
        `compact`. UsageError if it is not held.
        """
        place = self._layer(layer)
        place.check_ids(np.array([expert], np.int32))
        index, slot = int(place.segment_of[expert]), int(place.slot_of[expert])
        segment = place.segment(index)
        place.segment_of[expert] = place.slot_of[expert] = ABSENT
        if segment not in self._bound and self._pool.give_back(segment, slot):
            self._forget_segment(segment)
        self._publish(place)

    def compact(self, max_bytes: int) -> bool:
        """One step towards `used_bytes` <= max_bytes, by giving free slots back; False if there is none to take, as
        always where they take nothing.

        Copies one expert at most, so that rows wait for a moment only; holdings stay what they are. Stacked tensors of
        `stacked` are others afterwards if their layer was not bound.
        """
        source = self._pool.to_empty() if self.used_bytes > max_bytes else None
        if source is None:
            return False
        found = self._resident(source)
        if found is None:
            self._pool.free(source)
            self._forget_segment(source)
            return True
        place, expert = found
        slot = int(place.slot_of[expert])
        target, target_slot = self._pool.take_outside(source)
        source.copy(slot, target, target_slot)
        place.place(expert, target, target_slot)
        if self._pool.give_back(source, slot):
            self._forget_segment(source)
        self._publish(place)
        return True

    def _resident(self, segment: Segment) -> tuple[HeldLayer, int] | None:
        """An expert in this segment, and its layer; None if it is empty."""
        for place in self._layers.values():
            if segment in place.segments:
                inside = np.flatnonzero(place.segment_of == place.segments.index(segment))
                if inside.size:
                    return place, int(inside[0])
        return None

    def slab(self, layer: int, expert: int, kind: str) -> bytearray:
        """A copy of a held expert's slab, read back from the device. UsageError if it is not held."""
        place = self._layer(layer)
        place.check_ids(np.array([expert], np.int32))
        if kind not in place.layout.kinds:
            raise UsageError(f"layer {layer} has no {kind}")
        return place.segment(int(place.segment_of[expert])).read(int(place.slot_of[expert]), kind)

    def close(self) -> None:
        """Free graphs and weights."""
        self._graphs.clear()
        self._pool.close()
        for segment in self._bound:
            segment.close()
        self._bound.clear()
        self._layers.clear()
        self._holdings = MappingProxyType({})

    # -- computing

    def experts(self, layer: int, rows: Rows, pair_row: Ids, pair_expert: Ids) -> Rows:
        """y f32[P, E], unweighted: row rows[pair_row[p]] (rows f32[T, E]) through expert pair_expert[p]
        (i32[P]).

        A pair named twice is computed twice. UsageError for wrong shapes, dtypes, row or expert ids, or
        an expert that is not held.
        """
        place = self._check_pairs(layer, rows, pair_row, pair_expert)
        out: Rows = np.empty((pair_row.size, rows.shape[1]), np.float32)
        self._compute_pairs(place, rows, pair_row, pair_expert, out)
        return out

    def partial(self, layer: int, rows: Rows, pair_row: Ids, pair_expert: Ids, pair_weight: Rows) -> Rows:
        """f32[T, E]: for each row the sum of pair_weight[p] (f32[P]) * y[p] over its pairs, in the order
        of p.

        Errors as `experts`. Rows without a pair are zero.
        """
        place = self._check_pairs(layer, rows, pair_row, pair_expert)
        check_array("pair_weight", pair_weight, _F32, pair_row.shape)
        total = PairSum(rows.shape[0], rows.shape[1])
        for start in range(0, pair_row.size, self._max_rows):
            piece = slice(start, start + self._max_rows)
            y = self._pair_rows(place, rows, pair_row[piece], pair_expert[piece])
            total.add(y, pair_row[piece], pair_weight[piece])
        return total.total

    def moe(self, layer: int, rows: Rows, ids: Ids, weights: Rows) -> Rows:
        """f32[T, E]: for row t the sum over k of weights[t, k] * expert ids[t, k] (rows[t]), in the order
        of k.

        rows f32[T, E], ids i32[T, k], weights f32[T, k]. One graph where all experts of the layer are stacked
        together; bit-equal to `combine_top_k(experts(...))`. Errors as `experts`.
        """
        place = self._layer(layer)
        check_rows(place.layout, rows)
        if ids.ndim != 2 or ids.shape[1] < 1:
            raise UsageError(f"ids must be i32[T, k] with k >= 1, not {ids.dtype}{list(ids.shape)}")
        check_array("ids", ids, _I32, (rows.shape[0], ids.shape[1]))
        check_array("weights", weights, _F32, ids.shape)
        place.check_ids(ids)
        n_rows = max(1, self._max_rows // ids.shape[1])
        if 0 < rows.shape[0] <= n_rows:
            return self._moe_piece(place, rows, ids, weights).copy()
        out: Rows = np.empty(rows.shape, np.float32)
        for start in range(0, rows.shape[0], n_rows):
            piece = slice(start, start + n_rows)
            out[piece] = self._moe_piece(place, rows[piece], ids[piece], weights[piece])
        return out

    def _moe_piece(self, place: HeldLayer, rows: Rows, ids: Ids, weights: Rows) -> Rows:
        n_rows, n_used = ids.shape
        home = place.common_segment(ids)
        if home is None or not self._one_graph_is_defined(ids):
            y: Rows = np.empty((ids.size, rows.shape[1]), np.float32)
            pair_row = np.repeat(np.arange(n_rows, dtype=np.int32), n_used)
            self._compute_pairs(place, rows, pair_row, ids.reshape(-1), y)
            return combine_top_k(y.reshape(n_rows, n_used, -1), weights)
        tensors = place.segment(home).tensors
        graph = self._graphs.moe(place.shape, tensors, n_rows, n_used)
        slots = place.slots(ids)
        return graph.run(tensors, x=rows[:, None, :], ids=slots, p=weights[:, :, None])

    def _one_graph_is_defined(self, ids: Ids) -> bool:
        """Whether a device may take these ids as [k, T]: GPU kernels assume that no row names an expert
        twice.
        """
        if ids.shape[1] > self._max_rows:
            return False
        if self.device.is_host:
            return True
        ordered = np.sort(ids, axis=1)
        return not (ordered[:, 1:] == ordered[:, :-1]).any()

    def _pair_rows(self, place: HeldLayer, rows: Rows, pair_row: Ids, pair_expert: Ids) -> Rows:
        """y f32[P, E] for at most max_rows pairs: where one graph computes them all, its memory, without a copy."""
        home = place.common_segment(pair_expert)
        if home is not None:
            slots = place.slots(pair_expert)
            return self._run_piece(place.shape, place.segment(home), rows, pair_row, slots)
        y: Rows = np.empty((pair_row.size, rows.shape[1]), np.float32)
        self._compute_pairs(place, rows, pair_row, pair_expert, y)
        return y

    def _compute_pairs(
        self, place: HeldLayer, rows: Rows, pair_row: Ids, pair_expert: Ids, out: npt.NDArray[np.float32]
    ) -> None:
        for segment, index in self._pieces(place, pair_expert):
            slots = place.slots(pair_expert[index])
            out[index] = self._run_piece(place.shape, segment, rows, pair_row[index], slots)

    def _run_piece(self, shape: ExpertShape, segment: Segment, rows: Rows, pair_row: Ids, slots: Ids) -> Rows:
        """At most max_rows pairs of one segment: row pair_row[p] of rows f32[T, E] through slots[p] (i32[P]).

        y f32[P, E], valid until the next run.
        """
        graph = self._graphs.pairs(shape, segment.tensors, slots.size)
        graph.write_rows(rows, pair_row)
        return graph.run(segment.tensors, ids=slots[:, None])

    def _pieces(self, place: HeldLayer, pair_expert: Ids) -> Iterator[tuple[Segment, Any]]:
        """Cut pairs by segment and max_rows, as indices; a long call is sorted so that each expert is
        read once.
        """
        if pair_expert.size == 0:
            return
        only = place.common_segment(pair_expert)
        if pair_expert.size <= self._max_rows and only is not None:
            yield place.segment(only), slice(None)
            return
        homes = place.segment_of[pair_expert]
        for home in np.unique(homes):
            index = np.flatnonzero(homes == home)
            if index.size > self._max_rows:
                index = index[np.argsort(place.slot_of[pair_expert[index]], kind="stable")]
            for start in range(0, index.size, self._max_rows):
                yield place.segment(int(home)), index[start : start + self._max_rows]

    # -- checks and bookkeeping

    def _layer(self, layer: int) -> HeldLayer:
        place = self._layers.get(layer)
        if place is None:
            raise UsageError(f"no expert of layer {layer} is held")
        return place

    def _check_layout(self, layout: LayerLayout) -> None:
        check_layout(layout)
        known = self._layers.get(layout.layer)
        if known is not None and known.layout != layout:
            raise UsageError(f"layer {layout.layer} is held with another layout")

    def _check_new(self, layout: LayerLayout, experts: Sequence[int]) -> HeldLayer:
        if self.device.closed:
            raise DeviceError(f"device {self.device.info.name} is closed")
        self._check_layout(layout)
        check_new_experts(layout, experts, self._holdings.get(layout.layer, frozenset()))
        return self._layers.get(layout.layer) or HeldLayer(layout)

    def _fill(self, layer: HeldLayer, expert: int, slabs: Mapping[str, BytesLike]) -> None:
        segment, slot = self._pool.take(layer.layout, layer.segments)
        segment.write(slot, slabs)
        layer.place(expert, segment, slot)

    def _publish(self, layer: HeldLayer) -> None:
        """Make a change to a layer visible, atomically for readers in other threads."""
        number = layer.layout.layer
        self._layers[number] = layer
        layer.refresh()
        holdings = {**self._holdings, number: layer.held()}
        if not holdings[number]:
            del holdings[number], self._layers[number]
        self._holdings = MappingProxyType(holdings)

    def _forget_segment(self, segment: Segment) -> None:
        for layer in self._layers.values():
            layer.segments = [None if known is segment else known for known in layer.segments]

    def _check_pairs(self, layer: int, rows: Rows, pair_row: Ids, pair_expert: Ids) -> HeldLayer:
        place = self._layer(layer)
        check_pairs(place.layout, rows, pair_row, pair_expert)
        place.check_ids(pair_expert)
        return place
