"""Who is computed next: one batch at a time, what answers wait for first, and no more than can be done in time.

A decode step or a probe waits for the batch that is running and for other urgent ones, never for a whole prompt. What
could not be computed within the time that its asker waits anyway is refused at once, so that it can go elsewhere.

Whether a job is urgent is what its asker says, and everybody could say that. So owners take turns by what they have
had (start-time fair queueing: each job begins, in pairs, where the one before of its owner ended, or where the queue
is now, which goes on by what is computed, divided by the owners there are), and a wait of prompts for urgent ones is
bounded in pairs, too: whoever calls everything urgent has no more than its part.

A small job whose turn has come takes along the small jobs of its group (its layer) that wait by then: they are
coalesced. Nobody waits for company. Decisions and their reasons: docs/decisions/0026-coalescing.md.
"""

from __future__ import annotations

import time
from bisect import insort_right
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

import trio

from swarmnode.config import ServeConfig
from swarmnode.counts import counted
from swarmnode.errors import RequestRefusedError
from swarmnode.services.runners import BRIEF_S, Brief, Runner

_FORGET = 0.9
"""What each batch leaves of the time and pairs of those before it: the last ten or so decide what a pair takes."""
_LONGEST_RETRY_MS = 60_000
_KEPT_ENDS = 64
"""Owners that are remembered without looking whether that is still of use."""


class Job(Protocol):
    """What waits to be computed."""

    @property
    def n_pairs(self) -> int:
        """(row, expert) pairs: what it counts for in the queue."""
        ...

    @property
    def is_urgent(self) -> bool:
        """Whether somebody waits for a token that needs it, as its asker says."""
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

    def __init__(self, job: J, patience: int, begins: float) -> None:
        self.job = job
        self.begins = begins
        """Its place in the order: pairs, of all that its owner had in this busy period."""
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
        self.waiting: list[_Waiting[J, T]] = []
        self.pairs: Counter[Hashable] = Counter()
        """By owner. Owners without any are absent."""
        self.n_pairs = 0

    def count(self, owner: Hashable, n_pairs: int) -> None:
        self.n_pairs += n_pairs
        self.pairs[owner] += n_pairs
        if not self.pairs[owner]:
            del self.pairs[owner]

    def put(self, one: _Waiting[J, T]) -> None:
        """It waits, behind all that begin no later."""
        insort_right(self.waiting, one, key=lambda other: other.begins)

    def company(self, leader: J, max_jobs: int, max_width: int, max_pairs: int) -> list[_Waiting[J, T]]:
        """Who is computed together with `leader`: up to `max_jobs` of its group, at most `max_width` wide with it.

        In their order, and those of up to `max_pairs` only; who does not fit is passed over, and nobody is overtaken by
        more than it has patience for. They stay in `waiting` until they are computed.
        """
        room = max_width - leader.width
        chosen: list[_Waiting[J, T]] = []
        may_overtake: float = float("inf")
        for one in self.waiting:
            job = one.job
            if len(chosen) == max_jobs or room < 1 or may_overtake < 1:
                break
            fits = job.n_pairs <= max_pairs and job.width <= room and job.n_pairs <= may_overtake
            if fits and job.group == leader.group:
                chosen.append(one)
                room -= job.width
                may_overtake -= job.n_pairs
            else:
                may_overtake = min(may_overtake, one.patience)
        return chosen

    def remove(self, computed: Sequence[_Waiting[J, T]]) -> None:
        """These were computed out of turn: those before them have been overtaken."""
        left = set(computed)
        kept: list[_Waiting[J, T]] = []
        overtaking = 0
        for one in reversed(self.waiting):
            if one in left:
                overtaking += one.job.n_pairs
            else:
                kept.append(one)
                one.patience -= overtaking
        self.waiting = kept[::-1]


