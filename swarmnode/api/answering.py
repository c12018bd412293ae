"""The answers to one request: generated side by side, read, counted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import trio

from swarmnode.api.answer_text import AnswerReader, Reading
from swarmnode.api.deltas import Delta
from swarmnode.api.forms import Counts
from swarmnode.api.metrics import Metrics
from swarmnode.errors import UsageError
from swarmnode.models.grammar import GrammarConstraint
from swarmnode.models.logprobs import TokenLogprobs
from swarmnode.services.account import Account
from swarmnode.services.engine import Engine, GenerateRequest, TokenEvent

_LAST_SEED = 2**64

EMPTY_NOTICE = (
    "the answer is empty: it ended within the model's thoughts, which are in reasoning_content; give a larger "
    'max_tokens, or {"enable_thinking": false} as chat_template_kwargs'
)


@dataclass(frozen=True)
class Piece:
    """What came of one answer: a token of it, or (with a `finish_reason`) its end."""

    index: int
    """Of the answer."""
    delta: Delta
    account: Account
    """Of this answer, so far."""
    token: int | None = None
    logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None
    notice: str | None = None
    """What the person who asked should know."""


Take: TypeAlias = Callable[[Piece], Awaitable[None]]


def jobs_for(
    job: GenerateRequest, n: int, reading: Reading, constraint: GrammarConstraint | None = None
) -> list[GenerateRequest]:
    """`n` jobs like this one, with seeds of their own; each ends where its text says so, and keeps to `constraint`."""
    jobs = []
    for number in range(n):
        seed = job.sampling.seed
        if seed is not None and number:
            seed = seed + number if seed + number < _LAST_SEED else seed + number - _LAST_SEED
        sampling = replace(job.sampling, seed=seed)
        ends = AnswerReader(reading).ends if reading.stops or reading.one_call else None
        own = None if constraint is None else constraint.copy()
        jobs.append(replace(job, sampling=sampling, ends=ends, constraint=own))
    return jobs


class Answering:
    """`run` generates; the figures are those of what was taken so far."""

    def __init__(
        self,
        engine: Engine,
        jobs: Sequence[GenerateRequest],
        n_each: int,
        reading: Reading,
        metrics: Metrics,
    ) -> None:
        """At least one job; `n_each` for each prompt, one prompt's behind the other's."""
        self.jobs = jobs
        self.n_unasked = len(jobs)
        """Of them, those that the engine does not know of yet, and so counts as waiting nowhere."""
        self._metrics = metrics
        self._engine = engine
        self._reading = reading
        self._n_each = n_each
        self._n_prompt = sum(len(job.tokens) for job in jobs[::n_each])
        self._accounts = [Account() for _ in jobs]
        self._reasons = ["broken" for _ in jobs]
        self._began_s = trio.current_time()
        self._n_new = 0
        self._n_reasoning = 0

    @property
    def account(self) -> Account:
        """Of all answers together."""
        return Account.total(self._accounts, self._n_each)

    @property
    def counts(self) -> Counts:
        """Tokens so far."""
        return Counts(self._n_prompt, self._n_new, self._n_reasoning)

    async def run(self, take: Take) -> None:
        """All answers to their ends; `take` gets every piece. Raises what `Engine.generate` raises."""
        try:
            if len(self.jobs) == 1:
                await self._one(0, take)
                return
            async with trio.open_nursery() as nursery:
                for index in range(len(self.jobs)):
                    nursery.start_soon(partial(self._one, index, take))
        finally:
            self._metrics.ended(self.counts, self.account, self._reasons)

    async def _one(self, index: int, take: Take) -> None:
        reader = AnswerReader(self._reading)
        is_empty = True
        came_s: float | None = None
        async with aclosing(self._engine.generate(self.jobs[index])) as events:
            self.n_unasked -= 1
            async for event in events:
                self._accounts[index] = event.account
                delta = reader.push(event.text)
                if isinstance(event, TokenEvent):
                    came_s = self._time(came_s)
                    self._n_new += 1
                    self._n_reasoning += reader.is_thinking
                    is_empty &= not (delta.content.strip() or delta.calls)
                    await take(Piece(index, delta, event.account, event.token, event.logprobs))
                    continue
                self._check_form(index)
                delta = _joined(delta, reader.finish(event.finish_reason))
                is_empty &= not (delta.content.strip() or delta.calls)
                notice = EMPTY_NOTICE if is_empty and reader.is_thinking else None
                reason = self._reasons[index] = reader.finish_reason(event.finish_reason)
                await take(Piece(index, delta, event.account, finish_reason=reason, notice=notice))

    def _check_form(self, index: int) -> None:
        constraint = self.jobs[index].constraint
        if isinstance(constraint, GrammarConstraint) and constraint.failure is not None:
            raise UsageError(f"the answer could not be kept to its schema any more: {constraint.failure}")

    def _time(self, before_s: float | None) -> float:
        """A token came now; the one before it at `before_s`."""
        now_s = trio.current_time()
        if before_s is None:
            self._metrics.first_token.add(now_s - self._began_s)
        else:
            self._metrics.token_gap.add(now_s - before_s)
        return now_s


def _joined(first: Delta, second: Delta) -> Delta:
    return Delta(
        first.content + second.content, first.reasoning + second.reasoning, first.calls + second.calls
    )
