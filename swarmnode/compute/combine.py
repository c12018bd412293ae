"""The weighted sum over a row's experts, in numpy float32, with the order of additions that ggml's graph has.

For every row: ((w_0 * y_0 + w_1 * y_1) + w_2 * y_2) + ..., each product and each sum rounded to float32.
Bit-equal to llama.cpp's graph, so it does not matter whether a device or the backbone combines.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int32]

_ROWS_AT_ONCE = 64
"""Rows added in one numpy operation: 1.6 MB of copies at n_embd 3,072."""
_FEW_PAIRS = 16
"""Up to here (decode) a plain loop over the pairs is faster than sorting them into rounds."""


def combine_top_k(y: Rows, weights: Rows) -> Rows:
    """y f32[T, k, E], weights f32[T, k] -> f32[T, E], summed in the order of k. `y` is overwritten."""
    np.multiply(y, weights[:, :, None], out=y)
    total: Rows = y[:, 0].copy()
    for k in range(1, y.shape[1]):
        total += y[:, k]
    return total


class PairSum:
    """Sums weighted pairs row by row, in the order in which they come, in one or more pieces.

    Starts at -0.0, the one float32 to which adding x gives exactly x (0.0 would turn a -0.0 into 0.0).
    """

    def __init__(self, n_rows: int, n_embd: int) -> None:
        self.total: Rows = np.full((n_rows, n_embd), -0.0, np.float32)
        """f32[T, E]: the sums so far; zero for a row without a pair."""

    def add(self, y: Rows, pair_row: Ids, pair_weight: Rows) -> None:
        """Add y f32[P, E] * pair_weight f32[P] to the rows pair_row i32[P] (in range). `y` is overwritten."""
        np.multiply(y, pair_weight[:, None], out=y)
        if pair_row.size <= _FEW_PAIRS:
            for pair, row in enumerate(pair_row.tolist()):
                self.total[row] += y[pair]
            return
        for index in _rounds(pair_row):
            for start in range(0, index.size, _ROWS_AT_ONCE):  # indexing copies on both sides
                some = index[start : start + _ROWS_AT_ONCE]
                self.total[pair_row[some]] += y[some]


def sum_in_place(y: Rows, pair_row: Ids, pair_weight: Rows, n_rows: int) -> npt.NDArray[np.intp]:
    """The sums of `PairSum` for all pairs at once, without memory for them: y f32[P, E] is overwritten.

    pair_row i32[P] in 0 .. n_rows - 1, pair_weight f32[P]. Returns where the sums are, i[n_rows]: row t's in
    y[places[t]]; -1 for a row without a pair.
    """
    np.multiply(y, pair_weight[:, None], out=y)
    places = np.full(n_rows, -1, np.intp)
    for number, index in enumerate(_rounds(pair_row)):
        if number == 0:
            places[pair_row[index]] = index
            continue
        for start in range(0, index.size, _ROWS_AT_ONCE):
            some = index[start : start + _ROWS_AT_ONCE]
            y[places[pair_row[some]]] += y[some]
    return places


def _rounds(pair_row: Ids) -> list[npt.NDArray[np.intp]]:
    """Indices of each row's first pair, then of each row's second, and so on: no row twice in a round."""
    if pair_row.size == 0:
        return []
    order = np.argsort(pair_row, kind="stable")
    ordered = pair_row[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    lengths = np.diff(np.r_[starts, ordered.size])
    rank = np.arange(ordered.size) - np.repeat(starts, lengths)
    return [order[rank == r] for r in range(int(lengths.max()))]
