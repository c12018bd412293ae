"""Many sequences at once: each answer is the one that it would have been alone (cases.md 11, 13, 15)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import trio

from swarmnode.cli.bench_local import Bench
from swarmnode.config.engine import Speculate
from swarmnode.errors import ContextFullError, DeviceError, NotFiniteError, UsageError
from swarmnode.models.sampling import Sampler, SamplingParams
from swarmnode.net.peer import Asked, Body
from swarmnode.services.account import Account
from swarmnode.services.drafts import Drafts
from swarmnode.services.engine import GenerateRequest, TokenEvent
from swarmnode.services.passes import Rows
from swarmnode.services.runners import Inline
from swarmnode.testing.swarm import Swarm, open_swarm
from swarmnode.wire.constants import TrafficClass
from swarmnode.wire.messages import Experts, Message
from tests.swarm.conftest import ALL_BYTES

N_TOKENS = 12
PROMPTS = [[(7 * number + 3 * place) % 250 for place in range(1 + 5 * number % 70)] for number in range(64)]
"""Of 1 to 70 tokens: prompts and answers share steps."""


@asynccontextmanager
async def watched(
    model: Path, folder: Path, n_slots: int, n_workers: int = 0, latency_s: float = 0.0
) -> AsyncIterator[tuple[Swarm, list[int]]]:
    """A swarm, and how many sequences each step had."""
    async with open_swarm(model, folder, n_slots=n_slots, latency_s=latency_s, n_ctx=1024) as swarm:
        for _ in range(n_workers):
            await swarm.join(ALL_BYTES // n_workers)
        passes, widths = swarm.backbone.engine.passes, []
        real = passes.run

        async def run(rows: Sequence[Rows]) -> object:
            widths.append(len(rows))
            return await real(rows)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(passes, "run", run)
            yield swarm, widths


async def answers(
    swarm: Swarm, prompts: Sequence[Sequence[int]], n_tokens: int = N_TOKENS
) -> list[list[int]]:
    """What all of them are answered, asked at once."""
    found: dict[int, tuple[list[int], Account]] = {}

    async def ask(number: int) -> None:
        found[number] = await swarm.generate(prompts[number], n_tokens)

    async with trio.open_nursery() as nursery:
        for number in range(len(prompts)):
            nursery.start_soon(ask, number)
    return [found[number][0] for number in range(len(prompts))]


@pytest.fixture(scope="module")
def alone(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The answers to all prompts, one after another."""

    async def run() -> list[list[int]]:
        async with open_swarm(tiny_model, tmp_path_factory.mktemp("alone"), n_slots=1) as swarm:
            return [(await swarm.generate(prompt, N_TOKENS))[0] for prompt in PROMPTS]

    return trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize("n_sequences", [2, 8, 64])
async def test_each_answer_is_what_it_is_alone(
    tiny_model: Path, tmp_path: Path, alone: list[list[int]], n_sequences: int
) -> None:
    """cases.md 15."""
    async with watched(tiny_model, tmp_path, n_sequences) as (swarm, widths):
        assert await answers(swarm, PROMPTS[:n_sequences]) == alone[:n_sequences]
    assert max(widths) >= max(2, n_sequences / 3), "they hardly shared any steps"


async def test_with_workers_far_away_steps_take_turns(
    tiny_model: Path, tmp_path: Path, alone: list[list[int]]
) -> None:
    async with watched(tiny_model, tmp_path, 8, n_workers=2, latency_s=0.02) as (swarm, widths):
        assert await answers(swarm, PROMPTS[:8]) == alone[:8]
        assert swarm.backbone.engine.batcher.times.n_steps > 1
    assert 1 < sum(widths) / len(widths) < 8


