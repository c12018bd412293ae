"""Conversations whose next turn runs only what is new, and answers as if all of it had been run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from swarmnode.config import Config, EngineConfig
from swarmnode.errors import DeviceError
from swarmnode.models.sampling import SamplingParams
from swarmnode.services.engine import DoneEvent, Engine, GenerateRequest, TokenEvent
from swarmnode.services.passes import Rows
from swarmnode.testing.swarm import Swarm, open_swarm
from tests.swarm.conftest import ALL_BYTES

END = 280
TURNS = EngineConfig(min_checkpoint_tokens=4, checkpoint_tokens=64)
CHUNK = 32


def words(n: int, seed: int) -> list[int]:
    """Random tokens, none of which ends a turn."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, END, n)]


SYSTEM = [*words(40, 0), END]


@dataclass
class Turn:
    """What came of one prompt."""

    answer: list[int]
    done: DoneEvent
    n_run: int
    """Tokens of the prompt that were run."""


@dataclass
class Talk:
    """A backbone, and how many tokens its engine has run."""

    swarm: Swarm
    n_run: list[int] = field(default_factory=list)
    """Tokens of each pass."""

    @property
    def engine(self) -> Engine:
        return self.swarm.backbone.engine

    async def ask(
        self, prompt: Sequence[int], n: int = 6, on_token: Callable[[int], None] | None = None
    ) -> Turn:
        """The greedy answer to a prompt."""
        self.n_run.clear()
        job = GenerateRequest(prompt, n, SamplingParams(temperature=0.0), frozenset({END}))
        answer: list[int] = []
        async with aclosing(self.engine.generate(job)) as events:
            async for event in events:
                if isinstance(event, TokenEvent):
                    answer.append(event.token)
                    if on_token is not None:
                        on_token(len(answer))
        assert isinstance(event, DoneEvent)
        n_steps = len(answer) - (event.finish_reason == "length")
        return Turn(answer, event, sum(self.n_run) - n_steps)


@asynccontextmanager
async def open_talk(model: Path, folder: Path, engine: EngineConfig = TURNS) -> AsyncIterator[Talk]:
    """Two slots, nobody else in the swarm."""
    base = Config()
    config = replace(base, engine=engine, models=replace(base.models, n_ubatch=CHUNK))
    with pytest.MonkeyPatch.context() as patch:
        async with open_swarm(model, folder, config=config, n_ctx=1024) as swarm:
            talk = Talk(swarm)
            real = swarm.backbone.engine.passes.run

            async def counted(rows: Sequence[Rows]) -> Any:
                talk.n_run.append(sum(len(item.tokens) for item in rows))
                return await real(rows)

            patch.setattr(swarm.backbone.engine.passes, "run", counted)
            yield talk


