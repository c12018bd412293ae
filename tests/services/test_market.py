"""A worker's part in the market: what it fetches, keeps, gives up, and survives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import trio

from swarmnode.compute.devices import Device
from swarmnode.errors import RequestRefusedError, StoreError
from swarmnode.gossip.coverage import Coverage
from swarmnode.gossip.decisions import View
from swarmnode.gossip.records import ModelHoldings, NodeRecord, OwnState, network_id, sign_record
from swarmnode.gossip.table import Change
from swarmnode.gossip.volunteering import Volunteer
from swarmnode.identity import NodeId, NodeKey
from swarmnode.net.peer import Body, Peer
from swarmnode.testing.memory_net import MemoryNetwork
from swarmnode.testing.tiny_gguf import write_tiny_gguf
from swarmnode.weights import incoming
from swarmnode.weights.hashing import build_manifest
from swarmnode.weights.index import ModelIndex
from swarmnode.weights.manifest import Manifest
from swarmnode.weights.slices import ExpertRange
from swarmnode.wire import messages
from swarmnode.wire.messages import Message
from swarmnode.wire.secret import network_tag
from swarmnode.wire.tensors import encode_experts_body, parse_rows_body_untrusted
from tests.services.conftest import EXPERT_BYTES, MODEL
from tests.services.source import CONFIG, KEY, Source, joined, start_source

BUDGET = 8 * EXPERT_BYTES
BLOCKS = 3 * -(-EXPERT_BYTES // 3 // CONFIG.store.block_bytes)
"""Of one expert."""


class Slow(Source):
    """Takes its time for a slice, and says when enough were asked for."""

    def __init__(self, index: ModelIndex, manifest: Manifest, pause_s: float = 0.05) -> None:
        super().__init__(index, manifest)
        self.pause_s = pause_s

    async def _answer(self, peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
        if isinstance(message, messages.SliceGet):
            await trio.sleep(self.pause_s)
        return await super()._answer(peer, message, body)


class Liar(Source):
    """One bit of every slice is wrong."""

    def _slice(self, message: messages.SliceGet) -> tuple[Message, Body]:
        reply, (block,) = super()._slice(message)
        data = bytearray(block)
        data[0] ^= 1
        return reply, (bytes(data),)


class Partial(Source):
    """Has gates and ups only."""

    async def _answer(self, peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
        if isinstance(message, messages.SliceGet) and message.kind == "ffn_down_exps":
            raise RequestRefusedError("no_such_slice", "not here")
        return await super()._answer(peer, message, body)


def on_disk(folder: Path) -> int:
    """Bytes of slices, those on their way included."""
    return sum(path.stat().st_size for path in (folder / "cache").rglob("*") if path.is_file())


def experts_of(ranges: tuple[ExpertRange, ...]) -> set[tuple[int, int]]:
    return {(item.layer, expert) for item in ranges for expert in item.experts}


# ---- what is on disk


async def test_what_is_on_disk_is_claimed_before_it_is_served(
    source: Source, device: Device, tmp_path: Path
) -> None:
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        address = await start_source(nursery, network, source, 1)
        async with joined(network, [address], tmp_path, device, BUDGET) as worker:
            await worker.until_serving(source)
            before = worker.market.serving
        async with joined(network, [address], tmp_path, device, BUDGET) as worker:
            await worker.until(lambda: worker.parts.service.market is not None)
            seen: list[ModelHoldings] = []
            changed = worker.market.on_change

            def note() -> None:
                seen.append(worker.market.holdings)
                changed()

            worker.market.on_change = note
            await worker.until(lambda: worker.is_settled, 2)
            assert worker.market.serving == before
        nursery.cancel_scope.cancel()
    for holdings in seen:
        assert not experts_of(holdings.serving) & experts_of(holdings.fetching)
        assert experts_of(holdings.serving) | experts_of(holdings.fetching) == experts_of(before)


@pytest.mark.parametrize("n_asked", [3, BLOCKS + 5, 3 * BLOCKS])
async def test_a_worker_that_is_stopped_goes_on_where_it_was(
    n_asked: int, index: ModelIndex, source: Source, device: Device, tmp_path: Path
) -> None:
    """In the middle of an expert, and after some of a range were committed already."""
    slow = Slow(index, source.manifest)
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        address = await start_source(nursery, network, slow, 1)
        async with joined(network, [address], tmp_path, device, BUDGET) as worker:
            await worker.until(lambda: slow.asked[messages.SliceGet] >= n_asked)
            begun = experts_of(worker.market.holdings.fetching)
        async with joined(network, [address], tmp_path, device, BUDGET) as worker:
            await worker.until_serving(slow)
            assert begun & experts_of(worker.market.serving)
        nursery.cancel_scope.cancel()
    lost = 2 * CONFIG.market.max_downloads * CONFIG.store.blocks_in_flight
    assert slow.asked[messages.SliceGet] <= 8 * BLOCKS + lost
    assert worker.fetched[-1].done_bytes <= BUDGET


async def test_what_is_withdrawn_and_claimed_again_at_once_is_fetched(
    source: Source, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record says the same as before, so no new one is issued: that must not be waited for."""
    withdrawn: list[ExpertRange] = []
    settled = Volunteer._settled

    def once(self: Volunteer, view: View, now_s: float) -> list[Any]:
        found: list[Any] = settled(self, view, now_s)
        if found and not withdrawn and len(self._entries) == 1:  # the last one: nothing else makes a record
            ((_, item, entry),) = found
            withdrawn.append(item)
            return [(-1.0, item, entry)]  # anything else is scarcer
        return found

    monkeypatch.setattr(Volunteer, "_settled", once)
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        address = await start_source(nursery, network, source, 1)
        config = replace(CONFIG, market=replace(CONFIG.market, max_downloads=1))
        async with joined(network, [address], tmp_path, device, 2 * BUDGET, config=config) as worker:
            await worker.until_serving(source, 120)
        nursery.cancel_scope.cancel()
    assert len(withdrawn) == 1
    assert source.n_announced == 16