async def test_the_benchmarks_sequences_share_steps(tiny_model: Path, tmp_path: Path) -> None:
    """`swarmnode bench` runs passes of its own, and says that sequences are decoded at once."""
    n_tokens = 6
    async with watched(tiny_model, tmp_path, 4) as (swarm, widths):
        engine = swarm.backbone.engine
        unused: Any = None
        gate: Any = Inline()
        prompts = tuple(PROMPTS[number] for number in range(1, 5))
        bench = Bench(unused, engine.model, unused, gate, engine, prompts, n_tokens, swarm.config)
        sample = await bench.decode_sample(engine, 4)
        assert widths == [1] * 4 + [1] + [4] * (n_tokens - 1) + [3], (
            "prompts, the first to come, all, the others"
        )
        for prompt, answer in zip(prompts, sample.answers, strict=True):
            assert list(answer) == (await swarm.generate(prompt, n_tokens + 1))[0]


@asynccontextmanager
async def classes_of_rows(swarm: Swarm) -> AsyncIterator[list[TrafficClass]]:
    """In what class requests for experts travel; of probes nothing is noted."""
    found: list[TrafficClass] = []
    (worker,) = swarm.backbone.members.workers
    real = worker.peer.begin

    def begin(
        message: Message, body: Body = (), *, traffic_class: TrafficClass | None = None
    ) -> Asked | None:
        if isinstance(message, Experts) and traffic_class is not None:
            found.append(traffic_class)
        return real(message, body, traffic_class=traffic_class)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.peer, "begin", begin)
        yield found


@pytest.mark.parametrize(("n_sequences", "speculate"), [(12, "never"), (2, "always")])
async def test_rows_of_answers_travel_before_prompts_however_many_there_are(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_sequences: int, speculate: Speculate
) -> None:
    monkeypatch.setattr(Drafts, "propose", lambda drafts, n_most, stop_ids: [1] * min(n_most, 7))
    async with watched(tiny_model, tmp_path, n_sequences, n_workers=1) as (swarm, widths):
        swarm.backbone.engine.batcher.speculate = speculate
        async with classes_of_rows(swarm) as classes:
            await answers(swarm, [[1 + number] for number in range(n_sequences)])
            assert set(classes) == {TrafficClass.DECODE}
            assert max(widths) == n_sequences
            classes.clear()
            await swarm.generate([7] * 5, 1)
            assert set(classes) == {TrafficClass.PREFILL}, "few rows, and nobody waits for each"


async def test_seeded_sampling_is_what_it_is_alone(tiny_model: Path, tmp_path: Path) -> None:
    sampling = SamplingParams(temperature=1.0, seed=7)

    async def sampled(swarm: Swarm, number: int, into: dict[int, list[int]]) -> None:
        job = GenerateRequest(PROMPTS[number], N_TOKENS, sampling)
        async with aclosing(swarm.backbone.engine.generate(job)) as events:
            into[number] = [event.token async for event in events if isinstance(event, TokenEvent)]

    one_by_one: dict[int, list[int]] = {}
    together: dict[int, list[int]] = {}
    async with open_swarm(tiny_model, tmp_path, n_slots=8) as swarm:
        for number in range(8):
            await sampled(swarm, number, one_by_one)
        async with trio.open_nursery() as nursery:
            for number in reversed(range(8)):
                nursery.start_soon(sampled, swarm, number, together)
    assert together == one_by_one


