"""Dial a node, or serve the nodes that dial us, over any transport. Nothing that a peer does ends `serve`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial

import trio

from swarmnode.errors import ConnectionLostError, RemoteError
from swarmnode.net.address import PeerAddress
from swarmnode.net.admission import Admission
from swarmnode.net.peer import Handler, OnPeer, Peer, open_peer
from swarmnode.net.reasons import reason_of
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
    peer = await connect(transport, address, endpoint, handlers=handlers, connection_class=connection_class)
    task_status.started(peer)
    await peer.run(on_peer)


async def connect(
    transport: Transport,
    address: PeerAddress,
    endpoint: Endpoint,
    *,
    handlers: Handlers,
    connection_class: ConnectionClass = ConnectionClass.LATENCY,
) -> Peer:
    """An open connection to exactly this node, which the caller must `run`. Errors as `dial` before it is started."""
    stream = await _connect(transport, address, endpoint.config.dial_timeout_s)
    connection = Connection.dialer(endpoint, address.node_id, connection_class)
    remote = f"{address.host} port {address.port}"
    return await open_peer(stream, connection, handlers=handlers, config=endpoint.config, remote=remote)


async def connect_first(
    transport: Transport,
    addresses: Sequence[PeerAddress],
    endpoint: Endpoint,
    *,
    handlers: Handlers,
    stagger_s: float,
    failures: dict[PeerAddress, RemoteError],
) -> tuple[PeerAddress, Peer]:
    """Happy eyeballs (RFC 8305) over the addresses of one node: the first that finishes the handshake, and its peer.

    The next address is tried when the one before failed or has had `stagger_s`; losers are given up. The peer must be
    `run`. What failed is added to `failures`; raises the first failure when all have failed.
    """
    won: list[tuple[PeerAddress, Peer]] = []

    async def attempt(address: PeerAddress, ended: trio.Event) -> None:
        try:
            peer = await connect(transport, address, endpoint, handlers=handlers)
        except RemoteError as error:
            failures[address] = error
        else:
            if won:
                await _drop(peer)
            else:
                won.append((address, peer))
                nursery.cancel_scope.cancel()
        ended.set()

    try:
        async with trio.open_nursery() as nursery:
            for address in addresses:
                ended = trio.Event()
                nursery.start_soon(attempt, address, ended)
                with trio.move_on_after(stagger_s):
                    await ended.wait()
        if not won:
            raise next(iter(failures.values()))
        return won.pop(0)
    finally:
        for _, peer in won:  # cancelled between winning and returning
            await _drop(peer)


async def _drop(peer: Peer) -> None:
    """Close a connection that nobody has run."""
    with trio.CancelScope(shield=True, deadline=float("-inf")):
        await peer.run()


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
    """Accept nodes until cancelled; tells the addresses listened on. Raises OSError if it cannot listen.

    `on_peer` runs beside connections of class LATENCY only: a bulk one belongs to a node that has another, and gets
    nothing but answers.
    """
    gate = Admission(endpoint.config) if admission is None else admission
    handler = partial(_accept, endpoint, handlers, on_peer, gate)
    await transport.listen(handler, host, port, task_status=task_status)


async def _connect(transport: Transport, address: PeerAddress, timeout_s: float) -> trio.abc.Stream:
    try:
        with trio.fail_after(timeout_s):
            return await transport.connect(address.host, address.port)
    except trio.TooSlowError:
        raise ConnectionLostError(
            f"{address.host} port {address.port} did not answer in {timeout_s:g} s: "
            "a firewall, a wrong address, or a machine that is off"
        ) from None
    except OSError as error:
        raise ConnectionLostError(f"{address.host} port {address.port}: {reason_of(error)}") from error


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
        await peer.run(on_peer if peer.connection_class is ConnectionClass.LATENCY else None)
    finally:
        gate.node_done(peer.node_id, source)
