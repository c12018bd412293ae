"""The table of tensor types against the two libraries that define them."""

from __future__ import annotations

import ggml as api
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from swarmnode.weights.ggml_types import GGML_TYPES, is_weight_type, row_bytes, type_name


@pytest.mark.parametrize("number", GGML_TYPES)
def test_sizes_are_those_of_ggml_and_gguf(number: int) -> None:
    kind = GGML_TYPES[number]
    assert (kind.block_values, kind.block_bytes) == GGML_QUANT_SIZES[GGMLQuantizationType(number)]
    assert kind.block_values == api.ggml_blck_size(number)
    assert kind.block_bytes == api.ggml_type_size(number)
    assert kind.name == GGMLQuantizationType(number).name


def test_nothing_a_file_may_hold_is_left_out() -> None:
    inside_ggml_only = {GGMLQuantizationType.Q8_1, GGMLQuantizationType.Q8_K}
    assert set(GGML_TYPES) == {int(kind) for kind in GGMLQuantizationType if kind not in inside_ggml_only}


def test_rows_that_blocks_do_not_divide_have_no_size() -> None:
    assert row_bytes(12, 512) == 288
    assert row_bytes(12, 255) is None
    assert row_bytes(12, 0) is None
    assert row_bytes(99, 32) is None
    assert type_name(12) == "Q4_K"
    assert type_name(99) == "type 99"
    assert is_weight_type(12)
    assert not is_weight_type(26)
    assert not is_weight_type(99)
