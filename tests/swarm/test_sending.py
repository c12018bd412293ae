"""Late shares are asked for elsewhere, slow replicas avoided, and rows sent only where that is sooner.

Workers take virtual time to answer; computing here takes none, unless a test says that a disk is in between.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import trio

from swarmnode.config import Config, DispatchConfig
from swarmnode.net.peer import Body, Handler, Peer
from swarmnode.node.sending import prepare_policy, prepare_residents
from swarmnode.schedule.sending import Planner
from swarmnode.schedule.sending_auto import SendAuto
from swarmnode.services.account import Account
from swarmnode.services.runners import Inline
from swarmnode.testing.swarm import MeddledHandlers, Swarm, SwarmWorker, open_swarm
from swarmnode.weights.index import ModelIndex
from swarmnode.wire.messages import Experts, Message
from tests.swarm.conftest import ALL_BYTES, EXPERT_BYTES

PROMPT = [5, 80, 33, 7, 120, 64, 11, 200]
N_LAYER, N_USED = 4, 2


class Pace:
    """How long a worker takes to answer."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.n_cancelled = 0

    def meddle(self, handler: Handler) -> Handler:
        async def slowly(peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
            try:
                await trio.sleep(self.seconds)
            except trio.Cancelled:
                self.n_cancelled += 1
                raise
            return await handler(peer, message, body)

        return slowly


@dataclass
class Disk:
    """Has a bank sleep for what was not brought in, on the policy's clock."""

    read_s: float
    lag_s: float = 0.0
    held: set[tuple[int, int]] = field(default_factory=set)

    def now(self) -> float:
        return trio.current_time() + self.lag_s

    def bring(self, experts: Sequence[tuple[int, int]]) -> None:
        self.held |= set(experts)

    def drop(self, experts: Sequence[tuple[int, int]]) -> None:
        self.held -= set(experts)

    def read(self, layer: int, experts: Any) -> None:
        wanted = {(layer, expert) for expert in experts.ravel().tolist()}
        self.lag_s += self.read_s * len(wanted - self.held)


@dataclass
class Play:
    """A swarm whose workers hold everything, each at its pace."""

    swarm: Swarm
    alone: list[int]
    paces: list[Pace]
    workers: list[SwarmWorker]
    times_s: list[float] = field(default_factory=list)
    """When tokens came."""

    async def answer(self, n: int = 12, then: Callable[[], None] | None = None) -> Account:
        """Greedy; the tokens are those of the backbone alone. `then` is called after the first one."""
        self.times_s.clear()

        def on_token(count: int) -> None:
            self.times_s.append(trio.current_time())
            if count == 1 and then is not None:
                then()

        tokens, account = await self.swarm.generate(PROMPT, n, on_token)
        assert tokens == self.alone[:n]
        assert account.remote + account.fallback <= account.pairs
        return account

    @property
    def decode_s(self) -> float:
        """From the first token to the last."""
        return self.times_s[-1] - self.times_s[0]

    def slow_down(self, *seconds: float) -> Callable[[], None]:
        """For `then`: workers take so long from then on. Requests for prompts are too rare to be hedged."""

        def then() -> None:
            for pace, value in zip(self.paces, seconds, strict=False):
                pace.seconds = value

        return then

    def pairs_of(self, number: int, account: Account) -> int:
        name = self.workers[number].key.node_id.short
        return account.workers[name].pairs if name in account.workers else 0


@asynccontextmanager
async def open_play(
    model: Path, folder: Path, *seconds: float, config: DispatchConfig | None = None
) -> AsyncIterator[Play]:
    base = replace(Config(), dispatch=replace(config or DispatchConfig(), hedges=True))
    async with open_swarm(model, folder, config=base) as swarm:
        alone, _ = await swarm.generate(PROMPT, 40)
        paces = [Pace(value) for value in seconds]
        workers = [
            await swarm.join(ALL_BYTES, handlers=MeddledHandlers(Experts, pace.meddle)) for pace in paces
        ]
        yield Play(swarm, alone, paces, workers)


async def test_a_backbone_knows_how_many_steps_may_be_under_way(tiny_model: Path, tmp_path: Path) -> None:
    base = Config()
    config = replace(
        base,
        dispatch=replace(base.dispatch, send="auto"),
        engine=replace(base.engine, max_steps=3),
    )
    async with open_swarm(tiny_model, tmp_path, config=config) as swarm:
        policy = swarm.backbone.engine.passes.remote.policy
        assert isinstance(policy, SendAuto)
        assert policy.max_steps == 3


def choose_auto(swarm: Swarm, model: Path, disk: Disk, budget_bytes: int | None = None) -> DispatchConfig:
    """From now on the backbone sends what is sooner, on a clock that knows of the disk."""
    passes = swarm.backbone.engine.passes
    config = replace(swarm.config.dispatch, send="auto", local_budget_bytes=budget_bytes)
    with ModelIndex.open(model) as index:
        residents = prepare_residents(config, index, passes._model, Inline(), disk)
    passes.remote.policy = prepare_policy(
        config, residents, passes._model, swarm.config.engine.max_steps, disk.now, random.Random(0)
    )
    passes._residents = residents
    assert residents is not None
    swarm.nursery.start_soon(residents.run)
    bank: Any = passes._bank
    if not disk.read_s:
        return config
    bank.stacked = lambda layer, n_pairs: None
    for name in ("moe", "experts"):
        bank.__dict__[name] = reading(disk, getattr(bank, name), -1 if name == "experts" else 1)
    return config


def reading(disk: Disk, compute: Callable[..., Any], place: int) -> Callable[..., Any]:
    """`compute`, with the experts named in its argument behind the layer read first."""

    def read_first(layer: int, *arguments: Any) -> Any:
        disk.read(layer, arguments[place])
        return compute(layer, *arguments)

    return read_first


# -- hedging


async def test_a_late_share_is_answered_by_the_other_holder(tiny_model: Path, tmp_path: Path) -> None:
    async with open_play(tiny_model, tmp_path, 0.005, 0.005) as play:
        await play.answer(20)
        account = await play.answer(6, play.slow_down(0.3))
        assert account.hedged > 0
        assert account.fallback == 0
        assert account.remote == account.pairs
        assert play.decode_s < 0.3, "nobody waited for the slow one"
        assert play.paces[0].n_cancelled > 0, "and it was told"
        assert account.as_dict()["pairs_hedged"] == account.hedged


async def test_the_first_answer_counts_when_the_second_is_later_still(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with open_play(tiny_model, tmp_path, 0.005, 0.005) as play:
        await play.answer(20)
        before = await play.answer(20)
        account = await play.answer(2, play.slow_down(0.1, 0.3))
        assert account.hedged > 0
        assert account.fallback == 0
        assert account.remote == account.pairs
        assert play.pairs_of(0, before) > 0
        assert play.pairs_of(0, account) > 0


async def test_when_both_are_late_the_deadline_holds(tiny_model: Path, tmp_path: Path) -> None:
    async with open_play(tiny_model, tmp_path, 0.005, 0.005) as play:
        await play.answer(20)
        account = await play.answer(6, play.slow_down(1e6, 1e6))
        assert account.hedged > 0
        assert account.fallback > 0
        assert play.decode_s < 3 * play.swarm.config.dispatch.deadline_s, "both are out after a deadline each"
        assert not play.swarm.serving()


async def test_without_answers_to_judge_by_nothing_is_hedged(tiny_model: Path, tmp_path: Path) -> None:
    async with open_play(tiny_model, tmp_path, 0.2, 0.2) as play:
        assert (await play.answer(2)).hedged == 0


async def test_probes_and_pings_tell_what_to_expect_of_a_worker(tiny_model: Path, tmp_path: Path) -> None:
    async with open_play(tiny_model, tmp_path, 0.06) as play:
        cost = play.swarm.backbone.engine.passes.remote.policy.cost.worker(play.workers[0].key.node_id)
        assert cost.expect(1, trio.current_time()) == pytest.approx(0.06, rel=0.1), "nothing but probes yet"
        assert cost.rtt_s is None
        await play.answer(1)
        assert cost.rtt_s is not None
        assert cost.max_requests == play.swarm.config.wire.max_requests_in_flight


# -- replicas


async def test_of_two_holders_the_slow_one_is_avoided(tiny_model: Path, tmp_path: Path) -> None:
    async with open_play(tiny_model, tmp_path, 0.004, 0.05) as play:
        await play.answer(12)
        account = await play.answer(40)
        assert account.remote == account.pairs
        assert play.pairs_of(0, account) > 0.9 * account.pairs


# -- auto


async def test_auto_stays_here_when_workers_are_far(tiny_model: Path, tmp_path: Path) -> None:
    async with open_play(tiny_model, tmp_path, 0.04) as play:
        choose_auto(play.swarm, tiny_model, Disk(0.0))
        await play.answer(12)
        started_s = trio.current_time()
        account = await play.answer(40)
        assert account.remote_layers <= 2, "only to learn whether it is still far"
        assert trio.current_time() - started_s < 0.2


async def test_auto_asks_workers_when_the_disk_is_slower(tiny_model: Path, tmp_path: Path) -> None:
    async with open_play(tiny_model, tmp_path, 0.001) as play:
        disk = Disk(0.005)
        choose_auto(play.swarm, tiny_model, disk, budget_bytes=0)
        await play.answer(20)
        started_s = disk.now()
        account = await play.answer(40)
        assert account.remote > 0.9 * account.pairs
        assert disk.now() - started_s < 40 * N_LAYER * 0.005 * N_USED / 2, "half of reading it all"


async def test_what_workers_computed_is_not_taken_to_be_in_memory(tiny_model: Path, tmp_path: Path) -> None:
    async with open_play(tiny_model, tmp_path, 0.001) as play:
        disk = Disk(0.005)
        choose_auto(play.swarm, tiny_model, disk)
        residents = play.swarm.backbone.engine.passes._residents
        assert residents is not None
        account = await play.answer(40)
        assert account.remote > 0.8 * account.pairs
        n_here = sum(int(mask.sum()) for mask in residents.residents.masks.values())
        assert n_here <= account.pairs - account.remote


async def test_auto_reads_when_workers_are_slower_than_the_disk(tiny_model: Path, tmp_path: Path) -> None:
    async with open_play(tiny_model, tmp_path, 0.1) as play:
        disk = Disk(0.002)
        choose_auto(play.swarm, tiny_model, disk, budget_bytes=0)
        await play.answer(12)
        account = await play.answer(40)
        assert account.remote_layers < 0.05 * account.layers


async def test_the_experts_of_the_prompt_are_brought_in_and_do_not_wait(
    tiny_model: Path, tmp_path: Path
) -> None:
    budget = 12 * EXPERT_BYTES
    async with open_play(tiny_model, tmp_path, 0.003) as play:
        disk = Disk(0.01)
        choose_auto(play.swarm, tiny_model, disk, budget_bytes=budget)
        await play.answer(8)
        await play.answer(8)
        account = await play.answer(40)
        assert 0 < len(disk.held) <= 12
        assert 0 < account.remote < account.pairs, "some here, some there"
        assert account.remote_layers < account.layers, "layers whose experts are all here do not wait"


async def test_a_worker_that_falls_silent_costs_auto_no_more_than_a_deadline(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with open_play(tiny_model, tmp_path, 0.001) as play:
        disk = Disk(0.005)
        choose_auto(play.swarm, tiny_model, disk, budget_bytes=0)
        await play.answer(20)
        account = await play.answer(40, play.slow_down(1e6))
        assert account.hedged > 0
        assert account.hedged == account.fallback, "computed here, without waiting for the deadline"
        assert play.decode_s < 1.5 * play.swarm.config.dispatch.deadline_s


@pytest.mark.parametrize("budget", [None, 0, 6 * EXPERT_BYTES])
@pytest.mark.parametrize("read_s", [0.0, 0.004])
@pytest.mark.parametrize("rtt_s", [0.0003, 0.04])
async def test_the_tokens_are_the_same_whatever_is_chosen(
    tiny_model: Path, tmp_path: Path, rtt_s: float, read_s: float, budget: int | None
) -> None:
    async with open_play(tiny_model, tmp_path, rtt_s, 2 * rtt_s) as play:
        choose_auto(play.swarm, tiny_model, Disk(read_s), budget)
        await play.answer(40)
        await play.answer(40)


async def test_every_pass_is_over_for_its_planner_given_up_or_not(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the time of what it explored would last until the next decision."""
    async with open_play(tiny_model, tmp_path, 0.001) as play:
        policy = play.swarm.backbone.engine.passes.remote.policy
        n_begun, n_ended, begin = 0, 0, policy.begin

        def counted(n_sequences: int) -> Planner:
            nonlocal n_begun
            n_begun += 1
            return begin(n_sequences)

        def ended() -> None:
            nonlocal n_ended
            n_ended += 1

        monkeypatch.setattr(policy, "begin", counted)
        monkeypatch.setattr(policy, "ended", ended)
        await play.answer(4)
        assert n_begun == n_ended > 1
        play.paces[0].seconds = 0.3
        with trio.move_on_after(0.1) as scope:
            await play.answer(4)
        assert scope.cancelled_caught
        await trio.sleep(1)
        assert n_begun == n_ended
        assert policy.n_passes == 0
        cost = policy.cost.worker(play.workers[0].key.node_id)
        assert (cost.in_flight, cost.n_requests) == (0, 0)
