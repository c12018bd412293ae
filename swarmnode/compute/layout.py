"""How the routed experts of one layer lie in memory; pure facts shared by weights (files) and compute
(tensors).

A *slab* is one expert's part of one stacked GGUF tensor `blk.N.<kind>.weight` of shape [ne0, ne1,
n_expert]: expert e is the contiguous byte range [e * n_bytes, (e + 1) * n_bytes). A slab key is `(layer,
expert, kind)`.
"""

from __future__ import annotations

from dataclasses import dataclass

GATE = "ffn_gate_exps"
UP = "ffn_up_exps"
DOWN = "ffn_down_exps"
GATE_UP = "ffn_gate_up_exps"
"""Fused: rows 0..n_ff-1 are the gate, rows n_ff..2*n_ff-1 the up projection."""

SEPARATE_KINDS = (GATE, UP, DOWN)
FUSED_KINDS = (GATE_UP, DOWN)


@dataclass(frozen=True)
class ExpertTensor:
    """One expert's slab of one stacked tensor."""

    kind: str
    ggml_type: int
    """Value of GGMLQuantizationType."""
    ne0: int
    """Row length: the input width of the mat-mul."""
    ne1: int
    """Rows: the output width."""
    n_bytes: int
    """Bytes of one expert's slab: ne1 * bytes of a row of ne0 values."""


@dataclass(frozen=True)
class LayerLayout:
    """The slabs of every expert of one layer: (gate, up, down) or, fused, (gate_up, down)."""

    layer: int
    n_embd: int
    n_ff: int
    n_expert: int
    tensors: tuple[ExpertTensor, ...]

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert of this layer (layers of one file differ: mixed quantisations)."""
        return sum(tensor.n_bytes for tensor in self.tensors)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(tensor.kind for tensor in self.tensors)

    @property
    def fused(self) -> bool:
        """True if gate and up are one tensor."""
        return self.kinds == FUSED_KINDS

    def tensor(self, kind: str) -> ExpertTensor:
        """The tensor of that kind; KeyError if the layer has none."""
        for tensor in self.tensors:
            if tensor.kind == kind:
                return tensor
        raise KeyError(kind)


def expected_shapes(n_embd: int, n_ff: int) -> dict[str, tuple[int, int]]:
    """(ne0, ne1) of each kind of slab, for a layer of these widths."""
    return {GATE: (n_embd, n_ff), UP: (n_embd, n_ff), GATE_UP: (n_embd, 2 * n_ff), DOWN: (n_ff, n_embd)}


def layout_problem(layout: LayerLayout) -> str | None:
    """Why this layout cannot be a layer of experts, or None if it is consistent.

    Checks names, shapes and signs; whether `n_bytes` fits the ggml type is for whoever knows ggml's types.
    """
    if layout.layer < 0:
        return f"layer {layout.layer} is negative"
    if min(layout.n_embd, layout.n_ff, layout.n_expert) < 1:
        return f"layer {layout.layer}: n_embd, n_ff and n_expert must be at least 1"
    if layout.kinds not in (SEPARATE_KINDS, FUSED_KINDS):
        return f"layer {layout.layer}: tensors {layout.kinds} are neither gate, up, down nor gate_up, down"
    shapes = expected_shapes(layout.n_embd, layout.n_ff)
    for tensor in layout.tensors:
        if (tensor.ne0, tensor.ne1) != shapes[tensor.kind]:
            shape = (tensor.ne0, tensor.ne1)
            return f"layer {layout.layer}: {tensor.kind} is {shape}, not {shapes[tensor.kind]}"
        if tensor.n_bytes < tensor.ne1:
            return f"layer {layout.layer}: {tensor.kind} has {tensor.n_bytes} bytes for {tensor.ne1} rows"
    return None
