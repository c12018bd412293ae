"""A worker that is paused, limited, short of memory, on battery, or leaves: in a whole swarm."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.lowlevel

from swarmnode.compute import slot_pool
from swarmnode.compute.bank import ExpertBank
from swarmnode.errors import UsageError
from swarmnode.net.peer import Body, Handler, Peer
from swarmnode.node.backbone import _tell
from swarmnode.node.worker import steward_of
from swarmnode.services.control import Control
from swarmnode.services.machine import MachineState
from swarmnode.services.reports import BackboneEvent, Lending, Paused, Resumed, SteppedBack, WorkerChanged
from swarmnode.services.runners import Inline
from swarmnode.services.steward import Senses, Steward
from swarmnode.testing.swarm import MeddledHandlers, Swarm, SwarmWorker, open_swarm
from swarmnode.wire.messages import Experts, Message
from tests.swarm.conftest import EXPERT_BYTES

PROMPT = [1, 2, 3, 4]
GB = 10**9


@dataclass
class World:
    """A worker with a steward, on a machine that a test makes up."""

    swarm: Swarm
    worker: SwarmWorker
    machine: MachineState = field(default_factory=lambda: MachineState(4 * GB, 8 * GB, 0.0, False, 80, 40.0))
    minute: int = 600
    events: list[object] = field(default_factory=list)

    def steward(self) -> Steward:
        parts = replace(self.worker.parts, report=self.events.append)
        return steward_of(parts, Senses(lambda: self.machine, lambda: self.minute, Inline()))

    @property
    def n_served(self) -> int:
        """Experts for which the backbone sends rows."""
        return len(self.swarm.serving().get(self.worker.key.node_id, ()))

    @property
    def shown(self) -> list[str]:
        """What the backbone says that other nodes do."""
        return [node["state"] for node in self.swarm.backbone.state.as_dict()["nodes"]]

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@asynccontextmanager
async def open_world(model: Path, folder: Path, n_experts: int = 16) -> AsyncIterator[tuple[World, Steward]]:
    async with open_swarm(model, folder) as swarm:
        world = World(swarm, await swarm.join(n_experts * EXPERT_BYTES))
        steward = world.steward()
        swarm.nursery.start_soon(steward.run)
        await trio.lowlevel.checkpoint()
        yield world, steward


async def test_a_paused_worker_gets_no_rows_and_keeps_its_experts(tiny_model: Path, tmp_path: Path) -> None:
    async with open_world(tiny_model, tmp_path) as (world, steward):
        swarm = world.swarm
        alone, account = await swarm.generate(PROMPT, 6)
        assert account.remote > 0
        steward.wish(is_paused=True)
        await swarm.until(lambda: world.n_served == 0)
        paused, account = await swarm.generate(PROMPT, 6)
        assert (paused, account.remote, account.fallback) == (alone, 0, 0)
        market, residence = world.worker.service.market, world.worker.service.residence
        assert market is not None
        assert residence is not None
        assert (market.offered, market.holdings.serving, residence.n_experts) == ((), (), 16)
        await swarm.until(lambda: world.shown == ["paused"])

        await trio.sleep(3600)
        assert residence.n_experts == 16
        steward.wish(is_paused=False)
        await swarm.until(lambda: world.n_served == 16)
        await swarm.until(lambda: world.shown == ["serving"])
        again, account = await swarm.generate(PROMPT, 6)
        assert again == alone
        assert account.remote > 0
        assert [event.reason for event in world.of(Paused)] == ["told to pause"]
        assert len(world.of(Resumed)) == 1


async def test_less_memory_is_taken_when_told_and_more_again(tiny_model: Path, tmp_path: Path) -> None:
    async with open_world(tiny_model, tmp_path) as (world, steward):
        residence = world.worker.service.residence
        assert residence is not None
        steward.wish(budget_bytes=5 * EXPERT_BYTES)
        await world.swarm.until(lambda: residence.bank.used_bytes <= 5 * EXPERT_BYTES)
        await world.swarm.until(lambda: world.n_served == residence.n_experts > 0)
        assert sum(path.stat().st_size for path in (tmp_path / "worker1").rglob("*.gguf")) < 6 * EXPERT_BYTES
        tokens, account = await world.swarm.generate(PROMPT, 6)
        assert account.remote > 0
        steward.wish(budget_bytes=16 * EXPERT_BYTES)
        await world.swarm.until(lambda: world.n_served == 16, timeout_s=600)
        assert (await world.swarm.generate(PROMPT, 6))[0] == tokens


async def test_a_worker_without_room_for_one_expert_is_empty_and_not_paused(
    tiny_model: Path, tmp_path: Path
) -> None:
    """It gave up everything for a budget that was made too small, and the backbone said that it paused."""
    async with open_world(tiny_model, tmp_path) as (world, steward):
        backbone, residence = world.swarm.backbone, world.worker.service.residence
        assert residence is not None
        told: list[WorkerChanged] = []

        def tell(event: BackboneEvent) -> None:
            assert isinstance(event, WorkerChanged)
            told.append(event)

        backbone.members.on_change = partial(_tell, backbone.state, tell)
        for budget_bytes in (EXPERT_BYTES - 1, 0):
            steward.wish(budget_bytes=budget_bytes)
            await world.swarm.until(lambda: residence.n_experts == 0 and world.n_served == 0)
            await trio.sleep(10)
            gone = told[-1]
            assert (gone.standing, gone.n_experts) == ("empty", 0)
            assert f"its budget of {budget_bytes / 1e6:.2f} MB is too small for one expert" in gone.reason
            state = steward.state()
            assert (state["allowed_bytes"], state["least_bytes"]) == (budget_bytes, EXPERT_BYTES)
            assert state["paused"] == ""
            steward.wish(budget_bytes=16 * EXPERT_BYTES)
            await world.swarm.until(lambda: world.n_served == 16, timeout_s=600)
        steward.wish(is_paused=True)
        await world.swarm.until(lambda: world.n_served == 0)
        assert (told[-1].standing, told[-1].reason) == ("paused", "")


@pytest.mark.parametrize("n_started", [32, 40])
@pytest.mark.parametrize("n_left", [1, 11, 18, 30, 31])
async def test_free_slots_count_in_the_limit(
    n_left: int, n_started: int, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs that go leave holes wherever their experts were: whether the budget has room to copy what is between them
    (40) or has none (32), the memory itself comes within the limit, and stays."""
    monkeypatch.setattr(slot_pool, "can_reserve", lambda: False)  # as on a GPU
    monkeypatch.setattr(ExpertBank, "reserve", lambda self, layout, n_experts: None)  # slots as they come
    async with open_world(tiny_model, tmp_path, n_started) as (world, steward):
        residence = world.worker.service.residence
        assert residence is not None
        assert residence.n_experts == 32
        alone, _ = await world.swarm.generate(PROMPT, 6)
        limit_bytes = n_left * EXPERT_BYTES + EXPERT_BYTES // 2
        steward.wish(budget_bytes=limit_bytes)
        await world.swarm.until(lambda: residence.bank.used_bytes <= limit_bytes, timeout_s=60)
        for _ in range(60):
            await trio.sleep(1)
            assert residence.held_bytes <= residence.bank.used_bytes <= limit_bytes
        assert residence.n_experts > n_left - 4, "what went without need is there again"
        told: Lending = world.of(Lending)[-1]
        assert (told.held_bytes, told.memory_bytes) == (residence.held_bytes, residence.bank.used_bytes)
        tokens, account = await world.swarm.generate(PROMPT, 6)
        assert tokens == alone
        assert account.remote > 0


