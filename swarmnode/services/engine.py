"""Generation: sequences take slots, steps take turns, each step is one forward pass through model and swarm.

A step is one token of one sequence (or one chunk of its prompt). Sequences share nothing but the compute thread, which
takes their jobs in the order of asking: while one waits for workers, the others compute. A prompt gives the thread up
after every layer.

A slot keeps what it holds when its sequence ends, and the next prompt that begins with it goes on there (prefix_cache).
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
from swarmnode.config import EngineConfig
from swarmnode.errors import ContextFullError, UsageError
from swarmnode.models.base import Checkpoint, Model
from swarmnode.models.sampling import Sampler, SamplingParams
from swarmnode.models.tokenizer import StreamDecoder, Tokenizer
from swarmnode.services.account import Account
from swarmnode.services.demand import DemandWatch
from swarmnode.services.forward import Finished, ForwardPass, RemoteLayer
from swarmnode.services.members import Members
from swarmnode.services.prefix_cache import PrefixCache, plan_prefill
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

    @property
    def cached_tokens(self) -> int:
        """Of the prompt, those that were not run again."""
        return self.account.cached_tokens


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
        config: EngineConfig | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self._bank = bank
        self._compute = compute
        self._members = members
        self.remote = remote
        self._chunk_tokens = chunk_tokens
        self._demand = demand
        self._config = config or EngineConfig()
        self._prefixes = PrefixCache(n_slots, self._config)
        self._n_betrayals = 0
        self._waiting = 0
        self._free = set(range(n_slots))
        self._turns = trio.Semaphore(n_slots)

    @property
    def n_waiting(self) -> int:
        """Generations that wait for a slot."""
        return self._waiting

    @property
    def n_free(self) -> int:
        """Slots that nobody uses."""
        return len(self._free)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent | DoneEvent]:
        """Generate token by token; the last event is a DoneEvent.

        Raises UsageError for an empty prompt and ContextFullError when prompt and answer cannot fit the context.
        Closing the iterator (or cancelling its task) frees the slot at once.
        """
        self.check(request)
        tokens = list(request.tokens)
        async with self._slot(tokens) as slot:
            account = Account()
            sampler = Sampler(request.sampling)
            decoder = StreamDecoder(self.tokenizer)
            token = await self._prefill(slot, tokens, request.stop_ids, account, sampler)
            new_tokens = 0
            reason = "length"
            while new_tokens < request.max_tokens:
                if token in request.stop_ids:
                    reason = "stop"
                    break
                new_tokens += 1
                yield TokenEvent(token, decoder.push(token), account)
                if new_tokens < request.max_tokens:
                    token = await self._go_on(slot, [token], account, sampler.sample_last)
            yield DoneEvent(reason, decoder.finish(), len(tokens), new_tokens, account)

    async def step(
        self, slot: int, tokens: Sequence[int], account: Account, *, all_logits: bool = False
    ) -> F32:
        """Run one forward pass of a slot; returns logits f32 [1, n_vocab] ([T, n_vocab] with `all_logits`).

        Whoever calls this has the slot for himself and says where it stands: nothing is remembered of it.
        """
        self._prefixes.forget(slot)
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

    async def _prefill(
        self, slot: int, tokens: list[int], turn_ends: frozenset[int], account: Account, sampler: Sampler
    ) -> int:
        """The first token of the answer."""
        start = account.cached_tokens = await self._resume(slot, tokens)
        token = 0
        for piece in plan_prefill(tokens, start, turn_ends, self._chunk_tokens, self._config):
            part = tokens[start : piece.end]
            if piece.end == len(tokens):
                token = await self._go_on(slot, part, account, sampler.sample_last)
            else:
                await self._go_on(slot, part, account, _nothing)
            start = piece.end
            if piece.keeps:
                await self._keep(slot)
        return token

    async def _go_on(self, slot: int, tokens: list[int], account: Account, take: Callable[[F32], T]) -> T:
        """A pass of a slot's sequence. If it is cancelled the slot is torn, but its checkpoints are still good."""
        self._prefixes.begin(slot)
        value = await self._pass(slot, tokens, account, take)
        self._prefixes.append(slot, tokens)
        return value

    async def _resume(self, slot: int, tokens: list[int]) -> int:
        """Bring the slot to where this prompt can go on; the tokens that need not be run."""
        start = self._prefixes.usable(slot, tokens)
        if start and self._prefixes.stands_at(slot, start) and self._prefixes.wants(slot):
            # The end of the last answer: what was asked then may be asked again in other words.
            await self._keep(slot)
        checkpoint = self._prefixes.rewind(slot, start)
        if checkpoint is not None or not start:
            self._prefixes.begin(slot)
            await self._compute.run(partial(_place, self.model, slot, checkpoint))
            self._prefixes.append(slot, ())
        return start

    async def _keep(self, slot: int) -> None:
        """Make a checkpoint of where the slot stands, if there is memory for one at all."""
        n_bytes = self.model.checkpoint_bytes
        if not self._prefixes.reserve(n_bytes):
            return
        try:
            checkpoint = await self._compute.run(lambda: self.model.checkpoint(slot))
            self._prefixes.add(slot, checkpoint)
        finally:
            self._prefixes.release(n_bytes)

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
    async def _slot(self, tokens: Sequence[int]) -> AsyncIterator[int]:
        """A slot for a prompt, the best of those that are free."""
        self._waiting += 1
        try:
            await self._turns.acquire()
        finally:
            self._waiting -= 1
        if self._members.n_betrayals != self._n_betrayals:
            self._n_betrayals = self._members.n_betrayals
            self._prefixes.doubt()  # nobody knows which of the rows that were used were wrong
        slot = self._prefixes.choose(tokens, self._free)
        self._free.remove(slot)
        try:
            yield slot
        except Exception:  # not a cancellation: after that the checkpoints are good
            self._prefixes.forget(slot)
            raise
        finally:
            self._free.add(slot)
            self._turns.release()


def _place(model: Model, slot: int, checkpoint: Checkpoint | None) -> None:
    """Take the slot back to a checkpoint, or to its beginning."""
    if checkpoint is None:
        model.reset(slot)
    else:
        model.restore(slot, checkpoint)


def _nothing(logits: F32) -> None:
    """Take no notice of the logits: of every chunk of a prompt but the last."""
