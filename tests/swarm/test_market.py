"""Workers that know one entry point cover the model by themselves, and go on whoever leaves. Answers never change."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import trio

from swarmnode.identity import NodeKey
from swarmnode.net.address import PeerAddress
from swarmnode.net.peer import Body, Peer
from swarmnode.services.account import Account
from swarmnode.services.gossip import GossipService
from swarmnode.testing.swarm import PORT, Swarm, SwarmWorker, open_swarm
from swarmnode.weights.index import ModelIndex
from swarmnode.weights.slices import ExpertRange
from swarmnode.weights.store import SliceStore
from swarmnode.wire.messages import Message
from tests.swarm.conftest import ALL_BYTES, EXPERT_BYTES

PROMPT = [5, 80, 33, 7, 120, 64, 11, 200]
N_EXPERTS = 32
THIRD_AND_MORE = 12 * EXPERT_BYTES
"""Three runs of four: six workers hold 72 experts of 32, three of them 36."""


def address_of(worker: SwarmWorker) -> PeerAddress:
    return PeerAddress(worker.key.node_id, worker.name, PORT)


def replicas(swarm: Swarm) -> Counter[tuple[int, int]]:
    """How many workers get rows for each (layer, expert)."""
    return Counter(pair for pairs in swarm.serving().values() for pair in pairs)


def is_covered(swarm: Swarm, times: int) -> bool:
    found = replicas(swarm)
    return len(found) == N_EXPERTS and min(found.values()) >= times


def held_by(worker: SwarmWorker) -> set[tuple[int, int]]:
    market = worker.service.market
    return set() if market is None else {(item.layer, e) for item in market.serving for e in item.experts}


async def same_answer(swarm: Swarm, alone: list[int]) -> Account:
    """Generate again; nothing may have changed but who computes."""
    helped, account = await swarm.generate(PROMPT, len(alone))
    assert helped == alone
    return account


async def all_remote(swarm: Swarm, alone: list[int], timeout_s: float) -> None:
    """Answer again and again until workers compute every pair; trio.TooSlowError after `timeout_s`.

    What is on the move from one worker to another is computed here meanwhile, so a single answer may show less.
    """
    with trio.fail_after(timeout_s):
        account = await same_answer(swarm, alone)
        while not account.remote == account.pairs > 0:
            await trio.sleep(1)
            account = await same_answer(swarm, alone)


async def watch(swarm: Swarm, alone: list[int], accounts: list[Account]) -> None:
    """An answer every five virtual seconds, until cancelled."""
    while True:
        accounts.append(await same_answer(swarm, alone))
        await trio.sleep(5)


async def six(swarm: Swarm) -> list[SwarmWorker]:
    """Six workers that start at once, settled: at one moment all are full and every expert is held twice.

    They go on moving experts to where demand is, so a later look may find one on its way.
    """
    workers = [await swarm.join(THIRD_AND_MORE, wait=False) for _ in range(6)]
    await swarm.until(lambda: all(worker.is_settled for worker in workers), 120)
    await swarm.until(lambda: is_covered(swarm, 2) and all(len(held_by(each)) == 12 for each in workers), 600)
    return workers


async def test_six_workers_of_one_entry_cover_everything_twice(tiny_model: Path, tmp_path: Path) -> None:
    async with open_swarm(tiny_model, tmp_path, latency_s=0.02) as swarm:
        alone, _ = await swarm.generate(PROMPT, 6)
        workers = await six(swarm)
        before = replicas(swarm)
        await all_remote(swarm, alone, 60)
        for worker in workers:
            residence = worker.service.residence
            assert residence is not None
            assert residence.bank.used_bytes <= THIRD_AND_MORE
        await trio.sleep(600)
        await swarm.until(lambda: is_covered(swarm, 2), 60)
        assert (replicas(swarm) - before).total() <= 8, "a swarm that is covered moves little"


@pytest.mark.parametrize("gone", list(combinations(range(6), 3))[::7], ids=str)
async def test_three_killed_at_once_heal(gone: tuple[int, ...], tiny_model: Path, tmp_path: Path) -> None:
    async with open_swarm(tiny_model, tmp_path, latency_s=0.02) as swarm:
        alone, _ = await swarm.generate(PROMPT, 3)
        workers = await six(swarm)
        accounts: list[Account] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch, swarm, alone, accounts)
            for number in gone:
                workers[number].kill()
            await swarm.until(lambda: len(swarm.serving()) == 3)
            await swarm.until(lambda: is_covered(swarm, 1), 300)
            nursery.cancel_scope.cancel()
        await all_remote(swarm, alone, 60)
        assert all(account.remote > 0 for account in accounts)


async def test_a_newcomer_finds_the_backbone_through_a_worker(tiny_model: Path, tmp_path: Path) -> None:
    async with open_swarm(tiny_model, tmp_path) as swarm:
        alone, _ = await swarm.generate(PROMPT, 4)
        first = await swarm.join(4 * EXPERT_BYTES)
        second = await swarm.join(4 * EXPERT_BYTES, bootstrap=(address_of(first),))
        third = await swarm.join(4 * EXPERT_BYTES, bootstrap=(address_of(second),))
        assert len(held_by(first) | held_by(second) | held_by(third)) == 12
        account = await same_answer(swarm, alone)
        assert (
            set(account.workers) >= {first.key.node_id.short, third.key.node_id.short} or account.remote > 0
        )
        first.kill()
        await swarm.until(lambda: len(swarm.serving()) == 2)
        await trio.sleep(120)
        assert len(swarm.serving()) == 2, "they need the first one no more"
        assert (await same_answer(swarm, alone)).remote > 0


async def test_with_its_entry_gone_a_worker_joins_through_whom_it_remembers(
    tiny_model: Path, tmp_path: Path
) -> None:
    key = NodeKey.from_seed(bytes([77]) * 32)
    async with open_swarm(tiny_model, tmp_path) as swarm:
        alone, _ = await swarm.generate(PROMPT, 4)
        entry = await swarm.join(4 * EXPERT_BYTES)
        entries = (address_of(entry),)
        worker = await swarm.join(4 * EXPERT_BYTES, name="same", key=key, bootstrap=entries)
        await trio.sleep(swarm.config.address_book.save_interval_s + 1)
        worker.kill()
        entry.kill()
        await swarm.until(lambda: not swarm.serving())
        again = await swarm.join(4 * EXPERT_BYTES, name="same", key=key, bootstrap=entries)
        assert set(swarm.serving()) == {again.key.node_id}
        assert (await same_answer(swarm, alone)).remote > 0


class Reads:
    """Counts the slices that the backbone (from its files) and workers (from their stores) give away."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.backbone = self.workers = 0
        self.backbone_refuses = False
        from_index, from_store = ModelIndex.read_block, SliceStore.read_block

        def read_index(index: ModelIndex, layer: int, expert: int, kind: str, offset: int, n: int) -> bytes:
            if self.backbone_refuses:
                raise KeyError("not today")
            self.backbone += 1
            return from_index(index, layer, expert, kind, offset, n)

        def read_store(store: SliceStore, layer: int, expert: int, kind: str, offset: int, n: int) -> bytes:
            self.workers += 1
            return from_store(store, layer, expert, kind, offset, n)

        patch.setattr(ModelIndex, "read_block", read_index)
        patch.setattr(SliceStore, "read_block", read_store)

    @property
    def total(self) -> int:
        return self.backbone + self.workers


