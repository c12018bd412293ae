"""Keeping contact: whom to dial, how soon again, what ends it, and never two connections with one node."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

from swarmnode.config import AddressBookConfig, ContactConfig
from swarmnode.errors import BadReplyError, StoreError
from swarmnode.identity import NodeKey
from swarmnode.net.address import PeerAddress
from swarmnode.net.links import serve
from swarmnode.net.peer import OnPeer, Peer
from swarmnode.services.address_book import AddressBook, AddressBookKeeper, load_book
from swarmnode.services.connections import Connections
from swarmnode.services.contact import Contacts
from swarmnode.services.dial_plan import Source
from swarmnode.services.reports import Connecting, Waiting
from swarmnode.services.runners import Inline
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


class Node:
    """A node that dials and is dialled, as nodes are wired."""

    def __init__(
        self,
        network: MemoryNetwork,
        seed: int,
        nursery: trio.Nursery,
        *,
        config: ContactConfig = CONFIG,
        rng: int = 0,
        waits: bool = False,
    ) -> None:
        self.name = f"node{seed}"
        self.endpoint = endpoint(seed, "worker")
        self.node_id = self.endpoint.credentials.node_id
        self.address = PeerAddress(self.node_id, self.name, 1)
        self.log = Log()
        self.met: list[PeerAddress] = []
        self.attended: list[Peer] = []
        self._host = network.host(self.name)
        self._nursery = nursery
        self.connections = Connections(self.node_id, config, trio.current_time)
        self.contacts = Contacts(
            self._host,
            self.endpoint,
            {},
            self.attend,
            config,
            self.log.report,
            random.Random(rng),
            connections=self.connections,
            on_met=lambda address, peer: self.met.append(address),
            waits_for_others=waits,
        )

    async def attend(self, peer: Peer) -> None:
        self.attended.append(peer)
        await peer.wait_closed()

    async def listen(self, port: int = 1) -> None:
        on_peer = self.connections.attended(self.attend)
        await self._nursery.start(
            partial(serve, self._host, self.endpoint, handlers={}, host=None, port=port, on_peer=on_peer)
        )

    def start(self) -> None:
        self._nursery.start_soon(self.contacts.run)

    def is_connected_to(self, other: Node) -> bool:
        return other.node_id in self.connections.connected


@asynccontextmanager
async def nodes(
    count: int, latency_s: float = 0.01, config: ContactConfig = CONFIG
) -> AsyncIterator[tuple[MemoryNetwork, list[Node]]]:
    """Nodes that listen and do not dial yet."""
    network = MemoryNetwork(latency_s=latency_s)
    async with trio.open_nursery() as nursery:
        made = [Node(network, seed, nursery, config=config) for seed in range(1, count + 1)]
        for node in made:
            await node.listen()
        yield network, made
        nursery.cancel_scope.cancel()


async def until(condition: Callable[[], bool]) -> float:
    """The virtual time at which something holds."""
    with trio.fail_after(1000):
        while not condition():  # noqa: ASYNC110 - whatever the condition looks at cannot wake us
            await trio.sleep(0.01)
    return trio.current_time()


def strangers(count: int, host: str = "dead") -> list[PeerAddress]:
    """Addresses of that many different nodes."""
    keys = (NodeKey.from_seed(number.to_bytes(32, "big")) for number in range(1, count + 1))
    return [PeerAddress(key.node_id, f"{host}{number}", 1) for number, key in enumerate(keys)]


@pytest.mark.parametrize("black_holes", [False, True], ids=["refused", "no answer"])
async def test_500_dead_addresses_cost_seconds(black_holes: bool) -> None:
    """Case 8: the one that lives stands last in the list, and is reached all the same; others are not asked twice."""
    async with nodes(2) as (network, (me, other)):
        addresses = strangers(500)
        if black_holes:
            network.partition([me.name], [address.host for address in addresses])
        started_s = trio.current_time()
        me.contacts.add([*addresses, other.address])
        me.start()
        took_s = await until(lambda: me.is_connected_to(other)) - started_s
        assert took_s < 12
        assert len(me.log.waits) < 10
        assert me.met == [other.address]


async def test_the_worst_place_in_a_list_of_black_holes_is_reached_within_15_s() -> None:
    took_s = []
    for seed in range(8):
        network = MemoryNetwork(latency_s=0.01)
        async with trio.open_nursery() as nursery:
            me, other = Node(network, 1, nursery, rng=seed), Node(network, 2, nursery)
            await other.listen()
            addresses = strangers(500)
            network.partition([me.name], [address.host for address in addresses])
            started_s = trio.current_time()
            me.contacts.add([*addresses, other.address])
            me.start()
            took_s.append(await until(partial(me.is_connected_to, other)) - started_s)
            nursery.cancel_scope.cancel()
    assert max(took_s) < 15
    assert sum(took_s) / len(took_s) < 8


async def test_only_so_many_of_a_list_are_connected_and_others_take_their_places() -> None:
    config = ContactConfig(max_contacts=3, redial_min_s=1.0, redial_max_s=16.0)
    async with nodes(10, config=config) as (network, (me, *others)):
        me.contacts.add(node.address for node in others)
        me.start()
        await trio.sleep(60)
        first = set(me.connections.connected)
        assert len(first) == 3
        for node in others:
            if node.node_id in first:
                network.break_all(node.name)
                network.partition([me.name], [node.name])
        await trio.sleep(60)
        second = set(me.connections.connected)
        assert len(second) == 3
        assert not first & second


async def test_several_addresses_of_a_node_are_tried_in_order_and_the_good_one_first_next_time() -> None:
    async with nodes(2) as (network, (me, other)):
        hole = PeerAddress(other.node_id, "hole", 1)
        shut = PeerAddress(other.node_id, other.name, 99)
        network.partition([me.name], ["hole"])
        me.contacts.add([hole, shut, other.address])
        me.start()
        started_s = trio.current_time()
        took_s = await until(lambda: me.is_connected_to(other)) - started_s
        assert 0.25 < took_s < 0.5, "a black hole costs 250 ms, a refusal a round trip"
        network.break_all(other.name)
        await until(lambda: not me.is_connected_to(other))
        await until(lambda: me.is_connected_to(other))
        assert me.met == [other.address, other.address]
        assert len(me.log.dials) == 2
        assert me.log.dials[1] == f"{other.name} port 1"


async def test_an_address_with_another_node_is_wrong_for_that_id_only() -> None:
    async with nodes(3) as (_, (me, second, third)):
        wrong = PeerAddress(third.node_id, second.name, 1)
        me.contacts.add([wrong, third.address, second.address])
        me.start()
        await until(lambda: me.is_connected_to(second) and me.is_connected_to(third))
        target = me.contacts._plan.get(third.node_id)
        assert target is not None
        assert target.places == (third.address,)


async def test_a_node_that_dialled_us_is_not_dialled() -> None:
    async with nodes(2) as (_, (me, other)):
        other.contacts.add([me.address])
        other.start()
        await until(lambda: me.is_connected_to(other))
        me.contacts.add([other.address])
        me.start()
        await trio.sleep(100)
        assert me.log.dials == []
        assert (len(me.attended), len(other.attended)) == (1, 1)


@pytest.mark.parametrize("latency_s", [0.0, 0.01, 0.5])
async def test_two_nodes_that_dial_each_other_at_once_keep_the_dial_of_the_lower_id(latency_s: float) -> None:
    async with nodes(2, latency_s) as (_, pair):
        low, high = sorted(pair, key=lambda node: node.node_id)
        low.contacts.add([high.address])
        high.contacts.add([low.address])
        low.start()
        high.start()
        await trio.sleep(20)
        assert low.connections.connected[high.node_id].is_dialer
        assert not high.connections.connected[low.node_id].is_dialer
        peers = (low.connections.connected[high.node_id], high.connections.connected[low.node_id])
        await trio.sleep(200)
        assert peers == (low.connections.connected[high.node_id], high.connections.connected[low.node_id])
        assert all(peer.ended is None for peer in peers)
        assert (low.log.waits, high.log.waits) == ([], [])


async def test_a_node_that_lost_its_connection_and_dials_again_takes_the_place_of_the_old_one() -> None:
    """Its side is gone without a word; ours would be found dead 45 s later only."""
    async with nodes(2) as (network, (me, other)):
        me.contacts.add([other.address])
        me.start()
        await until(lambda: me.is_connected_to(other))
        old = me.connections.connected[other.node_id]
        await trio.sleep(15)
        async with trio.open_nursery() as nursery:
            again = Node(network, 2, nursery)
            again.contacts.add([me.address])
            again.start()
            await until(lambda: again.is_connected_to(me))
            await until(lambda: old.ended is not None)
            new = me.connections.connected[other.node_id]
            assert new is not old
            assert not new.is_dialer
            await trio.sleep(30)
            assert me.connections.connected[other.node_id] is new, "the old one's end did not remove it"
            nursery.cancel_scope.cancel()


async def test_whom_to_dial_changes_while_it_runs() -> None:
    async with nodes(4) as (network, (me, second, third, fourth)):
        me.start()
        await trio.sleep(10)
        me.contacts.set_wanted([second.address, third.address])
        await until(lambda: me.is_connected_to(second) and me.is_connected_to(third))
        me.contacts.set_wanted([third.address, fourth.address])
        await until(lambda: me.is_connected_to(fourth))
        assert me.is_connected_to(second), "who is no longer wanted stays connected"
        for node in (second, third):
            network.break_all(node.name)
        await until(lambda: not me.is_connected_to(second))
        await trio.sleep(60)
        assert me.is_connected_to(third)
        assert not me.is_connected_to(second)
        me.contacts.remove([third.node_id])
        network.break_all(third.name)
        await trio.sleep(60)
        assert not me.is_connected_to(third)


async def test_wanted_nodes_do_not_wait_for_dead_lists() -> None:
    async with nodes(2) as (network, (me, other)):
        addresses = strangers(500)
        network.partition([me.name], [address.host for address in addresses])
        me.contacts.add(addresses)
        me.start()
        await trio.sleep(20)
        me.contacts.set_wanted([other.address])
        started_s = trio.current_time()
        assert await until(lambda: me.is_connected_to(other)) - started_s < 1


async def test_remembered_nodes_are_dialled_when_no_other_answers() -> None:
    async with nodes(3) as (network, (me, listed, remembered)):
        me.contacts.add([listed.address])
        me.contacts.add([remembered.address], Source.REMEMBERED)
        me.start()
        await trio.sleep(60)
        assert me.is_connected_to(listed)
        assert not me.is_connected_to(remembered)
        network.partition([me.name], [listed.name])
        network.break_all(listed.name)
        assert await until(lambda: me.is_connected_to(remembered)) < 60 + 10


async def test_a_node_that_waits_to_be_dialled_tells_nobody_of_its_book() -> None:
    """A backbone whose workers had left once printed dials of them, 45 lines in 80 s."""
    async with nodes(1) as (network, (named,)), trio.open_nursery() as nursery:
        me = Node(network, 9, nursery, waits=True)
        me.contacts.add(strangers(1), Source.REMEMBERED)
        me.start()
        await trio.sleep(60)
        assert (me.log.dials, me.log.waits) == ([], [])
        me.contacts.add([named.address])
        await until(lambda: me.is_connected_to(named))
        assert me.log.dials == [f"{named.name} port 1"]
        nursery.cancel_scope.cancel()


async def test_who_said_goodbye_to_a_node_that_waits_is_not_dialled_at_once() -> None:
    async with nodes(1) as (network, (worker,)), trio.open_nursery() as nursery:
        me = Node(network, 9, nursery, waits=True)
        await me.listen()
        worker.contacts.add([me.address])
        worker.start()
        await until(lambda: worker.is_connected_to(me))
        me.contacts.add([worker.address], Source.REMEMBERED)
        me.start()
        worker.contacts.remove([me.node_id])
        worker.attended[0].close("leaving")
        await until(lambda: not me.is_connected_to(worker))
        left_s = trio.current_time()
        await until(lambda: me.is_connected_to(worker))
        assert trio.current_time() - left_s >= CONFIG.redial_max_s / 2
        nursery.cancel_scope.cancel()


async def test_without_any_list_remembered_nodes_are_dialled_at_once() -> None:
    async with nodes(2) as (_, (me, other)):
        me.contacts.add([other.address], Source.REMEMBERED)
        me.start()
        started_s = trio.current_time()
        assert await until(lambda: me.is_connected_to(other)) - started_s < 1


@pytest.mark.parametrize("is_higher", [False, True])
async def test_a_dial_that_hangs_is_forgotten_when_the_node_has_dialled_us(is_higher: bool) -> None:
    """The higher id gives it up; the lower one's would win, so it goes on, and nobody hears of its failure."""
    async with nodes(2) as (network, pair):
        me, other = sorted(pair, key=lambda node: node.node_id, reverse=is_higher)
        network.partition([me.name], ["hole"])
        me.contacts.add([PeerAddress(other.node_id, "hole", 1)])
        me.start()
        await trio.sleep(1)
        other.contacts.add([me.address])
        other.start()
        await until(lambda: me.is_connected_to(other))
        assert len(me.contacts._scopes) == (0 if is_higher else 1)
        await trio.sleep(100)
        assert me.contacts._scopes == {}
        assert me.log.waits == []
        assert me.is_connected_to(other)


