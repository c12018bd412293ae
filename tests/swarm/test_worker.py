"""A worker among several backbones, and with whatever a budget leads to, in a whole swarm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import trio

from swarmnode.config import Folders
from swarmnode.errors import DeviceError, StoreError
from swarmnode.identity import NodeId, NodeKey
from swarmnode.net.address import PeerAddress
from swarmnode.net.peer import Handler, Peer
from swarmnode.node.worker import WorkerOptions, may_meet_others
from swarmnode.services.market import Market
from swarmnode.testing.swarm import MeddledHandlers, open_swarm, silent
from swarmnode.testing.tiny_gguf import write_tiny_gguf
from swarmnode.weights import incoming
from swarmnode.wire.messages import Experts
from tests.swarm.conftest import ALL_BYTES, EXPERT_BYTES, MODEL

KEY, OTHER = NodeKey.from_seed(bytes(32)), NodeKey.from_seed(bytes([1] * 32))


@pytest.mark.parametrize(
    ("keys", "listen", "expected"),
    [
        ([OTHER], None, False),
        ([OTHER, OTHER], None, False),
        ([KEY, OTHER], None, False),
        ([OTHER, NodeKey.from_seed(bytes([2] * 32))], None, True),
        ([OTHER], ("h", 1), False),
        ([], ("h", 1), False),
    ],
)
def test_whether_another_backbone_may_come(
    keys: list[NodeKey], listen: tuple[str, int] | None, expected: bool, tmp_path: Path
) -> None:
    addresses = tuple(PeerAddress(key.node_id, "h", 1) for key in keys)
    options = WorkerOptions(Folders.under(tmp_path), "test", addresses, listen)
    assert may_meet_others(options, KEY) is expected


async def test_many_scattered_experts_are_announced_merged(tiny_model: Path, tmp_path: Path) -> None:
    """Taken run by run; what is told is as short as it can be."""
    async with open_swarm(tiny_model, tmp_path) as swarm:
        worker = await swarm.join(ALL_BYTES)
        market = worker.service.market
        assert market is not None
        assert [(item.first, item.count) for item in market.serving] == [(0, 8)] * 4
        assert len(swarm.serving()[worker.key.node_id]) == 32


async def test_a_second_model_takes_the_place_of_the_first_on_disk(tiny_model: Path, tmp_path: Path) -> None:
    """The budget is the disk's: joining another model deletes slices that no process uses."""
    second_model = write_tiny_gguf(tmp_path / "second.gguf", replace(MODEL, seed=9))
    budget_bytes = 6 * EXPERT_BYTES
    for model in (tiny_model, second_model, tiny_model):
        async with open_swarm(model, tmp_path) as swarm:
            await swarm.join(budget_bytes, name="same", key=OTHER)
            stored = sum(path.stat().st_size for path in (tmp_path / "same").rglob("*.gguf"))
            assert budget_bytes <= stored < budget_bytes + EXPERT_BYTES


async def test_a_small_second_model_leaves_the_first_where_there_is_room(
    tiny_model: Path, tmp_path: Path
) -> None:
    small = write_tiny_gguf(tmp_path / "small.gguf", replace(MODEL, n_layer=1, n_expert=2, seed=9))
    async with open_swarm(tiny_model, tmp_path) as swarm:
        await swarm.join(4 * EXPERT_BYTES, name="same", key=OTHER)
    async with open_swarm(small, tmp_path) as swarm:
        await swarm.join(7 * EXPERT_BYTES, name="same", key=OTHER)
    stored = sum(path.stat().st_size for path in (tmp_path / "same").rglob("*.gguf"))
    assert 6 * EXPERT_BYTES <= stored < 7 * EXPERT_BYTES


async def test_a_full_disk_ends_the_worker_with_a_clear_message(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str, flags: int) -> int:
        raise OSError(28, "No space left on device")

    group = pytest.RaisesGroup(
        pytest.RaisesExc(StoreError, match="No space left.*--home DIR"), flatten_subgroups=True
    )
    with group:
        async with open_swarm(tiny_model, tmp_path) as swarm:
            monkeypatch.setattr(incoming, "_creating", refuse)
            await swarm.join(4 * EXPERT_BYTES)


async def test_a_worker_whose_machine_fails_says_goodbye(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[tuple[NodeId, bool]] = []

    def leaving(peer: Peer, *, pauses: bool, lacks: str) -> None:
        left.append((peer.node_id, pauses))

    def decide(market: Market, nursery: trio.Nursery) -> None:
        raise DeviceError("the device is gone")

    with pytest.RaisesGroup(DeviceError, flatten_subgroups=True):
        async with open_swarm(tiny_model, tmp_path) as swarm:
            worker = await swarm.join(4 * EXPERT_BYTES)
            monkeypatch.setattr(swarm.backbone.members, "leaving", leaving)
            monkeypatch.setattr(Market, "_decide", decide)
            await trio.sleep(60)
    assert left == [(worker.key.node_id, False)]


async def test_leaving_is_not_delayed_by_a_backbone_that_does_not_answer(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with open_swarm(tiny_model, tmp_path) as swarm:
        worker = await swarm.join(4 * EXPERT_BYTES)
        swarm.network.partition({"backbone"}, {"worker1"})
        with trio.move_on_after(1) as scope:
            await worker.service.leave()
        assert scope.cancelled_caught
        swarm.network.heal()
        worker.kill()


async def test_a_worker_stopped_while_it_computes_frees_its_memory(tiny_model: Path, tmp_path: Path) -> None:
    def meddle(handler: Handler) -> Handler:
        return silent

    async with open_swarm(tiny_model, tmp_path) as swarm:
        worker = await swarm.join(4 * EXPERT_BYTES, handlers=MeddledHandlers(Experts, meddle), wait=False)
        await swarm.until(lambda: bool(swarm.backbone.members.workers))
        residence = worker.service.residence
        assert residence is not None
        bank = residence.bank
        assert bank.used_bytes == 4 * EXPERT_BYTES
        worker.scope.cancel()
        await swarm.until(lambda: worker.service.residence is None)
        assert bank.used_bytes == 0
