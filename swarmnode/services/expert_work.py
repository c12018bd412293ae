"""`experts` requests on the compute thread: rows in, the bodies of the replies out.

A prompt's pairs are computed in pieces, as wide as the bank's graphs may be. Beside the request and the reply,
y f32[P, E] is all that is as large as they are: a worker's budget is a promise. Small requests for one layer are
coalesced into one call of the bank, no wider than its graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from swarmnode.compute.bank import ExpertBank
from swarmnode.compute.combine import Ids, PairSum, Rows, sum_in_place
from swarmnode.errors import SwarmError
from swarmnode.wire.tensors import WireRows, encode_rows_body, widened

_ROWS_AT_ONCE = 64
"""Rows of a reply encoded in one operation: 0.8 MB of f32 at n_embd 3,072."""

Reply: TypeAlias = tuple[int, tuple[memoryview, ...]]
"""Number of rows in a reply, and its body."""


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
    is_urgent: bool = True
    """Somebody waits for a token that needs it, as the asker says: else it is a prompt's."""

    @property
    def n_pairs(self) -> int:
        """P."""
        return self.pair_row.size

    @property
    def width(self) -> int:
        """What it needs of a batch's `max_rows` pairs: a batch has no more rows than that either."""
        return max(self.n_pairs, len(self.rows))

    @property
    def group(self) -> int:
        """A graph has the experts of one layer."""
        return self.layer

    def run(self, bank: ExpertBank) -> Reply:
        """The reply, computed alone.

        Raises RequestRefusedError `overflow` for results that the encoding cannot hold, and what `ExpertBank.experts`
        raises.
        """
        if self.n_pairs <= bank.max_rows:
            values = self._at_once(bank)
            return len(values), encode_rows_body(values, self.encoding)
        y = self._in_pieces(bank)
        if self.pair_weight is None:
            return len(y), self._encoded(y, np.arange(len(y)))
        places = sum_in_place(y, self.pair_row, self.pair_weight, len(self.rows))
        return len(places), self._encoded(y, places)

    def reply(self, y: Rows) -> Reply:
        """The reply from its unweighted pair rows f32[P, E], a part of a batch's; they are overwritten.

        The same bytes as `run` gives. Raises RequestRefusedError `overflow`.
        """
        if self.pair_weight is None:
            # An f32 body is a view: a reply that leaves slowly would keep the whole batch's memory.
            values = y.copy() if self.encoding == "f32" else y
        else:
            total = PairSum(len(self.rows), y.shape[1])
            total.add(y, self.pair_row, self.pair_weight)
            values = total.total
        return len(values), encode_rows_body(values, self.encoding)

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


class ExpertBatches:
    """Requests for one layer, computed together or alone: for JobQueue."""

    def __init__(self, bank: ExpertBank) -> None:
        self._bank = bank

    @property
    def max_width(self) -> int:
        """The widest batch that passed the self-test, in pairs."""
        return self._bank.max_rows

    def run(self, jobs: Sequence[ExpertWork]) -> list[Reply | Exception]:
        """For each its reply, the same bytes as alone (on the CPU), or the SwarmError that ends it. Compute thread.

        Several must be for the same layer and together no wider than `max_width`.
        """
        if len(jobs) > 1:
            try:
                y = _pair_rows(self._bank, jobs)
            except SwarmError:
                pass  # an expert of one was dropped meanwhile, say: computed alone, each gets what is its own
            else:
                ends = np.cumsum([work.n_pairs for work in jobs])[:-1]
                return [
                    _outcome(partial(work.reply, own))
                    for work, own in zip(jobs, np.split(y, ends), strict=True)
                ]
        return [_outcome(partial(work.run, self._bank)) for work in jobs]


def _outcome(reply: Callable[[], Reply]) -> Reply | Exception:
    try:
        return reply()
    except SwarmError as error:
        return error


def _pair_rows(bank: ExpertBank, jobs: Sequence[ExpertWork]) -> Rows:
    """y f32[P, E], unweighted, of the pairs of all jobs, in order: one call of the bank."""
    layer = jobs[0].layer
    starts = np.cumsum([0, *(len(work.rows) for work in jobs)])
    rows: Rows = np.empty((int(starts[-1]), bank.layout(layer).n_embd), np.float32)
    for work, start in zip(jobs, starts, strict=False):
        rows[start : start + len(work.rows)] = widened(work.rows)
    pair_row = np.concatenate(
        [work.pair_row + np.int32(start) for work, start in zip(jobs, starts, strict=False)]
    )
    return bank.experts(layer, rows, pair_row, np.concatenate([work.pair_expert for work in jobs]))
