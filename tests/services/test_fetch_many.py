"""Fetching from several sources at once: slow, silent, leaving, lying, without what is wanted. cases.md 30."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from swarmnode.errors import BadReplyError, ConnectionLostError, RequestRefusedError
from swarmnode.services.fetch import SliceFetcher
from swarmnode.services.runners import Inline
from swarmnode.weights.slices import ExpertRange
from swarmnode.weights.store import SliceStore
from swarmnode.wire.messages import Ok, Slice, SliceGet
from tests.services.conftest import EXPERT_BYTES
from tests.services.slice_peers import FakePeer, Reply, fetcher
from tests.services.source import CONFIG, Source

RANGE = ExpertRange(1, 0, 8)
TOTAL_BYTES = 8 * EXPERT_BYTES


@pytest.fixture
def store(source: Source, tmp_path: Path) -> Iterator[SliceStore]:
    with SliceStore(tmp_path, source.manifest) as opened:
        yield opened


@pytest.fixture
def peers(source: Source) -> list[FakePeer]:
    """Three honest ones, 50 ms away."""
    made = [FakePeer(source, seed) for seed in range(3)]
    for peer in made:
        peer.answer = peer.after(0.05)
    return made


def check_held(store: SliceStore, source: Source) -> None:
    """The range is held, and every byte of it is the model's."""
    assert store.held() == (RANGE,)
    for expert in RANGE.experts:
        for kind in source.manifest.layers[RANGE.layer].layout.kinds:
            slab = store.read_slab(RANGE.layer, expert, kind)
            assert slab == source.index.slab(RANGE.layer, expert, kind)


async def test_the_work_is_shared(source: Source, store: SliceStore, peers: list[FakePeer]) -> None:
    arrived = list[int]()
    await fetcher(peers, source.manifest, store, arrived).fetch(RANGE)
    check_held(store, source)
    assert sum(arrived) == sum(peer.sent_bytes for peer in peers) == TOTAL_BYTES, "nothing is fetched twice"
    assert all(peer.sent_bytes > 0.1 * TOTAL_BYTES for peer in peers)


async def test_a_slow_source_gives_less_and_delays_nobody(
    source: Source, store: SliceStore, peers: list[FakePeer]
) -> None:
    peers[0].answer = peers[0].after(5)
    started_s = trio.current_time()
    await fetcher(peers, source.manifest, store).fetch(RANGE)
    check_held(store, source)
    assert trio.current_time() - started_s < 2 * CONFIG.store.takeover_s + 1, "its blocks were taken over"
    assert peers[0].sent_bytes == 0
    assert sum(peer.n_asked for peer in peers) <= TOTAL_BYTES / CONFIG.store.block_bytes * 1.3


async def test_a_silent_source_costs_one_takeover(
    source: Source, store: SliceStore, peers: list[FakePeer]
) -> None:
    peers[1].answer = peers[1].silent
    fetch = fetcher(peers, source.manifest, store)
    started_s = trio.current_time()
    await fetch.fetch(RANGE)
    check_held(store, source)
    assert trio.current_time() - started_s < 2 * CONFIG.store.takeover_s + 1
    assert peers[1].n_asked <= 2 * CONFIG.store.first_blocks


async def test_alone_with_silent_sources_it_ends(
    source: Source, store: SliceStore, peers: list[FakePeer]
) -> None:
    for peer in peers:
        peer.answer = peer.silent
    started_s = trio.current_time()
    with pytest.raises(ConnectionLostError, match="did not answer SliceGet"):
        await fetcher(peers, source.manifest, store).fetch(RANGE)
    assert trio.current_time() - started_s < 3 * CONFIG.store.block_timeout_s
    assert store.held() == ()


async def test_sources_come_and_go(source: Source, store: SliceStore, peers: list[FakePeer]) -> None:
    """One leaves at its third block, one vanishes from the list, one comes later; and one comes back."""
    known = [peers[0], peers[1]]

    async def leaving(number: int, message: SliceGet) -> Reply:
        if number == 3:
            known[:] = [peers[1], peers[2]]
        if number >= 3:
            raise ConnectionLostError("gone")
        return await peers[0].honest(number, message)

    async def vanishing(number: int, message: SliceGet) -> Reply:
        if number == 5:
            known[:] = [peers[2]]
        return await peers[1].after(0.05)(number, message)

    peers[0].answer, peers[1].answer = leaving, vanishing
    arrived = list[int]()
    config = replace(CONFIG.store, sources_s=0.02)
    await fetcher(known, source.manifest, store, arrived, config).fetch(RANGE)
    check_held(store, source)
    assert sum(arrived) == TOTAL_BYTES
    assert peers[2].sent_bytes > TOTAL_BYTES / 2