async def test_claims_are_downloaded_as_soon_as_everybody_has_heard_of_them(
    index: ModelIndex, source: Source, device: Device, tmp_path: Path
) -> None:
    """A record may wait for seconds until it goes out: from then on they settle, not from the next round on."""
    asked_s: list[float] = []
    published_s: list[float] = []

    class Noting(Source):
        def _slice(self, message: messages.SliceGet) -> tuple[Message, Body]:
            asked_s.append(trio.current_time())
            return super()._slice(message)

    def heard(change: Change) -> None:
        models = change.record.state.models if isinstance(change.record, NodeRecord) else ()
        if change.node_id == KEY.node_id and any(item.fetching for item in models):
            published_s.append(trio.current_time())

    noting = Noting(index, source.manifest)
    config = replace(
        CONFIG,
        market=replace(CONFIG.market, round_s=60.0),
        gossip=replace(CONFIG.gossip, issue_burst=1, issue_interval_s=10.0),
    )
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        address = await start_source(nursery, network, noting, 1)
        async with joined(network, [address], tmp_path, device, BUDGET, config=config) as worker:
            worker.parts.gossiping.service.subscribe(heard)
            await worker.until(lambda: worker.parts.service.market is not None)
            await worker.until(lambda: worker.market.holdings.fetching != ())
            assert published_s == [], "there was a record a moment ago"
            await worker.until(lambda: bool(asked_s))
        nursery.cancel_scope.cancel()
    settle_s = config.market.settle_hop_s  # alone
    assert settle_s <= asked_s[0] - published_s[0] <= settle_s + 0.1


# ---- downloads that fail


async def test_when_nobody_gives_slices_they_are_asked_for_now_and_then(
    source: Source, device: Device, tmp_path: Path
) -> None:
    source.refusing.add(messages.SliceGet)
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        address = await start_source(nursery, network, source, 1)
        async with joined(network, [address], tmp_path, device, BUDGET) as worker:
            await trio.sleep(600)
            assert worker.waits == [], "the session goes on"
            assert 20 < source.asked[messages.SliceGet] < 1000
            assert worker.market.serving == ()
            assert source.announced == []
            source.refusing.clear()
            await worker.until_serving(source, 120)
        nursery.cancel_scope.cancel()


