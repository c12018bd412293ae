"""Slices travel on a connection of their own where one can be dialled, and beside the rows where none can."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import trio

from swarmnode.config import StoreConfig
from swarmnode.net.address import PeerAddress
from swarmnode.net.links import dial, serve
from swarmnode.net.peer import Body, Peer
from swarmnode.services.bulk_links import BulkLinks
from swarmnode.testing.memory_net import MemoryNetwork
from swarmnode.wire.constants import ConnectionClass
from swarmnode.wire.messages import Message, Slice, SliceGet
from tests.net.nodes import endpoint

CONFIG = StoreConfig()
BLOCK = SliceGet(bytes(32), 0, 0, "ffn_up_exps", 0, 100)


@dataclass
class Holder:
    """A node that answers slices, and remembers on which class of connection it was asked."""

    asked: list[ConnectionClass] = field(default_factory=list)
    attended: list[ConnectionClass] = field(default_factory=list)
    silent_on: ConnectionClass | None = None

    async def slice(self, peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
        self.asked.append(peer.connection_class)
        if peer.connection_class is self.silent_on:
            await trio.sleep_forever()
        return Slice(0, 100, 1000), (bytes(100),)

    async def attend(self, peer: Peer) -> None:
        self.attended.append(peer.connection_class)


@dataclass
class Joined:
    """A node connected to the holder, and its bulk links."""

    network: MemoryNetwork
    peer: Peer
    links: BulkLinks


@asynccontextmanager
async def joined(holder: Holder, place: tuple[str, int] | None = ("holder", 1)) -> AsyncIterator[Joined]:
    network = MemoryNetwork(latency_s=0.01)
    async with trio.open_nursery() as nursery:
        start = partial(
            serve,
            network.host("holder"),
            endpoint(1),
            handlers={SliceGet: holder.slice},
            host=None,
            port=1,
            on_peer=holder.attend,
        )
        await nursery.start(start)
        holder_id = endpoint(1).credentials.node_id
        address = PeerAddress(holder_id, "holder", 1)
        peer = await nursery.start(partial(dial, network.host("me"), address, endpoint(2), handlers={}))
        said = None if place is None else PeerAddress(holder_id, *place)
        links = BulkLinks(network.host("me"), endpoint(2), lambda peer: said, CONFIG)
        await nursery.start(links.run)
        yield Joined(network, peer, links)
        nursery.cancel_scope.cancel()


async def test_slices_get_a_connection_of_their_own_until_it_is_idle() -> None:
    holder = Holder()
    async with joined(holder) as node:
        source = node.links.source(node.peer)
        assert source is node.links.source(node.peer)
        for _ in range(3):
            await source.request(BLOCK)
        assert holder.asked == [ConnectionClass.BULK] * 3
        assert node.links.connected == (source.node_id,)
        assert holder.attended == [ConnectionClass.LATENCY], "services beside a peer see one connection of it"
        await trio.sleep(CONFIG.bulk_idle_s * 1.5)
        assert not node.links.connected
        assert node.peer.ended is None
        await source.request(BLOCK)
        assert holder.asked == [ConnectionClass.BULK] * 4, "dialled again when it is wanted again"


async def test_one_dial_for_requests_at_once() -> None:
    holder = Holder()
    async with joined(holder) as node:
        source = node.links.source(node.peer)
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(source.request, BLOCK)
        assert holder.asked == [ConnectionClass.BULK] * 8


async def test_a_node_that_cannot_be_dialled_sends_beside_the_rows() -> None:
    for place in (None, ("holder", 2), ("nowhere", 1)):
        holder = Holder()
        async with joined(holder, place) as node:
            source = node.links.source(node.peer)
            for _ in range(3):
                await source.request(BLOCK)
            assert holder.asked == [ConnectionClass.LATENCY] * 3
            assert trio.current_time() < 1


async def test_a_dial_that_hangs_costs_one_pause() -> None:
    holder = Holder()
    async with joined(holder, ("black hole", 1)) as node:
        node.network.partition({"me"}, {"black hole"})
        source = node.links.source(node.peer)
        await source.request(BLOCK)
        assert CONFIG.bulk_dial_s <= trio.current_time() < CONFIG.bulk_dial_s + 0.5
        await trio.sleep(30)
        started_s = trio.current_time()
        await source.request(BLOCK)
        assert trio.current_time() - started_s < 0.5
        assert holder.asked == [ConnectionClass.LATENCY] * 2


async def test_what_was_asked_on_a_link_that_broke_is_asked_on_the_other() -> None:
    holder = Holder(silent_on=ConnectionClass.BULK)
    async with joined(holder) as node:
        source = node.links.source(node.peer)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(source.request, BLOCK)
            while not holder.asked:  # noqa: ASYNC110 - nothing to wake us
                await trio.sleep(0.01)
            (link,) = node.links._links.values()
            assert link.peer is not None
            link.peer.close("done")
        assert holder.asked == [ConnectionClass.BULK, ConnectionClass.LATENCY]
        await source.request(BLOCK)
        assert holder.asked[-1] is ConnectionClass.LATENCY, "not dialled again at once"


async def test_without_run_nothing_is_dialled() -> None:
    holder = Holder()
    async with joined(holder) as node:
        links = BulkLinks(node.network.host("me"), endpoint(2), lambda peer: None, CONFIG)
        await links.source(node.peer).request(BLOCK)
        assert holder.asked == [ConnectionClass.LATENCY]
