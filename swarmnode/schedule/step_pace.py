"""Whether several smaller steps in turns are really faster than one of everybody. Pure.

The times of steps say that others could compute while one waits (batching.StepTimes). They do not say what for: a
link's delay is shared by any number of steps, a worker's compute is not, and a worker reads its experts again for each
step. So both ways are tried, and the one with more tokens a second is kept; the other is tried again now and then, for
a small share of the time.
"""

from __future__ import annotations

import math

from swarmnode.config import EngineConfig

_ROUNDS = 3
"""Tokens of every sequence in a window, of which a rate is made ..."""
_SETTLING_ROUNDS = 1
"""... behind as many that do not count after a change."""
_WINDOWS = 2
"""Of the way in use before the other is tried."""
_SIMILAR = 1.5
"""Another number of sequences is another question if it is so many times as large, or small."""
_CLEARLY = 1.05
"""The other way has to be so much faster."""


class StepPace:
    """Chooses between one step of all sequences and as many as their waits suggest."""

    def __init__(self, config: EngineConfig) -> None:
        self._share = config.trial_share
        self._next_trial_s = -math.inf
        """Not before: what the last one cost has to be a small part of the time since, whatever it was about."""
        self._forget()

    def _forget(self) -> None:
        self._is_one = False
        """The way in use."""
        self._is_trial = False
        self._trial_began_s = 0.0
        self._rates: dict[bool, float] = {}
        """Sequences' steps a second, one step at a time (True) and several."""
        self._n_present = 0
        """When this was begun."""
        self._n_windows = 0
        self._restart(_SETTLING_ROUNDS)

    def _restart(self, settling_rounds: int) -> None:
        self._settling_rounds = settling_rounds
        self._n_done = 0
        self._n_counted = 0
        self._began_s: float | None = None
        """When the first step of the window ended: what it did was before the window."""

    def n_steps(self, suggested: int) -> int:
        """How many steps to have under way, of the number that times suggest."""
        return 1 if self._is_one else suggested

    def ended(self, n_sequences: int, n_present: int, suggested: int, now_s: float) -> None:
        """A step of so many sequences' answers ended, of `n_present`, at that time; `suggested` as in `n_steps`."""
        if suggested < 2 or n_present < 2:  # there is only one way now
            self._stop(now_s)
            return
        if not self._n_present <= _SIMILAR * n_present <= _SIMILAR**2 * self._n_present:
            self._forget()
            self._n_present = n_present
        self._n_done += n_sequences
        if self._n_done <= self._settling_rounds * n_present:
            return
        if self._began_s is None:
            self._began_s = now_s
            return
        self._n_counted += n_sequences
        if self._n_counted >= _ROUNDS * n_present and now_s > self._began_s:
            self._measured(self._n_counted / (now_s - self._began_s), now_s)

    def interrupted(self, now_s: float) -> None:
        """A step ended that says nothing of answers, because it had rows of prompts: the window does not count.

        A trial that is due begins now, when the time to the next prompt is longest.
        """
        self._stop(now_s)
        if self._is_due(now_s):
            self._begin_trial(now_s)

    def _stop(self, now_s: float) -> None:
        """Nothing is counted for now; a trial ends without a result, as who knows when there would be one."""
        if self._is_trial:
            self._is_one, self._is_trial = not self._is_one, False
            self._charge(self._rates[self._is_one], now_s)
        self._restart(_SETTLING_ROUNDS)

    def _is_due(self, now_s: float) -> bool:
        return self._n_windows >= _WINDOWS and now_s >= self._next_trial_s

    def _begin_trial(self, now_s: float) -> None:
        self._is_one, self._is_trial = not self._is_one, True
        self._trial_began_s = now_s
        self._restart(_SETTLING_ROUNDS)

    def _measured(self, rate: float, now_s: float) -> None:
        known = self._rates.get(self._is_one)
        self._rates[self._is_one] = rate if known is None else (known + rate) / 2
        self._n_windows += 1
        if self._is_trial:
            self._end_trial(rate, now_s)
        elif self._is_due(now_s):
            self._begin_trial(now_s)
        else:
            self._restart(0)

    def _end_trial(self, rate: float, now_s: float) -> None:
        """Keep what is faster; what was lost in the trial decides when there may be another."""
        before = self._rates[not self._is_one]
        self._charge(before, now_s)
        if rate < _CLEARLY * before:
            self._is_one = not self._is_one
        del self._rates[not self._is_one]
        self._is_trial, self._n_windows = False, 0
        self._restart(_SETTLING_ROUNDS)

    def _charge(self, before: float, now_s: float) -> None:
        """A trial is over: what it took longer than at the rate before has to be waited for."""
        lost_s = now_s - self._trial_began_s - self._n_done / before
        self._next_trial_s = now_s + max(0.0, lost_s) / self._share