async def test_what_failed_downloads_leave_takes_no_more_than_the_budget(
    index: ModelIndex, source: Source, device: Device, tmp_path: Path
) -> None:
    partial = Partial(index, source.manifest)
    network = MemoryNetwork()
    budget = 5 * EXPERT_BYTES
    async with trio.open_nursery() as nursery:
        address = await start_source(nursery, network, partial, 1)
        async with joined(network, [address], tmp_path, device, budget) as worker:
            for _ in range(60):
                await trio.sleep(10)
                assert on_disk(tmp_path) < budget + EXPERT_BYTES
            assert partial.asked[messages.SliceGet] > 8 * BLOCKS * 2 // 3
            other = await start_source(nursery, network, source, 2)
            worker.parts.meeting.contacts.add([other])
            await worker.until_serving(source, 120)
            assert on_disk(tmp_path) < budget + EXPERT_BYTES
        nursery.cancel_scope.cancel()


async def test_a_lost_connection_does_not_end_the_market(
    index: ModelIndex, source: Source, device: Device, tmp_path: Path
) -> None:
    slow = Slow(index, source.manifest)
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        address = await start_source(nursery, network, slow, 1)
        async with joined(network, [address], tmp_path, device, BUDGET) as worker:
            for n_asked in (5, 60, 90):
                await worker.until(lambda n_asked=n_asked: slow.asked[messages.SliceGet] >= n_asked)  # type: ignore[misc]
                network.break_all("worker")
            await worker.until_serving(slow)
        nursery.cancel_scope.cancel()
    assert on_disk(tmp_path) < BUDGET + EXPERT_BYTES