async def test_it_steps_back_while_memory_is_short_and_comes_back(tiny_model: Path, tmp_path: Path) -> None:
    async with open_world(tiny_model, tmp_path) as (world, steward):
        residence = world.worker.service.residence
        assert residence is not None
        world.machine = MachineState(100_000_000, 8 * GB)
        await trio.sleep(10)
        assert world.of(SteppedBack)
        await world.swarm.until(lambda: residence.n_experts == 0)
        assert "memory" in steward.state()
        world.machine = MachineState(4 * GB, 8 * GB)
        await world.swarm.until(lambda: world.n_served == 16, timeout_s=3600)
        assert not steward.state()["memory"]


async def test_on_battery_and_outside_its_hours_it_pauses(tiny_model: Path, tmp_path: Path) -> None:
    async with open_world(tiny_model, tmp_path) as (world, steward):
        control = Control(world.worker.key.node_id, "worker", lambda: None, steward)
        world.machine = replace(world.machine, on_battery=True)
        await world.swarm.until(lambda: world.n_served == 0)
        state = await control.answer({"do": "resume"})
        assert state["paused"] == "on battery"
        await control.answer({"do": "limits", "on_battery": "serve"})
        await world.swarm.until(lambda: world.n_served == 16)
        await control.answer({"do": "limits", "hours": ["22:00-07:00"]})
        await world.swarm.until(lambda: world.n_served == 0)
        world.minute = 23 * 60
        await world.swarm.until(lambda: world.n_served == 16)
        world.minute = 7 * 60
        await world.swarm.until(lambda: world.n_served == 0)
        await trio.sleep(600)
        assert [event.reason[:8] for event in world.of(Paused)] == ["on batte", "it is 10", "it is 07"]


