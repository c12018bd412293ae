"""Dial a node, or serve the nodes that dial us, over any transport. Nothing that a peer does ends `serve`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial

import trio

from swarmnode.errors import ConnectionLostError, RemoteError
from swarmnode.net.address import PeerAddress
from swarmnode.net.admission import Admission
from swarmnode.net.peer import Handler, OnPeer, Peer, open_peer
from swarmnode.net.transport import Transport
from swarmnode.wire.connection import Connection
from swarmnode.wire.constants import ConnectionClass
from swarmnode.wire.endpoint import Endpoint
from swarmnode.wire.messages import Message

log = logging.getLogger(__name__)

Handlers = Mapping[type[Message], Handler]


async def dial(
    transport: Transport,
    address: PeerAddress,
    endpoint: Endpoint,
    *,
    handlers: Handlers,
    connection_class: ConnectionClass = ConnectionClass.LATENCY,
    on_peer: OnPeer | None = None,
    task_status: trio.TaskStatus[Peer] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Connect to exactly this node and serve the connection until it ends.

    `peer = await nursery.start(partial(dial, transport, address, endpoint, handlers=...))`. Until it is started it
    raises ConnectionLostError (nobody there), HandshakeError (another key or network) or ProtocolError.
    """
    stream = await _connect(transport, address, endpoint.config.dial_timeout_s)
    connection = Connection.dialer(endpoint, address.node_id, connection_class)
    remote = f"{address.host} port {address.port}"
    peer = await open_peer(stream, connection, handlers=handlers, config=endpoint.config, remote=remote)
    task_status.started(peer)
    await peer.run(on_peer)


async def serve(
    transport: Transport,
    endpoint: Endpoint,
    *,
    handlers: Handlers,
    host: str | None,
    port: int,
    on_peer: OnPeer | None = None,
    admission: Admission | None = None,
    task_status: trio.TaskStatus[list[tuple[str, int]]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Accept nodes until cancelled; tells the addresses listened on. Raises OSError if it cannot listen."""
    gate = Admission(endpoint.config) if admission is None else admission
    handler = partial(_accept, endpoint, handlers, on_peer, gate)
    await transport.listen(handler, host, port, task_status=task_status)


async def _connect(transport: Transport, address: PeerAddress, timeout_s: float) -> trio.abc.Stream:
    try:
        with trio.fail_after(timeout_s):
            return await transport.connect(address.host, address.port)
    except trio.TooSlowError:
        raise ConnectionLostError(
            f"{address.host} port {address.port} did not answer in {timeout_s:g} s"
        ) from None
    except OSError as error:
        raise ConnectionLostError(f"{address.host} port {address.port}: {error}") from error


async def _accept(
    endpoint: Endpoint,
    handlers: Handlers,
    on_peer: OnPeer | None,
    gate: Admission,
    stream: trio.abc.Stream,
    source: str,
) -> None:
    """One accepted stream, from handshake to end."""
    if not gate.admit_stranger(source):
        log.info("no room for a connection from %s", source)
        await trio.aclose_forcefully(stream)
        return
    try:
        await _serve_stream(endpoint, handlers, on_peer, gate, stream, source)
    except RemoteError as error:
        log.info("a connection from %s failed: %s", source, error)
    except Exception:
        log.exception("a connection from %s failed", source)


async def _serve_stream(
    endpoint: Endpoint,
    handlers: Handlers,
    on_peer: OnPeer | None,
    gate: Admission,
    stream: trio.abc.Stream,
    source: str,
) -> None:
    try:
        connection = Connection.acceptor(endpoint)
        peer = await open_peer(stream, connection, handlers=handlers, config=endpoint.config, remote=source)
    finally:
        gate.stranger_done(source)
    if reason := gate.refuse_node(peer.node_id, source):
        peer.close("not_wanted", reason)
        await peer.run()
        return
    try:
        await peer.run(on_peer)
    finally:
        gate.node_done(peer.node_id, source)
