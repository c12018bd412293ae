"""Rows in 8 bits, by blocks of 256 numbers: the one of largest magnitude in f32, and each as a 127th part of it.

These are the quants that ggml's CPU kernels make of a row before they multiply it with a K-quant (`block_q8_K`), with
the opposite sign. Because the largest number itself travels, and not the scale that ggml derives from it, the kernel of
the receiver finds the very same scale and quants again: docs/decisions/0023-q8-rows.md.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from swarmnode.wire.constants import Q8_BLOCK_BYTES, Q8_BLOCK_NUMBERS

F32: TypeAlias = npt.NDArray[np.float32]
Blocks: TypeAlias = npt.NDArray[np.void]
"""Items of `BLOCK`: [T, n_embd / 256]."""

BLOCK = np.dtype([("largest", "<f4"), ("quants", "i1", (Q8_BLOCK_NUMBERS,))])
assert BLOCK.itemsize == Q8_BLOCK_BYTES

MAX_LARGEST = 65_504.0
"""As in f16, the encoding of the replies: what is larger goes, and is answered, in f32."""
MIN_LARGEST = 2.0**-96
"""Of blocks that are not all zero; of much smaller ones the kernels cannot take the reciprocal."""
_STEPS = np.float32(127)
_ROWS_AT_ONCE = 16
"""Rows quantised in one numpy operation: 0.2 MB at n_embd 3,072, which stays in the caches."""


def quantise(rows: F32) -> Blocks | None:
    """Blocks [T, n_embd / 256] of rows [T, n_embd].

    None if they do not fit: another width than whole blocks, a number over 65,504 or not finite, or a block with
    nothing but numbers under 2^-96.
    """
    n_rows, n_embd = rows.shape
    if n_embd % Q8_BLOCK_NUMBERS:
        return None
    blocks = np.empty((n_rows, n_embd // Q8_BLOCK_NUMBERS), BLOCK)
    for start in range(0, n_rows, _ROWS_AT_ONCE):
        some = blocks[start : start + _ROWS_AT_ONCE]
        if not _quantise_into(some, rows[start : start + _ROWS_AT_ONCE].reshape(*some.shape, -1)):
            return None
    return blocks


def _quantise_into(blocks: Blocks, numbers: F32) -> bool:
    """Fill blocks [T, B] with numbers [T, B, 256]; False if they do not fit."""
    highest, lowest = numbers.max(axis=2), numbers.min(axis=2)
    largest = np.where(highest >= -lowest, highest, lowest)  # a NaN comes through all three
    if not _fit(largest):
        return False
    inverse = np.divide(_STEPS, largest, out=np.zeros_like(largest), where=largest != 0)
    # In f32, and halves to even: ggml rounds the product before it rounds to a whole number.
    scaled = numbers * inverse[..., None]
    blocks["largest"] = largest
    blocks["quants"] = np.rint(scaled, out=scaled)
    return True


def dequantise(blocks: Blocks) -> F32:
    """Rows [T, n_embd] of blocks [T, n_embd / 256]. The largest number of each block is exactly what it was."""
    # 127 / 127 is 1 in any arithmetic, so that largest * 1 is exact; largest * 127 / 127 may not be.
    numbers: F32 = blocks["quants"].astype(np.float32)
    numbers /= _STEPS
    numbers *= blocks["largest"][..., None]
    return numbers.reshape(len(blocks), -1)


def are_good(blocks: Blocks) -> bool:
    """Whether blocks of a peer are such as `quantise` makes: finite, within 65,504, no quant of -128."""
    return _fit(blocks["largest"]) and bool(blocks["quants"].min() >= -_STEPS)


def _fit(largest: npt.NDArray[Any]) -> bool:
    size = np.abs(largest)
    # A NaN makes every comparison false.
    return bool(((size <= MAX_LARGEST) & ((size >= MIN_LARGEST) | (size == 0))).all())