async def test_what_it_tells(tiny_model: Path, tmp_path: Path) -> None:
    async with open_world(tiny_model, tmp_path) as (world, steward):
        await world.swarm.generate(PROMPT, 6)
        await trio.sleep(5)
        told: Lending = world.of(Lending)[-1]
        assert told.n_experts == 16
        assert told.held_bytes == 16 * EXPERT_BYTES
        assert told.rows > 0
        assert 4 <= told.tokens <= 4 + 6 + 8  # with probes
        assert told.bytes_in > 0
        assert told.bytes_out > 0
        assert told.fetched_bytes == 16 * EXPERT_BYTES
        assert (told.peers, told.device, told.power) == (1, "CPU", "battery 80 %, 40 °C")
        state = steward.state()
        assert state["battery_percent"] == 80
        assert state["budget_bytes"] == state["most_bytes"] == state["allowed_bytes"] == 16 * EXPERT_BYTES


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        ({"do": "dance"}, "is none of"),
        ({}, "is none of"),
        ({"do": "limits", "budget_bytes": 17 * EXPERT_BYTES}, "may hold less, not more"),
        ({"do": "limits", "budget_bytes": "much"}, "no number of bytes"),
        ({"do": "limits", "budget_bytes": True}, "no number of bytes"),
        ({"do": "limits", "keep_free_bytes": -1}, "no number of bytes"),
        ({"do": "limits", "hours": ["25:00-1:00"]}, "no such time of day"),
        ({"do": "limits", "hours": "22:00-07:00"}, "is no limit"),
        ({"do": "limits", "on_battery": "explode"}, "is no limit"),
        ({"do": "limits", "wibble": 1}, "is no limit"),
    ],
)
async def test_wishes_that_cannot_be(
    request_: dict[str, Any], says: str, tiny_model: Path, tmp_path: Path
) -> None:
    async with open_world(tiny_model, tmp_path) as (world, steward):
        wishes = steward.wishes
        with pytest.raises(UsageError, match=says):
            await Control(world.worker.key.node_id, "worker", lambda: None, steward).answer(request_)
        assert steward.wishes == wishes


async def test_a_backbone_can_only_leave() -> None:
    from swarmnode.identity import NodeKey

    left: list[bool] = []
    control = Control(NodeKey.from_seed(bytes(32)).node_id, "backbone", lambda: left.append(True))
    with pytest.raises(UsageError, match="which can only leave"):
        await control.answer({"do": "pause"})
    assert not left
    assert (await control.answer({"do": "leave"}))["role"] == "backbone"
    assert left


async def test_who_leaves_answers_what_was_asked_before(tiny_model: Path, tmp_path: Path) -> None:
    """Rows under way are not lost: nothing is computed a second time by the backbone."""
    begun, answered = trio.Event(), trio.Event()

    def slow(handler: Handler) -> Handler:
        async def answer(peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
            reply = await handler(peer, message, body)
            answered.set()
            return reply

        return answer

    async with open_swarm(tiny_model, tmp_path, latency_s=0.01) as swarm:
        worker = await swarm.join(16 * EXPERT_BYTES, handlers=MeddledHandlers(Experts, slow))
        alone, _ = await swarm.generate(PROMPT, 4)
        accounts = []

        async def ask() -> None:
            accounts.append(await swarm.generate(PROMPT, 20, lambda count: begun.set()))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await begun.wait()
            await worker.parts.leave()
            worker.scope.cancel()
        tokens, account = accounts[0]
        assert tokens[:4] == alone
        assert account.remote > 0
        assert account.fallback == 0
