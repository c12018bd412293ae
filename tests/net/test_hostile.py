"""Peers that break the rules: one clear error, that connection ends, the node and its other peers do not notice."""

from __future__ import annotations

import gc
import os
import tracemalloc

import pytest
import trio
import trio.testing

from swarmnode.config import WireConfig
from swarmnode.errors import ConnectionLostError, HandshakeError
from swarmnode.net.address import PeerAddress
from swarmnode.net.admission import Admission, source_block
from swarmnode.net.peer import Peer
from swarmnode.net.tcp import TcpStream, TcpTransport
from swarmnode.net.transport import Transport
from swarmnode.testing.memory_net import MemoryNetwork
from swarmnode.wire.connection import Connection
from swarmnode.wire.constants import FrameType
from swarmnode.wire.messages import Experts, encode_header
from tests.api.kit import n_descriptors, reset_when_closed, resident_bytes
from tests.wire.malformed import MALFORMED
from tests.wire.pairs import raw_frame, raw_request, raw_start

from .nodes import CLIENT, MODEL, SERVER, connected, dial_from, endpoint, experts, serve_on
from .rude import Rude

RUDE = 3


class Node:
    """A server with one honest peer, and a gate that can be looked at."""

    def __init__(self, network: MemoryNetwork, address: PeerAddress, gate: Admission, honest: Peer) -> None:
        self.network = network
        self.address = address
        self.gate = gate
        self.honest = honest

    @classmethod
    async def start(cls, nursery: trio.Nursery, seed: int = SERVER, **numbers: float) -> Node:
        network = MemoryNetwork()
        server = endpoint(seed, numbers=numbers)
        gate = Admission(server.config)
        address = await serve_on(nursery, network.host("b"), server, admission=gate)
        honest = await dial_from(nursery, network.host("a"), address)
        return cls(network, address, gate, honest)

    async def rude(self) -> Rude:
        return await Rude.dial(self.network.host("c"), self.address, endpoint(RUDE))

    async def is_well(self) -> bool:
        """The honest peer is served, and of the others nothing is left."""
        await self.honest.request(*experts())
        await trio.testing.wait_all_tasks_blocked()
        return (self.gate.n_strangers, self.gate.n_peers) == (0, 1)


@pytest.mark.parametrize(
    ("plain", "code"), [item[1:] for item in MALFORMED], ids=[item[0] for item in MALFORMED]
)
async def test_a_malformed_frame_ends_its_own_connection(plain: bytes, code: str) -> None:
    async with trio.open_nursery() as nursery:
        node = await Node.start(nursery)
        n_tasks = trio.lowlevel.current_statistics().tasks_living
        rude = await node.rude()
        await rude.send_raw(plain)
        assert await rude.last_words() == code
        assert await node.is_well()
        assert trio.lowlevel.current_statistics().tasks_living <= n_tasks
        nursery.cancel_scope.cancel()


async def test_all_malformed_frames_leave_no_memory() -> None:
    """RSS and tasks after 2 x 70 hostile connections as after the first 70."""
    async with trio.open_nursery() as nursery:
        node = await Node.start(nursery)

        async def attack() -> int:
            for _, plain, _ in MALFORMED:
                rude = await node.rude()
                await rude.send_raw(plain)
                await rude.last_words()
            assert await node.is_well()
            gc.collect()
            return tracemalloc.get_traced_memory()[0]

        tracemalloc.start()
        try:
            await attack()
            before = await attack()
            after = await attack()
        finally:
            tracemalloc.stop()
        assert after - before < 256 * 1024
        nursery.cancel_scope.cancel()


GARBAGE = [
    b"",
    b"S",
    b"SN\x02\x01" + bytes(31),
    b"GET / HTTP/1.1\r\n\r\n",
    bytes(36),
    os.urandom(36),
    bytes(100_000),
]


@pytest.mark.parametrize("data", GARBAGE, ids=range(len(GARBAGE)))
async def test_garbage_instead_of_a_handshake_is_not_answered(data: bytes) -> None:
    async with trio.open_nursery() as nursery:
        node = await Node.start(nursery)
        stream = await node.network.host("c").connect(node.address.host, node.address.port)
        with trio.move_on_after(20):
            try:
                await stream.send_all(data)
                assert await stream.receive_some() == b""
            except trio.BrokenResourceError:
                pass
        assert trio.current_time() < 11
        assert await node.is_well()
        nursery.cancel_scope.cancel()


