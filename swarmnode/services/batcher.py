"""Continuous batching: sequences ask for their next rows, and whoever is ready shares a step.

A sequence takes a `Seat`. While it sits there and is not `away`, the next step waits until it has asked: between two
tokens a sequence only has a few instructions to run, so nobody waits for a timer. Steps are formed by
schedule/batching.py and run by services/passes.py; each sequence joins and leaves between steps.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import trio

from swarmnode.config import EngineConfig
from swarmnode.errors import EngineStoppedError, UsageError
from swarmnode.schedule.batching import StepLimits, StepTimes, Wanted, cut_step, may_begin, step_share
from swarmnode.schedule.step_pace import StepPace
from swarmnode.services.forward import TakeFailure
from swarmnode.services.passes import PassRunner, Rows

Start: TypeAlias = Callable[[Callable[[], Awaitable[None]]], None]
"""`start(function)`: run it as a task of the engine's."""


@dataclass(eq=False)
class _Ask:
    """Rows that a sequence waits for."""

    rows: Rows
    may_be_cut: bool
    step: _Step | None = None
    """The one that it is in."""
    n_done: int = 0
    """Tokens that ran."""
    n_passed: int = 0
    """Steps that began without it since it asked, or was in one."""
    is_left: bool = False
    """Nobody waits for it any more."""
    value: Any = None
    error: Exception | None = None
    ended: trio.Event = field(default_factory=trio.Event)

    @property
    def wanted(self) -> Wanted:
        n_left = len(self.rows.tokens) - self.n_done
        return Wanted(n_left, self.may_be_cut, self.rows.tentative, self.n_passed)

    @property
    def is_done(self) -> bool:
        """Whether nothing of it has to run any more. What a step had no room for of a draft is given up."""
        return self.n_done == len(self.rows.tokens) or (self.rows.tentative and self.n_done > 0)

    def next_rows(self, n_tokens: int) -> Rows:
        """The next `n_tokens` of it: without logits unless they are the last, or a draft's."""
        if n_tokens == len(self.rows.tokens):
            return self.rows
        if self.rows.tentative:
            return self.rows.shortened(n_tokens)
        tokens = self.rows.tokens[self.n_done : self.n_done + n_tokens]
        is_last = self.n_done + n_tokens == len(self.rows.tokens)
        return replace(self.rows, tokens=tokens, n_out=self.rows.n_out if is_last else 0)


class _Step:
    """A pass under way, with so many tokens of each of its asks."""

    def __init__(self, parts: Sequence[tuple[_Ask, int]]) -> None:
        self.parts = parts
        self.scope = trio.CancelScope()
        self.is_answers = all(ask.wanted.is_answer for ask, _ in parts)
        """Whether there is no prompt in it."""
        for ask, _ in parts:
            ask.step = self

    @property
    def n_rows(self) -> int:
        """Tokens in it."""
        return sum(n_tokens for _, n_tokens in self.parts)

    def was_left(self) -> None:
        """Somebody left: the last one ends it."""
        if all(ask.is_left for ask, _ in self.parts):
            self.scope.cancel()


class Seat:
    """A sequence's place in the batcher."""

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher
        self.has_failed = False
        """Its rows failed while it was being cancelled, so that nobody was told."""

    async def run(self, rows: Rows, *, may_be_cut: bool = True) -> Any:
        """Run these rows in the next step (or, if they are many and may be cut, in the next ones); what `take` made.

        Raises what the pass raised, or what `take` of these rows did; UsageError for no rows. Cancelled, it leaves at
        once if the rows have not begun; else when their step ends, because the slot is in use until then; a step that
        everybody has left is cancelled.
        """
        return await self._batcher.run_rows(self, rows, may_be_cut)

    @property
    def wants_drafts(self) -> bool:
        """Whether steps with guessed tokens would be faster."""
        return self._batcher.wants_drafts

    @contextmanager
    def away(self) -> Iterator[None]:
        """While this sequence waits for something else: no step waits for it."""
        self._batcher.leave()
        try:
            yield
        finally:
            self._batcher.come()