class JobQueue(Generic[J, T]):
    """In front of the compute runner, which takes batches in the order of asking."""

    def __init__(self, compute: Runner, batches: Batches[J, T], config: ServeConfig) -> None:
        self._compute = compute
        self._batches = batches
        self._config = config
        self._urgent: _Lane[J, T] = _Lane()
        self._patient: _Lane[J, T] = _Lane()
        self._is_running = False
        self._urgent_in_a_row = 0
        """Small jobs, or as many pairs, that were computed while a patient one waited."""
        self._begun = 0.0
        """Where the queue is: not before the beginning of the job whose turn was last. By that alone it would stand
        still while ever new owners come, and those who have had a turn would wait for all of them."""
        self._ends: dict[Hashable, float] = {}
        """Where the next job of each owner begins, if that is not now; forgotten when nothing waits."""
        self._n_ahead = 0
        """How many of them there were when the others were forgotten last."""
        self._recent_s = 0.0
        self._recent_pairs = 0.0

    @property
    def queued_pairs(self) -> int:
        """(row, expert) pairs that wait or are being computed."""
        return self._urgent.n_pairs + self._patient.n_pairs

    @property
    def pair_s(self) -> float:
        """Seconds a pair took lately, 0 before the first."""
        return self._recent_s / self._recent_pairs if self._recent_pairs else 0.0

    async def run(self, owner: Hashable, job: J) -> Computed[T]:
        """The result of `job`, computed alone or with others of its group.

        Cancelled before it is computed, it never is. Raises RequestRefusedError `busy` at once when the queue is full,
        and the error that `Batches.run` has for it.
        """
        self.check_room(owner, job.n_pairs, is_urgent=job.is_urgent)
        lane = self._lane(job.is_urgent)
        begins = max(self._begun, self._ends.get(owner, 0))
        mine: _Waiting[J, T] = _Waiting(job, self._config.max_overtaking_pairs, begins)
        self._ends[owner] = begins + job.n_pairs
        self._forget()
        lane.count(owner, job.n_pairs)
        try:
            await self._wait_turn(lane, mine)
            if mine.outcome is None:
                await self._lead(lane, mine)
        finally:
            lane.count(owner, -job.n_pairs)
            if mine.outcome is None and owner in self._ends:  # it was not computed: it has had nothing
                self._ends[owner] -= job.n_pairs
        outcome = mine.outcome
        assert outcome is not None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def check_room(self, owner: Hashable, n_pairs: int, *, is_urgent: bool) -> None:
        """Raises RequestRefusedError `busy` if so many pairs more of this owner would wait too long.

        Whoever finds nothing before it is taken, so that the estimate can recover from a slow start.
        """
        lane = self._lane(is_urgent)
        ahead = lane.n_pairs if is_urgent else self.queued_pairs
        if ahead == 0:
            return
        most = self._config.max_queued_pairs
        if self.pair_s > 0:
            most = min(most, int(self._config.max_queue_s / self.pair_s))
        mine = lane.pairs.get(owner, 0)
        if ahead + n_pairs > most or (mine and mine + n_pairs > most // 2):
            retry_ms = max(self._config.retry_after_ms, int(ahead * self.pair_s * 1e3))
            raise RequestRefusedError(
                "busy",
                f"waiting: {counted(ahead, 'pair')}, {mine} of them yours",
                min(retry_ms, _LONGEST_RETRY_MS),
            )

    def _forget(self) -> None:
        """Owners that the queue has caught up with: it may be busy for days, and identities are free."""
        if len(self._ends) > 2 * self._n_ahead + _KEPT_ENDS:
            self._ends = {owner: end for owner, end in self._ends.items() if end > self._begun}
            self._n_ahead = len(self._ends)

    def _lane(self, is_urgent: bool) -> _Lane[J, T]:
        return self._urgent if is_urgent else self._patient

    async def _wait_turn(self, lane: _Lane[J, T], mine: _Waiting[J, T]) -> None:
        """Returns when it is this job's turn, or when it has been computed."""
        if not self._is_running:
            self._is_running = True
            return
        lane.put(mine)
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
        self._begun = max(self._begun, mine.begins)
        batch, config = [mine], self._config
        if mine.job.n_pairs <= config.small_pairs:
            n_others, max_width = config.coalesced_requests - 1, self._batches.max_width
            batch += lane.company(mine.job, n_others, max_width, config.small_pairs)
        try:
            computed = await self._compute.run(self._work(batch))
            self._deliver(lane, computed)
        finally:
            self._pass_on()

    def _work(self, batch: Sequence[_Waiting[J, T]]) -> Callable[[], _Batch[J, T]]:
        """The batch as the runner gets it. While nobody else asks, little work is done without going anywhere."""
        work = partial(self._compute_batch, batch)
        expected_s = (
            self.queued_pairs * self.pair_s
        )  # all that is not done: this batch if nobody else is here
        return Brief(work) if 0 < expected_s < BRIEF_S else work

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
        if self._patient.waiting and lane is self._urgent:
            self._urgent_in_a_row += sum(self._weight(one) for one in company)
        n_owners = len(self._urgent.pairs.keys() | self._patient.pairs.keys())
        self._begun += n_pairs / max(1, n_owners)
        self._recent_s = _FORGET * self._recent_s + batch.spent_s
        self._recent_pairs = _FORGET * self._recent_pairs + n_pairs

    def _pass_on(self) -> None:
        """The turn goes to the next job, if there is one."""
        urgent, patient = self._urgent.waiting, self._patient.waiting
        if urgent and not (patient and self._urgent_in_a_row >= self._config.small_before_large):
            self._urgent_in_a_row += self._weight(urgent[0]) if patient else 0
            urgent.pop(0).turn.set()
        elif patient:
            self._urgent_in_a_row = 0
            patient.pop(0).turn.set()
        else:
            self._is_running = False
            self._begun, self._ends, self._n_ahead = 0.0, {}, 0

    def _weight(self, one: _Waiting[J, T]) -> int:
        """How many small jobs it counts as."""
        return -(-one.job.n_pairs // self._config.small_pairs)
