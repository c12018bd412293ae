"""Answers with guesses of the model's MTP block: the same as without, and some of them right.

Blocks of random weights guess nothing right, which tests that guesses are taken back; a block that hands the next
token's embedding on (`TinyModel.mtp_copies`) is right often, as the tiny model's answers follow mostly from their last
token. What trained blocks guess right is not known here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from swarmnode.config import Config, Drafts, EngineConfig, Speculate
from swarmnode.errors import UsageError
from swarmnode.models.base import Model
from swarmnode.models.sampling import SamplingParams
from swarmnode.services.remote_experts import EXACT, WireForm
from swarmnode.testing.swarm import Swarm, open_swarm
from swarmnode.testing.tiny_gguf import write_tiny_gguf
from tests.swarm.conftest import ALL_BYTES, MODEL
from tests.swarm.test_speculation import GREEDY, Answer, ask, prompts

BLOCKS = {
    "random": replace(MODEL, mtp_block=True),
    "copies": replace(MODEL, mtp_block=True, mtp_copies=True),
    "copies well": replace(MODEL, mtp_block=True, mtp_copies=True, branch_scale=0.05),
}
"""How often the second is right depends on the seed: about every fifth time. The third nearly always is."""
SAMPLED = SamplingParams(temperature=0.5, seed=5)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    tiny_models = {**BLOCKS, "no block": replace(BLOCKS["copies well"], mtp_block=False)}
    return {name: write_tiny_gguf(folder / f"{name}.gguf", tiny) for name, tiny in tiny_models.items()}


@asynccontextmanager
async def opened(
    model: Path,
    folder: Path,
    *,
    speculate: Speculate = "always",
    drafts: Drafts = "mtp",
    n_workers: int = 0,
    form: WireForm = EXACT,
    latency_s: float = 0.0,
) -> AsyncIterator[Swarm]:
    engine = EngineConfig(speculate=speculate, drafts=drafts, min_checkpoint_tokens=4)
    config = replace(Config(), engine=engine)
    async with open_swarm(model, folder, config=config, form=form, latency_s=latency_s) as swarm:
        for _ in range(n_workers):
            await swarm.join(ALL_BYTES // 2)
        yield swarm


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("n_workers", [0, 1])
async def test_answers_are_those_without_guesses(
    models: dict[str, Path], tmp_path: Path, block: str, params: SamplingParams, n_workers: int
) -> None:
    """A seed in common gives the same tokens, so that the distribution is the same, too."""
    async with opened(models[block], tmp_path / "mtp", n_workers=n_workers) as swarm:
        model, batcher = swarm.backbone.engine.model, swarm.backbone.engine.batcher
        assert model.has_mtp
        guessed = [await ask(swarm, prompt, params) for prompt in prompts(4)]
        batcher.speculate = "never"
        plain = [await ask(swarm, prompt, params) for prompt in prompts(4)]
    async with opened(models[block], tmp_path / "never", speculate="never", drafts="auto") as swarm:
        assert not swarm.backbone.engine.model.has_mtp
        unloaded = [await ask(swarm, prompt, params) for prompt in prompts(4)]
    assert tokens(guessed) == tokens(plain) == tokens(unloaded)
    accepted, drafted = sum(each.accepted for each in guessed), sum(each.drafted for each in guessed)
    assert sum(each.drafted for each in plain) == 0
    assert drafted > 0
    least = {"random": 0.0, "copies": 0.1, "copies well": 0.7 if params is GREEDY else 0.3}[block]
    assert accepted >= least * drafted, f"{accepted} of {drafted}"
    if block == "copies well" and params is GREEDY:
        assert sum(each.done.account.layers for each in guessed) < 0.6 * sum(
            each.done.account.layers for each in plain
        )
    if n_workers:
        assert guessed[0].done.account.remote > 0


def tokens(answers: list[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


async def test_with_company_and_other_forms(models: dict[str, Path], tmp_path: Path) -> None:
    async with opened(models["copies"], tmp_path, n_workers=2, form=WireForm()) as swarm:
        batcher = swarm.backbone.engine.batcher
        found: dict[Speculate, list[Answer]] = {}
        modes: tuple[Speculate, ...] = ("always", "never")
        for mode in modes:
            batcher.speculate = mode
            found[mode] = await ask_together(swarm)
    assert tokens(found["always"]) == tokens(found["never"])
    assert sum(answer.accepted for answer in found["always"]) > 0


async def ask_together(swarm: Swarm) -> list[Answer]:
    """Six at a time, for two slots."""
    found: dict[int, Answer] = {}

    async def one(number: int, prompt: list[int]) -> None:
        found[number] = await ask(swarm, prompt, GREEDY if number % 2 else SAMPLED)

    async with trio.open_nursery() as nursery:
        for number, prompt in enumerate(prompts(6)):
            nursery.start_soon(one, number, prompt)
    return [found[number] for number in range(6)]


@pytest.mark.parametrize("block", ["random", "copies"])
async def test_turns_go_on_and_are_edited(models: dict[str, Path], tmp_path: Path, block: str) -> None:
    """Checkpoints and slots that go on, in the middle of it."""
    found = []
    speculations: tuple[Speculate, ...] = ("always", "never")
    for speculate in speculations:
        drafts: Drafts = "mtp" if speculate == "always" else "ngram"
        async with opened(models[block], tmp_path / speculate, speculate=speculate, drafts=drafts) as swarm:
            one = await ask(swarm, prompts(5)[2])
            two = await ask(swarm, [*prompts(5)[2], *one.tokens, 1, 2, 3])
            edited = await ask(swarm, [*prompts(5)[2], *one.tokens, 4, 5])
            again = await ask(swarm, prompts(5)[2])
            found.append([(each.tokens, each.done.cached_tokens) for each in (one, two, edited, again)])
    assert found[0] == found[1]


@pytest.mark.parametrize("n_told", [2, 7])
async def test_cancelled_in_the_middle(models: dict[str, Path], tmp_path: Path, n_told: int) -> None:
    prompt = prompts(9)[8]
    async with opened(models["copies"], tmp_path, n_workers=1) as swarm:
        plain = await ask(swarm, prompt)
        with trio.CancelScope() as scope:
            await ask(swarm, prompt, on_token=lambda n: scope.cancel() if n == n_told else None)
        assert scope.cancelled_caught
        assert swarm.backbone.engine.n_free == 2
        again = await ask(swarm, prompt)
    assert again.tokens == plain.tokens


@pytest.mark.parametrize("place", [1, 3, 6])
async def test_an_end_token_ends_the_guess(models: dict[str, Path], tmp_path: Path, place: int) -> None:
    async with opened(models["copies"], tmp_path) as swarm:
        batcher = swarm.backbone.engine.batcher
        batcher.speculate = "never"
        plain = (await ask(swarm, [1, 2, 3], SAMPLED, n=20)).tokens
        batcher.speculate = "always"
        guessed = await ask(swarm, [1, 2, 3], SAMPLED, n=20, stop_ids={plain[place]})
    assert guessed.tokens == plain[: plain.index(plain[place])]


async def test_the_end_of_the_context(models: dict[str, Path], tmp_path: Path) -> None:
    prompt = [7 * number % 280 for number in range(500)]
    async with opened(models["copies"], tmp_path) as swarm:
        guessed = await ask(swarm, prompt, n=12)
        swarm.backbone.engine.batcher.speculate = "never"
        assert (await ask(swarm, prompt, n=12)).tokens == guessed.tokens


# -- which guesses


class Asked:
    """Counts what the block was asked for."""

    def __init__(self, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n = 0
        self._draft = model.draft
        monkeypatch.setattr(model, "draft", self.draft)

    def draft(self, slot: int, token: int) -> Iterator[int]:
        self.n += 1
        return self._draft(slot, token)


async def test_the_text_counts_where_it_repeats_itself_else_the_block(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy answers of the tiny model run in circles: the block is asked until they do."""
    async with opened(models["copies well"], tmp_path, drafts="auto") as swarm:
        asked = Asked(swarm.backbone.engine.model, monkeypatch)
        swarm.backbone.engine.batcher.speculate = "never"
        plain = await ask(swarm, [1, 2, 3], n=120)
        assert asked.n == 0
        swarm.backbone.engine.batcher.speculate = "always"
        guessed = await ask(swarm, [1, 2, 3], n=120)
    assert guessed.tokens == plain.tokens
    assert 0 < asked.n < 10
    assert guessed.accepted > 80


