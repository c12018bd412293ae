"""Keeping contact: whom to dial, how soon again, and what ends it."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio

from swarmnode.config import ContactConfig
from swarmnode.errors import BadReplyError, StoreError
from swarmnode.net.address import PeerAddress
from swarmnode.net.links import serve
from swarmnode.net.peer import OnPeer, Peer
from swarmnode.services.contact import Contacts
from swarmnode.services.reports import Connecting, Waiting
from swarmnode.testing.memory_net import MemoryNetwork
from tests.services.source import endpoint

CONFIG = ContactConfig(redial_min_s=1.0, redial_max_s=16.0)
ME, OTHER = endpoint(1, "worker"), endpoint(2, "backbone")
THERE = PeerAddress(OTHER.credentials.node_id, "other", 1)


class Log:
    """Events, with their times."""

    def __init__(self) -> None:
        self.dials: list[str] = []
        self.waits: list[Waiting] = []

    def report(self, event: Connecting | Waiting) -> None:
        if isinstance(event, Waiting):
            self.waits.append(event)
        else:
            self.dials.append(event.address)

    def in_steps(self, delays_s: Sequence[float]) -> bool:
        """Whether the pauses were these, times 0.5 to 1."""
        pauses_s = [wait.delay_s for wait in self.waits[: len(delays_s)]]
        return len(pauses_s) == len(delays_s) and all(
            delay_s / 2 <= pause_s <= delay_s for delay_s, pause_s in zip(delays_s, pauses_s, strict=True)
        )


@asynccontextmanager
async def contacts(
    on_peer: OnPeer,
    addresses: Sequence[PeerAddress] = (THERE,),
    on_their_side: OnPeer | None = None,
    listening: bool = True,
) -> AsyncIterator[Log]:
    network, log = MemoryNetwork(), Log()
    async with trio.open_nursery() as nursery:
        if listening:
            host = network.host("other")
            await nursery.start(
                partial(serve, host, OTHER, handlers={}, host=None, port=1, on_peer=on_their_side)
            )
        run = Contacts(network.host("me"), ME, {}, on_peer, CONFIG, log.report, random.Random(0)).run
        nursery.start_soon(run, addresses)
        yield log
        nursery.cancel_scope.cancel()


async def stay(peer: Peer) -> None:
    await peer.wait_closed()


async def fail(peer: Peer) -> None:
    raise BadReplyError("not for me")


async def hang_up(peer: Peer) -> None:
    peer.close("leaving")


async def test_pauses_grow_while_nobody_is_there() -> None:
    async with contacts(stay, listening=False) as log:
        await trio.sleep(100)
    assert log.in_steps([1, 2, 4, 8, 16, 16])
    assert "nobody listens" in log.waits[0].reason


async def test_pauses_grow_for_a_peer_that_answers_but_will_not_do() -> None:
    """Or a worker would fetch the manifest of a model too large for it every second."""
    async with contacts(fail) as log:
        await trio.sleep(100)
    assert log.in_steps([1, 2, 4, 8, 16, 16])
    assert log.waits[0].reason == "other port 1: not for me"


async def test_pauses_grow_for_a_peer_that_hangs_up_at_once() -> None:
    async with contacts(stay, on_their_side=hang_up) as log:
        await trio.sleep(100)
    assert log.in_steps([1, 2, 4, 8, 16, 16])
    assert "closed (leaving)" in log.waits[0].reason


async def test_a_connection_that_went_well_is_dialled_again_soon() -> None:
    async def leave_later(peer: Peer) -> None:
        await trio.sleep(50)
        peer.close("leaving")

    async with contacts(stay, on_their_side=leave_later) as log:
        await trio.sleep(300)
    assert log.in_steps([1, 1, 1, 1])


async def test_a_fault_of_this_machine_ends_it() -> None:
    async def no_disk(peer: Peer) -> None:
        raise StoreError("disk full; --home DIR")

    with pytest.RaisesGroup(pytest.RaisesExc(StoreError, match="disk full"), flatten_subgroups=True):
        async with contacts(no_disk):
            await trio.sleep(10)


async def test_the_own_address_is_left_out_and_others_dialled_once() -> None:
    mine = PeerAddress(ME.credentials.node_id, "me", 1)
    async with contacts(stay, [mine, THERE, THERE]) as log:
        await trio.sleep(10)
    assert log.dials == ["other port 1"]
    assert log.waits == []