async def test_a_worker_that_is_restarted_serves_the_same_and_fetches_nothing(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(monkeypatch)
    async with open_swarm(tiny_model, tmp_path) as swarm:
        alone, _ = await swarm.generate(PROMPT, 4)
        other = await swarm.join(10 * EXPERT_BYTES)
        worker = await swarm.join(10 * EXPERT_BYTES)
        held, n_reads = held_by(worker), reads.total
        for _ in range(3):
            worker.kill()
            await swarm.until(lambda: len(swarm.serving()) == 1)
            worker = await swarm.join(10 * EXPERT_BYTES, name=worker.name, key=worker.key)
            assert held_by(worker) == held
            assert (await same_answer(swarm, alone)).remote > 0
        await trio.sleep(120)
        assert held_by(worker) == held
        assert reads.total == n_reads
        assert len(held_by(other) | held) == 20


async def test_slices_come_from_workers_when_the_backbone_gives_none(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(monkeypatch)
    async with open_swarm(tiny_model, tmp_path) as swarm:
        alone, _ = await swarm.generate(PROMPT, 4)
        first = await swarm.join(ALL_BYTES)
        reads.backbone_refuses = True
        n_before = reads.backbone
        second = await swarm.join(8 * EXPERT_BYTES)
        assert reads.backbone == n_before
        assert reads.workers > 0
        assert len(held_by(second)) == 8
        first.kill()
        await swarm.until(lambda: len(swarm.serving()) == 1)
        assert (await same_answer(swarm, alone)).remote > 0


@pytest.mark.parametrize("hot", [ExpertRange(0, 4, 4), ExpertRange(3, 0, 4)], ids=str)
async def test_hot_experts_get_a_second_replica_first(
    hot: ExpertRange, tiny_model: Path, tmp_path: Path
) -> None:
    async with open_swarm(tiny_model, tmp_path) as swarm:
        alone, _ = await swarm.generate(PROMPT, 4)
        await swarm.join(ALL_BYTES)
        ids = np.array(hot.experts, np.int32)
        async with trio.open_nursery() as nursery:

            async def want() -> None:
                while True:
                    swarm.backbone.demand.count([(hot.layer, ids)] * 50, [])
                    await trio.sleep(1)

            nursery.start_soon(want)
            await trio.sleep(3 * swarm.config.market.demand_interval_s)
            newcomer = await swarm.join(4 * EXPERT_BYTES)
            assert held_by(newcomer) == {(hot.layer, expert) for expert in hot.experts}
            nursery.cancel_scope.cancel()
        assert replicas(swarm)[hot.layer, hot.first] == 2
        assert (await same_answer(swarm, alone)).remote > 0


async def test_lost_gossip_changes_no_answer(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cases.md 9: three of ten requests are never answered, at every node."""
    dice = random.Random(7)
    answer = GossipService._answer
    lost = 0

    async def lossy(
        self: GossipService, peer: Peer, message: Message, body: memoryview
    ) -> tuple[Message, Body]:
        nonlocal lost
        if dice.random() < 0.3:
            lost += 1
            await trio.sleep_forever()
        return await answer(self, peer, message, body)

    monkeypatch.setattr(GossipService, "_answer", lossy)
    async with open_swarm(tiny_model, tmp_path, latency_s=0.02) as swarm:
        alone, _ = await swarm.generate(PROMPT, 3)
        workers = await six(swarm)
        accounts: list[Account] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch, swarm, alone, accounts)
            for number in (0, 3, 5):
                workers[number].kill()
            await swarm.until(lambda: len(swarm.serving()) == 3)
            await swarm.until(lambda: is_covered(swarm, 1), 600)
            nursery.cancel_scope.cancel()
        await all_remote(swarm, alone, 300)
    assert all(account.remote > 0 for account in accounts)
    assert lost > 20


async def test_a_worker_that_leaves_and_comes_back_at_once_counts_once(
    tiny_model: Path, tmp_path: Path
) -> None:
    """cases.md 7."""
    async with open_swarm(tiny_model, tmp_path) as swarm:
        alone, _ = await swarm.generate(PROMPT, 4)
        watcher = await swarm.join(4 * EXPERT_BYTES)
        worker = await swarm.join(8 * EXPERT_BYTES)
        for _ in range(3):
            await worker.parts.leave()
            await trio.sleep(0.1)
            worker.kill()
            worker = await swarm.join(8 * EXPERT_BYTES, name=worker.name, key=worker.key)
        await trio.sleep(10)
        market = watcher.service.market
        assert market is not None
        holders = market._coverage.holders
        assert holders.max() == 1
        assert holders.sum() == 8
        assert (await same_answer(swarm, alone)).remote > 0
