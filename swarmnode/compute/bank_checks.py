"""What the bank is given: looked at before ggml sees it, because ggml aborts the process on a bad id or shape.

Each raises UsageError, naming what is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from swarmnode.compute import ggml
from swarmnode.compute.combine import Ids, Rows
from swarmnode.compute.layout import LayerLayout, layout_problem
from swarmnode.compute.tensors import BytesLike, byte_view
from swarmnode.errors import UsageError

_F32, _I32 = np.dtype(np.float32), np.dtype(np.int32)
_FEW_IDS = 64


def check_layout(layout: LayerLayout) -> None:
    """Its types can be multiplied, and its sizes are theirs."""
    problem = layout_problem(layout)
    if problem is not None:
        raise UsageError(problem)
    for tensor in layout.tensors:
        info = ggml.type_info(tensor.ggml_type)
        if not info.multiplies:
            raise UsageError(f"layer {layout.layer}: {tensor.kind} is {info.name}, which cannot multiply")
        if tensor.n_bytes != tensor.ne1 * ggml.row_bytes(tensor.ggml_type, tensor.ne0):
            raise UsageError(f"layer {layout.layer}: {tensor.kind} slabs have {tensor.n_bytes} bytes")


def extremes(ids: Ids) -> tuple[int, int]:
    """Least and greatest of at least one id."""
    if ids.size > _FEW_IDS:
        return int(ids.min()), int(ids.max())
    few = ids.ravel().tolist()  # numpy's reductions cost 30 us each when their code is out of the caches
    return min(few), max(few)


def check_rows(layout: LayerLayout, rows: Rows) -> None:
    """f32 [T, n_embd]."""
    if rows.ndim != 2:
        raise UsageError(f"rows must be f32[T, {layout.n_embd}], not {rows.dtype}{list(rows.shape)}")
    check_array("rows", rows, _F32, (rows.shape[0], layout.n_embd))


def check_pairs(layout: LayerLayout, rows: Rows, pair_row: Ids, pair_expert: Ids) -> None:
    """Rows f32 [T, n_embd], pairs i32[P] each, of rows that are there; `HeldLayer.check_ids` looks at the experts."""
    check_rows(layout, rows)
    if pair_row.ndim != 1:
        raise UsageError(f"pair_row must have one dimension, not {pair_row.ndim}")
    check_array("pair_row", pair_row, _I32, pair_row.shape)
    check_array("pair_expert", pair_expert, _I32, pair_row.shape)
    if pair_row.size:
        lowest, highest = extremes(pair_row)
        if lowest < 0 or highest >= rows.shape[0]:
            raise UsageError(f"pair_row names a row outside 0..{rows.shape[0] - 1}")


def check_new_experts(layout: LayerLayout, experts: Sequence[int], held: frozenset[int]) -> None:
    """At least one expert of the layer, none twice, none of those held."""
    if not experts or len(set(experts)) != len(experts) or not held.isdisjoint(experts):
        raise UsageError(f"layer {layout.layer}: experts named twice, held already, or none: {list(experts)}")
    if min(experts) < 0 or max(experts) >= layout.n_expert:
        raise UsageError(f"layer {layout.layer} has experts 0..{layout.n_expert - 1}, not {list(experts)}")


def check_array(name: str, array: npt.NDArray[Any], dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """Of exactly this dtype and shape."""
    if array.dtype != dtype or array.shape != shape:
        raise UsageError(f"{name} must be {dtype}{list(shape)}, not {array.dtype}{list(array.shape)}")


def check_slabs(layout: LayerLayout, slabs: Mapping[str, BytesLike], n_experts: int) -> None:
    """Every kind of the layout, with the bytes of so many experts."""
    if set(slabs) != set(layout.kinds):
        raise UsageError(f"layer {layout.layer} has {layout.kinds}, not {sorted(slabs)}")
    for tensor in layout.tensors:
        n_bytes = byte_view(slabs[tensor.kind], tensor.kind).size
        due = n_experts * tensor.n_bytes
        if n_bytes != due:
            raise UsageError(f"layer {layout.layer}: {tensor.kind} takes {due} bytes, not {n_bytes}")


def slabs_at(layout: LayerLayout, stacked: Mapping[str, BytesLike], index: int) -> dict[str, BytesLike]:
    """The slabs of one expert, by kind, from stacked ones; `index`: its place among them."""
    return {
        tensor.kind: byte_view(stacked[tensor.kind], tensor.kind)[
            index * tensor.n_bytes : (index + 1) * tensor.n_bytes
        ]
        for tensor in layout.tensors
    }