async def test_a_node_that_reconnects_is_a_source_again(source: Source, store: SliceStore) -> None:
    before, after = FakePeer(source, 1), FakePeer(source, 1)
    known = [before]

    async def breaking(number: int, message: SliceGet) -> Reply:
        if number >= 4:
            known[:] = [after]
            raise ConnectionLostError("broken")
        return await before.honest(number, message)

    before.answer = breaking
    await fetcher(known, source.manifest, store).fetch(RANGE)
    check_held(store, source)
    assert before.sent_bytes + after.sent_bytes == TOTAL_BYTES


async def test_rows_find_the_path_free(source: Source, store: SliceStore) -> None:
    """While rows travel with one of the sources, all give one block at a time, with pauses in between."""
    peers = [FakePeer(source, seed) for seed in range(2)]
    busy_s = 0.0

    async def answer(number: int, message: SliceGet) -> Reply:
        nonlocal busy_s
        peers[0].rows_at_s = trio.current_time()
        busy_s += 0.01
        await trio.sleep(0.01)
        return await peers[0].honest(number, message)

    for peer in peers:
        peer.answer = answer
    started_s = peers[0].rows_at_s = trio.current_time()
    await fetcher(peers, source.manifest, store).fetch(RANGE)
    check_held(store, source)
    assert [peer.most_at_once for peer in peers] == [1, 1]
    assert busy_s / 2 < 0.55 * (trio.current_time() - started_s)


async def test_without_any_source(source: Source, store: SliceStore) -> None:
    with pytest.raises(ConnectionLostError, match="no node to fetch layer 1, experts 0:8 from"):
        await fetcher([], source.manifest, store).fetch(RANGE)


# ---- sources that hold only some of it


def holding(peer: FakePeer, experts: range, code: str = "no_such_slice") -> None:
    async def answer(number: int, message: SliceGet) -> Reply:
        await trio.sleep(0.05)
        if message.expert not in experts:
            raise RequestRefusedError(code, "not here", 100)
        return await peer.honest(number, message)

    peer.answer = answer


async def test_two_halves_make_a_whole(source: Source, store: SliceStore, peers: list[FakePeer]) -> None:
    holding(peers[0], range(4))
    holding(peers[1], range(4, 8))
    fetch = fetcher(peers[:2], source.manifest, store)
    await fetch.fetch(RANGE)
    check_held(store, source)
    assert peers[0].sent_bytes + peers[1].sent_bytes == TOTAL_BYTES
    assert all(standing.n_wrong == 0 for standing in fetch.standings.values())


async def test_a_source_that_refuses_everything_is_left(
    source: Source, store: SliceStore, peers: list[FakePeer]
) -> None:
    holding(peers[0], range(0))
    await fetcher(peers, source.manifest, store).fetch(RANGE)
    check_held(store, source)
    assert peers[0].n_asked <= RANGE.count * CONFIG.store.first_blocks


async def test_a_source_of_another_model_is_asked_once(
    source: Source, store: SliceStore, peers: list[FakePeer]
) -> None:
    holding(peers[0], range(0), "wrong_model")
    fetch = fetcher(peers, source.manifest, store)
    await fetch.fetch(RANGE)
    check_held(store, source)
    assert peers[0].n_asked <= CONFIG.store.first_blocks
    assert fetch.standings[peers[0].node_id].n_refused == 1


async def test_what_nobody_has_is_refused(source: Source, store: SliceStore, peers: list[FakePeer]) -> None:
    for peer in peers:
        holding(peer, range(7))
    with pytest.raises(RequestRefusedError, match="no_such_slice"):
        await fetcher(peers, source.manifest, store).fetch(RANGE)
    assert store.held() == ()


async def test_a_busy_source_is_asked_again_later(source: Source, store: SliceStore) -> None:
    peer = FakePeer(source)

    async def busy(number: int, message: SliceGet) -> Reply:
        if number in (3, 7):
            raise RequestRefusedError("busy", "later", 500)
        return await peer.honest(number, message)

    peer.answer = busy
    await fetcher([peer], source.manifest, store).fetch(RANGE)
    check_held(store, source)
    assert trio.current_time() >= 0.5


async def test_a_source_that_is_busy_for_ever_does_not_hold_up_a_download(
    source: Source, store: SliceStore
) -> None:
    peer = FakePeer(source)

    async def busy(number: int, message: SliceGet) -> Reply:
        raise RequestRefusedError("busy", "in an hour", 3_600_000)

    peer.answer = busy
    with trio.fail_after(60), pytest.raises(ConnectionLostError, match="was busy for 20 s"):
        await fetcher([peer], source.manifest, store).fetch(RANGE)


