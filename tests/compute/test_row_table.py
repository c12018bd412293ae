"""Embedding rows out of a mapped matrix."""

from __future__ import annotations

import numpy as np
import pytest

from swarmnode.compute import ggml
from swarmnode.compute.row_table import RowTable
from swarmnode.errors import UsageError

VALUES = np.random.default_rng(0).standard_normal((7, 256)).astype(np.float32)


@pytest.mark.parametrize("ggml_type", [ggml.F32, ggml.F16, ggml.BF16, ggml.Q8_0, ggml.Q4_K, ggml.Q6_K])
def test_rows_are_what_ggml_decodes_from_the_whole_matrix(ggml_type: int) -> None:
    data = ggml.quantize(ggml_type, VALUES)
    whole = ggml.dequantize(ggml_type, data, VALUES.size).reshape(VALUES.shape)
    table = RowTable(ggml_type, data, 7, 256)
    np.testing.assert_array_equal(table.rows([6, 0, 6]), whole[[6, 0, 6]])
    assert table.rows([]).shape == (0, 256)
    np.testing.assert_array_equal(table.rows(list(np.array([6, 1], np.int32))), whole[[6, 1]])


@pytest.mark.parametrize("numbers", [[7], [-1], [0, 2**40]])
def test_a_row_that_is_not_there_is_refused(numbers: list[int]) -> None:
    table = RowTable(ggml.F32, VALUES.tobytes(), 7, 256)
    with pytest.raises(UsageError, match="not all of 0 to 6"):
        table.rows(numbers)


def test_wrong_sizes_and_types_without_a_decoder_are_refused() -> None:
    with pytest.raises(UsageError, match="bytes are not"):
        RowTable(ggml.F32, VALUES.tobytes(), 8, 256)
    with pytest.raises(UsageError, match="no decoder"):
        RowTable(ggml.Q8_K, bytes(7 * 292), 7, 256)
