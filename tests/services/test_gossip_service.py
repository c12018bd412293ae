"""Gossip over real connections: records spread, and whoever talks nonsense loses its own connection only."""

from __future__ import annotations

import logging
from collections import Counter
from hashlib import sha256
from itertools import pairwise

import pytest
import trio

from swarmnode.errors import ConnectionLostError, RequestRefusedError, StoreError
from swarmnode.gossip.records import ModelDemand, network_id, sign_record
from swarmnode.identity import NodeId
from swarmnode.net.peer import Body, Handler, Peer
from swarmnode.services.gossip import MAX_NAP_S, asleep_s
from swarmnode.testing.memory_net import MemoryNetwork
from swarmnode.wire.messages import (
    GossipDifferences,
    GossipDigest,
    GossipHave,
    GossipLink,
    GossipRecords,
    GossipWant,
    Message,
    Ok,
)
from tests.services.gossip_nodes import CONFIG, WALL_S, GossipNode, key_of, state_of, stranger, until

KINDS = (GossipLink, GossipHave, GossipWant, GossipDigest)


async def test_two_nodes_hear_each_other_and_of_every_change() -> None:
    network = MemoryNetwork(latency_s=0.02)
    a, b = GossipNode(network, 1), GossipNode(network, 2)
    async with trio.open_nursery() as nursery:
        await a.start(nursery, 10)
        await b.start(nursery, 20)
        await a.meet(nursery, b.address)
        await until(lambda: a.hears(b.node_id) == 20 and b.hears(a.node_id) == 10, 3)
        assert a.service.neighbours == b.service.neighbours == 1
        await trio.sleep(CONFIG.gossip.issue_interval_s)
        a.say(11)
        await until(lambda: b.hears(a.node_id) == 11, 3)
        b.service.publish_demand((ModelDemand(bytes(32), b"much"),))
        await until(lambda: [d.models[0].sketch for d in a.service.table.demands()] == [b"much"], 10)
        nursery.cancel_scope.cancel()
    assert b.heard_of(a.node_id) == [10, 11]
    assert [node.kept for node in (a, b)] == [[], []]


async def test_who_subscribes_late_hears_all_and_who_has_enough_nothing() -> None:
    network = MemoryNetwork()
    a, b = GossipNode(network, 1), GossipNode(network, 2)
    heard: list[object] = []
    async with trio.open_nursery() as nursery:
        await a.start(nursery)
        await b.start(nursery)
        await a.meet(nursery, b.address)
        await until(lambda: a.hears(b.node_id) == 1)
        unsubscribe = a.service.subscribe(lambda change: heard.append(change.node_id))
        assert set(heard) == {a.node_id, b.node_id}
        unsubscribe()
        b.say(2)
        await until(lambda: a.hears(b.node_id) == 2)
        nursery.cancel_scope.cancel()
    assert len(heard) == 2


async def test_five_nodes_in_a_line_hear_of_all() -> None:
    network = MemoryNetwork(latency_s=0.05)
    nodes = [GossipNode(network, seed) for seed in range(1, 6)]
    async with trio.open_nursery() as nursery:
        for node in nodes:
            await node.start(nursery)
        for node, other in pairwise(nodes):
            await node.meet(nursery, other.address)
        await until(lambda: all(a.hears(b.node_id) == 1 for a in nodes for b in nodes), 10)
        await trio.sleep(CONFIG.gossip.issue_interval_s)
        nodes[0].say(2)
        await until(lambda: nodes[4].hears(nodes[0].node_id) == 2, 10)
        nursery.cancel_scope.cancel()
    for node in nodes:
        for other in nodes:
            if other is not node:
                assert node.heard_of(other.node_id) in ([1], [1, 2])


async def test_a_leave_is_heard_at_once_and_everywhere() -> None:
    network = MemoryNetwork()
    nodes = [GossipNode(network, seed) for seed in range(1, 4)]
    a, b, c = nodes
    async with trio.open_nursery() as nursery:
        for node in nodes:
            await node.start(nursery)
        await a.meet(nursery, b.address)
        await b.meet(nursery, c.address)
        await until(lambda: c.hears(a.node_id) == 1)
        a.say(2)  # told in five seconds; a leave does not wait for that
        a.service.publish(state_of("node1", 2, leaving=True))
        await until(lambda: a.node_id not in {record.node_id for record in c.service.table.live()}, 3)
        nursery.cancel_scope.cancel()
    assert c.heard_of(a.node_id)[-1] is None


