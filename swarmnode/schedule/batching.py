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
    """The next token of an answer, with guessed ones behind it, of which any number may be left out."""
    n_passed: int = 0
    """Steps that began without it while it waited."""

    @property
    def is_answer(self) -> bool:
        """Whether it is an answer's, and not a prompt's."""
        return self.n_tokens == 1 or self.is_draft

    @property
    def is_whole(self) -> bool:
        """Whether it has to run in one step, however many rows that takes."""
        return not self.may_be_cut and not self.is_answer


@dataclass(frozen=True)
class StepLimits:
    """How many rows there are for whom in a step."""

    max_rows: int
    """Of a step; at least 2, or a prompt and an answer could not go together. Only what may not be cut may have more,
    and is alone then."""
    mixed_rows: int
    """Of prompts beside answers; at least 1."""
    patience_steps: int
    """See EngineConfig."""


class StepTimes:
    """How long steps computed and waited lately, and how many should be under way for that."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._compute_s = 0.0
        self._wait_s = 0.0

    def add(self, compute_s: float, wait_s: float) -> None:
        """A step ended. Less than nothing is nothing: what exploring took is taken off, maybe by another clock."""
        self._compute_s = _FORGET * self._compute_s + max(0.0, compute_s)
        self._wait_s = _FORGET * self._wait_s + max(0.0, wait_s)

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
    if not n_waiting:
        return False
    if not n_under_way:  # whatever `n_steps` says: nobody would ask again
        return True
    return n_under_way < n_steps and 2 * n_waiting >= step_share(n_present, n_steps)


def step_share(n_present: int, n_steps: int) -> int:
    """Most sequences in one of `n_steps` steps."""
    return math.ceil(n_present / max(1, n_steps))


def cut_step(wanted: Sequence[Wanted], n_most: int, limits: StepLimits) -> list[int]:
    """How many tokens of each sequence (in order of asking) to run in a step of at most `n_most` of them; 0: none yet.

    A token of every answer, and beside them at most `mixed_rows` of prompts, so that nobody's next token takes much
    longer because another prompt is long. So many, or half of the rows, they get however many answers there are.
    Guessed tokens fill what is left.
    Whoever was passed over `patience_steps` times goes before all others, the longest first, and may not be kept out by
    its size. So, as each step has rows for the one that has waited longest, nobody is passed over more often than
    `patience_steps` and once for each other sequence.
    """
    turns = _in_turn(wanted, limits.patience_steps)[:n_most]
    counts = [0] * len(wanted)
    room, mixed_rows = limits.max_rows, limits.mixed_rows
    first = wanted[turns[0]]
    if first.is_whole and first.n_passed >= limits.patience_steps:
        counts[turns[0]] = first.n_tokens
        room, mixed_rows = room - first.n_tokens, mixed_rows - first.n_tokens
    answers = [index for index in turns if wanted[index].is_answer]
    prompt_rows = min(mixed_rows, max(room - len(answers), room // 2)) if answers else room
    room -= _cut_prompts(wanted, turns, prompt_rows, counts)
    answers = answers[: max(0, room)]
    guesses = share_out(room - len(answers), [wanted[index].n_tokens - 1 for index in answers])
    for index, n_guesses in zip(answers, guesses, strict=True):
        counts[index] = 1 + n_guesses
    if not any(counts):  # all are larger than a step and may not be cut: one alone, then
        counts[turns[0]] = first.n_tokens
    return counts


def _in_turn(wanted: Sequence[Wanted], patience_steps: int) -> list[int]:
    """Places in the order of getting rows: those passed over too often, the longest first; then as they asked."""
    return sorted(
        range(len(wanted)),
        key=lambda index: -wanted[index].n_passed if wanted[index].n_passed >= patience_steps else 0,
    )


def _cut_prompts(wanted: Sequence[Wanted], turns: Sequence[int], room: int, counts: list[int]) -> int:
    """Enter how much of each prompt that has no rows yet fits into `room` rows; all of it together."""
    n_rows = 0
    for index in turns:
        item, left = wanted[index], room - n_rows
        if left < 1:
            break
        if item.is_answer or counts[index] or (item.is_whole and item.n_tokens > left):
            continue
        counts[index] = min(item.n_tokens, left)
        n_rows += counts[index]
    return n_rows


def share_out(n: int, wanted: Sequence[int]) -> list[int]:
    """Divide n (none if it is negative) among those who want so many each, as evenly as that goes."""
    shares = [0] * len(wanted)
    n_left = max(0, n)
    smallest_first = sorted(range(len(wanted)), key=wanted.__getitem__)
    for n_before, index in enumerate(smallest_first):
        shares[index] = min(wanted[index], n_left // (len(wanted) - n_before))
        n_left -= shares[index]
    return shares