async def test_a_handshake_byte_by_byte_has_ten_seconds() -> None:
    async with trio.open_nursery() as nursery:
        node = await Node.start(nursery)
        stream = await node.network.host("c").connect(node.address.host, node.address.port)
        hello = Connection.dialer(endpoint(RUDE), node.address.node_id).data_to_send(4096)
        started_s = trio.current_time()

        async def drip() -> None:
            for number in range(len(hello)):
                await stream.send_all(hello[number : number + 1])
                await trio.sleep(1)

        with pytest.raises(trio.BrokenResourceError):
            await drip()
        assert trio.current_time() - started_s <= 12
        assert await node.is_well()
        nursery.cancel_scope.cancel()


async def test_a_stream_cut_at_any_byte_leaves_nothing() -> None:
    """During the handshake, in a record, in a frame, in a body, after a good request."""
    async with trio.open_nursery() as nursery:
        node = await Node.start(nursery)
        transport = node.network.host("c")
        for n_bytes in range(0, 36, 5):
            stream = await transport.connect(node.address.host, node.address.port)
            hello = Connection.dialer(endpoint(RUDE), node.address.node_id).data_to_send(4096)
            await stream.send_all(hello[:n_bytes])
            await stream.aclose()
        request = raw_request() + raw_frame(
            FrameType.REQUEST, raw_start(80, hundred(), 20_006, bytes(9)), request_id=3
        )
        for n_bytes in range(0, len(request), 29):
            rude = await node.rude()
            writer = rude.connection._writer
            assert writer is not None
            await rude.stream.send_all(writer.seal(request)[:n_bytes])
            await rude.stream.aclose()
        assert await node.is_well()
        nursery.cancel_scope.cancel()


def hundred() -> bytes:
    """The header of a request of 100 rows of 100 numbers."""
    return encode_header(Experts(MODEL, 1, "experts", "f16", 100, 1))


async def test_a_large_body_that_never_comes_costs_nothing_and_ends_as_too_slow() -> None:
    async with trio.open_nursery() as nursery:
        node = await Node.start(nursery)
        rude = await node.rude()
        header = encode_header(Experts(MODEL, 1, "partial", "f16", 8000, 1))
        tracemalloc.start()
        try:
            await rude.send_raw(
                raw_frame(FrameType.REQUEST, raw_start(80, header, 8000 * 3900 * 2 + 10, bytes(64)))
            )
            await trio.testing.wait_all_tasks_blocked()
            assert tracemalloc.get_traced_memory()[1] < 1024 * 1024
        finally:
            tracemalloc.stop()

        async def look_alive() -> None:
            for nonce in range(100):
                rude.connection.send_ping(nonce)
                await rude.flush()
                await trio.sleep(5)

        nursery.start_soon(look_alive)
        assert await rude.last_words() == "too_slow"
        assert trio.current_time() < 61
        nursery.cancel_scope.cancel()


async def test_a_peer_that_never_reads_meets_the_deadline_and_others_do_not() -> None:
    """Its replies fill the window; the writer waits 30 s, then gives up; the honest peer is served all the while."""
    async with trio.open_nursery() as nursery:
        node = await Node.start(nursery)
        rude = await node.rude()
        for _ in range(40):
            rude.connection.send_request(
                experts(100, 1000)[0], [memoryview(part) for part in experts(100, 1000)[1]]
            )
        while rude.connection.has_data_to_send:
            await rude.flush()
        await trio.sleep(20)
        assert node.gate.n_peers == 2
        await node.honest.request(*experts())
        await trio.sleep(12)
        assert await node.is_well()
        nursery.cancel_scope.cancel()


async def test_a_slow_reader_meets_back_pressure() -> None:
    """Askers wait while 8 MiB are queued, and go on when the peer reads; nothing is lost."""
    network = MemoryNetwork()
    done = []
    async with trio.open_nursery() as nursery:
        peer = await connected(nursery, network=network, max_queued_bytes=100_000)

        async def ask() -> None:
            done.append(await peer.request(*experts(10, 1000)))

        network.partition(["a"], ["b"])
        async with trio.open_nursery() as askers:
            for _ in range(50):
                askers.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            assert peer._connection.queued_bytes < 140_000
            network.heal()
        assert len(done) == 50
        nursery.cancel_scope.cancel()