@pytest.mark.parametrize("at_token", [1, 2, 50])
async def test_a_worker_killed_at_a_token_changes_no_answer(
    tiny_model: Path, tmp_path: Path, at_token: int
) -> None:
    """cases.md 11, with several sequences in its steps."""
    n_tokens = 60
    async with open_swarm(tiny_model, tmp_path / "alone", n_slots=1) as swarm:
        expected = [(await swarm.generate(prompt, n_tokens))[0] for prompt in PROMPTS[:4]]
    async with watched(tiny_model, tmp_path, 4, n_workers=2) as (swarm, _):
        worker = await swarm.join(ALL_BYTES // 2)
        found: dict[int, list[int]] = {}

        async def ask(number: int, on_token: Callable[[int], None] | None) -> None:
            found[number] = (await swarm.generate(PROMPTS[number], n_tokens, on_token))[0]

        def kill(count: int) -> None:
            if count == at_token:
                worker.kill()

        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(ask, number, kill if number == 0 else None)
    assert [found[number] for number in range(4)] == expected


@pytest.mark.parametrize("n_tokens", [100, pytest.param(500, marks=pytest.mark.slow)])
async def test_workers_that_come_and_go_all_the_time_change_no_answer(
    tiny_model: Path, tmp_path: Path, n_tokens: int
) -> None:
    async with open_swarm(tiny_model, tmp_path / "alone", n_slots=1, n_ctx=1024) as swarm:
        expected = [(await swarm.generate(prompt, n_tokens))[0] for prompt in PROMPTS[:3]]
    async with watched(tiny_model, tmp_path, 3, n_workers=1, latency_s=0.005) as (swarm, _):
        remote = 0

        async def come_and_go() -> None:
            while True:
                worker = await swarm.join(ALL_BYTES // 2, wait=False)
                await trio.sleep(1.0)
                worker.kill()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(come_and_go)
            found = await answers(swarm, PROMPTS[:3], n_tokens)
            nursery.cancel_scope.cancel()
        remote = sum(worker.tally.pairs for worker in swarm.backbone.members.workers)
    assert found == expected
    assert remote > 0


async def test_sixteen_sessions_of_which_some_read_slowly(
    tiny_model: Path, tmp_path: Path, alone: list[list[int]]
) -> None:
    """cases.md 13: a slow reader holds up nobody, and loses nothing."""
    async with watched(tiny_model, tmp_path, 16) as (swarm, _):
        found: dict[int, list[int]] = {}
        ended_s: dict[int, float] = {}

        async def read(number: int, pause_s: float) -> None:
            job = GenerateRequest(PROMPTS[number], N_TOKENS, SamplingParams(temperature=0.0))
            found[number] = []
            async with aclosing(swarm.backbone.engine.generate(job)) as events:
                async for event in events:
                    if isinstance(event, TokenEvent):
                        found[number].append(event.token)
                    await trio.sleep(pause_s)
            ended_s[number] = trio.current_time()

        started_s = trio.current_time()
        async with trio.open_nursery() as nursery:
            for number in range(16):
                nursery.start_soon(partial(read, number, 100.0 if number % 4 == 0 else 0.0))
    assert [found[number] for number in range(16)] == alone[:16]
    quick = [ended_s[number] - started_s for number in range(16) if number % 4]
    assert max(quick) < 1.0


async def test_what_a_token_tells_of_the_account_ends_with_its_step(tiny_model: Path, tmp_path: Path) -> None:
    """The answer is up to 16 tokens ahead of whoever reads it."""
    async with watched(tiny_model, tmp_path, 1, n_workers=1) as (swarm, _):
        job = GenerateRequest(PROMPTS[1], N_TOKENS, SamplingParams(temperature=0.0))
        accounts: list[Account] = []
        async with aclosing(swarm.backbone.engine.generate(job)) as events:
            async for event in events:
                await trio.sleep(1.0)
                accounts.append(event.account)
    assert [account.layers for account in accounts] == [4 * min(n, N_TOKENS) for n in range(1, N_TOKENS + 2)]
    requests = [sum(share.requests for share in account.workers.values()) for account in accounts]
    assert requests[:-1] == sorted(set(requests)), "workers' entries are of that step, too"


async def test_an_unknown_token_id_is_refused_before_it_shares_a_step(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with watched(tiny_model, tmp_path, 2) as (swarm, widths):
        for token in (-1, swarm.backbone.engine.model.n_vocab):
            with pytest.raises(UsageError, match="vocabulary"):
                await swarm.generate([1, token], 2)
    assert not widths


@pytest.mark.parametrize(
    ("slot", "tokens", "error", "reason"),
    [
        (1, [1, -1], UsageError, "vocabulary"),
        (1, [1, 1 << 40], UsageError, "vocabulary"),
        (1, [], UsageError, "no tokens"),
        (1, [1] * 1025, ContextFullError, "context"),
        (2, [1], UsageError, "does not exist"),
        (-1, [1], UsageError, "does not exist"),
    ],
)
async def test_a_step_by_hand_that_is_refused_is_nobody_elses_affair(
    tiny_model: Path,
    tmp_path: Path,
    alone: list[list[int]],
    slot: int,
    tokens: list[int],
    error: type[Exception],
    reason: str,
) -> None:
    async with watched(tiny_model, tmp_path, 2) as (swarm, _):
        engine = swarm.backbone.engine
        engine.model.reset(1)

        async def step() -> None:
            for _ in range(5):
                with pytest.raises(error, match=reason):
                    await engine.step(slot, tokens, Account())
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(step)
            assert await answers(swarm, PROMPTS[:1]) == alone[:1]


async def test_a_sequence_whose_token_cannot_be_drawn_fails_alone(
    tiny_model: Path, tmp_path: Path, alone: list[list[int]]
) -> None:
    """Nor does the slot keep anything of it."""
    real, doomed = Sampler.sample, SamplingParams(temperature=0.5, seed=1)
    n_drawn = 0

    def sample(sampler: Sampler, logits: npt.NDArray[np.float32]) -> int:
        nonlocal n_drawn
        n_drawn += sampler.params is doomed
        if n_drawn == 3 and sampler.params is doomed:
            raise NotFiniteError("the logits are not finite")
        return real(sampler, logits)

    async with watched(tiny_model, tmp_path, 3, n_workers=1) as (swarm, widths):

        async def fail() -> None:
            async with aclosing(swarm.backbone.engine.generate(job)) as events:
                with pytest.raises(NotFiniteError, match="not finite; or one of these workers"):
                    [event async for event in events]

        job = GenerateRequest(PROMPTS[9], N_TOKENS, doomed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Sampler, "sample", sample)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(fail)
                assert await answers(swarm, PROMPTS[:2]) == alone[:2]
        assert max(widths) == 3
        prefixes = swarm.backbone.engine._prefixes
        assert all(prefixes.usable(slot, [*PROMPTS[9], 1]) == 0 for slot in range(3))
        assert swarm.backbone.engine.n_free == 3


async def test_what_breaks_in_a_pass_is_told(tiny_model: Path, tmp_path: Path) -> None:
    """It is not taken for a client that has gone."""
    async with open_swarm(tiny_model, tmp_path) as swarm:

        async def run(rows: Sequence[Rows]) -> object:
            raise trio.BrokenResourceError("a stream")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(swarm.backbone.engine.passes, "run", run)
            with pytest.raises(trio.BrokenResourceError, match="a stream"):
                await swarm.generate(PROMPTS[3], 2)


async def test_numbers_that_fail_while_their_sequence_is_cancelled_leave_nothing_behind(
    tiny_model: Path, tmp_path: Path
) -> None:
    prompt = PROMPTS[13]
    async with open_swarm(tiny_model, tmp_path) as swarm:
        engine = swarm.backbone.engine
        real = engine.passes.run

        async def run(rows: Sequence[Rows]) -> object:
            if len(rows[0].tokens) > 1:
                return await real(rows)
            scope.cancel()
            with trio.CancelScope(shield=True):  # as a job that has begun on the compute thread
                await trio.sleep(0.1)
            raise DeviceError("not finite")

        with pytest.MonkeyPatch.context() as patch, trio.CancelScope() as scope:
            patch.setattr(engine.passes, "run", run)
            await swarm.generate(prompt, 5)
        assert scope.cancelled_caught
        assert all(engine._prefixes.usable(slot, [*prompt, 1]) == 0 for slot in range(2))
