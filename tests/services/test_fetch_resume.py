"""A fetch that is ended anywhere goes on with what is on disk. Real processes: tests/process/test_slices.py."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import trio

from swarmnode.weights.slices import ExpertRange
from swarmnode.weights.store import SliceStore
from swarmnode.wire.messages import SliceGet
from tests.services.conftest import EXPERT_BYTES
from tests.services.slice_peers import FakePeer, Reply, fetcher
from tests.services.source import CONFIG, Source

RANGES = tuple(ExpertRange(layer, first, 2) for layer in (0, 1) for first in (0, 2, 4, 6))
TOTAL_BYTES = 16 * EXPERT_BYTES
N_BLOCKS = 2 * 8 * 3 * -(-EXPERT_BYTES // 3 // CONFIG.store.block_bytes)


async def fetch_all(store: SliceStore, source: Source, peers: list[FakePeer]) -> None:
    fetch = fetcher(peers, source.manifest, store)
    for item in RANGES:
        if item not in store.held():
            await fetch.fetch(item)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("n_peers", [1, 3])
async def test_ten_ends_at_random_moments(seed: int, n_peers: int, source: Source, tmp_path: Path) -> None:
    """Cancelled like a process that dies: nothing is told, written or tidied up. What the sources sent in all is less
    than 1.1 times the bytes."""
    rng = random.Random(seed)
    ends = sorted(rng.sample(range(1, N_BLOCKS), 10))
    peers = [FakePeer(source, number) for number in range(n_peers)]
    n_sent = 0
    scopes: list[trio.CancelScope] = []

    def answer_of(peer: FakePeer) -> None:
        async def answer(number: int, message: SliceGet) -> Reply:
            nonlocal n_sent
            await trio.sleep(rng.uniform(0.01, 0.02))
            n_sent += 1
            if ends and n_sent >= ends[0]:
                ends.pop(0)
                scopes[-1].cancel()
            return await peer.honest(number, message)

        peer.answer = answer

    for peer in peers:
        answer_of(peer)
    while not scopes or scopes[-1].cancelled_caught:
        with SliceStore(tmp_path, source.manifest) as store, trio.CancelScope() as scope:
            scopes.append(scope)
            await fetch_all(store, source, peers)
    assert len(scopes) == 11
    assert sum(peer.sent_bytes for peer in peers) < 1.1 * TOTAL_BYTES
    with SliceStore(tmp_path, source.manifest) as store:
        assert store.held() == RANGES
        for item in RANGES:
            for expert in item.experts:
                for kind in source.manifest.layers[item.layer].layout.kinds:
                    assert store.read_slab(item.layer, expert, kind) == source.index.slab(
                        item.layer, expert, kind
                    )


async def test_what_an_earlier_run_left_is_counted_and_not_asked_for(source: Source, tmp_path: Path) -> None:
    peer, again = FakePeer(source), FakePeer(source)
    item = RANGES[0]

    async def stopping(number: int, message: SliceGet) -> Reply:
        if number > 22:
            scope.cancel()
        return await peer.after(0.01)(number, message)

    peer.answer = stopping
    with SliceStore(tmp_path, source.manifest) as store, trio.CancelScope() as scope:
        await fetcher([peer], source.manifest, store).fetch(item)
    arrived = list[int]()
    with SliceStore(tmp_path, source.manifest) as store:
        assert store.incoming.ranges() == (item,)
        await fetcher([again], source.manifest, store, arrived).fetch(item)
        assert store.held() == (item,)
        assert store.incoming.ranges() == ()
    assert sum(arrived) == 2 * EXPERT_BYTES
    assert again.sent_bytes <= 2 * EXPERT_BYTES - 8 * CONFIG.store.block_bytes


async def test_a_range_nobody_wants_any_more_frees_its_bytes(source: Source, tmp_path: Path) -> None:
    peer = FakePeer(source)

    async def stopping(number: int, message: SliceGet) -> Reply:
        if number > 22:
            scope.cancel()
        return await peer.after(0.01)(number, message)

    peer.answer = stopping
    with SliceStore(tmp_path, source.manifest) as store, trio.CancelScope() as scope:
        await fetcher([peer], source.manifest, store).fetch(RANGES[0])
    with SliceStore(tmp_path, source.manifest) as store:
        store.incoming.keep_only([RANGES[1]])
        assert store.incoming.ranges() == ()
        assert [path.name for path in store.folder.rglob("*") if path.is_file()] == ["lock"]