async def test_a_source_that_lies_is_suspected_of_what_it_says_to_hold(
    index: ModelIndex, source: Source, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suspected: set[NodeId] = set()
    suspect = Coverage.suspect

    def noting(self: Coverage, node_id: NodeId, is_suspected: bool) -> None:
        (suspected.add if is_suspected else suspected.discard)(node_id)
        suspect(self, node_id, is_suspected)

    monkeypatch.setattr(Coverage, "suspect", noting)
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        bad = await start_source(nursery, network, Liar(index, source.manifest), 1)
        good = await start_source(nursery, network, source, 2)
        async with joined(network, [bad, good], tmp_path, device, BUDGET) as worker:
            await worker.until_serving(source)
            await trio.sleep(20)
            assert suspected == {bad.node_id}
        nursery.cancel_scope.cancel()


# ---- the disk


def refuse(path: str, flags: int) -> int:
    raise OSError(28, "No space left on device")


async def test_a_full_disk_with_nothing_served_ends_the_command(
    source: Source, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incoming, "_creating", refuse)
    network = MemoryNetwork()
    group = pytest.RaisesGroup(
        pytest.RaisesExc(StoreError, match="No space left.*--home DIR"), flatten_subgroups=True
    )
    with group:
        async with trio.open_nursery() as nursery:
            address = await start_source(nursery, network, source, 1)
            async with joined(network, [address], tmp_path, device, BUDGET):
                await trio.sleep(100)


async def test_a_full_disk_with_something_served_leaves_that(
    source: Source, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = MemoryNetwork()
    config = replace(CONFIG, market=replace(CONFIG.market, max_downloads=1))
    create, is_full = incoming._creating, True
    refused: set[tuple[int, str]] = set()

    def creating(path: str, flags: int) -> int:
        if not (is_full and source.n_announced):
            return create(path, flags)
        refused.add((round(trio.current_time()), Path(path).name.rsplit("-", 1)[0]))
        return refuse(path, flags)

    monkeypatch.setattr(incoming, "_creating", creating)
    async with trio.open_nursery() as nursery:
        address = await start_source(nursery, network, source, 1)
        async with joined(network, [address], tmp_path, device, BUDGET, config=config) as worker:
            await worker.until(lambda: source.n_announced > 0)
            n_served = source.n_announced
            await trio.sleep(300)
            assert source.n_announced == n_served < 8
            assert 1 < len(refused) <= 2 + 300 / CONFIG.market.retry_s, "it does not download for nothing"
            assert source.peers[-1].ended is None
            is_full = False
            await worker.until_serving(source, 120)
        nursery.cancel_scope.cancel()
    assert source.n_announced == 8


# ---- giving up


def claim(network: str, number: int, model: bytes, *serving: ExpertRange) -> NodeRecord:
    """The record of a node that serves these experts, at a site of its own."""
    holdings = ModelHoldings(model, 2, 8, serving, (), 512, False)
    state = OwnState((f"host{number}:7",), (), ("worker",), 5, "cpu", (holdings,))
    key = NodeKey.from_seed(bytes([number]) * 32)
    return sign_record(key, network_id(network_tag(network, None).hex()), (1, 1), 3600, 0, state)


async def ask_rows(peer: Peer, model: bytes, layer: int, expert: int) -> npt.NDArray[np.float32]:
    """One row of ones through one expert: f32 [1, 256]. RequestRefusedError."""
    message = messages.Experts(model, layer, "experts", "f32", 1, 1)
    zero = np.zeros(1, np.int32)
    rows = np.ones((1, 256), np.float32)
    body = encode_experts_body(rows, zero, np.full(1, expert, np.int32), None, "f32")
    reply, reply_body = await peer.request(message, body)
    assert isinstance(reply, messages.Rows)
    return parse_rows_body_untrusted(reply, reply_body, 1, 256)[:1]


async def test_what_is_given_up_is_told_before_its_memory_is_freed(
    source: Source, device: Device, tmp_path: Path
) -> None:
    """Five others hold what this worker holds, and nobody the rest: it exchanges, and never holds too much."""
    market = replace(CONFIG.market, surplus_share=1.0, max_surplus_share=1.0)
    network = MemoryNetwork()
    model = source.manifest.model_id
    async with trio.open_nursery() as nursery:
        address = await start_source(nursery, network, source, 1)
        config = replace(CONFIG, market=market)
        async with joined(network, [address], tmp_path, device, BUDGET, config=config) as worker:
            await worker.until_serving(source)
            before = experts_of(worker.market.serving)
            residence = worker.parts.service.residence
            assert residence is not None
            table = worker.parts.gossiping.service.table
            for number in range(20, 25):
                table.offer(claim("test", number, model, *worker.market.serving), trio.current_time())
            n_told = len(source.announced)
            with trio.fail_after(120):
                while len(source.announced) == n_told:
                    await trio.lowlevel.checkpoint()
                    await trio.sleep(0.01)
            told_s = trio.current_time()
            gone = before - experts_of(tuple(ExpertRange(*item) for item in source.announced[-1].holdings))
            assert len(gone) in (4, 8)
            (layer, expert), peer = min(gone), source.peers[-1]
            await trio.sleep(market.withdraw_s - 0.1)
            assert np.isfinite(await ask_rows(peer, model, layer, expert)).all()
            assert residence.bank.used_bytes == BUDGET
            await trio.sleep(0.2)
            assert trio.current_time() - told_s < market.withdraw_s + 0.5
            with pytest.raises(RequestRefusedError, match="not_owner"):
                await ask_rows(peer, model, layer, expert)
            assert residence.bank.used_bytes <= BUDGET
            await worker.until(lambda: bool(experts_of(worker.market.serving) - before), 60)
            for _ in range(300):
                await trio.sleep(0.5)
                assert residence.bank.used_bytes <= BUDGET
                assert on_disk(tmp_path) < BUDGET + EXPERT_BYTES
            assert not experts_of(worker.market.serving) & before, "both runs went for what nobody had"
        nursery.cancel_scope.cancel()


async def test_who_has_said_that_it_leaves_announces_nothing_more(
    source: Source, device: Device, tmp_path: Path
) -> None:
    """A download that ends within the goodbye would bring it back into routing."""
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        address = await start_source(nursery, network, source, 1)
        async with joined(network, [address], tmp_path, device, BUDGET) as worker:
            await worker.until_serving(source)
            service = worker.parts.service
            await service.leave()
            assert source.announced[-1].state == "leaving"
            worker.market._volunteer._serving.pop()
            service._market_changed()
            await trio.sleep(1)
            assert source.announced[-1].state == "leaving"
        nursery.cancel_scope.cancel()


# ---- weights that come out wrong


async def test_broken_weights_in_a_later_layer_end_the_service_of_the_model(
    source: Source, device: Device, tmp_path: Path
) -> None:
    """Something is served by then: it is withdrawn everywhere, and another model is taken."""
    path = write_tiny_gguf(tmp_path / "broken.gguf", replace(MODEL, down_types=("Q8_0", "Q4_0")))
    with ModelIndex.open(path) as index:
        place = index.tensors["blk.1.ffn_down_exps.weight"]
    content = np.fromfile(path, np.uint8)
    blocks = content[place.offset : place.offset + place.n_bytes].reshape(-1, 18)
    blocks[:, :2] = np.array([np.nan], np.float16).view(np.uint8)
    content.tofile(path)
    network = MemoryNetwork()
    home = tmp_path / "home"
    with ModelIndex.open(path) as index:
        broken = Slow(index, build_manifest(index))
        async with trio.open_nursery() as nursery:
            first = await start_source(nursery, network, broken, 1)
            async with joined(network, [first], home, device, 16 * EXPERT_BYTES) as worker:
                await worker.until_waiting(2)
                assert "is right with other weights" in worker.waits[1]
                table = worker.parts.gossiping.service.table
                own = table.get(KEY.node_id)
                assert own is not None
                await worker.until(lambda: table.get(KEY.node_id).state.models == (), 10)  # type: ignore[union-attr]
                assert not list(home.rglob("*.gguf"))
                assert not list(home.rglob("*.part"))
                second = await start_source(nursery, network, source, 2)
                worker.parts.meeting.contacts.add([second])
                await worker.until_serving(source)
                n_changes = len(worker.parts.gossiping.service._listeners)
                assert n_changes <= 4, "the market that ended hears no more"
            nursery.cancel_scope.cancel()


async def test_nodes_of_our_own_network_count_one_by_one_once_we_know_where_we_are(
    source: Source, device: Device, tmp_path: Path
) -> None:
    """A node's first record may have no address yet; two neighbours on a LAN are two replicas all the same."""
    network = MemoryNetwork()
    model = source.manifest.model_id
    async with trio.open_nursery() as nursery:
        address = await start_source(nursery, network, source, 1)
        async with joined(network, [address], tmp_path, device, BUDGET) as worker:
            await worker.until_serving(source)
            gossip, record = worker.parts.gossiping.service, worker.parts.gossiping.record
            for number in (20, 21):
                holdings = ModelHoldings(model, 2, 8, (ExpertRange(0, 0, 4),), (), 512, False)
                state = OwnState((f"192.168.7.{number}:7",), (), ("worker",), 5, "cpu", (holdings,))
                key = NodeKey.from_seed(bytes([number]) * 32)
                name = network_id(network_tag("test", None).hex())
                gossip.table.offer(sign_record(key, name, (1, 1), 3600, 0, state), trio.current_time())
            await trio.sleep(1)
            assert worker.market._view.replicas[0] < 1.5
            record.listening([("192.168.7.9", 7)])
            await trio.sleep(10)
            assert worker.market._view.replicas[0] == 2.0
            lost = NodeKey.from_seed(bytes([20]) * 32).node_id
            worker.market._lost = lambda: frozenset({lost})
            await trio.sleep(10)
            one = pytest.approx(1 + CONFIG.market.suspect_weight, abs=0.01)
            assert worker.market._view.replicas[0] == one
            for place in ("192.168.9.9", "192.168.7.9"):  # we move, and it is suspected still
                record.listening([(place, 7)])
                await trio.sleep(15)
            assert worker.market._view.replicas[0] == one
            worker.market._lost = frozenset
            await trio.sleep(10)
            assert worker.market._view.replicas[0] == 2.0
        nursery.cancel_scope.cancel()