async def test_more_bytes_than_the_handlers_may_hold_are_refused_as_busy() -> None:
    async with trio.open_nursery() as nursery:
        node = await Node.start(nursery, max_held_bytes=150_000)
        codes = []

        async def ask() -> None:
            try:
                await node.honest.request(*experts(10, 1000))
                codes.append("answered")
            except Exception as error:
                codes.append(getattr(error, "code", repr(error)))

        async with trio.open_nursery() as askers:
            for _ in range(30):
                askers.start_soon(ask)
        assert set(codes) <= {"answered", "busy"}
        assert "answered" in codes
        assert await node.is_well()
        nursery.cancel_scope.cancel()


async def test_strangers_are_counted_and_bounded() -> None:
    """Eight sockets of one address that say nothing; the ninth is closed at once, another address is served."""
    async with trio.open_nursery() as nursery:
        node = await Node.start(nursery)
        streams = [
            await node.network.host("c").connect(node.address.host, node.address.port) for _ in range(9)
        ]
        assert await streams[8].receive_some() == b""
        await trio.testing.wait_all_tasks_blocked()
        assert node.gate.n_strangers == 8
        other = await dial_from(nursery, node.network.host("d"), node.address, endpoint(4))
        other.close()
        await trio.sleep(11)
        assert await node.is_well()
        nursery.cancel_scope.cancel()


async def test_strangers_of_many_addresses_are_bounded_too() -> None:
    async with trio.open_nursery() as nursery:
        node = await Node.start(nursery, max_unauthenticated=10)
        for number in range(15):
            await node.network.host(f"host {number}").connect(node.address.host, node.address.port)
        await trio.testing.wait_all_tasks_blocked()
        assert node.gate.n_strangers == 10
        with pytest.raises((HandshakeError, ConnectionLostError)):
            await dial_from(nursery, node.network.host("d"), node.address, endpoint(4))
        await trio.sleep(11)
        late = await dial_from(nursery, node.network.host("d"), node.address, endpoint(4))
        await late.request(*experts())
        nursery.cancel_scope.cancel()


async def test_one_node_has_four_connections() -> None:
    async with trio.open_nursery() as nursery:
        node = await Node.start(nursery)
        peers = [
            await dial_from(nursery, node.network.host("d"), node.address, endpoint(4)) for _ in range(4)
        ]
        with pytest.raises(ConnectionLostError, match="hung up: not_wanted: too many connections"):
            await dial_from(nursery, node.network.host("d"), node.address, endpoint(4))
        for peer in peers:
            await peer.request(*experts())
            peer.close()
        await trio.sleep(1)
        assert await node.is_well()
        again = await dial_from(nursery, node.network.host("d"), node.address, endpoint(4))
        await again.request(*experts())
        nursery.cancel_scope.cancel()


def test_addresses_that_share_a_limit() -> None:
    assert source_block("127.0.0.1") is None
    assert source_block("::1") is None
    assert source_block("::ffff:127.0.0.1") is None
    assert source_block("::ffff:192.0.2.1") == source_block("192.0.2.1") == "192.0.2.1"
    assert source_block("2001:db8::1") == source_block("2001:db8::2:3") != source_block("2001:db8:0:1::1")
    assert source_block("fe80::1%eth0") == source_block("fe80::2")
    assert source_block("some host") == "some host"
    gate = Admission(WireConfig())
    assert all(gate.admit_stranger("127.0.0.1") for _ in range(64))
    assert not gate.admit_stranger("127.0.0.1")
    for _ in range(64):
        gate.stranger_done("127.0.0.1")
    assert gate.n_strangers == 0


async def test_free_identities_of_one_address_do_not_lock_others_out() -> None:
    """A key costs nothing: what counts is where the connections come from."""
    async with trio.open_nursery() as nursery:
        node = await Node.start(nursery, max_peers=12, max_peers_per_ip=4)
        attacker = node.network.host("d")
        peers = [await dial_from(nursery, attacker, node.address, endpoint(10 + n)) for n in range(4)]
        for number in range(20, 30):
            with pytest.raises(
                ConnectionLostError, match="not_wanted: too many connections from this address"
            ):
                await dial_from(nursery, attacker, node.address, endpoint(number))
        assert node.gate.n_peers == 5
        late = await dial_from(nursery, node.network.host("e"), node.address, endpoint(4))
        await late.request(*experts())
        late.close()
        for peer in peers:
            peer.close()
        await trio.sleep(1)
        assert await node.is_well()
        again = await dial_from(nursery, attacker, node.address, endpoint(40))
        await again.request(*experts())
        nursery.cancel_scope.cancel()


