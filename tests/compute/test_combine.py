"""Sums in the order of ggml's graph."""

from __future__ import annotations

import numpy as np

from swarmnode.compute.combine import PairSum, combine_top_k, sum_in_place


def test_top_k_sums_in_order_of_k() -> None:
    y = np.array([[[1e8], [1.0], [-1e8]], [[-1e8], [1e8], [1.0]]], np.float32)
    assert combine_top_k(y, np.ones((2, 3), np.float32)).tolist() == [[0.0], [1.0]]


def test_pairs_sum_in_the_order_they_come_over_pieces() -> None:
    rng = np.random.default_rng(0)
    y = rng.standard_normal((40, 6), np.float32) * np.float32(1e4)
    row = rng.integers(0, 5, 40).astype(np.int32)
    weight = rng.standard_normal(40).astype(np.float32)
    expected = np.full((7, 6), -0.0, np.float32)
    for p in range(40):
        expected[row[p]] = expected[row[p]] + y[p] * weight[p]
    for step in (1, 7, 40):
        total = PairSum(7, 6)
        for start in range(0, 40, step):
            piece = slice(start, start + step)
            total.add(y[piece].copy(), row[piece], weight[piece])
        assert total.total.tobytes() == expected.tobytes()
    assert not expected[5:].any()
    places = sum_in_place(y, row, weight, 7)
    assert y[places[:5]].tobytes() == expected[:5].tobytes()
    assert places[5:].tolist() == [-1, -1]
    assert sorted(set(places[:5].tolist())) == sorted(int(np.flatnonzero(row == t)[0]) for t in range(5))


def test_negative_zero_survives() -> None:
    total = PairSum(1, 1)
    total.add(np.array([[-0.0]], np.float32), np.zeros(1, np.int32), np.ones(1, np.float32))
    assert np.signbit(total.total[0, 0])