# ---- sources that lie


@pytest.mark.parametrize("every", [1, 5, 20])
async def test_flipped_bits_change_nothing_but_the_standing(
    every: int, source: Source, store: SliceStore, peers: list[FakePeer]
) -> None:
    liar = peers[0]
    liar.answer = liar.flipping(every, liar.after(0.01))
    fetch = fetcher(peers, source.manifest, store)
    await fetch.fetch(RANGE)
    check_held(store, source)
    assert {node: standing.n_wrong for node, standing in fetch.standings.items()} == {
        peer.node_id: int(peer is liar) for peer in peers
    }
    sent_bytes = sum(peer.sent_bytes for peer in peers)
    assert sent_bytes <= 1.35 * TOTAL_BYTES, "of a small range, one slab or two and what the liar had sent"


async def test_a_liar_is_not_asked_for_other_ranges_while_others_may_be(
    source: Source, store: SliceStore, peers: list[FakePeer]
) -> None:
    liar = peers[0]
    liar.answer = liar.flipping(3)
    fetch = fetcher(peers, source.manifest, store)
    await fetch.fetch(RANGE)
    n_asked = liar.n_asked
    await fetch.fetch(ExpertRange(0, 0, 4))
    assert liar.n_asked == n_asked
    assert fetch.standings[liar.node_id].n_wrong == 1


async def test_a_liar_alone_is_found_and_after_three_times_not_asked(
    source: Source, store: SliceStore
) -> None:
    liar = FakePeer(source)
    liar.answer = liar.flipping(2)
    fetch = fetcher([liar], source.manifest, store)
    for _ in range(CONFIG.store.max_wrong_slabs):
        with pytest.raises(BadReplyError, match="not the bytes of the manifest"):
            await fetch.fetch(RANGE)
    n_asked = liar.n_asked
    with pytest.raises(BadReplyError, match="too often"):
        await fetch.fetch(RANGE)
    assert liar.n_asked == n_asked
    assert store.held() == ()


async def test_two_liars_and_one_honest_source(
    source: Source, store: SliceStore, peers: list[FakePeer]
) -> None:
    for liar in peers[:2]:
        liar.answer = liar.flipping(4, liar.after(0.02))
    fetch = fetcher(peers, source.manifest, store)
    await fetch.fetch(RANGE)
    check_held(store, source)
    assert fetch.standings[peers[2].node_id].n_wrong == 0
    assert all(fetch.standings[liar.node_id].n_wrong == 1 for liar in peers[:2])


async def test_only_liars_leave_nothing_visible(
    source: Source, store: SliceStore, peers: list[FakePeer]
) -> None:
    for liar in peers:
        liar.answer = liar.flipping(1)
    with pytest.raises(BadReplyError):
        await fetcher(peers, source.manifest, store).fetch(RANGE)
    assert store.held() == ()


@pytest.mark.parametrize("lie", ["400 bytes short", "another block", "another type"])
async def test_a_source_whose_answers_do_not_fit_is_left(
    lie: str, source: Source, store: SliceStore, peers: list[FakePeer]
) -> None:
    liar = peers[0]

    async def answer(number: int, message: SliceGet) -> Reply:
        reply, body = await liar.honest(number, message)
        assert isinstance(reply, Slice)
        match lie:
            case "400 bytes short":
                return reply, body[:-400]
            case "another block":
                return Slice(reply.offset + 1, reply.length, reply.total), body
        return Ok(), memoryview(b"")

    liar.answer = answer
    fetch = fetcher(peers, source.manifest, store)
    await fetch.fetch(RANGE)
    check_held(store, source)
    assert fetch.standings[liar.node_id].n_wrong == 1
    assert liar.n_asked <= CONFIG.store.blocks_in_flight


async def test_damage_on_disk_is_nobodys_fault(
    source: Source, store: SliceStore, peers: list[FakePeer]
) -> None:
    """Half a slab is left by an earlier run, and its bytes have changed meanwhile."""
    key, block_bytes = (1, 0, "ffn_up_exps"), CONFIG.store.block_bytes
    store.incoming.put(key, block_bytes, 0, bytes(block_bytes))
    arrived = list[int]()
    fetch = SliceFetcher(lambda _: peers, source.manifest, store, Inline(), CONFIG.store, arrived.append)
    await fetch.fetch(RANGE)
    check_held(store, source)
    assert sum(arrived) == TOTAL_BYTES, "wrong bytes are taken back from the count"
    assert all(standing.n_wrong == 0 for standing in fetch.standings.values())
