"""Who is computed next: one batch at a time, small jobs first, and no more than can be done in time.

A decode step or a probe waits for the batch that is running and for other small ones, never for a whole prompt. What
could not be computed within the time that its asker waits anyway is refused at once, so that it can go elsewhere.

A small job whose turn has come takes along the small jobs of its group (its layer) that wait by then: they are
coalesced. Nobody waits for company. Decisions and their reasons: docs/decisions/0026-coalescing.md.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

import trio

from swarmnode.config import ServeConfig
from swarmnode.errors import RequestRefusedError
from swarmnode.services.runners import Runner

_FORGET = 0.9
"""What each batch leaves of the time and pairs of those before it: the last ten or so decide what a pair takes."""
_LONGEST_RETRY_MS = 60_000


class Job(Protocol):
    """What waits to be computed."""

    @property
    def n_pairs(self) -> int:
        """(row, expert) pairs: what it counts for in the queue."""
        ...

    @property
    def width(self) -> int:
        """How much of `Batches.max_width` it takes."""
        ...

    @property
    def group(self) -> Hashable:
        """Jobs of one group may be computed together."""
        ...


J = TypeVar("J", bound=Job)
J_contra = TypeVar("J_contra", bound=Job, contravariant=True)
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Batches(Protocol[J_contra, T_co]):
    """Computes jobs of one group together."""

    @property
    def max_width(self) -> int:
        """Most width of a batch of several jobs."""
        ...

    def run(self, jobs: Sequence[J_contra]) -> Sequence[T_co | Exception]:
        """For each of at least one job its result, or the error that ends this job alone. Compute thread.

        Whatever it raises ends the first job, and the others wait for their own turn.
        """
        ...


@dataclass(frozen=True)
class Computed(Generic[T]):
    """A job's result."""

    result: T
    batch_s: float
    """On the compute thread, with everything that was computed in the same batch, without the time in the queue."""
    own_s: float
    """This job's part of it, by pairs: the parts of a batch add up to its time."""


class _Waiting(Generic[J, T]):
    """A job from when it is asked for until its outcome is there."""

    def __init__(self, job: J, patience: int) -> None:
        self.job = job
        self.turn = trio.Event()
        """Set when its turn has come, or another's batch has computed it."""
        self.patience = patience
        """So many pairs may still be computed before it though they came after it."""
        self.is_gone = False
        """Cancelled. Read on the compute thread too: a batch that has not begun leaves it out."""
        self.outcome: Computed[T] | Exception | None = None


@dataclass(frozen=True)
class _Batch(Generic[J, T]):
    """What was computed together."""

    jobs: Sequence[_Waiting[J, T]]
    outcomes: Sequence[T | Exception]
    spent_s: float


class _Lane(Generic[J, T]):
    """Jobs of one kind: those that wait, in order, and the pairs of all that are not done."""

    def __init__(self) -> None:
        self.waiting: deque[_Waiting[J, T]] = deque()
        self.pairs: Counter[Hashable] = Counter()
        """By owner. Owners without any are absent."""
        self.n_pairs = 0

    def count(self, owner: Hashable, n_pairs: int) -> None:
        self.n_pairs += n_pairs
        self.pairs[owner] += n_pairs
        if not self.pairs[owner]:
            del self.pairs[owner]

    def company(self, leader: J, max_jobs: int, max_width: int) -> list[_Waiting[J, T]]:
        """Who is computed together with `leader`: up to `max_jobs` of its group, at most `max_width` wide with it.

        In order of asking; who does not fit is passed over, and nobody is overtaken by more than it has patience for.
        They stay in `waiting` until they are computed.
        """
        room = max_width - leader.width
        chosen: list[_Waiting[J, T]] = []
        may_overtake: float = float("inf")
        for one in self.waiting:
            job = one.job
            if len(chosen) == max_jobs or room < 1 or may_overtake < 1:
                break
            if job.group == leader.group and job.width <= room and job.n_pairs <= may_overtake:
                chosen.append(one)
                room -= job.width
                may_overtake -= job.n_pairs
            else:
                may_overtake = min(may_overtake, one.patience)
        return chosen

    def remove(self, computed: Sequence[_Waiting[J, T]]) -> None:
        """These were computed out of turn: those before them have been overtaken."""
        left = set(computed)
        kept: deque[_Waiting[J, T]] = deque()
        overtaking = 0
        for one in reversed(self.waiting):
            if one in left:
                overtaking += one.job.n_pairs
            else:
                kept.appendleft(one)
                one.patience -= overtaking
        self.waiting = kept


