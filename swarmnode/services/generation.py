"""One answer: its prompt into a slot (from where the slot can go on), then token by token, in steps shared with others.

Runs as a task of the engine's, ahead of whoever asked by at most `EngineConfig.tokens_ahead` tokens: a step waits for
sequences, never for clients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import trio

from swarmnode.config import EngineConfig
from swarmnode.models.base import Checkpoint, Model
from swarmnode.models.logprobs import TokenLogprobs
from swarmnode.models.sampling import Constraint, Sampler, SamplingParams
from swarmnode.models.tokenizer import StreamDecoder, Tokenizer
from swarmnode.services.account import Account
from swarmnode.services.batcher import Seat
from swarmnode.services.drafts import Drafts, verify
from swarmnode.services.passes import F32, Rows
from swarmnode.services.prefix_cache import PrefixCache, plan_prefill
from swarmnode.services.runners import Runner


@dataclass(frozen=True)
class GenerateRequest:
    """What to generate. `tokens` are the prompt's ids; `stop_ids` end the answer and are not part of it."""

    tokens: Sequence[int]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()
    n_logprobs: int | None = None
    """Tell each token's logprob, and those of so many of the best; None: no logprobs."""
    constraint: Constraint | None = None
    """What the answer must look like. It belongs to this one request."""
    ends: Callable[[str], bool] | None = None
    """Told the answer's text, piece by piece; true: this piece is the last."""


@dataclass(frozen=True)
class TokenEvent:
    """One new token: its id, the text that became complete with it, and the account up to the step that it came of."""

    token: int
    text: str
    account: Account
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class DoneEvent:
    """The end: `finish_reason` is "stop" (an end token, or `ends`) or "length" (max_tokens or context)."""

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


Event: TypeAlias = TokenEvent | DoneEvent


@dataclass(frozen=True)
class Parts:
    """What generations work with."""

    model: Model
    tokenizer: Tokenizer
    compute: Runner
    prefixes: PrefixCache
    config: EngineConfig
    chunk_tokens: int
    threads: Runner


