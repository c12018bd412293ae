"""Two nodes over the memory network: requests, refusals, crashes, cancellation, endings."""

from __future__ import annotations

from functools import partial

import pytest
import trio

from swarmnode.config import WireConfig
from swarmnode.errors import ConnectionLostError, HandshakeError, RequestRefusedError
from swarmnode.identity import NodeKey
from swarmnode.net.address import PeerAddress
from swarmnode.net.links import dial, serve
from swarmnode.net.peer import Body, Handler, Peer
from swarmnode.testing.memory_net import MemoryNetwork
from swarmnode.wire.endpoint import Endpoint
from swarmnode.wire.handshake import Credentials
from swarmnode.wire.messages import Experts, Message, Models, ModelsGet, Rows

MODEL = bytes(32)
PORT = 7000


def endpoint(seed: int, network: str = "test", config: WireConfig | None = None) -> Endpoint:
    """A node whose id repeats from run to run."""
    key = NodeKey.from_seed(bytes([seed]) * 32)
    return Endpoint.create(Credentials(key), network=network, agent="test", roles=("worker",), config=config)


async def echo(peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
    """Answer with the rows that came."""
    assert isinstance(message, Experts)
    return Rows(message.encoding, message.n_rows, 1), (body[: len(body) - message.pair_bytes],)


def experts(n_rows: int = 1, n_embd: int = 8) -> tuple[Experts, Body]:
    """A request with a body of zeros."""
    message = Experts(MODEL, 1, "experts", "f16", n_rows, 1)
    return message, (bytes(n_rows * n_embd * 2), bytes(6))


async def start(
    nursery: trio.Nursery, handlers: dict[type[Message], Handler], network: MemoryNetwork | None = None
) -> Peer:
    """A server at host b with these handlers; returns the dialer's peer at host a."""
    network = MemoryNetwork() if network is None else network
    server, client = endpoint(1), endpoint(2)
    await nursery.start(partial(serve, network.host("b"), server, handlers=handlers, host=None, port=PORT))
    address = PeerAddress(server.credentials.node_id, "b", PORT)
    peer: Peer = await nursery.start(partial(dial, network.host("a"), address, client, handlers={}))
    return peer


@pytest.mark.parametrize("n_rows", [1, 2, 500, 8192])
async def test_a_request_is_answered(n_rows: int) -> None:
    async with trio.open_nursery() as nursery:
        peer = await start(nursery, {Experts: echo})
        message, body = experts(n_rows, 300)
        reply, reply_body = await peer.request(message, body)
        assert isinstance(reply, Rows)
        assert reply.n_rows == n_rows
        assert reply_body == body[0]
        nursery.cancel_scope.cancel()


async def test_a_refusal_is_an_error_of_that_request_only() -> None:
    async def refuse(peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
        raise RequestRefusedError("busy", "later", 50)

    async with trio.open_nursery() as nursery:
        peer = await start(nursery, {Experts: refuse, ModelsGet: answer_models})
        with pytest.raises(RequestRefusedError) as refusal:
            await peer.request(*experts())
        assert (refusal.value.code, refusal.value.retry_after_ms) == ("busy", 50)
        reply, _ = await peer.request(ModelsGet())
        assert reply == Models(())
        nursery.cancel_scope.cancel()


async def answer_models(peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
    """No models."""
    return Models(()), ()


async def test_another_network_is_refused_without_an_answer() -> None:
    network = MemoryNetwork()
    server, client = endpoint(1), endpoint(2, network="other")
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(serve, network.host("b"), server, handlers={}, host=None, port=PORT))
        address = PeerAddress(server.credentials.node_id, "b", PORT)
        with pytest.raises(HandshakeError):
            await nursery.start(partial(dial, network.host("a"), address, client, handlers={}))
        nursery.cancel_scope.cancel()


async def test_a_broken_stream_ends_requests_in_flight() -> None:
    network = MemoryNetwork()

    async def never(peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
        await trio.sleep_forever()
        raise AssertionError("not reached")

    async def ask() -> None:
        with pytest.raises(ConnectionLostError):
            await peer.request(*experts())
        asked.set()

    asked = trio.Event()
    async with trio.open_nursery() as nursery:
        peer = await start(nursery, {Experts: never}, network)
        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        network.break_all("b")
        await asked.wait()
        ended = await peer.wait_closed()
        assert ended is not None
        nursery.cancel_scope.cancel()