@pytest.mark.parametrize(("latency_s", "n_workers"), [(0.0, 0), (0.1, 1)])
async def test_by_itself_it_is_asked_only_where_steps_wait(
    models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    latency_s: float,
    n_workers: int,
) -> None:
    async with opened(
        models["copies"], tmp_path, speculate="auto", latency_s=latency_s, n_workers=n_workers
    ) as swarm:
        asked = Asked(swarm.backbone.engine.model, monkeypatch)
        for seed in range(3):
            await ask(swarm, [seed, 2, 3])
    assert (asked.n > 0) is (latency_s > 0)


async def test_drafts_from_the_text_only_load_no_block(models: dict[str, Path], tmp_path: Path) -> None:
    async with opened(models["copies well"], tmp_path, drafts="ngram") as swarm:
        assert not swarm.backbone.engine.model.has_mtp
        assert (await ask(swarm, [1, 2, 3], n=60)).accepted > 0


async def test_a_model_without_a_block_guesses_from_the_text(models: dict[str, Path], tmp_path: Path) -> None:
    async with opened(models["no block"], tmp_path / "auto", drafts="auto") as swarm:
        assert not swarm.backbone.engine.model.has_mtp
        assert (await ask(swarm, [1, 2, 3], n=60)).accepted > 0
    with pytest.raises(UsageError, match="no MTP block"):
        async with opened(models["no block"], tmp_path / "mtp", drafts="mtp"):
            pass


@pytest.mark.parametrize("name", ["copies well", "no block"])
async def test_the_account_knows_which_rows_the_last_layer_has(
    models: dict[str, Path], tmp_path: Path, name: str
) -> None:
    """A block looks at what every token becomes, so all rows of a prompt go through the last layer."""
    async with open_swarm(models[name], tmp_path) as swarm:
        await swarm.join(ALL_BYTES)
        _, account = await swarm.generate([5, 80, 33, 7] * 20, 8)
        assert account.remote == account.pairs > 0
        assert account.fallback == 0