class JobQueue(Generic[J, T]):
    """In front of the compute runner, which takes batches in the order of asking."""

    def __init__(self, compute: Runner, batches: Batches[J, T], config: ServeConfig) -> None:
        self._compute = compute
        self._batches = batches
        self._config = config
        self._small: _Lane[J, T] = _Lane()
        self._large: _Lane[J, T] = _Lane()
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

    async def run(self, owner: Hashable, job: J) -> Computed[T]:
        """The result of `job`, computed alone or with others of its group.

        Cancelled before it is computed, it never is. Raises RequestRefusedError `busy` at once when the queue is full,
        and the error that `Batches.run` has for it.
        """
        self.check_room(owner, job.n_pairs)
        lane = self._lane(job.n_pairs)
        mine: _Waiting[J, T] = _Waiting(job, self._config.max_overtaking_pairs)
        lane.count(owner, job.n_pairs)
        try:
            await self._wait_turn(lane, mine)
            if mine.outcome is None:
                await self._lead(lane, mine)
        finally:
            lane.count(owner, -job.n_pairs)
        outcome = mine.outcome
        assert outcome is not None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

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

    def _lane(self, n_pairs: int) -> _Lane[J, T]:
        return self._small if n_pairs <= self._config.small_pairs else self._large

    async def _wait_turn(self, lane: _Lane[J, T], mine: _Waiting[J, T]) -> None:
        """Returns when it is this job's turn, or when it has been computed."""
        if not self._is_running:
            self._is_running = True
            return
        lane.waiting.append(mine)
        try:
            await mine.turn.wait()
        except trio.Cancelled:
            mine.is_gone = True
            if not mine.turn.is_set():
                lane.waiting.remove(mine)
            elif mine.outcome is None:
                self._pass_on()
            raise

    async def _lead(self, lane: _Lane[J, T], mine: _Waiting[J, T]) -> None:
        """It is this job's turn: compute it and its company.

        The company stays in the queue meanwhile: a leader that is cancelled or fails leaves the others as they were.
        """
        batch = [mine]
        if lane is self._small:
            batch += lane.company(mine.job, self._config.coalesced_requests - 1, self._batches.max_width)
        try:
            computed = await self._compute.run(partial(self._compute_batch, batch))
            self._deliver(lane, computed)
        finally:
            self._pass_on()

    def _compute_batch(self, batch: Sequence[_Waiting[J, T]]) -> _Batch[J, T]:
        """Compute thread."""
        present = [one for one in batch if not one.is_gone]
        started_s = time.perf_counter()
        outcomes = self._batches.run([one.job for one in present])
        return _Batch(present, outcomes, time.perf_counter() - started_s)

    def _deliver(self, lane: _Lane[J, T], batch: _Batch[J, T]) -> None:
        """Everybody's outcome, and what is learned from the batch."""
        n_pairs = sum(one.job.n_pairs for one in batch.jobs)
        for one, outcome in zip(batch.jobs, batch.outcomes, strict=True):
            if isinstance(outcome, Exception):
                one.outcome = outcome
            else:
                one.outcome = Computed(outcome, batch.spent_s, batch.spent_s * one.job.n_pairs / n_pairs)
            one.turn.set()
        company = batch.jobs[1:]
        if company:
            lane.remove(company)
        if self._large.waiting:
            self._small_in_a_row += len(company)
        self._recent_s = _FORGET * self._recent_s + batch.spent_s
        self._recent_pairs = _FORGET * self._recent_pairs + n_pairs

    def _pass_on(self) -> None:
        """The turn goes to the next job, if there is one."""
        small, large = self._small.waiting, self._large.waiting
        if small and not (large and self._small_in_a_row >= self._config.small_before_large):
            self._small_in_a_row += 1 if large else 0
            small.popleft().turn.set()
        elif large:
            self._small_in_a_row = 0
            large.popleft().turn.set()
        else:
            self._is_running = False
