"""Generation: sequences take slots, steps take turns, each step is one forward pass through model and swarm.

A step is one token of one sequence (or one chunk of its prompt). Sequences share nothing but the compute thread, which
takes their jobs in the order of asking: while one waits for workers, the others compute. A prompt gives the thread up
after every layer.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import trio

from swarmnode.compute.bank import ExpertBank
from swarmnode.errors import ContextFullError, UsageError
from swarmnode.models.base import Model
from swarmnode.models.sampling import Sampler, SamplingParams
from swarmnode.models.tokenizer import StreamDecoder, Tokenizer
from swarmnode.services.account import Account
from swarmnode.services.demand import DemandWatch
from swarmnode.services.forward import Finished, ForwardPass, RemoteLayer
from swarmnode.services.members import Members
from swarmnode.services.remote_experts import RemoteExperts
from swarmnode.services.runners import Runner

F32: TypeAlias = npt.NDArray[np.float32]
T = TypeVar("T")


@dataclass(frozen=True)
class GenerateRequest:
    """What to generate. `tokens` are the prompt's ids; `stop_ids` end the answer and are not part of it."""

    tokens: Sequence[int]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class TokenEvent:
    """One new token: its id, the text that became complete with it, and the account so far."""

    token: int
    text: str
    account: Account


@dataclass(frozen=True)
class DoneEvent:
    """The end: `finish_reason` is "stop" (an end token) or "length" (max_tokens or context)."""

    finish_reason: str
    text: str
    """Text still held back by the streaming decoder (an incomplete character is replaced)."""
    prompt_tokens: int
    new_tokens: int
    account: Account


class Engine:
    """Owns the model's slots and runs the steps. One per backbone."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        bank: ExpertBank,
        compute: Runner,
        members: Members,
        remote: RemoteExperts,
        *,
        n_slots: int,
        chunk_tokens: int,
        demand: DemandWatch | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self._bank = bank
        self._compute = compute
        self._members = members
        self.remote = remote
        self._chunk_tokens = chunk_tokens
        self._demand = demand
        self._waiting = 0
        self._free_send, self._free_receive = trio.open_memory_channel[int](n_slots)
        for slot in range(n_slots):
            self._free_send.send_nowait(slot)

    @property
    def n_waiting(self) -> int:
        """Generations that wait for a slot."""
        return self._waiting

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent | DoneEvent]:
        """Generate token by token; the last event is a DoneEvent.

        Raises UsageError for an empty prompt and ContextFullError when prompt and answer cannot fit the context.
        Closing the iterator (or cancelling its task) frees the slot at once.
        """
        self.check(request)
        async with self._slot() as slot:
            account = Account()
            sampler = Sampler(request.sampling)
            decoder = StreamDecoder(self.tokenizer)
            token = await self._prefill(slot, request.tokens, account, sampler)
            new_tokens = 0
            reason = "length"
            while new_tokens < request.max_tokens:
                if token in request.stop_ids:
                    reason = "stop"
                    break
                new_tokens += 1
                yield TokenEvent(token, decoder.push(token), account)
                if new_tokens < request.max_tokens:
                    token = await self._pass(slot, [token], account, sampler.sample_last)
            yield DoneEvent(reason, decoder.finish(), len(request.tokens), new_tokens, account)

    async def step(
        self, slot: int, tokens: Sequence[int], account: Account, *, all_logits: bool = False
    ) -> F32:
        """Run one forward pass of a slot; returns logits f32 [1, n_vocab] ([T, n_vocab] with `all_logits`)."""
        return await self._pass(slot, tokens, account, lambda logits: logits, all_logits=all_logits)

    async def _pass(
        self,
        slot: int,
        tokens: Sequence[int],
        account: Account,
        take: Callable[[F32], T],
        *,
        all_logits: bool = False,
    ) -> T:
        """One forward pass; what `take` makes of the logits, on the compute thread: to sort 248,320 of them takes
        milliseconds in which no message would be read.
        """
        counts = self._demand is not None and self._demand.wants_pass()
        forward = ForwardPass(
            self.model, self._bank, slot, tokens, take, all_logits=all_logits, counts=counts
        )
        routing, workers = self._members.routing()
        result = await self._compute.run(partial(forward.advance, routing))
        while not isinstance(result, Finished):
            finish = None
            if isinstance(result, RemoteLayer):
                pending = await self.remote.layer(result, workers, account)
                finish = pending.finish
            routing, workers = self._members.routing()
            result = await self._compute.run(partial(forward.advance, routing, finish))
            if finish is not None:
                pending.settle()
                if counts:
                    forward.unmet += pending.unmet
        account.pairs += forward.pairs
        account.layers += self.model.n_layer
        if counts and self._demand is not None:
            self._demand.count(forward.chosen, forward.unmet)
        return result.value

    async def _prefill(self, slot: int, tokens: Sequence[int], account: Account, sampler: Sampler) -> int:
        """The first token of the answer."""
        last = (len(tokens) - 1) // self._chunk_tokens * self._chunk_tokens
        for start in range(0, last, self._chunk_tokens):
            await self._pass(slot, tokens[start : start + self._chunk_tokens], account, _nothing)
        return await self._pass(slot, tokens[last:], account, sampler.sample_last)

    def check(self, request: GenerateRequest) -> None:
        """Raise what `generate` would raise at once: UsageError (empty prompt), ContextFullError (too long)."""
        if not request.tokens:
            raise UsageError("the prompt is empty: give at least one token")
        needed = len(request.tokens) + request.max_tokens
        if needed > self.model.n_ctx:
            raise ContextFullError(
                f"prompt ({len(request.tokens)} tokens) and answer ({request.max_tokens}) need {needed} tokens, but "
                f"the context holds {self.model.n_ctx}: shorten one of them or give the backbone a larger --context"
            )

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[int]:
        self._waiting += 1
        try:
            slot = await self._free_receive.receive()
        finally:
            self._waiting -= 1
        try:
            # A slot is reset when taken, not when left: a cancelled forward pass leaves its state half written.
            await self._compute.run(lambda: self.model.reset(slot))
            yield slot
        finally:
            self._free_send.send_nowait(slot)


def _nothing(logits: F32) -> None:
    """Take no notice of the logits: of every chunk of a prompt but the last."""
