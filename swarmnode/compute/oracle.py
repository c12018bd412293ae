"""The reference: one expert's FFN in numpy float64 from dequantised weights, sharing no code with ggml's
kernels.

    y = Down( silu(Gate x) * (Up x) ),   silu(z) = z / (1 + exp(-z))

Weights are decoded by gguf-py, a block of matrix rows at a time, so that a float64 expert (75 MB at the
real sizes) never exists as a whole. With `activations` other than None, each mat-mul's input is first
rounded as ggml's CPU kernels round it (8 bit for quantised weights): what remains between that and the
device is float32 rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import gguf
import numpy as np
import numpy.typing as npt

from swarmnode.compute.layout import DOWN, GATE, GATE_UP, UP, LayerLayout
from swarmnode.errors import UnsupportedModelError

F64 = npt.NDArray[np.float64]
Rounding = Literal["exact", "f16", "bf16", "q8_0", "q8_1", "q8_K"]
"""How a mat-mul's input is rounded before it multiplies."""

_BLOCK_ELEMENTS = 1 << 18
"""Matrix elements decoded at once: 2 MiB in float64, and the decoder's own scratch beside it."""


@dataclass(frozen=True)
class Matrix:
    """One slab: `ne1` rows of `ne0` values, encoded."""

    ggml_type: int
    ne0: int
    ne1: int
    data: bytes | bytearray | memoryview | npt.NDArray[np.uint8]

    def rows(self, first: int, count: int) -> F64:
        """Rows first..first+count-1 as float64; UnsupportedModelError for a type that gguf-py cannot
        decode.
        """
        raw = np.frombuffer(self.data, np.uint8)
        row_bytes = raw.size // self.ne1
        block = raw[first * row_bytes : (first + count) * row_bytes].reshape(count, row_bytes)
        kind = gguf.GGMLQuantizationType(self.ggml_type)
        try:
            values = gguf.quants.dequantize(block, kind)
        except NotImplementedError as error:
            raise UnsupportedModelError(f"the oracle cannot decode {kind.name}") from error
        return values.reshape(count, self.ne0).astype(np.float64)


def apply(matrix: Matrix, x: F64) -> F64:
    """x f64[T, ne0] -> x @ matrix^T, f64[T, ne1]."""
    y: F64 = np.empty((x.shape[0], matrix.ne1), np.float64)
    step = max(1, _BLOCK_ELEMENTS // matrix.ne0)
    for first in range(0, matrix.ne1, step):
        count = min(step, matrix.ne1 - first)
        np.matmul(x, matrix.rows(first, count).T, out=y[:, first : first + count])
    return y


def expert_ffn(
    rows: npt.NDArray[np.floating],
    gate: Matrix,
    up: Matrix,
    down: Matrix,
    activations: tuple[Rounding, Rounding] = ("exact", "exact"),
) -> F64:
    """rows f32 or f64 [T, n_embd] -> f64[T, n_embd].

    `activations`: the rounding before gate and up, and before down.
    """
    x = round_activations(rows.astype(np.float64), activations[0])
    hidden = apply(gate, x)
    hidden *= 1.0 / (1.0 + np.exp(-hidden))
    hidden *= apply(up, x)
    del x
    return apply(down, round_activations(hidden, activations[1]))


def expert_matrices(
    layout: LayerLayout, slabs: Mapping[str, bytes | bytearray | memoryview]
) -> tuple[Matrix, Matrix, Matrix]:
    """(gate, up, down) of one expert from its slabs; a fused gate_up is cut in the middle."""
    found = {
        tensor.kind: Matrix(tensor.ggml_type, tensor.ne0, tensor.ne1, slabs[tensor.kind])
        for tensor in layout.tensors
    }
    if layout.fused:
        whole = found[GATE_UP]
        raw = np.frombuffer(whole.data, np.uint8)
        half = raw.size // 2
        found[GATE] = Matrix(whole.ggml_type, whole.ne0, layout.n_ff, raw[:half])
        found[UP] = Matrix(whole.ggml_type, whole.ne0, layout.n_ff, raw[half:])
    return found[GATE], found[UP], found[DOWN]


def round_activations(x: F64, rounding: Rounding) -> F64:
    """x f64[T, n] as the kernels see it: cut to f32, then to the given type's blocks along n, back in f64."""
    if rounding == "exact":
        return x
    return _ROUNDERS[rounding](x.astype(np.float32))


def _round_f16(x: npt.NDArray[np.float32]) -> F64:
    return x.astype(np.float16).astype(np.float64)


def _round_bf16(x: npt.NDArray[np.float32]) -> F64:
    bits = x.view(np.uint32)
    bits = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64)


def _round_q8_0(x: npt.NDArray[np.float32]) -> F64:
    """Blocks of 32: q = round(x * 127 / max|x|), scale max|x| / 127 kept as f16 (ggml quantize_row_q8_0)."""
    blocks = x.reshape(-1, 32)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    scale = (largest / np.float32(127)).astype(np.float16).astype(np.float64)
    rounded: F64 = np.rint(blocks * inverse) * scale
    return rounded.reshape(x.shape)


def _round_q8_k(x: npt.NDArray[np.float32]) -> F64:
    """Blocks of 256: the value of largest magnitude becomes -127, scale in f32 (ggml quantize_row_q8_K)."""
    blocks = x.reshape(-1, 256)
    where = np.abs(blocks).argmax(axis=1)
    largest = blocks[np.arange(blocks.shape[0]), where][:, None]
    inverse = np.divide(np.float32(-127), largest, out=np.zeros_like(largest), where=largest != 0)
    scale = np.divide(np.float32(1), inverse, out=np.zeros_like(inverse), where=inverse != 0)
    rounded: F64 = np.minimum(np.rint(blocks * inverse), 127) * scale.astype(np.float64)
    return rounded.reshape(x.shape)


_ROUNDERS: Mapping[str, Callable[[npt.NDArray[np.float32]], F64]] = {
    "f16": _round_f16,
    "bf16": _round_bf16,
    "q8_0": _round_q8_0,
    "q8_1": _round_q8_0,  # q8_1 adds a sum beside the same quants
    "q8_K": _round_q8_k,
}


def row_cosines(a: npt.NDArray[np.floating], b: npt.NDArray[np.floating]) -> F64:
    """Cosine of a[t] and b[t] for each row, f64[T]; 1 for two zero rows, 0 for one; NaN counts as -1."""
    dot = np.einsum("te,te->t", a, b, dtype=np.float64)
    norm = np.sqrt(
        np.einsum("te,te->t", a, a, dtype=np.float64) * np.einsum("te,te->t", b, b, dtype=np.float64)
    )
    finite = np.isfinite(dot) & np.isfinite(norm)
    cosines = np.where(finite, 0.0, -1.0)
    cosines[~a.any(axis=1) & ~b.any(axis=1)] = 1.0
    np.divide(dot, norm, out=cosines, where=finite & (norm > 0))
    return cosines
