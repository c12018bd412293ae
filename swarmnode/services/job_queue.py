"""Who is computed next: one job at a time, small ones first, and no more than can be done in time.

A decode step or a probe waits for the job that is running and for other small ones, never for a whole prompt. What
could not be computed within the time that its asker waits anyway is refused at once, so that it can go elsewhere.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Hashable
from functools import partial
from typing import TypeVar

import trio

from swarmnode.config import ServeConfig
from swarmnode.errors import RequestRefusedError
from swarmnode.services.runners import Runner

T = TypeVar("T")

_FORGET = 0.9
"""What each job leaves of the time and pairs of those before it: the last ten or so decide what a pair takes."""
_LONGEST_RETRY_MS = 60_000


class _Lane:
    """Jobs of one kind: those that wait, in order, and the pairs of all that are not done."""

    def __init__(self) -> None:
        self.turns: deque[trio.Event] = deque()
        self.pairs: Counter[Hashable] = Counter()
        """By owner. Owners without any are absent."""
        self.n_pairs = 0

    def count(self, owner: Hashable, n_pairs: int) -> None:
        self.n_pairs += n_pairs
        self.pairs[owner] += n_pairs
        if not self.pairs[owner]:
            del self.pairs[owner]


class JobQueue:
    """In front of the compute runner, which takes jobs in the order of asking."""

    def __init__(self, compute: Runner, config: ServeConfig) -> None:
        self._compute = compute
        self._config = config
        self._small = _Lane()
        self._large = _Lane()
        self._is_running = False
        self._small_in_a_row = 0
        self._recent_s = 0.0
        self._recent_pairs = 0.0

    @property
    def queued_pairs(self) -> int:
        """(row, expert) pairs that wait or are being computed."""
        return self._small.n_pairs + self._large.n_pairs

    @property
    def pair_s(self) -> float:
        """Seconds a pair took lately, 0 before the first."""
        return self._recent_s / self._recent_pairs if self._recent_pairs else 0.0

    async def run(self, owner: Hashable, n_pairs: int, function: Callable[[], T]) -> tuple[T, float]:
        """The result of `function`, which computes `n_pairs` pairs, and the seconds it took on the compute thread.

        Cancelled before its turn, it never runs. Raises RequestRefusedError `busy` at once when the queue is full, and
        what `function` raises.
        """
        self.check_room(owner, n_pairs)
        lane = self._lane(n_pairs)
        lane.count(owner, n_pairs)
        try:
            await self._wait_turn(lane)
            try:
                result, spent_s = await self._compute.run(partial(_timed, function))
            finally:
                self._pass_on()
        finally:
            lane.count(owner, -n_pairs)
        self._recent_s = _FORGET * self._recent_s + spent_s
        self._recent_pairs = _FORGET * self._recent_pairs + n_pairs
        return result, spent_s

    def check_room(self, owner: Hashable, n_pairs: int) -> None:
        """Raises RequestRefusedError `busy` if so many pairs more of this owner would wait too long.

        Whoever finds nothing before it is taken, so that the estimate can recover from a slow start.
        """
        lane = self._lane(n_pairs)
        ahead = lane.n_pairs if lane is self._small else self.queued_pairs
        if ahead == 0:
            return
        most = self._config.max_queued_pairs
        if self.pair_s > 0:
            most = min(most, int(self._config.max_queue_s / self.pair_s))
        mine = lane.pairs.get(owner, 0)
        if ahead + n_pairs > most or (mine and mine + n_pairs > most // 2):
            retry_ms = max(self._config.retry_after_ms, int(ahead * self.pair_s * 1e3))
            raise RequestRefusedError(
                "busy", f"{ahead} pairs are waiting, {mine} of them yours", min(retry_ms, _LONGEST_RETRY_MS)
            )

    def _lane(self, n_pairs: int) -> _Lane:
        return self._small if n_pairs <= self._config.small_pairs else self._large

    async def _wait_turn(self, lane: _Lane) -> None:
        if not self._is_running:
            self._is_running = True
            return
        turn = trio.Event()
        lane.turns.append(turn)
        try:
            await turn.wait()
        except trio.Cancelled:
            if turn.is_set():
                self._pass_on()
            else:
                lane.turns.remove(turn)
            raise

    def _pass_on(self) -> None:
        """The turn goes to the next job, if there is one."""
        small, large = self._small.turns, self._large.turns
        if small and not (large and self._small_in_a_row >= self._config.small_before_large):
            self._small_in_a_row += 1 if large else 0
            small.popleft().set()
        elif large:
            self._small_in_a_row = 0
            large.popleft().set()
        else:
            self._is_running = False


def _timed(function: Callable[[], T]) -> tuple[T, float]:
    started_s = time.perf_counter()
    result = function()
    return result, time.perf_counter() - started_s