async def asleep_and_awake(
    nursery: trio.Nursery, network: MemoryNetwork, naps_s: tuple[float, ...]
) -> tuple[GossipNode, GossipNode, NodeId]:
    """A node that slept so long after it had met another one, which is gone; a newcomer that meets it; who is gone."""
    laptop, newcomer = GossipNode(network, 1), GossipNode(network, 3)
    await laptop.start(nursery)
    async with trio.open_nursery() as others:
        dead = GossipNode(network, 2)
        await dead.start(others)
        await dead.meet(others, laptop.address)
        await until(lambda: laptop.hears(dead.node_id) == 1)
        network.break_all("node2")
        others.cancel_scope.cancel()
    for nap_s in naps_s:
        laptop.asleep_s += nap_s
        await trio.sleep(10.0)
    await newcomer.start(nursery)
    await newcomer.meet(nursery, laptop.address)
    await until(lambda: newcomer.hears(laptop.node_id) == 1 and laptop.hears(newcomer.node_id) == 1)
    await trio.sleep(5.0)
    return laptop, newcomer, dead.node_id


@pytest.mark.parametrize("naps_s", [(3 * 3600.0,), (25.0,) * 24])
async def test_who_slept_does_not_bring_the_dead_back(naps_s: tuple[float, ...]) -> None:
    """The clock of a suspended laptop stands still, and with it the age of all that it knows."""
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        laptop, newcomer, dead = await asleep_and_awake(nursery, network, naps_s)
        assert laptop.hears(dead) is None
        assert newcomer.heard_of(dead) == []
        assert laptop.heard_of(laptop.node_id)[-1] == 1, "it lives, and says so"
        nursery.cancel_scope.cancel()


async def test_what_is_known_before_a_short_sleep_is_known_after_it_and_ends_in_time() -> None:
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        laptop, newcomer, dead = await asleep_and_awake(nursery, network, (400.0,))
        assert laptop.hears(dead) == newcomer.hears(dead) == 1
        await trio.sleep(CONFIG.gossip.ttl_s - 400.0)
        assert laptop.hears(dead) is newcomer.hears(dead) is None
        nursery.cancel_scope.cancel()


async def test_clocks_that_differ_by_little_change_nothing() -> None:
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        laptop, _, dead = await asleep_and_awake(nursery, network, (20.0,))
        born_s = laptop.service.table.issued_s(dead)
        laptop.asleep_s -= 500.0
        await trio.sleep(5.0)
        assert laptop.service.table.issued_s(dead) == born_s
        nursery.cancel_scope.cancel()


def test_how_long_this_machine_slept_does_not_grow_while_it_is_awake() -> None:
    first = asleep_s()
    assert first > -MAX_NAP_S / 10  # the two clocks are not read at one moment
    assert abs(asleep_s() - first) < MAX_NAP_S / 10


async def test_a_record_that_nobody_renews_ends() -> None:
    network = MemoryNetwork()
    a, b = GossipNode(network, 1), GossipNode(network, 2)
    async with trio.open_nursery() as nursery:
        await b.start(nursery)
        async with trio.open_nursery() as first:
            await a.start(first)
            await b.meet(nursery, a.address)
            await until(lambda: b.hears(a.node_id) == 1)
            network.break_all("node1")
            first.cancel_scope.cancel()
        await trio.sleep(CONFIG.gossip.ttl_s - 10)
        assert b.hears(a.node_id) == 1
        await trio.sleep(20)
        assert b.hears(a.node_id) is None
        nursery.cancel_scope.cancel()
    assert b.heard_of(a.node_id) == [1, None]


# ---- peers that talk nonsense


def record_of(seed: int) -> bytes:
    return sign_record(
        key_of(seed), network_id("test"), (1, 1), 600, int(WALL_S), state_of(f"node{seed}", 1)
    ).data


RIGHT = record_of(9)
UNSIGNED = RIGHT[:-1] + bytes([RIGHT[-1] ^ 1])
ABROAD = sign_record(key_of(9), network_id("other"), (1, 1), 600, int(WALL_S), state_of("node9", 1)).data


def in_a_body(data: bytes) -> bytes:
    return len(data).to_bytes(2, "little") + b"\0" + data


BAD_RECORDS: dict[str, tuple[bytes, bytes]] = {
    "not asked for": (RIGHT, in_a_body(record_of(10))),
    "cut": (RIGHT, b"\xff\x0f\x00abc"),
    "twice": (RIGHT, 2 * in_a_body(RIGHT)),
    "wrong signature": (UNSIGNED, in_a_body(UNSIGNED)),
    "another network": (ABROAD, in_a_body(ABROAD)),
    "noise": (b"noise", in_a_body(b"noise")),
}
BAD_BUCKETS: dict[str, bytes] = {
    "cut": b"\x00\x00\xff\xff",
    "half": b"\x00",
    "not asked for": b"\xff\x7f\x00\x00",
    "twice": bytes(8),
}


