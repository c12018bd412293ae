"""What computing pairs of a layer costs here and at each worker, learned from what it took lately. Pure.

Times depend on the size of a call, and not in proportion: a single row is a latency, a chunk of a prompt is compute.
So every kind of call is remembered by the power of two of its pairs, and sizes that were never seen are derived from
the nearest one that was. All times are in seconds, `now_s` of the clock that comes in.

Two threads use it: the compute thread writes what was computed here, trio's what workers did, and each reads both.
Every number is replaced, never changed in place, and the table of workers has a lock.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from swarmnode.config import DispatchConfig

_BUCKETS = 24
"""Calls of up to 2^24 pairs are told apart."""
_NEIGHBOURS = 3
"""Sizes up to 8 times larger or smaller tell of a change, too."""
_FASTER_WEIGHT = 0.5
"""Of a sample far below all before: it is no accident, so that a change for the better is followed after a few."""
_MOST_WAY = 8.0
"""An answer takes no more than so many times what was computed for it, as far as pairs are concerned: where the way is
longer than that, what a pair more takes decides nothing."""
_LEAST_HALF_LIVES = 6.0
"""The shortest time of all is taken to be twice as long after so many half-lives without one that short: by time and
not by answers, or a worker that grows slower by a little each time would take it along."""


@dataclass(frozen=True)
class Estimate:
    """An exponentially weighted mean and mean deviation, and when it was last renewed."""

    mean: float
    deviation: float
    at_s: float
    n: int = 1

    def with_sample(self, value: float, now_s: float, weight: float) -> Estimate:
        """With one more sample. The first ones count as a plain mean, so that a slow first call is soon forgotten.

        What is far above all before is cut: a machine that was busy elsewhere for once says nothing about the next
        call. If it was no exception the deviation grows, and the mean follows after a few samples.
        """
        weight = max(weight, 1 / (self.n + 1))
        if value < self.mean - 4 * self.deviation:  # a machine may be slow by accident, and not fast
            weight = max(weight, _FASTER_WEIGHT)
        value = min(value, self.mean + 8 * max(self.deviation, 0.1 * self.mean)) if self.mean else value
        deviation = self.deviation + weight * (abs(value - self.mean) - self.deviation)
        return Estimate(self.mean + weight * (value - self.mean), deviation, now_s, self.n + 1)

    def faded(self, floor: float, now_s: float, half_life_s: float) -> float:
        """The mean, of which what is above `floor` halves every `half_life_s` without a sample.

        What was slow once and is not used for that reason would otherwise never be found to be fast again.
        """
        if self.mean <= floor:
            return self.mean
        return floor + (self.mean - floor) * self._left(now_s, half_life_s)

    def believed(self, value: float, floor: float, now_s: float, half_life_s: float) -> Estimate:
        """The estimate that a sample of so much is to be added to: a faded one if it confirms that, else as it was."""
        faded_s = self.faded(floor, now_s, half_life_s)
        if value > faded_s:
            return self
        return Estimate(faded_s, self.deviation * self._left(now_s, half_life_s), self.at_s, self.n)

    def late_s(self, floor: float, now_s: float, half_life_s: float) -> float:
        """Above about 95 % of samples: mean + 4 deviations, as TCP's retransmission timer has it (RFC 6298).

        Both fade as `faded` does: what is believed to be fast again is also late as soon as it was then.
        """
        return self.faded(floor, now_s, half_life_s) + 4 * self.deviation * self._left(now_s, half_life_s)

    def _left(self, now_s: float, half_life_s: float) -> float:
        return math.exp2(-max(0.0, now_s - self.at_s) / half_life_s)


_SMALL = tuple(max(1, n_pairs).bit_length() - 1 for n_pairs in range(65))


def _bucket(n_pairs: int) -> int:
    if n_pairs <= 64:  # a token's shares, several times for each layer
        return _SMALL[n_pairs]
    return min(n_pairs.bit_length(), _BUCKETS) - 1


class _BySize:
    """Estimates by size of call."""

    def __init__(self, config: DispatchConfig, *, fades: bool) -> None:
        self._weight = config.estimate_weight
        self._half_life_s = config.estimate_half_life_s if fades else math.inf
        self._doubling_s = _LEAST_HALF_LIVES * config.estimate_half_life_s
        self.items: list[Estimate | None] = [None] * _BUCKETS
        self.least = float("inf")
        """The smallest sample lately: kept as a floor."""
        self._last_s = 0.0

    def add(self, n_pairs: int, value: float, now_s: float) -> None:
        """A call of so many pairs had this value."""
        index = _bucket(n_pairs)
        known = self.items[index]
        if known is None:
            self.items[index] = Estimate(value, value / 2, now_s)
        else:
            floor = min(self.least, known.mean)
            believed = known.believed(value, floor, now_s, self._half_life_s)
            self.items[index] = believed.with_sample(value, now_s, self._weight)
        n_doublings = min(100.0, max(0.0, now_s - self._last_s) / self._doubling_s)
        self.least = min(value, self.least * math.exp2(n_doublings))
        self._last_s = now_s

    def at(self, n_pairs: int) -> Estimate | None:
        """For calls of this size, exactly."""
        return self.items[_bucket(n_pairs)]

    def near(self, n_pairs: int) -> tuple[Estimate, float] | None:
        """The estimate of the nearest size (the smaller of two), and how many times as many pairs are asked for."""
        wanted = _bucket(n_pairs)
        here = self.items[wanted]
        if here is not None:
            return here, 1.0
        for step in range(1, _BUCKETS):
            for index in (wanted - step, wanted + step):
                if 0 <= index < _BUCKETS and (found := self.items[index]) is not None:
                    return found, 2.0 ** (wanted - index)
        return None

    def newer(self, n_pairs: int, at_s: float) -> Iterator[tuple[Estimate, float]]:
        """Estimates of sizes up to `_NEIGHBOURS` buckets away that were renewed after `at_s`; as `near`."""
        wanted = _bucket(n_pairs)
        first = max(0, wanted - _NEIGHBOURS)
        for index, found in enumerate(self.items[first : wanted + _NEIGHBOURS + 1], first):
            if found is not None and found.at_s > at_s:
                yield found, 2.0 ** (wanted - index)


class LocalCost:
    """The bank of this process: seconds a pair where its expert is in memory, and seconds more for each that is not."""

    def __init__(self, config: DispatchConfig, expert_bytes: int) -> None:
        """`expert_bytes`: of one expert, for a first guess of what reading it takes."""
        self._config = config
        self._warm = _BySize(config, fades=False)
        self._cold: Estimate | None = None
        self._cold_guess_s = expert_bytes / config.disk_bytes_per_s

    def add(self, n_pairs: int, n_cold: int, seconds: float, now_s: float) -> None:
        """A call of so many pairs took so long; `n_cold` of its distinct experts were not in memory."""
        if not n_pairs:
            return
        if not n_cold:
            self._warm.add(n_pairs, seconds / n_pairs, now_s)
            return
        each_s = max(0.0, seconds - self._warm_s(n_pairs)) / n_cold
        self._cold = (
            Estimate(each_s, each_s / 2, now_s)
            if self._cold is None
            else self._cold.with_sample(each_s, now_s, self._config.estimate_weight)
        )

    def expect(self, n_pairs: int, n_cold: float, now_s: float) -> float:
        """Seconds that a call of so many pairs will take."""
        if not n_pairs:
            return 0.0
        return self._warm_s(n_pairs) + (n_cold * self.cold_s(now_s) if n_cold else 0.0)

    def cold_s(self, now_s: float) -> float:
        """Seconds for each distinct expert that is not in memory."""
        if self._cold is None:
            return self._cold_guess_s
        return self._cold.faded(0.0, now_s, self._config.estimate_half_life_s)

    @property
    def is_known(self) -> bool:
        """Whether anything was computed while all of it was in memory."""
        return self._warm.near(1) is not None

    def _warm_s(self, n_pairs: int) -> float:
        near = self._warm.near(n_pairs)
        return n_pairs * (self._config.pair_s if near is None else near[0].mean)


class WorkerCost:
    """One worker: how long its shares of a layer took, by size, from the first request to the last reply.

    A share counts once, in however many requests it is asked for: that is up to the worker.
    """

    def __init__(self, config: DispatchConfig) -> None:
        self._config = config
        self._times = _BySize(config, fades=True)
        self._pairs = _BySize(config, fades=False)
        """Seconds a pair by size of request, as the worker says. That decides how pairs are spread among holders of the
        same experts; what it takes decides whether it is asked at all."""
        self.in_flight = 0
        """Shares under way."""
        self.n_requests = 0
        """Requests under way."""
        self.max_requests = 1 << 30
        """Most that its connection takes at once."""
        self.rtt_s: float | None = None
        """Round trip of a ping: what is expected before anything was answered."""
        self.unanswered = 0.0
        """What was waited for shares that were given up, since the last one that was answered, in deadlines of each:
        of a token's share and a prompt's, 1 is all the patience that there is."""

    @property
    def is_known(self) -> bool:
        """Whether it has answered, or let us wait."""
        return self._times.near(1) is not None

    @property
    def n_requests_left(self) -> int:
        """How many more requests its connection takes."""
        return max(0, self.max_requests - self.n_requests)

    @property
    def has_room(self) -> bool:
        """Whether there are any."""
        return self.n_requests < self.max_requests

    def add(self, n_pairs: int, seconds: float, now_s: float) -> None:
        """A share of so many pairs was answered, all of it."""
        self.unanswered = 0.0
        self._times.add(n_pairs, seconds, now_s)

    def computed(self, n_pairs: int, says_s: float, took_s: float, now_s: float) -> None:
        """It says that it computed so long on a request of so many pairs, whose answer took so long in all.

        It is believed within bounds: whoever says nothing at all would have pairs for nothing.
        """
        seconds = min(max(says_s, took_s / _MOST_WAY), took_s)
        self._pairs.add(n_pairs, seconds / n_pairs, now_s)

    def pair_s(self, n_pairs: int) -> float:
        """Seconds that one pair more or less makes in a request of about so many."""
        near = self._pairs.near(n_pairs)
        return self._config.pair_s if near is None else near[0].mean

    def probed(self, seconds: float, now_s: float) -> None:
        """A probe was answered, which is one pair. It makes up for no work that was not."""
        self._times.add(1, seconds, now_s)

    def refused(self, n_pairs: int, seconds: float, now_s: float) -> None:
        """A share was refused, and done by others in so many seconds: for decisions it took those."""
        self._times.add(n_pairs, seconds, now_s)

    def gave_up(self, n_pairs: int, seconds: float, now_s: float, deadline_s: float) -> None:
        """A share was given up after so long, of the `deadline_s` that it had: it would have taken at least that."""
        self.unanswered += seconds / deadline_s
        known = self._times.at(n_pairs)
        if known is None or seconds > known.mean:
            self._times.add(n_pairs, seconds, now_s)

    def expect(self, n_pairs: int, now_s: float) -> float:
        """Seconds until the reply to so many pairs is here, with nothing else under way."""
        if not n_pairs:
            return 0.0
        near = self._times.near(n_pairs)
        if near is None:
            return (self.rtt_s or 0.0) + n_pairs * self._config.pair_s
        estimate, factor = near
        seconds = self._derived_s(estimate, factor, n_pairs, now_s)
        for other, its_factor in self._times.newer(n_pairs, estimate.at_s):
            # A part of a larger share that came since, or as many smaller ones: it does not take longer.
            seconds = min(seconds, self._derived_s(other, its_factor, n_pairs, now_s))
        return seconds

    def took_s(self, n_pairs: int, now_s: float) -> float:
        """As `expect`, where shares of this size were answered; 0 where none was."""
        return 0.0 if self._times.at(n_pairs) is None else self.expect(n_pairs, now_s)

    def _derived_s(self, estimate: Estimate, factor: float, n_pairs: int, now_s: float) -> float:
        """Of so many pairs, from an estimate of `factor` times fewer."""
        floor = min(self._times.least, estimate.mean)
        seconds = estimate.faded(floor, now_s, self._config.estimate_half_life_s)
        if factor <= 1:
            return seconds
        # What pairs beyond those of a known size may cost: only until shares of this size have been seen.
        return floor + factor * (seconds - floor) + n_pairs * (1 - 1 / factor) * self._config.pair_s

    def late_after_s(self, n_pairs: int, now_s: float, work_s: float) -> float | None:
        """How long to wait for such a share before asking elsewhere; None: not even a ping was answered.

        While few of the size are known: thrice what the nearest known size took (RFC 6298's first guess), or the ping,
        and `work_s` for the slowest device and link that are waited for.
        """
        known = self._times.at(n_pairs)
        if known is not None and known.n >= self._config.hedge_samples:
            floor = min(self._times.least, known.mean)
            late_s = known.late_s(floor, now_s, self._config.estimate_half_life_s)
            return max(self._config.hedge_min_s, late_s)
        near = self._times.near(n_pairs)
        usual_s = self.rtt_s if near is None else near[0].mean
        return None if usual_s is None else max(self._config.hedge_min_s, 3 * usual_s + work_s)

    def score_s(self, n_pairs: int, now_s: float) -> float:
        """For choosing between replicas: such a share's time, once for each that is under way and once more."""
        return self.expect(n_pairs, now_s) * (self.in_flight + 1)


class CostModel:
    """All of it."""

    def __init__(self, config: DispatchConfig, expert_bytes: int, now: Callable[[], float]) -> None:
        """`expert_bytes`: of one expert; `now`: seconds, from either thread."""
        self.now = now
        self._config = config
        self.local = LocalCost(config, expert_bytes)
        self._lock = threading.Lock()
        self._workers: OrderedDict[Hashable, WorkerCost] = OrderedDict()
        """The one asked for most recently last."""
        self._cut: Estimate | None = None

    def worker(self, node: Hashable) -> WorkerCost:
        """What is known of a node. It outlives connections; of too many, those not asked for longest are forgotten.

        From either thread.
        """
        with self._lock:
            known = self._workers.get(node)
            if known is not None:
                self._workers.move_to_end(node)
                return known
            if len(self._workers) >= self._config.max_known_workers:
                self._workers.popitem(last=False)
            known = self._workers[node] = WorkerCost(self._config)
            return known

    def add_cut(self, seconds: float, now_s: float) -> None:
        """A layer that was sent out took so much longer than its slowest part."""
        value = max(0.0, seconds)
        self._cut = (
            Estimate(value, value / 2, now_s)
            if self._cut is None
            else self._cut.with_sample(value, now_s, self._config.estimate_weight)
        )

    @property
    def cut_s(self) -> float:
        """Seconds that a layer costs because it is sent out: handovers between threads, and the messages' making."""
        return self._config.cut_s if self._cut is None else self._cut.mean
