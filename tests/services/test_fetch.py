"""Fetching a range from a peer that sends other bytes, fewer, of another block, or none. cases.md 30."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, cast

import pytest
import trio

from swarmnode.errors import BadReplyError, ConnectionLostError, RequestRefusedError, StoreError
from swarmnode.identity import NodeKey
from swarmnode.net.peer import Peer
from swarmnode.services.fetch import SliceFetcher
from swarmnode.services.runners import Inline
from swarmnode.weights.manifest import Manifest
from swarmnode.weights.slices import ExpertRange
from swarmnode.weights.store import SliceStore
from swarmnode.wire.messages import Message, Ok, Slice, SliceGet
from tests.services.conftest import EXPERT_BYTES
from tests.services.source import CONFIG, Source

RANGE = ExpertRange(1, 2, 2)
Reply = tuple[Message, memoryview]
T = TypeVar("T")


class FakePeer:
    """A peer of which `answer` says what it replies to the n-th request."""

    def __init__(self, source: Source) -> None:
        self.node_id = NodeKey.from_seed(bytes(32)).node_id
        self.source = source
        self.n_asked = 0
        self.at_once = self.most_at_once = 0
        self.slabs: set[tuple[int, str]] = set()
        """Every slab of which a block was asked for."""
        self.answer: Callable[[int, SliceGet], Awaitable[Reply]] = self.honest

    async def honest(self, number: int, message: SliceGet) -> Reply:
        reply, parts = self.source._slice(message)
        return reply, memoryview(bytes(parts[0]))

    async def far(self, number: int, message: SliceGet) -> Reply:
        await trio.sleep(0.1)
        return await self.honest(number, message)

    async def request(self, message: SliceGet) -> Reply:
        self.n_asked += 1
        number = self.n_asked
        self.slabs.add((message.expert, message.kind))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await trio.lowlevel.checkpoint()
            return await self.answer(number, message)
        finally:
            self.at_once -= 1


class SlowDisk:
    """A runner that takes its time, and counts the slabs that were begun and are not stored."""

    def __init__(self, peer: FakePeer) -> None:
        self._peer = peer
        self._n_stored = 0
        self.most_in_memory = 0

    async def run(self, function: Callable[[], T]) -> T:
        await trio.sleep(1)
        self.most_in_memory = max(self.most_in_memory, len(self._peer.slabs) - self._n_stored)
        self._n_stored += 1
        return function()


@pytest.fixture
def store(source: Source, tmp_path: Path) -> Iterator[SliceStore]:
    with SliceStore(tmp_path, source.manifest) as opened:
        yield opened


def fetcher(peer: FakePeer, manifest: Manifest, store: SliceStore, on_bytes: list[int]) -> SliceFetcher:
    return SliceFetcher(cast(Peer, peer), manifest, store, Inline(), CONFIG.store, on_bytes.append)


async def test_an_honest_peer_gives_the_range(source: Source, store: SliceStore) -> None:
    peer, arrived = FakePeer(source), list[int]()
    peer.answer = peer.far
    await fetcher(peer, source.manifest, store, arrived).fetch(RANGE)
    assert store.held() == (RANGE,)
    assert sum(arrived) == 2 * EXPERT_BYTES
    assert peer.most_at_once == CONFIG.store.blocks_in_flight, "blocks travel side by side, across slabs"
    assert max(arrived) == CONFIG.store.block_bytes


@pytest.mark.parametrize(("flight_slabs", "most_slabs"), [(0.5, 1), (1, 1), (2.5, 2), (100, 6)])
async def test_slabs_in_memory_are_bounded(
    flight_slabs: float, most_slabs: int, source: Source, store: SliceStore
) -> None:
    """A slab is begun only when there is room for all of it beside those that are not on disk yet."""
    peer, layout = FakePeer(source), source.manifest.layers[RANGE.layer].layout
    peer.answer = peer.far
    slab_bytes = max(tensor.n_bytes for tensor in layout.tensors)
    config = replace(CONFIG.store, max_flight_bytes=int(flight_slabs * slab_bytes))
    disk = SlowDisk(peer)
    await SliceFetcher(cast(Peer, peer), source.manifest, store, disk, config, lambda _: None).fetch(RANGE)
    assert store.held() == (RANGE,)
    assert disk.most_in_memory == most_slabs


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
        await fetcher(peer, source.manifest, store, []).fetch(RANGE)
    assert store.held() == ()
    peer.answer = peer.honest
    await fetcher(peer, source.manifest, store, []).fetch(RANGE)
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
        await fetcher(peer, source.manifest, store, []).fetch(RANGE)
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
    await fetcher(peer, source.manifest, store, []).fetch(RANGE)
    assert store.held() == (RANGE,)


async def test_a_disk_that_refuses_is_no_fault_of_the_peer(
    source: Source, store: SliceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, data: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(StoreError, match="No space left"):
        await fetcher(FakePeer(source), source.manifest, store, []).fetch(RANGE)
