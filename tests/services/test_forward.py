"""Pure parts of dispatch: when rows agree, and sums that do not depend on who answered first."""

from __future__ import annotations

import numpy as np
import pytest

from swarmnode.models.base import ExpertCall
from swarmnode.schedule.dispatch import Share
from swarmnode.services.forward import Combiner, rows_agree

RNG = np.random.default_rng(0)
ROW = RNG.standard_normal(256).astype(np.float32)
MAX_ERROR = 0.1


@pytest.mark.parametrize(
    ("got", "agrees"),
    [
        (ROW, True),
        (ROW.astype(np.float16).astype(np.float32), True),
        (ROW + 0.03 * RNG.standard_normal(256).astype(np.float32), True),
        (ROW * np.float32(1.2), False),
        (ROW * np.float32(1000), False),
        (ROW * np.float32(0.5), False),
        (-ROW, False),
        (np.roll(ROW, 1), False),
        (np.zeros_like(ROW), False),
        (np.full_like(ROW, np.nan), False),
        (np.full_like(ROW, np.inf), False),
    ],
)
def test_rows_agree(got: np.ndarray[tuple[int], np.dtype[np.float32]], agrees: bool) -> None:
    assert rows_agree(ROW, got, MAX_ERROR) is agrees


def test_honest_zeros_and_tiny_rows_agree() -> None:
    """A weight of nearly nothing makes rows that f16 cannot tell from zero."""
    zero = np.zeros_like(ROW)
    tiny = (ROW * np.float32(2e-8)).astype(np.float32)
    assert rows_agree(zero, zero, MAX_ERROR)
    assert rows_agree(tiny, tiny.astype(np.float16).astype(np.float32), MAX_ERROR)
    assert not rows_agree(zero, ROW, MAX_ERROR)


@pytest.mark.parametrize("exact", [True, False])
def test_a_layer_is_the_sum_of_its_shares(exact: bool) -> None:
    ids = np.array([[0, 1], [2, 0], [1, 2]], np.int32)
    weights = RNG.random((3, 2), np.float32)
    call = ExpertCall(0, RNG.standard_normal((3, 4), np.float32), ids, weights)
    outputs = RNG.standard_normal((6, 4), np.float32)
    combiner = Combiner(call, exact)
    for flat in (np.array([0, 3, 4]), np.array([1, 2, 5])):
        rows, pair_row = np.unique(flat // 2, return_inverse=True)
        share = Share(flat, rows, pair_row.astype(np.int32), ids.ravel()[flat])
        values = outputs[flat]
        if not exact:
            values = np.zeros((len(rows), 4), np.float32)
            np.add.at(values, pair_row, outputs[flat] * weights.ravel()[flat][:, None])
        combiner.add(share, values)
    expected = (outputs.reshape(3, 2, 4) * weights[:, :, None]).sum(1)
    assert np.allclose(combiner.result(), expected, atol=1e-6)
