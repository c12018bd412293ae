"""Answers with guessed tokens are those without, token for token, whatever is guessed and whoever helps."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import trio

from swarmnode.config import Config, EngineConfig, Speculate
from swarmnode.errors import UsageError
from swarmnode.models.logprobs import TokenLogprobs
from swarmnode.models.sampling import SamplingParams
from swarmnode.services.drafts import Drafts
from swarmnode.services.engine import DoneEvent, GenerateRequest, TokenEvent
from swarmnode.services.remote_experts import EXACT, WireForm
from swarmnode.testing.swarm import Swarm, open_swarm
from swarmnode.weights.catalog import bundled_model
from tests.swarm.conftest import ALL_BYTES

GREEDY = SamplingParams(temperature=0.0)
T = TypeVar("T")
N_NEW = 24
BUNDLED_BYTES = 64 * 127_488
BEGINNINGS = (
    "On account of the bequest of the late Ezekiah Hopkins, of",
    "To Sherlock Holmes she is always the woman. I have",
    "It is an old maxim of mine that when you have excluded the impossible,",
    "My name is Sherlock Holmes. It is my business to",
    "You see, but you do not observe. The distinction is",
    "one two three one two three one two three one two",
    "He was, I take it, the most perfect reasoning and observing machine that",
    "We are ready to",
    "Holmes: yes. Watson: no. Holmes: yes. Watson: no. Holmes:",
    "Apply in person on Monday, at eleven o'clock, to",
)
"""The bundled model knows some of these by heart."""


def prompts(n: int) -> list[list[int]]:
    """Random ones, and ones that repeat themselves, with a slip now and then."""
    found = []
    for seed in range(n):
        rng = np.random.default_rng(seed)
        piece = [int(token) for token in rng.integers(0, 280, 4 + seed)]
        text = piece * (1 if seed % 3 == 0 else 4)
        if seed % 3 == 2:
            text[len(text) // 2] = 1
        found.append(text)
    return found


@dataclass
class Answer:
    tokens: list[int]
    done: DoneEvent
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)

    @property
    def drafted(self) -> int:
        return self.done.account.drafted_tokens

    @property
    def accepted(self) -> int:
        return self.done.account.accepted_tokens


async def ask(
    swarm: Swarm,
    prompt: Sequence[int],
    params: SamplingParams = GREEDY,
    *,
    n: int = N_NEW,
    stop_ids: Collection[int] = (),
    on_token: Callable[[int], None] | None = None,
) -> Answer:
    tokens: list[int] = []
    logprobs: list[TokenLogprobs | None] = []
    request = GenerateRequest(prompt, n, params, frozenset(stop_ids), n_logprobs=2)
    async with aclosing(swarm.backbone.engine.generate(request)) as events:
        async for event in events:
            if isinstance(event, TokenEvent):
                tokens.append(event.token)
                logprobs.append(event.logprobs)
                if on_token is not None:
                    on_token(len(tokens))
    assert isinstance(event, DoneEvent)
    assert event.new_tokens == len(tokens)
    return Answer(tokens, event, logprobs)


@asynccontextmanager
async def open_speculating(
    model: Path,
    folder: Path,
    speculate: Speculate,
    *,
    n_workers: int = 0,
    form: WireForm = EXACT,
    latency_s: float = 0.0,
    n_ubatch: int = 512,
) -> AsyncIterator[Swarm]:
    config = replace(Config(), engine=EngineConfig(speculate=speculate, min_checkpoint_tokens=4))
    config = replace(config, models=replace(config.models, n_ubatch=n_ubatch))
    async with open_swarm(model, folder, config=config, form=form, latency_s=latency_s) as swarm:
        for _ in range(n_workers):
            await swarm.join(ALL_BYTES // 2)
        yield swarm


async def answers_of(swarm: Swarm, together: int = 1) -> list[Answer]:
    """The answers to 20 prompts: ten beginnings, and each again behind what came of it."""
    found: dict[int, Answer] = {}
    limit = trio.CapacityLimiter(together)
    encode = swarm.backbone.engine.tokenizer.encode

    async def one(number: int) -> None:
        async with limit:
            text = prompt = encode(BEGINNINGS[number])
            for turn in (number, number + len(BEGINNINGS)):
                found[turn] = await ask(swarm, prompt, PARAMS[number % len(PARAMS)])
                prompt = [*text, *found[number].tokens, *text]

    async with trio.open_nursery() as nursery:
        for number in range(len(BEGINNINGS)):
            nursery.start_soon(one, number)
    return [found[number] for number in range(20)]


PARAMS = [
    GREEDY,
    SamplingParams(temperature=0.3, seed=1),
    GREEDY,
    SamplingParams(temperature=0.7, seed=2),
    SamplingParams(temperature=1.0, top_k=5, top_p=0.8, seed=3),
    SamplingParams(temperature=0.0, presence_penalty=0.6, frequency_penalty=0.3),
    SamplingParams(temperature=0.7, presence_penalty=0.2, frequency_penalty=0.4, seed=4),
    SamplingParams(temperature=0.7, logit_bias=((65, 4.0), (66, 3.0), (67, -100.0)), seed=4),
]
FORMS = {"experts": EXACT, "partial": WireForm(), "q8": WireForm(encoding="q8")}


@pytest.mark.parametrize(("form", "together"), [("experts", 1), ("partial", 3), ("q8", 3)])
async def test_answers_are_those_without_guesses(tmp_path: Path, form: str, together: int) -> None:
    """In the same swarm: who holds what decides in which order `partial` sums are added."""
    async with open_speculating(bundled_model(), tmp_path, "never", form=FORMS[form]) as swarm:
        for _ in range(2):
            await swarm.join(BUNDLED_BYTES // 2)
        never = await answers_of(swarm)
        swarm.backbone.engine.batcher.speculate = "always"
        always = await answers_of(swarm, together)
    assert [a.tokens for a in always] == [a.tokens for a in never]
    assert [a.logprobs for a in always] == [a.logprobs for a in never]
    assert all(
        report and report.token == token
        for a in always
        for report, token in zip(a.logprobs, a.tokens, strict=True)
    )
    assert sum(a.drafted for a in never) == 0
    assert 0 < sum(a.accepted for a in always) < sum(a.drafted for a in always)
    assert sum(a.done.account.remote for a in always) > 0


# -- guesses of a given quality


def guess_from(answer: Sequence[int], monkeypatch: pytest.MonkeyPatch, wrong: float = 0.0) -> None:
    """Let guesses be this answer's tokens, each of them wrong with some probability."""
    rng = np.random.default_rng(0)
    text = list(answer)

    def propose(drafts: Drafts, n_most: int, stop_ids: Collection[int]) -> list[int]:
        n_so_far = len(drafts._new)
        draft = text[n_so_far : n_so_far + min(n_most, 6)]
        return [int(rng.integers(280)) if rng.random() < wrong else token for token in draft]

    monkeypatch.setattr(Drafts, "propose", propose)


