"""A worker that lied, and what its rows may have spoiled: found by the audit or by a probe, used no more."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import trio

from swarmnode.config import Config, DispatchConfig, EngineConfig
from swarmnode.models.sampling import SamplingParams
from swarmnode.net.peer import Body, Handler, Peer
from swarmnode.services.engine import DoneEvent, GenerateRequest, TokenEvent
from swarmnode.services.members import Standing
from swarmnode.testing.swarm import MeddledHandlers, Swarm, open_swarm
from swarmnode.wire.messages import Experts, Message, Rows
from tests.swarm.conftest import ALL_BYTES

END = 280
PROMPTS = [
    [*(int(token) for token in np.random.default_rng(seed).integers(0, END, 70)), END, 1, 2]
    for seed in (1, 2)
]
"""With an end of a turn, behind which a checkpoint is made."""
N_TOKENS = 12


class LastRow(random.Random):
    """Audits every answer, always its last row: so it can be foreseen what is found."""

    def random(self) -> float:
        return 0.999


@dataclass
class Liar:
    """What a worker does to the rows that it computed."""

    spoils: str = "nothing"
    """Or "all but the last", which is never found, or "all"; or "time", never answering."""

    def meddle(self, handler: Handler) -> Handler:
        """The handler, with wrong rows."""

        async def answer(peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
            reply, parts = await handler(peer, message, body)
            assert isinstance(reply, Rows)
            if self.spoils == "time":
                await trio.sleep_forever()
            raw = b"".join(bytes(part) for part in parts)
            values = np.frombuffer(raw, np.float32).reshape(reply.n_rows, -1).copy()
            end = {"nothing": 0, "all but the last": reply.n_rows - 1, "all": reply.n_rows}[self.spoils]
            values[:end] = np.roll(values[:end], 1, axis=1)
            return reply, (values.tobytes(),)

        return answer


@dataclass
class Conversation:
    """A backbone with one worker, which holds everything."""

    swarm: Swarm
    liar: Liar
    alone: list[list[int]]
    """The right answers."""

    async def ask(
        self, number: int, on_token: Callable[[int], None] = lambda count: None, n_tokens: int = N_TOKENS
    ) -> tuple[list[int], DoneEvent]:
        """The greedy answer to a prompt."""
        return await greedy(self.swarm, PROMPTS[number], on_token, n_tokens)

    async def assert_nothing_is_used_again(self, numbers: Sequence[int]) -> None:
        """All of these prompts are run anew, and answered rightly; what is held of them then is used."""
        for number in numbers:
            answer, done = await self.ask(number)
            assert (done.cached_tokens, answer) == (0, self.alone[number])
        for number in numbers:
            answer, done = await self.ask(number)
            assert done.cached_tokens > 0
            assert answer == self.alone[number]


async def greedy(
    swarm: Swarm,
    prompt: list[int],
    on_token: Callable[[int], None] = lambda count: None,
    n_tokens: int = N_TOKENS,
) -> tuple[list[int], DoneEvent]:
    job = GenerateRequest(prompt, n_tokens, SamplingParams(temperature=0.0), frozenset({END}))
    answer: list[int] = []
    async with aclosing(swarm.backbone.engine.generate(job)) as events:
        async for event in events:
            if isinstance(event, TokenEvent):
                answer.append(event.token)
                on_token(len(answer))
    assert isinstance(event, DoneEvent)
    return answer, event


@asynccontextmanager
async def open_conversation(model: Path, folder: Path, latency_s: float = 0.0) -> AsyncIterator[Conversation]:
    """Two slots that hold nothing yet, and a worker that was honest until now."""
    base = Config()
    config = replace(
        base,
        dispatch=replace(DispatchConfig(), audit_share=1.0),
        engine=EngineConfig(min_checkpoint_tokens=4, tokens_ahead=0),
        models=replace(base.models, n_ubatch=32),
    )
    async with open_swarm(model, folder / "alone", config=config) as swarm:
        alone = [(await greedy(swarm, prompt))[0] for prompt in PROMPTS]
    liar = Liar()
    async with open_swarm(model, folder, config=config, latency_s=latency_s) as swarm:
        swarm.backbone.engine.passes.remote._rng = LastRow()
        for layer in range(
            4
        ):  # its numbers are known: that they are what they should be is what nobody looks at
            swarm.backbone.engine.passes.remote._magnitudes.learn(layer, np.ones((1, 1), np.float32))
        await swarm.join(ALL_BYTES, handlers=MeddledHandlers(Experts, liar.meddle))
        yield Conversation(swarm, liar, alone)


def is_found(talk: Conversation) -> bool:
    return any(worker.standing is Standing.QUARANTINED for worker in talk.swarm.backbone.members.workers)


async def test_what_the_audit_finds_is_used_in_no_other_prompt(tiny_model: Path, tmp_path: Path) -> None:
    """One conversation is over and one is running when the liar is found."""
    async with open_conversation(tiny_model, tmp_path) as talk:
        members = talk.swarm.backbone.members
        talk.liar.spoils = "all but the last"
        spoiled, done = await talk.ask(0)
        assert done.account.remote == done.account.pairs
        assert spoiled != talk.alone[0]
        _, done = await talk.ask(0)
        assert done.cached_tokens > 0, "nobody knows yet"
        assert not is_found(talk)

        def lie_more(count: int) -> None:
            if count == 3:
                talk.liar.spoils = "all"

        _, done = await talk.ask(1, lie_more)
        assert 0 < done.account.remote < done.account.pairs
        (member,) = members.workers
        assert member.standing is Standing.QUARANTINED
        assert "recomputing" in member.reason
        await talk.assert_nothing_is_used_again((0, 1))


async def test_of_two_that_run_when_the_liar_is_found_none_is_used(tiny_model: Path, tmp_path: Path) -> None:
    async with open_conversation(tiny_model, tmp_path) as talk:
        talk.liar.spoils = "all but the last"
        counts = [0, 0]
        found_at: list[list[int]] = []

        def note(number: int, count: int) -> None:
            counts[number] = count
            if min(counts) == 3:
                talk.liar.spoils = "all"
            if is_found(talk) and not found_at:
                found_at.append(list(counts))

        async with trio.open_nursery() as nursery:
            for number in range(2):
                nursery.start_soon(talk.ask, number, partial(note, number))
        assert found_at
        assert max(found_at[0]) < N_TOKENS, "both were running"
        await talk.assert_nothing_is_used_again((0, 1))


async def test_a_strangers_wrong_probe_costs_nobody_what_slots_hold(tiny_model: Path, tmp_path: Path) -> None:
    """It is found out while a pass is under way, to which it never helped."""
    stranger = Liar("all")
    async with open_conversation(tiny_model, tmp_path, latency_s=0.02) as talk:
        members = talk.swarm.backbone.members
        found_at: list[int] = []

        def note(count: int) -> None:
            if is_found(talk) and not found_at:
                found_at.append(count)

        async def come() -> None:
            await trio.sleep(0.5)
            await talk.swarm.join(ALL_BYTES, handlers=MeddledHandlers(Experts, stranger.meddle), wait=False)

        talk.swarm.nursery.start_soon(come)
        answer, _ = await talk.ask(0, note, n_tokens=60)
        assert found_at, "it came while the answer ran"
        (liar,) = (worker for worker in members.workers if worker.standing is Standing.QUARANTINED)
        assert liar.tally.pairs == 0
        next_prompt = [*PROMPTS[0], *answer, 1, 2, 3]
        _, done = await greedy(talk.swarm, next_prompt)
        assert done.cached_tokens >= len(next_prompt) - 4, (
            "all but the answer's last token, which was not run"
        )


async def test_who_was_asked_and_never_answered_spoils_nothing(tiny_model: Path, tmp_path: Path) -> None:
    async with open_conversation(tiny_model, tmp_path) as talk:
        talk.liar.spoils = "time"
        _, done = await talk.ask(0)
        (asked,) = done.account.workers.values()
        assert asked.late
        assert done.account.helpers == []
        talk.liar.spoils = "all"
        await talk.swarm.until(partial(is_found, talk))
        _, done = await talk.ask(0)
        assert done.cached_tokens > 0


async def test_a_liar_found_by_the_probe_after_reconnecting_betrayed(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with open_conversation(tiny_model, tmp_path) as talk:
        members = talk.swarm.backbone.members
        talk.liar.spoils = "all but the last"
        spoiled, _ = await talk.ask(0)
        assert spoiled != talk.alone[0]
        (before,) = members.workers
        talk.liar.spoils = "all"
        talk.swarm.network.break_all("worker1")
        await talk.swarm.until(partial(is_found, talk))
        (member,) = members.workers
        assert member is not before
        assert member.tally.pairs == 0
        await talk.assert_nothing_is_used_again((0,))
