"""One `experts` request on the compute thread: rows in, the body of the reply out.

A prompt's pairs are computed in pieces, as wide as the bank's graphs may be. Beside the request and the reply,
y f32[P, E] is all that is as large as they are: a worker's budget is a promise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swarmnode.compute.bank import ExpertBank
from swarmnode.compute.combine import Ids, Rows, sum_in_place
from swarmnode.wire.tensors import WireRows, encode_rows_body, widened

_ROWS_AT_ONCE = 64
"""Rows of a reply encoded in one operation: 0.8 MB of f32 at n_embd 3,072."""


@dataclass(frozen=True)
class ExpertWork:
    """What a request asks for, parsed: T rows as they came, pair_row and pair_expert i32[P].

    `pair_weight` f32[P] for weighted sums by row, None for the pairs themselves. `encoding` is that of the reply.
    """

    layer: int
    rows: WireRows
    pair_row: Ids
    pair_expert: Ids
    pair_weight: Rows | None
    encoding: str

    def run(self, bank: ExpertBank) -> tuple[int, tuple[memoryview, ...]]:
        """Number of rows in the reply, and its body.

        Raises RequestRefusedError `overflow` for results that the encoding cannot hold, and what `ExpertBank.experts`
        raises.
        """
        if self.pair_row.size <= bank.max_rows:
            values = self._at_once(bank)
            return len(values), encode_rows_body(values, self.encoding)
        y = self._in_pieces(bank)
        if self.pair_weight is None:
            return len(y), self._encoded(y, np.arange(len(y)))
        places = sum_in_place(y, self.pair_row, self.pair_weight, len(self.rows))
        return len(places), self._encoded(y, places)

    def _at_once(self, bank: ExpertBank) -> Rows:
        rows = widened(self.rows)
        if self.pair_weight is None:
            return bank.experts(self.layer, rows, self.pair_row, self.pair_expert)
        return bank.partial(self.layer, rows, self.pair_row, self.pair_expert, self.pair_weight)

    def _in_pieces(self, bank: ExpertBank) -> Rows:
        """y f32[P, E], unweighted. Sorted by expert, so that each one's weights are read once."""
        order = np.argsort(self.pair_expert, kind="stable")
        y: Rows = np.empty((order.size, bank.layout(self.layer).n_embd), np.float32)
        for start in range(0, order.size, bank.max_rows):
            index = order[start : start + bank.max_rows]
            used = widened(self.rows[self.pair_row[index]])
            each = np.arange(index.size, dtype=np.int32)
            y[index] = bank.experts(self.layer, used, each, self.pair_expert[index])
        return y

    def _encoded(self, y: Rows, places: npt.NDArray[np.intp]) -> tuple[memoryview, ...]:
        """Rows y[places] as a body in parts; a row without a place (-1) is -0.0, as in PairSum."""
        parts: list[memoryview] = []
        for start in range(0, places.size, _ROWS_AT_ONCE):
            some = places[start : start + _ROWS_AT_ONCE]
            rows = y[some]
            rows[some < 0] = -0.0
            parts += encode_rows_body(rows, self.encoding)
        return tuple(parts)