@pytest.mark.parametrize("wrong", [0.0, 0.1, 0.4, 1.0])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.8, seed=5), *PARAMS[-2:]])
async def test_any_guesses_give_the_same_answer(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: float, params: SamplingParams
) -> None:
    prompt = prompts(5)[3]
    async with open_speculating(tiny_model, tmp_path / "never", "never") as swarm:
        plain = await ask(swarm, prompt, params, n=40)
    guess_from(plain.tokens, monkeypatch, wrong)
    async with open_speculating(tiny_model, tmp_path, "always", n_workers=1) as swarm:
        guessed = await ask(swarm, prompt, params, n=40)
        assert guessed.tokens == plain.tokens
        assert (guessed.accepted == guessed.drafted) is (wrong == 0.0)
        if wrong == 0.0:
            assert guessed.accepted == 33, "39 tokens behind the first: 5 passes of 7 and one of 4"
            assert guessed.done.account.layers == 4 * (2 + 6)
        told = guessed.done.account.as_dict()
        assert (told["drafted_tokens"], told["accepted_tokens"]) == (guessed.drafted, guessed.accepted)


@pytest.mark.parametrize("n_ubatch", [2, 3, 8])
async def test_guesses_that_a_step_has_no_room_for_are_left_out(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_ubatch: int
) -> None:
    prompt, params = prompts(5)[3], SamplingParams(temperature=0.8, seed=5)
    found: list[Answer] = []
    async with open_speculating(tiny_model, tmp_path, "always", n_ubatch=n_ubatch) as swarm:
        swarm.backbone.engine.batcher.speculate = "never"
        plain = await ask(swarm, prompt, params)
        swarm.backbone.engine.batcher.speculate = "always"
        guess_from(plain.tokens, monkeypatch)

        async def one() -> None:
            found.append(await ask(swarm, prompt, params))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            nursery.start_soon(one)
    assert [answer.tokens for answer in found] == [plain.tokens] * 2
    assert all(answer.accepted == answer.drafted for answer in found)
    assert n_ubatch < 8 or all(answer.drafted > 0 for answer in found)