async def test_a_node_that_is_removed_and_added_again_in_the_middle_of_a_dial_is_dialled_anew() -> None:
    async with nodes(2, latency_s=1.0) as (_, (me, other)):
        me.start()
        for _ in range(5):
            me.contacts.set_wanted([other.address])
            await trio.sleep(0.7)
            me.contacts.set_wanted([])
        assert me.contacts._scopes == {} or not me.is_connected_to(other)
        me.contacts.set_wanted([other.address])
        await until(lambda: me.is_connected_to(other))
        await trio.sleep(100)
        assert len(other.attended) == 1


async def test_a_restarted_node_joins_through_a_peer_that_it_remembers(tmp_path: Path) -> None:
    """The bootstrap node is gone; what is left of the last run is a file."""
    path = tmp_path / "book"
    config = AddressBookConfig()
    async with nodes(4) as (network, (me, bootstrap, neighbour, newcomer)):
        keeper = AddressBookKeeper(AddressBook(config), path, Inline(), trio.current_time)
        me.contacts.add([bootstrap.address])
        me.contacts.set_wanted([neighbour.address])
        me.start()
        await until(lambda: me.is_connected_to(bootstrap) and me.is_connected_to(neighbour))
        for address in me.met:
            keeper.met(address)
        await keeper.save()
        network.partition([newcomer.name], [bootstrap.name])
        newcomer.contacts.add([bootstrap.address])
        newcomer.contacts.add(load_book(path, config).to_dial(), Source.REMEMBERED)
        newcomer.start()
        started_s = trio.current_time()
        assert await until(lambda: newcomer.is_connected_to(neighbour)) - started_s < 5


async def test_a_dial_begun_while_an_older_connection_closes_is_not_forgotten_with_it() -> None:
    """The node dialled us and was lost again, within the second that our replaced connection takes to close."""
    network, log = MemoryNetwork(latency_s=0.2), Log()
    opened: list[Peer] = []

    async def attend(peer: Peer) -> None:
        opened.append(peer)
        await peer.wait_closed()

    contact = Contacts(network.host("me"), ME, {}, attend, CONFIG, log.report, random.Random(0))
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(serve, network.host("other"), OTHER, handlers={}, host=None, port=1))
        nursery.start_soon(contact.run, [THERE])
        await until(lambda: len(opened) == 1)
        contact.connections.leave(opened[0])  # so it is dialled at once
        await trio.sleep(0.1)
        opened[0].close("replaced")
        await until(lambda: len(opened) == 2)
        await trio.sleep(10)
        assert opened[1].ended is None
        assert len(opened) == 2, "dialled once"
        nursery.cancel_scope.cancel()
