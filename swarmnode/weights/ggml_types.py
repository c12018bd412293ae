"""The tensor types of ggml, as far as model files may use them: numbers, block sizes, which can be multiplied
with.

Own table instead of gguf-py's: importing gguf costs 130 ms and it lists types (Q8_1, Q8_K) that ggml only
uses inside a mat-mul. `tests/weights/test_ggml_types.py` holds it against gguf-py and against the ggml that
is installed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GgmlType:
    """One storage type: `block_values` values of a row are stored in `block_bytes` bytes."""

    name: str
    block_values: int
    block_bytes: int
    is_weight: bool = True
    """ggml can multiply (mul_mat, mul_mat_id) by a tensor of this type."""


GGML_TYPES: dict[int, GgmlType] = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    16: GgmlType("IQ2_XXS", 256, 66),
    17: GgmlType("IQ2_XS", 256, 74),
    18: GgmlType("IQ3_XXS", 256, 98),
    19: GgmlType("IQ1_S", 256, 50),
    20: GgmlType("IQ4_NL", 32, 18),
    21: GgmlType("IQ3_S", 256, 110),
    22: GgmlType("IQ2_S", 256, 82),
    23: GgmlType("IQ4_XS", 256, 136),
    24: GgmlType("I8", 1, 1, is_weight=False),
    25: GgmlType("I16", 1, 2, is_weight=False),
    26: GgmlType("I32", 1, 4, is_weight=False),
    27: GgmlType("I64", 1, 8, is_weight=False),
    28: GgmlType("F64", 1, 8, is_weight=False),
    29: GgmlType("IQ1_M", 256, 56),
    30: GgmlType("BF16", 1, 2),
    34: GgmlType("TQ1_0", 256, 54),
    35: GgmlType("TQ2_0", 256, 66),
    39: GgmlType("MXFP4", 32, 17),
    40: GgmlType("NVFP4", 64, 36),
    41: GgmlType("Q1_0", 128, 18),
}

TYPE_NUMBERS: dict[str, int] = {kind.name: number for number, kind in GGML_TYPES.items()}


def type_name(number: int) -> str:
    """`Q4_K` for 12; `type 99` for a number this version does not know."""
    kind = GGML_TYPES.get(number)
    return kind.name if kind is not None else f"type {number}"


def is_weight_type(number: int) -> bool:
    """True if ggml can multiply by tensors of this type."""
    kind = GGML_TYPES.get(number)
    return kind is not None and kind.is_weight


def row_bytes(number: int, ne0: int) -> int | None:
    """Bytes of a row of `ne0` values; None if the type is unknown or ne0 is no positive multiple of its
    block.
    """
    kind = GGML_TYPES.get(number)
    if kind is None or ne0 < 1 or ne0 % kind.block_values:
        return None
    return ne0 // kind.block_values * kind.block_bytes
