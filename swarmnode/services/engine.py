"""Generation: sequences take slots, and all that are ready share a step, which is one pass through model and swarm.

Each answer is a task of the engine's (generation.py); the batcher forms steps of the rows that they ask for, and
passes.py runs them. A slot keeps what it holds when its sequence ends, and the next prompt that begins with it goes on
there (prefix_cache).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import trio

from swarmnode.compute.bank import ExpertBank
from swarmnode.config import EngineConfig
from swarmnode.counts import counted
from swarmnode.errors import ContextFullError, EngineStoppedError, UsageError
from swarmnode.identity import NodeId
from swarmnode.models.base import Model
from swarmnode.models.tokenizer import Tokenizer
from swarmnode.services.account import Account
from swarmnode.services.batcher import Batcher, Seat
from swarmnode.services.demand import DemandWatch
from swarmnode.services.engine_tasks import EngineTasks
from swarmnode.services.generation import DoneEvent, Event, GenerateRequest, Generation, Parts, TokenEvent
from swarmnode.services.members import Members
from swarmnode.services.passes import F32, Passes, Rows
from swarmnode.services.prefix_cache import PrefixCache, Tokens
from swarmnode.services.remote_experts import RemoteExperts
from swarmnode.services.resident_experts import ResidentExperts
from swarmnode.services.runners import Inline, Runner

__all__ = ["DoneEvent", "Engine", "GenerateRequest", "TokenEvent"]


@dataclass(eq=False)
class _Asked:
    """A request on its way to a task, and how that can be ended."""

    request: GenerateRequest
    send: trio.MemorySendChannel[Event]
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    is_waiting: bool = True
    """It has no slot yet."""
    error: Exception | None = None
    ended: trio.Event = field(default_factory=trio.Event)

    def end(self, error: Exception | None) -> None:
        """Nothing more comes of it."""
        self.error = error
        self.send.close()
        self.ended.set()


class Stepping:
    """A slot whose passes somebody runs one by one: benchmarks and tests, that want logits (Engine.stepping)."""

    def __init__(self, model: Model, prefixes: PrefixCache, slot: int, seat: Seat) -> None:
        self._model = model
        self._prefixes = prefixes
        self._slot = slot
        self._seat = seat

    async def run(self, tokens: Sequence[int], account: Account, *, all_logits: bool = False) -> F32:
        """One pass; returns logits f32 [1, n_vocab] ([T, n_vocab] with `all_logits`).

        Raises what `Model.forward` raises; what it refuses never shares a step with others.
        """
        self._model.check(self._slot, tokens)
        self._prefixes.forget(self._slot)
        n_out = len(tokens) if all_logits else 1
        rows = Rows(self._slot, list(tokens), n_out, lambda logits: logits, account)
        logits: F32 = await self._seat.run(rows, may_be_cut=False)
        return logits


class Engine:
    """Owns the model's slots and runs the steps. One per backbone; `run` must run."""

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
        residents: ResidentExperts | None = None,
        threads: Runner | None = None,
    ) -> None:
        """`threads`: for what takes long and is not ggml's; None: right here."""
        config = config or EngineConfig()
        self.model = model
        self.tokenizer = tokenizer
        self._prefixes = PrefixCache(n_slots, config)
        self._tasks = EngineTasks()
        self._asked: set[_Asked] = set()
        self._free = set(range(n_slots))
        self._turns = trio.Semaphore(n_slots)
        members.on_betrayal = self._doubt
        self._parts = Parts(
            model, tokenizer, compute, self._prefixes, config, chunk_tokens, threads or Inline()
        )
        self.passes = Passes(model, bank, compute, members, remote, demand, residents)
        self.batcher = Batcher(self.passes, self._tasks.start, config, chunk_tokens)
        self.n_tokens = 0
        """Tokens of answers that were handed to whoever asked, since the start."""

    @property
    def n_waiting(self) -> int:
        """Generations that wait for a slot."""
        return sum(asked.is_waiting for asked in self._asked)

    @property
    def n_free(self) -> int:
        """Slots that nobody uses."""
        return len(self._free)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run answers and steps until cancelled; then everything that is under way ends with EngineStoppedError."""
        try:
            await self._tasks.run(task_status=task_status)
        finally:
            self.batcher.stop()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent | DoneEvent]:
        """Generate token by token; the last event is a DoneEvent.

        Raises UsageError for an empty prompt, ContextFullError when prompt and answer cannot fit the context,
        EngineStoppedError. Closing the iterator (or cancelling its task) ends the answer and frees its slot: at once,
        or when the step ends that it shares with others.
        """
        self.check(request)
        send, receive = trio.open_memory_channel[Event](self._parts.config.tokens_ahead)
        asked = _Asked(request, send)
        self._tasks.start(partial(self._answer, asked))
        self._asked.add(asked)
        try:
            async with receive:
                async for event in receive:
                    self.n_tokens += isinstance(event, TokenEvent)
                    yield event
                if asked.error is not None:
                    raise asked.error
        finally:
            asked.scope.cancel()
            with trio.CancelScope(shield=True):
                await asked.ended.wait()

    async def _answer(self, asked: _Asked) -> None:
        """The task of one answer. What it raises is for whoever asked."""
        failure: Exception | None = EngineStoppedError()  # if this is cancelled while somebody listens
        try:
            with asked.scope:
                async with self._slot(np.asarray(asked.request.tokens, np.int32)) as slot:
                    asked.is_waiting = False
                    with self.batcher.seat() as seat:
                        try:
                            await Generation(self._parts, asked.request, slot, seat, asked.send).run()
                        finally:
                            if seat.has_failed:  # while it was being cancelled
                                self._prefixes.forget(slot)
                failure = None
        except Exception as error:
            failure = error
        finally:
            self._asked.discard(asked)
            asked.end(failure)

    async def step(
        self, slot: int, tokens: Sequence[int], account: Account, *, all_logits: bool = False
    ) -> F32:
        """Run one forward pass of a slot, and nothing behind it: see `stepping` and `Stepping.run`."""
        with self.stepping(slot) as stepping:
            return await stepping.run(tokens, account, all_logits=all_logits)

    @contextmanager
    def stepping(self, slot: int) -> Iterator[Stepping]:
        """Run passes of a slot one behind the other, in steps shared with whatever else runs.

        Whoever calls this has the slot for himself and says where it stands: nothing is remembered of it. Until the
        block ends steps wait for its next pass, so do nothing else in it that takes time.
        """
        with self.batcher.seat() as seat:
            yield Stepping(self.model, self._prefixes, slot, seat)

    def check(self, request: GenerateRequest) -> None:
        """Raise what `generate` would raise at once: UsageError (no tokens, or an unknown one, which would end the step
        for everybody in it, also in `logit_bias`), ContextFullError (too long).
        """
        if not request.tokens:
            raise UsageError("the prompt is empty: give at least one token")
        if min(request.tokens) < 0 or max(request.tokens) >= self.model.n_vocab:
            raise UsageError(f"a token id is outside the vocabulary of {self.model.n_vocab}")
        biased = [token for token, _ in request.sampling.logit_bias if token >= self.model.n_vocab]
        if biased:
            raise UsageError(
                f"logit_bias: there is no token {biased[0]}; this model's ids go up to {self.model.n_vocab - 1}"
            )
        needed = len(request.tokens) + request.max_tokens
        if needed > self.model.n_ctx:
            raise ContextFullError(
                f"prompt ({counted(len(request.tokens), 'token')}) and answer ({request.max_tokens}) "
                f"need {counted(needed, 'token')}, but "
                f"the context holds {self.model.n_ctx}: shorten one of them or give the backbone a larger --context"
            )

    def _doubt(self, node_id: NodeId) -> None:
        """Wrong numbers ended with the answer that they were found in: they must not live on in what slots keep."""
        self._prefixes.doubt(node_id.short)

    @asynccontextmanager
    async def _slot(self, tokens: Tokens) -> AsyncIterator[int]:
        """A slot for a prompt, the best of those that are free."""
        async with self._turns:
            slot = self._prefixes.choose(tokens, self._free)
            self._free.remove(slot)
            try:
                yield slot
            except Exception:  # not a cancellation: after that the checkpoints are good
                self._prefixes.forget(slot)
                raise
            finally:
                self._free.add(slot)
