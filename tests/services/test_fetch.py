"""Fetching a range from a peer that sends other bytes, fewer, of another block, or none. cases.md 30."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import trio

from swarmnode.errors import BadReplyError, ConnectionLostError, RequestRefusedError, StoreError
from swarmnode.services.fetch import SliceFetcher
from swarmnode.weights import incoming
from swarmnode.weights.incoming import Incoming
from swarmnode.weights.slices import ExpertRange
from swarmnode.weights.store import SliceStore
from swarmnode.wire.messages import Ok, Slice, SliceGet
from tests.services.conftest import EXPERT_BYTES
from tests.services.slice_peers import FakePeer, Reply, fetcher
from tests.services.source import CONFIG, Source

RANGE = ExpertRange(1, 2, 2)
T = TypeVar("T")


class SlowDisk:
    """A runner that takes its time, and counts the blocks that were asked for and are not stored."""

    def __init__(self, peers: Sequence[FakePeer]) -> None:
        self._peers = peers
        self._n_stored = 0
        self.most_in_memory = 0

    async def run(self, function: Callable[[], T]) -> T:
        is_put = getattr(getattr(function, "func", None), "__func__", None) is Incoming.put
        await trio.sleep(1)
        self.most_in_memory = max(
            self.most_in_memory, sum(peer.n_asked for peer in self._peers) - self._n_stored
        )
        self._n_stored += is_put
        return function()


@pytest.fixture
def store(source: Source, tmp_path: Path) -> Iterator[SliceStore]:
    with SliceStore(tmp_path, source.manifest) as opened:
        yield opened


async def test_an_honest_peer_gives_the_range(source: Source, store: SliceStore) -> None:
    peer, arrived = FakePeer(source), list[int]()
    peer.answer = peer.after(0.1)
    item = ExpertRange(1, 2, 6)
    await fetcher([peer], source.manifest, store, arrived).fetch(item)
    assert store.held() == (item,)
    assert sum(arrived) == 6 * EXPERT_BYTES
    assert peer.most_at_once == CONFIG.store.blocks_in_flight, "blocks travel side by side, across slabs"
    assert max(arrived) == CONFIG.store.block_bytes


@pytest.mark.parametrize("most_blocks", [1, 3, 8])
async def test_blocks_in_memory_are_bounded(most_blocks: int, source: Source, store: SliceStore) -> None:
    """Over all sources, while the disk is slow."""
    peers = [FakePeer(source, seed) for seed in range(3)]
    config = replace(CONFIG.store, max_flight_bytes=most_blocks * CONFIG.store.block_bytes)
    disk = SlowDisk(peers)
    await SliceFetcher(lambda _: peers, source.manifest, store, disk, config, lambda _: None).fetch(RANGE)
    assert store.held() == (RANGE,)
    assert disk.most_in_memory == most_blocks


@pytest.mark.parametrize(
    "lie", ["one flipped byte", "a block short", "another block", "another type", "refused"]
)
async def test_a_lying_peer_leaves_nothing_visible(lie: str, source: Source, store: SliceStore) -> None:
    peer = FakePeer(source)

    async def liar(number: int, message: SliceGet) -> Reply:
        reply, body = await peer.honest(number, message)
        assert isinstance(reply, Slice)
        if number != 9:
            return reply, body
        match lie:
            case "one flipped byte":
                return reply, memoryview(bytes([body[0] ^ 1]) + bytes(body[1:]))
            case "a block short":
                return Slice(reply.offset, reply.length - 400, reply.total), body[:-400]
            case "another block":
                return Slice(reply.offset + 1, reply.length, reply.total), body
            case "another type":
                return Ok(), memoryview(b"")
        raise RequestRefusedError("no_such_slice", "gone")

    peer.answer = liar
    with pytest.raises((BadReplyError, RequestRefusedError)):
        await fetcher([peer], source.manifest, store, []).fetch(RANGE)
    assert store.held() == ()
    peer.answer = peer.honest
    await fetcher([peer], source.manifest, store, []).fetch(RANGE)
    assert store.held() == (RANGE,)


async def test_one_slab_that_never_comes_ends_the_fetch(source: Source, store: SliceStore) -> None:
    """The other slabs come; when nothing more does, the wait is one block's deadline."""
    peer = FakePeer(source)

    async def partly_silent(number: int, message: SliceGet) -> Reply:
        if (message.expert, message.kind) == (2, "ffn_up_exps"):
            await trio.sleep_forever()
        return await peer.honest(number, message)

    peer.answer = partly_silent
    started_s = trio.current_time()
    with pytest.raises(ConnectionLostError, match="did not answer SliceGet"):
        await fetcher([peer], source.manifest, store, []).fetch(RANGE)
    assert trio.current_time() - started_s < 1.5 * CONFIG.store.block_timeout_s
    assert store.held() == ()


async def test_a_slow_link_is_not_given_up(source: Source, store: SliceStore) -> None:
    """Six blocks travel at once and arrive one every 15 s: each for itself takes 90 s, far over its deadline."""
    peer = FakePeer(source)
    link = trio.Lock()

    async def slow(number: int, message: SliceGet) -> Reply:
        async with link:
            await trio.sleep(15)
        return await peer.honest(number, message)

    peer.answer = slow
    await fetcher([peer], source.manifest, store, []).fetch(RANGE)
    assert store.held() == (RANGE,)


async def test_a_disk_that_refuses_is_no_fault_of_the_peer(
    source: Source, store: SliceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is anything of the range left there: a full disk is not ours alone."""
    peer = FakePeer(source)
    with monkeypatch.context() as patch:
        patch.setattr(incoming, "_creating", full_after(7))
        with pytest.raises(StoreError, match=r"No space left.*--home DIR"):
            await fetcher([peer], source.manifest, store, []).fetch(RANGE)
    assert peer.n_asked > 7
    assert store.held() == ()
    assert [path.name for path in store.folder.rglob("*") if path.is_file()] == ["lock"]
    await fetcher([peer], source.manifest, store, []).fetch(RANGE)
    assert store.held() == (RANGE,)


async def test_a_disk_that_is_full_at_the_commit_shows_nothing(
    source: Source, store: SliceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="No space left"):
        await fetcher([FakePeer(source)], source.manifest, store, []).fetch(RANGE)
    assert store.held() == ()
    assert [path.name for path in store.folder.rglob("*") if path.is_file()] == ["lock"]


def full_after(n_writes: int) -> Callable[[str, int], int]:
    """Opens files for writing so many times, then says that the disk is full."""
    opened = iter(range(n_writes))

    def opener(path: str, flags: int) -> int:
        if next(opened, None) is None:
            raise OSError(28, "No space left on device")
        return os.open(path, flags | os.O_CREAT, 0o600)

    return opener
