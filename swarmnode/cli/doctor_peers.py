"""Whether the nodes named for joining can be reached, up to the end of a handshake, under a key made for that."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import trio

from swarmnode import __version__
from swarmnode.cli.common import Membership
from swarmnode.cli.doctor_machine import Finding
from swarmnode.config import WireConfig
from swarmnode.errors import OTHER_NETWORK, ConnectionLostError, HandshakeError, RemoteError
from swarmnode.identity import NodeKey
from swarmnode.net.address import PeerAddress
from swarmnode.net.links import connect
from swarmnode.net.tcp import TcpTransport
from swarmnode.net.transport import Transport
from swarmnode.wire.endpoint import Endpoint
from swarmnode.wire.handshake import Credentials

TIMEOUT_S = 5.0
MAX_PEERS = 8


def peers(member: Membership, *, knows_others: bool) -> Iterator[Finding]:
    """One line for each of the first few; all of them unreachable is a failure."""
    if not member.peers:
        text = "no peer is named (--bootstrap, SWARMNODE_BOOTSTRAP, peers.txt)"
        if knows_others:
            yield "ok", f"{text}; nodes met earlier are dialled"
        else:
            yield "warn", f"{text}: a worker needs one, or --lan; a backbone prints its address"
        return
    found = trio.run(partial(dial_all, member, TcpTransport()))
    is_any = any(level == "ok" for level, _ in found)
    yield from ((level if is_any or level == "ok" else "fail", text) for level, text in found)
    if more := len(member.peers) - len(found):
        yield "ok", f"{more} more peers were not tried"


async def dial_all(member: Membership, transport: Transport) -> list[Finding]:
    """A finding for each of the first peers, in order; all are dialled at once, so it takes TIMEOUT_S at most."""
    endpoint = Endpoint.create(
        Credentials(NodeKey.generate()),
        network=member.network,
        agent=f"swarmnode/{__version__}",
        roles=("worker",),
        config=WireConfig(dial_timeout_s=TIMEOUT_S, handshake_timeout_s=TIMEOUT_S),
        secret=member.secret,
    )
    tried = member.peers[:MAX_PEERS]
    found: dict[PeerAddress, Finding] = {}

    async def try_one(address: PeerAddress) -> None:
        found[address] = await _dial(address, transport, endpoint)

    async with trio.open_nursery() as nursery:
        for address in tried:
            nursery.start_soon(try_one, address)
    return [found[address] for address in tried]


async def _dial(address: PeerAddress, transport: Transport, endpoint: Endpoint) -> Finding:
    name = f"peer {address.node_id.short} at {address.host} port {address.port}"
    began_s = time.perf_counter()
    try:
        with trio.fail_after(2 * TIMEOUT_S):
            peer = await connect(transport, address, endpoint, handlers={})
    except HandshakeError as error:
        return "warn", f"{name}: {error}; it is another node, or {OTHER_NETWORK}"
    except ConnectionLostError as error:
        return "warn", f"{name}: {error}; check that it runs, its address, and the firewalls between"
    except (RemoteError, trio.TooSlowError) as error:
        return "warn", f"{name}: {error or 'no answer'}; update one of the two"
    took_ms = 1e3 * (time.perf_counter() - began_s)
    with trio.CancelScope(shield=True, deadline=float("-inf")):
        await peer.run()
    return "ok", f"{name} answers, {took_ms:.0f} ms to the end of the handshake"
