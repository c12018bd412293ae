"""What graphs for one token of each of several slots hand on, in memory of the device.

The graphs before and behind the cores treat all rows alike: their buffers hold row r in column r. A core belongs to a
slot, and its graph is kept whoever else is there: in the buffers on both sides of it, each slot has a column.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from swarmnode.compute import ggml
from swarmnode.compute.tensors import Tensor, WeightSet
from swarmnode.models.architecture import Architecture
from swarmnode.models.hparams import Hparams

Sizes = tuple[int, tuple[int, ...]]
"""A ggml type, and sizes in ggml's order."""
_PREFIX = "batch."


@dataclass(frozen=True)
class BatchBuffers:
    """The tensors; n = n_slots, the most rows; E is n_embd, k is n_expert_used."""

    given: Tensor
    """f32 [E, n]: embeddings, or the routed output of the layer before; from the host."""
    positions: Tensor
    """i32 [4 n], of which the first 4 N are used: three times the position of each row, then zeros."""
    columns: Tensor
    """i32 [n]: the slot of each row."""
    cells: Tensor
    """i64 [n]: the KV cell of each slot's token."""
    masks: Tensor
    """f16 [n_cells, n]: its mask."""
    x: Tensor
    """f32 [E, n]: what the layer started from."""
    residual: Tensor
    """f32 [E, n]"""
    shared: Tensor
    """f32 [E, n]"""
    rows: Tensor
    """f32 [E, n]: for the routed experts."""
    ids: Tensor
    """i32 [k, n]"""
    weights: Tensor
    """f32 [k, n]"""
    squares: Tensor
    """f32 [n], each finite if and only if its row is (and less than 1e19)."""
    logits: Tensor
    """f32 [n_vocab, n]"""
    kept: Tensor
    """f32, flat: StepShapes.kept of each row."""
    into: tuple[Tensor, ...]
    """f32, flat: StepShapes.into of each slot."""
    out: Tensor
    """f32, flat: StepShapes.out of each slot."""
    hidden: Tensor | None = None
    """f32 [E, n]: what the logits are made of, if the model has an MTP block."""


def allocate_batch(tensors: WeightSet, sizes: Mapping[str, Sizes]) -> BatchBuffers:
    """Allocate what `batch_sizes` said. DeviceError without memory."""
    made = {name: tensors.state(_PREFIX + name, ggml_type, ne) for name, (ggml_type, ne) in sizes.items()}
    into = tuple(made.pop(name) for name in sorted(made) if name.startswith("into"))
    return BatchBuffers(into=into, **made)


def batch_sizes(
    architecture: Architecture, hparams: Hparams, *, n_slots: int, n_cells: int
) -> dict[str, Sizes]:
    """Name -> type and sizes of the buffers. A single slot has no company, and needs none."""
    if n_slots == 1:
        return {}
    rows: Sizes = (ggml.F32, (hparams.n_embd, n_slots))
    return {
        **dict.fromkeys(("given", "x", "residual", "shared", "rows"), rows),
        **({"hidden": rows} if hparams.n_mtp else {}),
        "positions": (ggml.I32, (4 * n_slots,)),
        "columns": (ggml.I32, (n_slots,)),
        "cells": (ggml.I64, (n_slots,)),
        "masks": (ggml.F16, (n_cells, n_slots)),
        "ids": (ggml.I32, (hparams.n_expert_used, n_slots)),
        "weights": (ggml.F32, (hparams.n_expert_used, n_slots)),
        "squares": (ggml.F32, (n_slots,)),
        "logits": (ggml.F32, (hparams.n_vocab, n_slots)),
        **_step_sizes(architecture, hparams, n_slots),
    }


def _step_sizes(architecture: Architecture, hparams: Hparams, n_slots: int) -> dict[str, Sizes]:
    """Layers run one after another, so that those of all kinds share the largest."""
    n_values: dict[str, int] = {}
    for layer in range(hparams.n_layer):
        shapes = architecture.step_shapes(hparams, layer)
        wanted = {"kept": shapes.kept, "out": shapes.out}
        wanted |= {f"into{i}": ne for i, ne in enumerate(shapes.into)}
        for name, ne in wanted.items():
            n_values[name] = max(n_slots * math.prod(ne), n_values.get(name, 0))
    return {name: (ggml.F32, (n,)) for name, n in n_values.items()}


def n_bytes_of(sizes: Mapping[str, Sizes]) -> int:
    """Memory of tensors of these sizes."""
    return sum(ggml.row_bytes(kind, ne[0]) * math.prod(ne[1:]) for kind, ne in sizes.values())