async def fresh_answers(model: Path, folder: Path, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """What an engine that keeps nothing answers."""
    answers = []
    async with open_talk(model, folder) as talk:
        for prompt in prompts:
            for slot in range(2):
                talk.engine._prefixes.forget(slot)
            turn = await talk.ask(prompt)
            assert turn.done.cached_tokens == 0
            assert turn.n_run == len(prompt)
            answers.append(turn.answer)
    return answers


async def test_the_next_turn_runs_only_what_is_new(tiny_model: Path, tmp_path: Path) -> None:
    first = [*SYSTEM, *words(400, 1)]
    async with open_talk(tiny_model, tmp_path) as talk:
        one = await talk.ask(first)
        new = [END, *words(50, 2), END, 3, 4]
        second = [*first, *one.answer, *new]
        two = await talk.ask(second)
    assert one.done.cached_tokens == 0
    assert two.done.cached_tokens == len(second) - two.n_run
    assert two.n_run <= 1.1 * len(new), (two.n_run, len(new))
    assert two.done.account.as_dict()["cached_tokens"] == two.done.cached_tokens
    expected = await fresh_answers(tiny_model, tmp_path / "fresh", [first, second])
    assert [one.answer, two.answer] == expected


async def test_an_edited_message_goes_on_behind_the_last_answer(tiny_model: Path, tmp_path: Path) -> None:
    first = [*SYSTEM, *words(100, 1), END]
    async with open_talk(tiny_model, tmp_path) as talk:
        one = await talk.ask(first)
        before = [*first, *one.answer]
        await talk.ask([*before, END, *words(30, 2)])
        edited = [*before, END, *words(35, 3)]
        two = await talk.ask(edited)
    assert two.n_run == 36 + 1, "the answer's last token was never run"
    assert two.answer == (await fresh_answers(tiny_model, tmp_path / "fresh", [edited]))[0]


async def test_an_answer_that_is_rendered_otherwise_is_run_again(tiny_model: Path, tmp_path: Path) -> None:
    """As when the template leaves thoughts out: the question's end is still the same."""
    question = [*SYSTEM, *words(60, 1), END]
    async with open_talk(tiny_model, tmp_path) as talk:
        await talk.ask([*question, 1, 2, 3])
        second = [*question, 1, 2, *words(9, 5), END, *words(20, 6), END, 1, 2, 3]
        two = await talk.ask(second)
        again = await talk.ask(second)
    assert two.done.cached_tokens == len(question)
    assert again.n_run == 3, "the same question again"
    expected = (await fresh_answers(tiny_model, tmp_path / "fresh", [second]))[0]
    assert two.answer == again.answer == expected


async def test_a_system_prompt_is_shared(tiny_model: Path, tmp_path: Path) -> None:
    prompts = [[*SYSTEM, *words(20, seed), END, 1] for seed in (1, 2, 3)]
    async with open_talk(tiny_model, tmp_path) as talk:
        turns = [await talk.ask(prompt) for prompt in prompts]
    assert [turn.done.cached_tokens for turn in turns] == [0, len(SYSTEM), len(SYSTEM)]
    assert [turn.answer for turn in turns] == await fresh_answers(tiny_model, tmp_path / "fresh", prompts)


async def test_conversations_in_turns_keep_a_slot_each(tiny_model: Path, tmp_path: Path) -> None:
    prompts = [[*SYSTEM, *words(90, seed), END, 1] for seed in (1, 2)]
    async with open_talk(tiny_model, tmp_path) as talk:
        for _ in range(3):
            for number, prompt in enumerate(prompts):
                turn = await talk.ask(prompt)
                prompts[number] = [*prompt, *turn.answer, END, *words(10, number), END, 1]
        for prompt in prompts:
            assert (await talk.ask(prompt)).n_run == 14


async def test_conversations_at_the_same_time_do_not_mix(tiny_model: Path, tmp_path: Path) -> None:
    prompts = [[*SYSTEM, *words(60, seed), END, 1] for seed in range(4)]
    answers: dict[int, list[int]] = {}
    async with open_talk(tiny_model, tmp_path) as talk:

        async def ask(number: int) -> None:
            answers[number] = (await talk.ask(prompts[number])).answer

        for _ in range(2):
            async with trio.open_nursery() as nursery:
                for number in range(4):
                    nursery.start_soon(ask, number)
            assert talk.engine.n_free == 2
    expected = await fresh_answers(tiny_model, tmp_path / "fresh", prompts)
    assert [answers[number] for number in range(4)] == expected


async def test_turns_with_workers_give_what_those_without_give(tiny_model: Path, tmp_path: Path) -> None:
    first = [*SYSTEM, *words(60, 1), END, 1, 2]
    answers: list[list[list[int]]] = []
    for n_workers in (0, 2):
        async with open_talk(tiny_model, tmp_path / str(n_workers)) as talk:
            for _ in range(n_workers):
                await talk.swarm.join(ALL_BYTES // 2)
            one = await talk.ask(first)
            two = await talk.ask([*first, *one.answer, END, *words(20, 2)])
            assert two.n_run == 22
            assert (two.done.account.remote > 0) is (n_workers > 0)
            answers.append([one.answer, two.answer])
    assert answers[0] == answers[1]


# -- what ends early, and what goes wrong


def cancel_at(scope: trio.CancelScope, n: int, count: int) -> None:
    if count == n:
        scope.cancel()


async def test_a_cancelled_answer_leaves_its_prompt(tiny_model: Path, tmp_path: Path) -> None:
    prompt = [*SYSTEM, *words(60, 1), END, 1, 2]
    async with open_talk(tiny_model, tmp_path) as talk:
        with trio.CancelScope() as scope:
            await talk.ask(prompt, 6, partial(cancel_at, scope, 3))
        assert scope.cancelled_caught
        assert talk.engine.n_free == 2
        turn = await talk.ask(prompt)
    assert turn.n_run == 2
    assert turn.answer == (await fresh_answers(tiny_model, tmp_path / "fresh", [prompt]))[0]


@pytest.mark.parametrize("n_hops", [3, 12, 25, 33])
async def test_a_prompt_cancelled_half_way_goes_on_at_its_last_checkpoint(
    tiny_model: Path, tmp_path: Path, n_hops: int
) -> None:
    prompt = words(300, 1)
    async with open_talk(tiny_model, tmp_path) as talk:
        n, real = 0, talk.engine._parts.compute.run

        async def run(function: Any) -> Any:
            nonlocal n
            n += 1
            if n == n_hops:
                scope.cancel()
            return await real(function)

        with pytest.MonkeyPatch.context() as patch, trio.CancelScope() as scope:
            patch.setattr(talk.engine._parts.compute, "run", run)
            await talk.ask(prompt)
        assert scope.cancelled_caught
        n_begun = sum(talk.n_run)
        turn = await talk.ask(prompt)
    assert turn.n_run == 300 - turn.done.cached_tokens
    assert n_begun - 3 * CHUNK <= turn.done.cached_tokens <= n_begun < 300
    assert turn.answer == (await fresh_answers(tiny_model, tmp_path / "fresh", [prompt]))[0]


async def test_after_an_error_nothing_of_the_slot_is_used(tiny_model: Path, tmp_path: Path) -> None:
    prompt = [*SYSTEM, *words(60, 1), END, 1, 2]
    async with open_talk(tiny_model, tmp_path) as talk:
        counted = talk.engine.passes.run

        async def broken(rows: Sequence[Rows]) -> Any:
            if len(rows[0].tokens) == 1:
                raise DeviceError("broken")
            return await counted(rows)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(talk.engine.passes, "run", broken)
            with pytest.raises(DeviceError):
                await talk.ask(prompt)
        assert talk.engine.n_free == 2
        assert talk.engine._prefixes.n_bytes == 0
        assert (await talk.ask(prompt)).done.cached_tokens == 0


async def test_steps_by_hand_are_not_taken_for_a_conversation(tiny_model: Path, tmp_path: Path) -> None:
    prompt = [*SYSTEM, *words(60, 1), END, 1, 2]
    async with open_talk(tiny_model, tmp_path) as talk:
        answer = (await talk.ask(prompt)).answer
        await talk.swarm.logits(words(20, 2))  # in slot 0
        turn = await talk.ask(prompt)
    assert (turn.done.cached_tokens, turn.answer) == (0, answer)


async def test_without_memory_for_checkpoints_a_conversation_still_goes_on(
    tiny_model: Path, tmp_path: Path
) -> None:
    first = [*SYSTEM, *words(60, 1), END, 1, 2]
    async with open_talk(tiny_model, tmp_path, replace(TURNS, checkpoint_bytes=0)) as talk:
        one = await talk.ask(first)
        two = await talk.ask([*first, *one.answer, END, *words(20, 2)])
        assert two.n_run == 22
        assert talk.engine._prefixes.n_bytes == 0
        assert (await talk.ask(first)).done.cached_tokens == 0


async def test_checkpoints_stay_within_their_budget(tiny_model: Path, tmp_path: Path) -> None:
    async with open_talk(tiny_model, tmp_path) as talk:
        budget = 3 * talk.engine.model.checkpoint_bytes
    async with open_talk(tiny_model, tmp_path, replace(TURNS, checkpoint_bytes=budget)) as talk:
        prompt = list(SYSTEM)
        for turn_number in range(6):
            prompt += [*words(20, turn_number), END, 1]
            turn = await talk.ask(prompt)
            assert 0 < talk.engine._prefixes.n_bytes <= budget
            assert turn.n_run <= len(SYSTEM) + 22
            prompt += [*turn.answer, END]


async def test_what_a_slot_stands_on_may_become_doubtful_while_it_is_copied(
    tiny_model: Path, tmp_path: Path
) -> None:
    first = [*SYSTEM, *words(60, 1), END, 1, 2]
    async with open_talk(tiny_model, tmp_path) as talk:
        one = await talk.ask(first)
        prefixes, compute = talk.engine._prefixes, talk.engine._parts.compute
        real = compute.run

        async def run(function: Any) -> Any:
            value = await real(function)
            for held in prefixes._slots:
                held.helpers.add("liar")
            prefixes.doubt("liar")
            return value

        second = [*first, *one.answer, END, *words(40, 2)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compute, "run", run)
            two = await talk.ask(second)
        (slot,) = [i for i, held in enumerate(prefixes._slots) if len(held.tokens)]
        assert talk.engine.model.n_past(slot) == len(prefixes._slots[slot].tokens)
    assert two.answer == (await fresh_answers(tiny_model, tmp_path / "fresh", [second]))[0]
