"""Several passes side by side, layer by layer, that share one call for experts."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from swarmnode.errors import UsageError
from swarmnode.models.base import ExpertCall, F32Array

Steps = Generator[ExpertCall, F32Array, F32Array | None]


class Lane:
    """One of the passes. All have calls for the same layers, but those without rows in the last one leave it out."""

    def __init__(
        self, steps: Steps, places: Sequence[int], n_rows: Sequence[int], n_last: Sequence[int]
    ) -> None:
        """`places`: of its members among those of all lanes, which is where their rows belong in the shared call;
        `n_rows`, `n_last`: how many each has in the calls of all layers but the last, and in the last one's.
        """
        self._steps = steps
        self.places = places
        self.n_rows = n_rows
        self.n_last = n_last
        self.call: ExpertCall | None = None
        """What it waits for; None: it has ended."""
        self.result: F32Array | None = None

    def resume(self, values: F32Array | None) -> None:
        """Go on to the next call, or to the end. `values`: the routed output; None at the beginning."""
        try:
            self.call = next(self._steps) if values is None else self._steps.send(values)
        except StopIteration as end:
            self.call, self.result = None, end.value


def run_together(
    lanes: Sequence[Lane], n_layer: int, n_embd: int
) -> Generator[ExpertCall, F32Array, list[F32Array | None]]:
    """Run all lanes; what each returns. UsageError for a routed output of another shape, and whatever a lane raises."""
    every = _Order(lanes, [lane.n_rows for lane in lanes])
    active = list(lanes)
    parts: Sequence[F32Array | None] = [None] * len(lanes)
    while True:
        for lane, values in zip(active, parts, strict=True):
            lane.resume(values)
        active = [lane for lane in active if lane.call is not None]
        calls = [lane.call for lane in active if lane.call is not None]
        if not calls:
            return [lane.result for lane in lanes]
        is_last = calls[0].layer == n_layer - 1
        order = _Order(active, [lane.n_last for lane in active]) if is_last else every
        routed = yield order.join(calls)
        check_routed(routed, order.n_rows, n_embd)
        parts = order.part(routed)


def check_routed(values: object, n: int, n_embd: int) -> None:
    """UsageError unless it is f32 [n, n_embd]."""
    if not isinstance(values, np.ndarray) or values.dtype != np.float32 or values.shape != (n, n_embd):
        raise UsageError(f"the routed output must be float32{[n, n_embd]}")


class _Order:
    """Which row of the lanes' calls, one after another, is which of the shared call."""

    def __init__(self, lanes: Sequence[Lane], n_rows: Sequence[Sequence[int]]) -> None:
        places = [place for lane in lanes for place in lane.places]
        rows = np.repeat(places, [n for of_lane in n_rows for n in of_lane])
        order = np.argsort(rows, kind="stable")
        self._order = None if (order[1:] > order[:-1]).all() else order
        """None: it is the same."""
        self.n_rows = len(rows)
        self._ends = np.cumsum([sum(of_lane) for of_lane in n_rows]).tolist()

    def join(self, calls: Sequence[ExpertCall]) -> ExpertCall:
        """The shared call."""
        rows = self._joined([call.rows for call in calls])
        ids = self._joined([call.ids for call in calls])
        return ExpertCall(calls[0].layer, rows, ids, self._joined([call.weights for call in calls]))

    def part(self, routed: F32Array) -> list[F32Array]:
        """The rows of each lane."""
        values = routed
        if self._order is not None:
            values = np.empty_like(routed)
            values[self._order] = routed
        return [values[start:end] for start, end in zip([0, *self._ends], self._ends, strict=False)]

    def _joined(self, arrays: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        joined = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        return joined if self._order is None else joined[self._order]