@pytest.mark.parametrize("n", range(1, 10))
async def test_max_tokens_within_a_draft(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    prompt = prompts(5)[4]
    async with open_speculating(tiny_model, tmp_path, "always") as swarm:
        swarm.backbone.engine.batcher.speculate = "never"
        plain = await ask(swarm, prompt, n=30)
        swarm.backbone.engine.batcher.speculate = "always"
        guess_from(plain.tokens, monkeypatch)
        guessed = await ask(swarm, prompt, n=n)
    assert guessed.tokens == plain.tokens[:n]
    assert guessed.done.finish_reason == "length"
    assert guessed.accepted == max(0, n - 1 - -(-(n - 1) // 7))


@pytest.mark.parametrize("place", range(1, 12))
async def test_an_end_within_a_draft(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    """The end token is not part of the answer, nothing comes behind it, and the slot does not hold it."""
    prompt = prompts(5)[4]
    async with open_speculating(tiny_model, tmp_path, "always") as swarm:
        engine = swarm.backbone.engine
        engine.batcher.speculate = "never"
        sampled = SamplingParams(temperature=2.0, top_k=0, top_p=1.0, seed=11)  # few tokens come twice
        plain = (await ask(swarm, prompt, sampled, n=30)).tokens
        end = plain[place]
        n_kept = plain.index(end)
        engine.batcher.speculate = "always"
        guess_from(plain, monkeypatch)
        guessed = await ask(swarm, prompt, sampled, n=30, stop_ids={end})
        assert guessed.tokens == plain[:n_kept]
        assert guessed.drafted > 0 or n_kept < 2, "none where the end is the first guess"
        assert guessed.done.finish_reason == "stop"
        held = [slot.tokens.array.tolist() for slot in engine._prefixes._slots]
        assert [*prompt, *plain[:n_kept]] in held


async def test_the_end_of_the_context_within_a_draft(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [int(token) for token in np.random.default_rng(0).integers(0, 280, 500)]
    found = []
    for speculate in ("never", "always"):
        async with open_speculating(tiny_model, tmp_path / speculate, speculate) as swarm:
            found.append(await ask(swarm, prompt, n=12))
            guess_from(found[0].tokens, monkeypatch)
    plain, guessed = found
    assert guessed.tokens == plain.tokens
    assert guessed.drafted > 0


async def test_the_next_turn_goes_on_where_the_slot_stands(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompts(5)[2]
    turns: list[list[tuple[list[int], int]]] = []
    for speculate in ("never", "always"):
        async with open_speculating(tiny_model, tmp_path / speculate, speculate, n_workers=1) as swarm:
            one = await ask(swarm, prompt)
            assert (one.drafted > 0) is (speculate == "always")
            second = [*prompt, *one.tokens, 1, 2, 3]
            two = await ask(swarm, second)
            edited = await ask(swarm, [*prompt, *one.tokens, 4, 5])
            turns.append([(turn.tokens, turn.done.cached_tokens) for turn in (one, two, edited)])
        guess_from(one.tokens, monkeypatch, 0.3)
    assert turns[0] == turns[1]
    assert turns[0][1][1] == len(second) - 4


@pytest.mark.parametrize("n_told", [2, 5, 9])
async def test_cancelled_in_the_middle_it_leaves_the_prompt(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_told: int
) -> None:
    prompt = prompts(9)[8]
    async with open_speculating(tiny_model, tmp_path / "never", "never") as swarm:
        plain = await ask(swarm, prompt)
    guess_from(plain.tokens, monkeypatch, 0.2)
    async with open_speculating(tiny_model, tmp_path, "always", n_workers=1) as swarm:
        with trio.CancelScope() as scope:
            await ask(swarm, prompt, on_token=lambda n: scope.cancel() if n == n_told else None)
        assert scope.cancelled_caught
        assert swarm.backbone.engine.n_free == 2
        again = await ask(swarm, prompt)
    assert again.tokens == plain.tokens
    assert again.drafted > 0
    assert again.done.cached_tokens > 0


async def test_a_worker_killed_between_two_drafts(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompts(9)[7]
    async with open_speculating(tiny_model, tmp_path / "never", "never") as swarm:
        plain = await ask(swarm, prompt)
    guess_from(plain.tokens, monkeypatch, 0.2)
    async with open_speculating(tiny_model, tmp_path, "always") as swarm:
        worker = await swarm.join(ALL_BYTES)
        guessed = await ask(swarm, prompt, on_token=lambda n: worker.kill() if n == 8 else None)
    assert guessed.tokens == plain.tokens
    assert guessed.drafted > 0
    assert 0 < guessed.done.account.remote < guessed.done.account.pairs


class SlowAtFirst:
    """A runner whose first function takes ten seconds."""

    def __init__(self) -> None:
        self.n_run = 0

    async def run(self, function: Callable[[], T]) -> T:
        self.n_run += 1
        await trio.sleep(10.0 if self.n_run == 1 else 0.0)
        return function()


async def test_nobody_waits_while_the_prompt_of_another_is_indexed(tiny_model: Path, tmp_path: Path) -> None:
    async with open_speculating(tiny_model, tmp_path, "never") as swarm:
        engine, texts = swarm.backbone.engine, prompts(2)
        plain = [(await ask(swarm, text)).tokens for text in texts]
        engine.batcher.speculate = "always"
        threads = SlowAtFirst()
        engine._parts = replace(engine._parts, threads=threads)
        took_s: list[float] = []
        started_s = trio.current_time()

        async def answer(number: int) -> None:
            assert (await ask(swarm, texts[number])).tokens == plain[number]
            took_s.append(trio.current_time() - started_s)

        async with trio.open_nursery() as nursery:
            for number in range(2):
                nursery.start_soon(answer, number)
    assert threads.n_run == 2, "once an answer"
    assert took_s[0] < 1.0 < 10.0 <= took_s[1]


# -- when


@pytest.mark.parametrize(("n_workers", "latency_s"), [(0, 0.0), (1, 0.0), (1, 0.1)])
async def test_by_itself_it_guesses_only_where_steps_wait(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_workers: int, latency_s: float
) -> None:
    async with open_speculating(tiny_model, tmp_path, "never", n_workers=n_workers, latency_s=latency_s) as s:
        plain = await ask(s, [1, 2, 3])
        guess_from(plain.tokens, monkeypatch)
        s.backbone.engine.batcher.speculate = "auto"
        guessed = await ask(s, [1, 2, 3])
    assert guessed.tokens == plain.tokens
    assert (guessed.drafted > 0) is (latency_s > 0)


@pytest.mark.parametrize("draft_tokens", [0, -1, 32, 100])
async def test_more_guesses_than_a_pass_can_take_back_are_refused_at_the_start(
    tiny_model: Path, tmp_path: Path, draft_tokens: int
) -> None:
    config = replace(Config(), engine=replace(EngineConfig(), draft_tokens=draft_tokens))
    said = f"draft_tokens = {draft_tokens} must be 1 or more, and less than max_tentative_tokens = 32"
    with pytest.raises(UsageError, match=said):
        async with open_swarm(tiny_model, tmp_path, config=config):
            pass
