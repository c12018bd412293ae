"""Nodes for the tests of this folder: endpoints with fixed ids, a server and a dialer on the memory network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import trio

from swarmnode.config import WireConfig
from swarmnode.identity import NodeId, NodeKey
from swarmnode.net.address import PeerAddress
from swarmnode.net.admission import Admission
from swarmnode.net.links import dial, serve
from swarmnode.net.peer import Body, Handler, OnPeer, Peer
from swarmnode.net.transport import Transport
from swarmnode.testing.memory_net import MemoryNetwork
from swarmnode.wire.constants import ENCODINGS
from swarmnode.wire.endpoint import Endpoint
from swarmnode.wire.handshake import Credentials
from swarmnode.wire.messages import Experts, Message, Models, ModelsGet, Rows

MODEL = bytes(32)
PORT = 7000
SERVER, CLIENT = 1, 2


def endpoint(
    seed: int,
    network: str = "test",
    numbers: Mapping[str, Any] | None = None,
    encodings: tuple[str, ...] = ENCODINGS,
    allowed: frozenset[NodeId] | None = None,
) -> Endpoint:
    """A node whose id repeats from run to run; `numbers` replace some of WireConfig."""
    credentials = Credentials(NodeKey.from_seed(bytes([seed]) * 32))
    config = replace(WireConfig(), **(numbers or {}))
    made = Endpoint.create(
        credentials, network=network, agent="test", roles=("worker",), config=config, allowed=allowed
    )
    return replace(made, settings=replace(made.settings, encodings=encodings))


async def echo(peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
    """Answer with the rows that came."""
    assert isinstance(message, Experts)
    return Rows(message.encoding, message.n_rows, 1), (body[: len(body) - message.pair_bytes],)


async def no_models(peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
    """No models here."""
    return Models(()), ()


HANDLERS: Mapping[type[Message], Handler] = {Experts: echo, ModelsGet: no_models}


def experts(n_rows: int = 1, n_embd: int = 8) -> tuple[Experts, Body]:
    """A request in f16 with a body of zeros."""
    message = Experts(MODEL, 1, "experts", "f16", n_rows, 1)
    return message, (bytes(n_rows * n_embd * 2), bytes(6))


async def serve_on(
    nursery: trio.Nursery,
    transport: Transport,
    server: Endpoint,
    handlers: Mapping[type[Message], Handler] = HANDLERS,
    on_peer: OnPeer | None = None,
    admission: Admission | None = None,
    port: int = PORT,
    host: str | None = None,
) -> PeerAddress:
    """Start a server; returns where it is."""
    places = await nursery.start(
        partial(
            serve,
            transport,
            server,
            handlers=handlers,
            host=host,
            port=port,
            on_peer=on_peer,
            admission=admission,
        )
    )
    return PeerAddress(server.credentials.node_id, *places[0])


async def dial_from(
    nursery: trio.Nursery,
    transport: Transport,
    address: PeerAddress,
    client: Endpoint | None = None,
    handlers: Mapping[type[Message], Handler] = HANDLERS,
) -> Peer:
    """Dial; returns the open peer."""
    client = endpoint(CLIENT) if client is None else client
    peer: Peer = await nursery.start(partial(dial, transport, address, client, handlers=handlers))
    return peer


async def connected(
    nursery: trio.Nursery,
    handlers: Mapping[type[Message], Handler] = HANDLERS,
    network: MemoryNetwork | None = None,
    **numbers: float,
) -> Peer:
    """A server at host b and a dialer at host a, both with these numbers; the dialer's peer."""
    network = MemoryNetwork() if network is None else network
    address = await serve_on(nursery, network.host("b"), endpoint(SERVER, numbers=numbers), handlers)
    return await dial_from(nursery, network.host("a"), address, endpoint(CLIENT, numbers=numbers))