def test_loopback_has_no_limit_of_its_own_but_counts() -> None:
    gate = Admission(WireConfig(max_peers=10, max_peers_per_ip=2))
    nodes = [endpoint(number + 1).credentials.node_id for number in range(11)]
    assert [gate.refuse_node(node, "127.0.0.1") for node in nodes[:10]] == [""] * 10
    assert gate.refuse_node(nodes[10], "192.0.2.1") == "too many connections"
    for node in nodes[:10]:
        gate.node_done(node, "127.0.0.1")
    assert gate.n_peers == 0
    assert not gate._sources
    assert [gate.refuse_node(node, "2001:db8::1") for node in nodes[:2]] == ["", ""]
    assert gate.refuse_node(nodes[2], "2001:db8::2") == "too many connections from this address"


async def test_only_allowed_nodes_may_dial_and_the_others_get_no_answer() -> None:
    friend, stranger = endpoint(4), endpoint(5)
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        server = endpoint(SERVER, allowed=frozenset({friend.credentials.node_id}))
        address = await serve_on(nursery, network.host("b"), server)
        with pytest.raises((HandshakeError, ConnectionLostError)):
            await dial_from(nursery, network.host("a"), address, stranger)
        await (await dial_from(nursery, network.host("a"), address, friend)).request(*experts())
        nursery.cancel_scope.cancel()


async def rude_connection(transport: Transport, address: PeerAddress, number: int) -> None:
    """One of: nothing said, half a hello, after the handshake, after a header, mid-body, after a good request; every
    other one of each ends with a RST."""

    def end_rudely(stream: trio.abc.Stream) -> None:
        assert isinstance(stream, TcpStream)
        if number // 6 % 2:
            reset_when_closed(stream._stream.socket)

    if number % 6 < 2:
        stream = await transport.connect(address.host, address.port)
        end_rudely(stream)
        await stream.send_all(b"SN\x02"[: 3 * (number % 6)])
        await trio.aclose_forcefully(stream)
        return
    rude = await Rude.dial(transport, address, endpoint(10 + number % 50))
    end_rudely(rude.stream)
    match number % 6:
        case 3:
            await rude.send_raw(raw_frame(FrameType.REQUEST, raw_start(80, hundred(), 20_006)))
        case 4:
            await rude.send_raw(raw_frame(FrameType.REQUEST, raw_start(80, hundred(), 20_006, bytes(5000))))
        case 5:
            await rude.send_raw(raw_request())
    await trio.aclose_forcefully(rude.stream)


@pytest.mark.real_time
async def test_300_connections_ended_rudely_leave_nothing() -> None:
    """cases.md 31 and 12, over real sockets: descriptors, memory, tasks and permits flat, the next request answered."""
    transport = TcpTransport()
    async with trio.open_nursery() as nursery:
        server = endpoint(SERVER)
        gate = Admission(server.config)
        address = await serve_on(nursery, transport, server, admission=gate, port=0, host="127.0.0.1")
        honest = await dial_from(nursery, transport, address, endpoint(CLIENT))
        await honest.request(*experts())

        async def settle() -> tuple[int, int]:
            with trio.fail_after(5):
                while gate.n_strangers or gate.n_peers > 1:
                    await honest.request(*experts())
            await trio.testing.wait_all_tasks_blocked(0.01)
            gc.collect()
            return n_descriptors(), trio.lowlevel.current_statistics().tasks_living

        for number in range(30):
            await rude_connection(transport, address, number)
        before, before_bytes = await settle(), resident_bytes()
        for number in range(300):
            await rude_connection(transport, address, number)
        n_files, n_tasks = await settle()
        assert n_files == before[0]
        assert n_tasks <= before[1]
        assert resident_bytes() - before_bytes < 16 * 1024 * 1024
        await honest.request(*experts())
        nursery.cancel_scope.cancel()