async def loses_its_connection(
    handler: Handler, offered: bytes | None = None, taken: NodeId | None = None
) -> None:
    """A peer that answers with `handler` (and offers this record) is closed; another one stays and goes on.

    `taken`: whose record may have been taken before.
    """
    network = MemoryNetwork()
    a, b = GossipNode(network, 1), GossipNode(network, 2)
    async with trio.open_nursery() as nursery:
        await a.start(nursery)
        await b.start(nursery)
        good = await a.meet(nursery, b.address)
        bad = await stranger(nursery, network, a.address, dict.fromkeys(KINDS, handler))
        if offered is not None:
            await bad.request(GossipHave(), (sha256(offered).digest()[:8] + b"\0",))
        with trio.fail_after(10):
            ended = await bad.wait_closed()
        assert ended is not None
        assert ended.code in ("bad_gossip", "bad_body")
        await trio.sleep(CONFIG.gossip.issue_interval_s)
        b.say(2)
        await until(lambda: a.hears(b.node_id) == 2, 5)
        assert good.ended is None
        assert list(a.connections.connected) == [b.node_id]
        assert {record.node_id for record in a.service.table.live()} <= {a.node_id, b.node_id, taken}
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("case", BAD_RECORDS)
async def test_records_that_cannot_be_right_cost_the_peer_its_connection(case: str) -> None:
    offered, sent = BAD_RECORDS[case]

    async def liar(peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
        if isinstance(message, GossipWant):
            return GossipRecords(), (sent,)
        return (GossipDifferences(0) if isinstance(message, GossipDigest) else Ok()), ()

    await loses_its_connection(liar, offered, key_of(9).node_id if case == "twice" else None)


@pytest.mark.parametrize("case", BAD_BUCKETS)
async def test_buckets_that_cannot_be_right_cost_the_peer_its_connection(case: str) -> None:
    async def liar(peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
        if isinstance(message, GossipDigest):
            return GossipDifferences(0), (BAD_BUCKETS[case],)
        return Ok(), ()

    await loses_its_connection(liar)


async def test_requests_without_an_answer_hold_up_nothing() -> None:
    network = MemoryNetwork()
    a, b = GossipNode(network, 1), GossipNode(network, 2)
    asked: list[type[Message]] = []

    async def silent(peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
        asked.append(type(message))
        await trio.sleep_forever()
        raise AssertionError("unreachable")

    handlers: dict[type[Message], Handler] = dict.fromkeys(KINDS, silent)
    async with trio.open_nursery() as nursery:
        await a.start(nursery)
        await b.start(nursery)
        peers = [await stranger(nursery, network, a.address, handlers, seed) for seed in range(60, 64)]
        await a.meet(nursery, b.address)
        await until(lambda: a.hears(b.node_id) == 1 and b.hears(a.node_id) == 1, 5)
        await trio.sleep(200)
        b.say(2)
        await until(lambda: a.hears(b.node_id) == 2, 5)
        assert [peer.ended for peer in peers] == [None] * 4, "slow is not wrong"
        nursery.cancel_scope.cancel()
    most = 1 + 205 / CONFIG.gossip.request_timeout_s
    assert max(Counter(asked).values()) <= len(peers) * most, "one of each kind under way at a time"


async def test_a_peer_that_refuses_everything_is_not_asked_all_the_time() -> None:
    """One that has enough neighbours, or another version that does not gossip."""
    network = MemoryNetwork()
    a, b = GossipNode(network, 1), GossipNode(network, 2)
    asked: list[type[Message]] = []

    async def refuse(peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
        asked.append(type(message))
        raise RequestRefusedError("unsupported", "no gossip here")

    async with trio.open_nursery() as nursery:
        await a.start(nursery)
        await b.start(nursery)
        peer = await stranger(nursery, network, a.address, dict.fromkeys(KINDS, refuse))
        await a.meet(nursery, b.address)
        await trio.sleep(300)
        assert peer.ended is None
        assert a.hears(b.node_id) == 1
        nursery.cancel_scope.cancel()
    assert Counter(asked)[GossipLink] <= 1 + 300 / CONFIG.gossip.link_retry_s
    assert len(asked) < 60


async def test_a_peer_that_is_gone_in_the_middle_of_a_request_is_asked_again_when_it_is_back() -> None:
    network = MemoryNetwork(latency_s=0.2)
    a, b = GossipNode(network, 1), GossipNode(network, 2)
    async with trio.open_nursery() as nursery:
        await a.start(nursery)
        await b.start(nursery)
        for pause_s in (0.1, 0.45, 0.7, 1.1, 1.7):
            await a.meet(nursery, b.address)
            await trio.sleep(pause_s)
            network.break_all("node2")
            await until(lambda: not a.connections.connected and not b.connections.connected)
        b.say(2)
        await a.meet(nursery, b.address)
        await until(lambda: a.hears(b.node_id) == 2 and b.hears(a.node_id) == 1, 10)
        nursery.cancel_scope.cancel()


async def test_of_two_connections_of_a_node_the_newer_one_stays() -> None:
    network = MemoryNetwork()
    a = GossipNode(network, 1)
    async with trio.open_nursery() as nursery:
        await a.start(nursery)
        first = await stranger(nursery, network, a.address, {})
        await stranger(nursery, network, a.address, {})
        with trio.fail_after(5):
            await first.wait_closed()
        with pytest.raises(ConnectionLostError):
            await first.request(GossipLink("all", (), (), ()))
        assert len(a.connections.connected) == 1
        nursery.cancel_scope.cancel()


# ---- our own key


async def test_a_request_on_a_connection_that_was_replaced_says_nothing_of_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ends a second later, when the same is under way on the new one: that must not be taken as failed."""
    network = MemoryNetwork()
    a = GossipNode(network, 1)
    told: list[str] = []

    async def silent(peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
        await trio.sleep_forever()
        raise AssertionError("unreachable")

    async with trio.open_nursery() as nursery:
        await a.start(nursery)
        peer = await stranger(nursery, network, a.address, dict.fromkeys(KINDS, silent))
        core = a.service._core
        await until(lambda: any(p.comparing for p in core._overlay), 5)
        monkeypatch.setattr(core, "failed", lambda sent, now_s: told.append(type(sent.message).__name__))
        again = await stranger(nursery, network, a.address, dict.fromkeys(KINDS, silent))
        with trio.fail_after(5):
            await peer.wait_closed()
        await trio.sleep(2)
        assert again.ended is None
        assert told == []
        nursery.cancel_scope.cancel()


async def restored(network: MemoryNetwork, nursery: trio.Nursery, again: GossipNode) -> GossipNode:
    """A node that knows a record of incarnation 5 of node 1, which then starts anew as `again`."""
    b = GossipNode(network, 2)
    await b.start(nursery)
    async with trio.open_nursery() as first:
        a = GossipNode(network, 1, name="first", incarnation=5)
        await a.start(first, 10)
        await a.meet(first, b.address)
        await until(lambda: b.hears(a.node_id) == 10)
        network.break_all("first")
        first.cancel_scope.cancel()
    await again.start(nursery, 20)
    await again.meet(nursery, b.address)
    return b


async def test_an_incarnation_that_jumps_is_stored() -> None:
    """A restored disk: an older number than others have heard."""
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        again = GossipNode(network, 1, incarnation=3)
        b = await restored(network, nursery, again)
        await until(lambda: b.hears(again.node_id) == 20, 10)
        nursery.cancel_scope.cancel()
    assert again.kept
    assert again.kept[-1] == again.service.incarnation >= 5
    assert not again.service.own_conflict


async def test_a_number_that_cannot_be_stored_does_not_end_the_node(caplog: pytest.LogCaptureFixture) -> None:
    def full(incarnation: int) -> None:
        raise StoreError("the disk is full")

    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        again = GossipNode(network, 1, incarnation=3, keep=full)
        b = await restored(network, nursery, again)
        await until(lambda: b.hears(again.node_id) == 20, 10)
        nursery.cancel_scope.cancel()
    assert caplog.messages.count("the disk is full") == 1


async def test_two_nodes_with_one_key_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    network = MemoryNetwork()
    a, twin = GossipNode(network, 1), GossipNode(network, 1, name="twin", incarnation=2)
    c, d = GossipNode(network, 3), GossipNode(network, 4)
    async with trio.open_nursery() as nursery:
        for node in (a, twin, c, d):
            await node.start(nursery)
        await a.meet(nursery, c.address)
        await twin.meet(nursery, d.address)
        await c.meet(nursery, d.address)
        with caplog.at_level(logging.ERROR):
            await until(lambda: a.service.own_conflict or twin.service.own_conflict, 600)
            await trio.sleep(600)
        nursery.cancel_scope.cancel()
    told = [message for message in caplog.messages if "this node's key" in message]
    assert len(told) == a.service.own_conflict + twin.service.own_conflict