class Batcher:
    """Forms steps. Whatever changes its state is synchronous, so nobody ever sees it half changed; during the waits of
    `run_rows` it changes all the time.
    """

    def __init__(self, passes: PassRunner, start: Start, config: EngineConfig, max_rows: int) -> None:
        """`start` runs steps; a step has at most `max_rows` rows."""
        self.passes = passes
        self.speculate = config.speculate
        """See EngineConfig; may be changed at any time."""
        self.times = StepTimes(config)
        self.pace = StepPace(config)
        self._answer_times = StepTimes(config)
        """Of steps without prompts, as if no tokens had been guessed in them."""
        self._start = start
        self._limits = StepLimits(max_rows, config.mixed_rows, config.patience_steps)
        self._waiting: list[_Ask] = []
        self._steps: set[_Step] = set()
        """Those under way."""
        self._n_expected = 0
        """Sequences that are about to ask."""

    @contextmanager
    def seat(self) -> Iterator[Seat]:
        """A place for a sequence, until the block ends."""
        self.come()
        try:
            yield Seat(self)
        finally:
            self.leave()

    def come(self) -> None:
        """A sequence will ask soon."""
        self._n_expected += 1

    def leave(self) -> None:
        """A sequence that was expected will not ask."""
        self._n_expected -= 1
        self._begin_steps()

    @property
    def wants_drafts(self) -> bool:
        """See Seat."""
        if self.speculate == "auto":
            return self._answer_times.leave_idle(len(self._steps) + 1)
        return self.speculate == "always"

    async def run_rows(self, seat: Seat, rows: Rows, may_be_cut: bool) -> Any:
        """See Seat.run."""
        if not rows.tokens:  # a step without rows would begin again and again
            raise UsageError("there are no tokens to compute")
        ask = _Ask(rows, may_be_cut)
        self._waiting.append(ask)
        self.leave()  # it has asked
        try:
            await ask.ended.wait()
        except trio.Cancelled:
            await self._give_up(ask)
            seat.has_failed |= ask.error is not None and not isinstance(ask.error, EngineStoppedError)
            raise
        if ask.error is not None:
            raise ask.error
        return ask.value

    async def _give_up(self, ask: _Ask) -> None:
        ask.is_left = True
        if ask.ended.is_set():
            return
        if ask.step is None:
            self._waiting.remove(ask)
            self.come()
        else:
            ask.step.was_left()
            with trio.CancelScope(shield=True):
                await ask.ended.wait()

    def stop(self) -> None:
        """No step will begin any more: whoever waits for one is told."""
        for ask in self._waiting:
            ask.error = EngineStoppedError()
            self._n_expected += 1
            ask.ended.set()
        self._waiting.clear()

    # -- steps

    @property
    def _n_present(self) -> int:
        """Sequences that wait or are in a step."""
        return len(self._waiting) + sum(len(step.parts) for step in self._steps)

    def _begin_steps(self) -> None:
        """Begin all steps that should begin now."""
        while not self._n_expected:
            n_present = self._n_present
            n_steps = self.pace.n_steps(self.times.n_steps)
            if not may_begin(len(self._waiting), n_present, len(self._steps), n_steps):
                return
            step = self._form_step(step_share(n_present, n_steps))
            self._steps.add(step)
            try:
                self._start(partial(self._run, step))
            except EngineStoppedError as error:
                self._steps.remove(step)
                self._settle(step, [None] * len(step.parts), error)
                return

    def _form_step(self, n_most: int) -> _Step:
        """The next step, of at most so many sequences of those that wait, of which there are some."""
        counts = cut_step([ask.wanted for ask in self._waiting], n_most, self._limits)
        step = _Step([(ask, n) for ask, n in zip(self._waiting, counts, strict=True) if n])
        self._waiting = [ask for ask in self._waiting if ask.step is None]
        for ask in self._waiting:
            ask.n_passed += 1
        return step

    async def _run(self, step: _Step) -> None:
        """One pass."""
        error: Exception | None = EngineStoppedError()
        values: list[Any] = [None] * len(step.parts)
        try:
            with step.scope:
                values, times = await self.passes.run([ask.next_rows(n) for ask, n in step.parts])
                self.times.add(times.compute_s, times.wait_s)
                if step.is_answers:
                    self._answer_times.add(times.compute_s * len(step.parts) / step.n_rows, times.wait_s)
                    n_steps = self.times.n_steps
                    self.pace.ended(len(step.parts), self._n_present, n_steps, trio.current_time())
                else:
                    self.pace.interrupted(trio.current_time())
                error = None
        except Exception as caught:
            error = caught
        finally:
            self._steps.remove(step)
            self._settle(step, values, error)
            self._begin_steps()

    def _settle(self, step: _Step, values: Sequence[Any], error: Exception | None) -> None:
        """Whoever has more to run waits again, before all others; the rest is told, and expected to ask again."""
        unfinished: list[_Ask] = []
        for (ask, n_tokens), value in zip(step.parts, values, strict=True):
            ask.n_done += n_tokens
            ask.n_passed = 0
            ask.step, ask.value, ask.error = None, value, error
            if isinstance(value, TakeFailure):
                ask.error = value.error
            if ask.error is None and not ask.is_left and not ask.is_done:
                unfinished.append(ask)
            else:
                self._n_expected += 1
                ask.ended.set()
        self._waiting[:0] = unfinished
