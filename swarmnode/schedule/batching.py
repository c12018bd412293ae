"""Which sequences go into the next step, and how many steps are under way at once. Pure.

One step for everybody reads each expert's weights once for all rows. Where steps wait for workers, several smaller ones
take turns, so that one computes while the others wait.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from swarmnode.config import EngineConfig

_FORGET = 0.8
"""What each step leaves of the times of those before it."""


@dataclass(frozen=True)
class Wanted:
    """What a sequence that waits wants to run: so many tokens, which may be cut into several steps, or not."""

    n_tokens: int
    may_be_cut: bool
    is_draft: bool = False
    """The next token of an answer, with guessed ones behind it."""

    @property
    def is_answer(self) -> bool:
        """Whether it is an answer's, and not a prompt's."""
        return self.n_tokens == 1 or self.is_draft


class StepTimes:
    """How long steps computed and waited lately, and how many should be under way for that."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._compute_s = 0.0
        self._wait_s = 0.0

    def add(self, compute_s: float, wait_s: float) -> None:
        """A step ended."""
        self._compute_s = _FORGET * self._compute_s + compute_s
        self._wait_s = _FORGET * self._wait_s + wait_s

    def leave_idle(self, n_under_way: int) -> bool:
        """Whether so many such steps at once leave the compute thread idle for more than half of the time."""
        return 2 * n_under_way * self._compute_s < self._compute_s + self._wait_s

    @property
    def n_steps(self) -> int:
        """Steps under way at once: while one waits w, others that compute c each fill the time if there are w / c."""
        if self._wait_s <= self._config.short_wait * self._compute_s:
            return 1
        if not self._compute_s:
            return self._config.max_steps
        return min(self._config.max_steps, 1 + math.ceil(self._wait_s / self._compute_s))


def may_begin(n_waiting: int, n_present: int, n_under_way: int, n_steps: int) -> bool:
    """Whether to begin a step now. `n_present`: sequences that wait or are in a step; `n_steps`: see StepTimes.

    With fewer than half of its share of the sequences it waits for others, unless nothing is under way.
    """
    if not n_waiting or n_under_way >= n_steps:
        return False
    return not n_under_way or 2 * n_waiting >= step_share(n_present, n_steps)


def step_share(n_present: int, n_steps: int) -> int:
    """Most sequences in one of `n_steps` steps."""
    return math.ceil(n_present / n_steps)


def cut_step(wanted: Sequence[Wanted], max_rows: int, mixed_rows: int) -> list[int]:
    """How many tokens of each sequence (in order of asking) to run in a step of at most `max_rows`; 0: none yet.

    Answers first: single tokens, and drafts, which are never cut. Beside them prompts get at most `mixed_rows`, so that
    nobody's next token takes much longer because another prompt is long.
    """
    counts = [0] * len(wanted)
    room = max_rows
    for index, item in enumerate(wanted):
        if item.is_answer and item.n_tokens <= room:
            counts[index] = item.n_tokens
            room -= item.n_tokens
    if room < max_rows:
        room = min(room, mixed_rows)
    for index, item in enumerate(wanted):
        if not item.is_answer and (item.may_be_cut or item.n_tokens <= room):
            counts[index] = min(item.n_tokens, room)
            room -= counts[index]
    if not any(counts):  # the first is larger than the room and cannot be cut: alone, then
        counts[0] = wanted[0].n_tokens
    return counts
