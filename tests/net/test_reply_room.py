"""What a peer costs that asks for much and does not read: a bounded number of bytes, whatever it asks."""

from __future__ import annotations

import tracemalloc
from collections.abc import Mapping
from functools import partial

import pytest
import trio
import trio.testing

from swarmnode.errors import UsageError
from swarmnode.net.peer import Body, Handler, Peer
from swarmnode.testing.memory_net import MemoryNetwork
from swarmnode.wire.connection import printable
from swarmnode.wire.constants import MAX_MANIFEST_BYTES, TrafficClass
from swarmnode.wire.events import ReplyReceived
from swarmnode.wire.messages import Experts, ManifestGet, ManifestReply, Message, Rows, Slice, SliceGet

from .nodes import CLIENT, MODEL, SERVER, dial_from, echo, endpoint, experts, serve_on
from .rude import Rude

MIB = 1024 * 1024
RUDE = 3


class Shop:
    """A server with slices, a manifest and an echo; counts what it made."""

    def __init__(self) -> None:
        self.n_made = 0
        self.peers: list[Peer] = []

    async def slice(self, peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
        assert isinstance(message, SliceGet)
        self.n_made += 1
        await trio.lowlevel.checkpoint()
        return Slice(message.offset, message.length, 2**30), (bytes(message.length),)

    async def manifest(self, peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
        self.n_made += 1
        await trio.lowlevel.checkpoint()
        return ManifestReply(MODEL), (bytes(MAX_MANIFEST_BYTES),)

    async def rows(self, peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
        """A row a pair, as `experts` asks for."""
        assert isinstance(message, Experts)
        self.n_made += 1
        await trio.lowlevel.checkpoint()
        return Rows(message.encoding, message.n_pairs, 1), (bytes(message.reply_bytes(len(body))),)

    @property
    def handlers(self) -> Mapping[type[Message], Handler]:
        return {SliceGet: self.slice, ManifestGet: self.manifest, Experts: self.rows}

    async def remember(self, peer: Peer) -> None:
        self.peers.append(peer)

    async def rude(self, nursery: trio.Nursery) -> Rude:
        network = MemoryNetwork()
        address = await serve_on(
            nursery, network.host("b"), endpoint(SERVER), self.handlers, on_peer=self.remember
        )
        return await Rude.dial(network.host("c"), address, endpoint(RUDE))


def slice_get(number: int, length: int = MIB) -> SliceGet:
    return SliceGet(MODEL, 0, 0, "ffn_up_exps", number * length, length)


async def ask_all(rude: Rude, messages: list[Message], body: tuple[bytes, ...] = ()) -> None:
    """Send requests and read nothing."""
    for message in messages:
        rude.connection.send_request(message, [memoryview(part) for part in body])
    while rude.connection.has_data_to_send:
        await rude.flush()
    await trio.testing.wait_all_tasks_blocked()


@pytest.mark.parametrize(
    ("messages", "body", "limit_bytes"),
    [
        ([slice_get(number) for number in range(256)], (), 4 * MIB),
        ([ManifestGet(MODEL)] * 256, (), 18 * MIB),
        # A body of 120 KB that asks for 2 MiB.
        ([Experts(MODEL, 0, "experts", "f16", 1, 16_384)] * 100, (bytes(128 + 6 * 16_384),), 14 * MIB),
    ],
    ids=["slices", "manifests", "rows"],
)
async def test_a_peer_that_asks_and_does_not_read_costs_little(
    messages: list[Message], body: tuple[bytes, ...], limit_bytes: int
) -> None:
    shop = Shop()
    async with trio.open_nursery() as nursery:
        rude = await shop.rude(nursery)
        tracemalloc.start()
        try:
            await ask_all(rude, messages, body)
            assert tracemalloc.get_traced_memory()[1] < limit_bytes
        finally:
            tracemalloc.stop()
        assert shop.n_made < 5
        assert shop.peers[0]._connection.queued_bytes <= 17 * MIB
        nursery.cancel_scope.cancel()


async def test_all_is_answered_once_the_peer_reads() -> None:
    shop = Shop()
    async with trio.open_nursery() as nursery:
        rude = await shop.rude(nursery)
        await ask_all(rude, [slice_get(number, 100_000) for number in range(200)])
        assert shop.n_made < 30
        while sum(isinstance(event, ReplyReceived) for event in rude.events) < 200:
            assert await rude.receive()
        offsets = [event.message.offset for event in rude.events if isinstance(event, ReplyReceived)]  # type: ignore[attr-defined]
        assert sorted(offsets) == [number * 100_000 for number in range(200)]
        nursery.cancel_scope.cancel()


async def test_a_decode_does_not_wait_for_slices_or_prompts_to_leave() -> None:
    """Bulk and prefill are full and nothing is read; a row is computed and queued all the same."""
    shop = Shop()
    async with trio.open_nursery() as nursery:
        rude = await shop.rude(nursery)
        await ask_all(rude, [slice_get(number) for number in range(50)])
        message, body = experts(500, 3000)
        for _ in range(6):
            rude.connection.send_request(message, [memoryview(part) for part in body], TrafficClass.PREFILL)
        await ask_all(rude, [])
        n_before = shop.n_made
        await ask_all(rude, [Experts(MODEL, 0, "experts", "f16", 1, 1)], (bytes(16 + 6),))
        assert shop.n_made == n_before + 1
        nursery.cancel_scope.cancel()


async def test_cancelling_what_waits_for_room_frees_its_place() -> None:
    shop = Shop()
    async with trio.open_nursery() as nursery:
        rude = await shop.rude(nursery)
        await ask_all(rude, [slice_get(number) for number in range(19)])
        await ask_all(rude, [slice_get(19)])  # behind the others, whichever order trio starts tasks in
        n_before = shop.n_made
        for request_id in list(rude.connection._requests._asked)[:19]:
            rude.connection.cancel_request(request_id)
        await ask_all(rude, [])
        while not any(isinstance(event, ReplyReceived) for event in rude.events):
            assert await rude.receive()
        (reply,) = (event for event in rude.events if isinstance(event, ReplyReceived))
        assert reply.message == Slice(19 * MIB, MIB, 2**30)
        assert shop.n_made == n_before + 1
        nursery.cancel_scope.cancel()


async def test_refusals_and_crashes_give_their_room_back() -> None:
    async def crash(peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
        raise ZeroDivisionError(printable("x"))

    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        numbers = {"bulk_reply_bytes": 1, "decode_reply_bytes": 1}
        server = endpoint(SERVER, numbers=numbers)
        address = await serve_on(nursery, network.host("b"), server, {SliceGet: crash, Experts: echo})
        peer = await dial_from(nursery, network.host("a"), address, endpoint(CLIENT))
        done = []

        async def ask(number: int) -> None:
            with pytest.raises(Exception, match="internal"):
                await peer.request(slice_get(number))
            done.append(number)

        with trio.fail_after(5):
            async with trio.open_nursery() as askers:
                for number in range(40):
                    askers.start_soon(partial(ask, number))
            for _ in range(5):
                await peer.request(*experts())
        assert sorted(done) == list(range(40))
        nursery.cancel_scope.cancel()


async def test_rows_travel_only_in_an_encoding_that_the_peer_lists() -> None:
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        server = endpoint(SERVER, encodings=("f32",))
        address = await serve_on(nursery, network.host("b"), server)
        peer = await dial_from(nursery, network.host("a"), address)
        assert peer.settings.encodings == ("f32",)
        with pytest.raises(UsageError, match="does not read f16"):
            await peer.request(*experts())
        await peer.request(Experts(MODEL, 1, "experts", "f32", 1, 1), (bytes(8), bytes(6)))
        nursery.cancel_scope.cancel()