class Generation:
    """An answer under way in `slot`, sitting in `seat`; `send` takes its events."""

    def __init__(
        self,
        parts: Parts,
        request: GenerateRequest,
        slot: int,
        seat: Seat,
        send: trio.MemorySendChannel[Event],
    ) -> None:
        self._parts = parts
        self._request = request
        self._tokens: npt.NDArray[np.int32] = np.asarray(request.tokens, np.int32)
        self._slot = slot
        self._seat = seat
        self._send = send
        self._account = Account()
        self._sampler = Sampler(
            request.sampling, n_logprobs=request.n_logprobs, constraint=request.constraint
        )
        self._drafts = Drafts(self._tokens, parts.config, has_mtp=parts.model.has_mtp)

    async def run(self) -> None:
        """To the end of the answer, or until nobody listens any more. Raises what passes raise."""
        request, decoder = self._request, StreamDecoder(self._parts.tokenizer)
        token = await self._prefill()
        ahead: deque[int] = deque([token])
        new_tokens = 0
        reason = "length"
        while new_tokens < request.max_tokens:
            token = ahead.popleft()
            if token in request.stop_ids:
                reason = "stop"
                break
            new_tokens += 1
            self._drafts.add(token)
            text = decoder.push(token)
            account = self._account.copy()
            if not await self._tell(TokenEvent(token, text, account, self._sampler.next_report())):
                return
            if request.ends is not None and request.ends(text):
                reason = "stop"
                break
            if not ahead and new_tokens < request.max_tokens:
                ahead.extend(await self._next(token, request.max_tokens - new_tokens))
        n_prompt = len(self._tokens)
        await self._tell(DoneEvent(reason, decoder.finish(), n_prompt, new_tokens, self._account))

    async def _next(self, token: int, n_most: int) -> list[int]:
        """Run the answer's last token, and guesses behind it; the one to `n_most` tokens that follow."""
        draft = await self._guess(token, min(n_most, self._parts.chunk_tokens) - 1)
        began_s = trio.current_time()
        found = await self._try_out(token, draft)
        self._drafts.stepped(trio.current_time() - began_s)
        return found

    async def _guess(self, token: int, n_most: int) -> list[int]:
        """Up to `n_most` tokens that may come behind the answer's last one: from the text so far, else from the model's
        MTP block. Steps wait for those (the seat is kept): they are short beside steps that wait for workers, and a
        sequence that came late to each would have steps of its own.
        """
        if n_most < 1 or not self._seat.wants_drafts:
            return []
        await self._index_text()
        draft = self._drafts.propose(n_most, self._request.stop_ids)
        n_wanted = 0 if draft else self._drafts.wanted_of_model(n_most)
        if not n_wanted:
            return draft
        began_s, compute = trio.current_time(), self._parts.compute
        guesses = await compute.run(partial(self._parts.model.draft, self._slot, token))
        while len(draft) < n_wanted:
            guess = await compute.run(
                partial(_next_of, guesses)
            )  # one by one: others get the thread in between
            if guess is None or guess in self._request.stop_ids:
                break
            draft.append(guess)
        self._drafts.took((trio.current_time() - began_s) / max(1, len(draft)))
        return draft

    async def _try_out(self, token: int, draft: list[int]) -> list[int]:
        if not draft:
            return [await self._go_on([token], self._sampler.sample_last)]
        prefixes, slot = self._parts.prefixes, self._slot
        prefixes.begin(slot)
        take = partial(self._take_draft, draft)
        rows = Rows(slot, [token, *draft], 1 + len(draft), take, self._account, tentative=True)
        found: list[int]
        found, n_tried = await self._seat.run(rows, may_be_cut=False)
        prefixes.append(slot, [token, *found[:-1]], self._account.helpers)
        if n_tried:  # else the step had no room for any
            self._account.drafted_tokens += n_tried
            self._account.accepted_tokens += len(found) - 1
            self._drafts.judge(n_tried, len(found) - 1)
        return found

    async def _index_text(self) -> None:
        """Look through the prompt before the first guess, without holding up a step."""
        if self._parts.config.drafts != "mtp" and not self._drafts.is_indexed:
            with self._seat.away():
                await self._parts.threads.run(self._drafts.index)

    def _take_draft(self, draft: Sequence[int], logits: F32) -> tuple[list[int], int]:
        """On the compute thread: the tokens that follow, and how many guesses were tried out, of which steps may leave
        out the last ones. The slot holds all but the last of the tokens then.
        """
        n_tried = len(logits) - 1
        found = verify(draft[:n_tried], logits, self._sampler.sample, self._request.stop_ids)
        if n_tried:  # the one that was run for sure, and len(found) - 1 guesses
            self._parts.model.accept(self._slot, len(found))
        return found, n_tried

    async def _tell(self, event: Event) -> bool:
        """False if nobody listens any more."""
        try:
            self._send.send_nowait(event)
        except trio.BrokenResourceError:
            return False
        except trio.WouldBlock:
            return await self._tell_later(event)
        return True

    async def _tell_later(self, event: Event) -> bool:
        with self._seat.away():
            try:
                await self._send.send(event)
            except trio.BrokenResourceError:
                return False
        return True

    async def _prefill(self) -> int:
        """The first token of the answer."""
        tokens, config = self._tokens, self._parts.config
        start = self._account.cached_tokens = await self._resume()
        token = 0
        for piece in plan_prefill(tokens, start, self._request.stop_ids, self._parts.chunk_tokens, config):
            is_last = piece.end == len(tokens)
            token = await self._go_on(
                tokens[start : piece.end].tolist(), self._sampler.sample_last if is_last else None
            )
            start = piece.end
            if piece.keeps:
                await self._keep()
        return token

    async def _go_on(self, tokens: list[int], take: Callable[[F32], int] | None) -> Any:
        """Run tokens; what `take` makes of the last one's logits. If it is cancelled the slot is torn, but its
        checkpoints are still good.
        """
        prefixes, slot = self._parts.prefixes, self._slot
        prefixes.begin(slot)
        rows = Rows(slot, tokens, 0 if take is None else 1, take or _nothing, self._account)
        value = await self._seat.run(rows)
        prefixes.append(slot, tokens, self._account.helpers)
        return value

    async def _resume(self) -> int:
        """Bring the slot to where this prompt can go on; the tokens that need not be run."""
        prefixes, slot, model = self._parts.prefixes, self._slot, self._parts.model
        start = prefixes.usable(slot, self._tokens)
        if start and prefixes.stands_at(slot, start) and prefixes.wants(slot):
            # The end of the last answer: what was asked then may be asked again in other words.
            await self._keep()
            start = prefixes.usable(slot, self._tokens)  # what it stood on may have become doubtful meanwhile
        checkpoint = prefixes.rewind(slot, start)
        if checkpoint is not None or not start:
            prefixes.begin(slot)
            await self._compute(partial(_place, model, slot, checkpoint))
            prefixes.append(slot, ())
        return start

    async def _keep(self) -> None:
        """Make a checkpoint of where the slot stands, if there is memory for one at all."""
        prefixes, slot, model = self._parts.prefixes, self._slot, self._parts.model
        n_bytes = model.checkpoint_bytes
        if not prefixes.reserve(slot, n_bytes):
            return
        try:
            prefixes.add(slot, await self._compute(partial(model.checkpoint, slot)))
        finally:
            prefixes.release(n_bytes)

    async def _compute(self, function: Callable[[], Any]) -> Any:
        """On the compute thread, beside the steps of others."""
        with self._seat.away():
            return await self._parts.compute.run(function)


def _place(model: Model, slot: int, checkpoint: Checkpoint | None) -> None:
    """Take the slot back to a checkpoint, or to its beginning."""
    if checkpoint is None:
        model.reset(slot)
    else:
        model.restore(slot, checkpoint)


def _next_of(guesses: Iterator[int]) -> int | None:
    return next(guesses, None)


def _nothing(logits: F32) -> int:
    """Never called: no logits are wanted of a chunk of a prompt but the last."""
    raise AssertionError("logits that nobody wanted")
