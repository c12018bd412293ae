"""How a node meets others: the registry of connections, whom it dials, what it remembers, and the LAN. No logic."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import trio

from swarmnode.net.links import Handlers
from swarmnode.net.peer import OnPeer
from swarmnode.net.transport import Transport
from swarmnode.node.common import NodeOptions
from swarmnode.services.address_book import AddressBookKeeper, load_book
from swarmnode.services.connections import Connections
from swarmnode.services.contact import Contacts
from swarmnode.services.dial_plan import Source
from swarmnode.services.lan import LanDiscovery
from swarmnode.services.lan_zeroconf import ZeroconfBackend, hosts_of
from swarmnode.services.reports import Connecting, Waiting
from swarmnode.services.runners import Inline, Runner
from swarmnode.wire.endpoint import Endpoint
from swarmnode.wire.secret import network_tag


@dataclass(frozen=True)
class Meeting:
    """What a node has for meeting others; `start` runs it."""

    connections: Connections
    """Who is connected. What accepts connections must run `connections.attended(on_peer)`."""
    contacts: Contacts
    book: AddressBookKeeper

    def start(
        self,
        nursery: trio.Nursery,
        options: NodeOptions,
        endpoint: Endpoint,
        listening: list[tuple[str, int]],
        threads: Runner,
    ) -> None:
        """Begin to dial, to remember and (with `--lan`) to look around. `listening`: where nodes are accepted."""
        nursery.start_soon(self.contacts.run)
        nursery.start_soon(self.book.run)
        if options.lan:
            hosts = tuple(dict.fromkeys(found for host, _ in listening for found in hosts_of(host)))
            discovery = LanDiscovery(
                ZeroconfBackend(options.config.lan),
                endpoint.credentials.node_id,
                network_tag(endpoint.network, endpoint.secret),
                (hosts, listening[0][1]) if listening else None,
                self.contacts.add,
                threads,
                options.config.lan,
            )
            nursery.start_soon(discovery.run)

    async def close(self, code: str) -> None:
        """Say bye on every connection, and wait until it has left."""
        peers = list(self.connections.connected.values())
        for peer in peers:
            peer.close(code)
        for peer in peers:
            await peer.wait_closed()


def prepare_meeting(
    options: NodeOptions,
    transport: Transport,
    endpoint: Endpoint,
    handlers: Handlers,
    on_peer: OnPeer,
    report: Callable[[Connecting | Waiting], None],
    rng: random.Random,
    threads: Runner | None = None,
) -> Meeting:
    """Wire it; nothing runs yet. `threads` write the address book (None: right here, for tests on a mock clock)."""
    config = options.config
    connections = Connections(endpoint.credentials.node_id, config.contact, trio.current_time)
    path = options.folders.address_book(network_tag(endpoint.network, endpoint.secret))
    book = load_book(path, config.address_book)
    keeper = AddressBookKeeper(book, path, Inline() if threads is None else threads, time.time)
    contacts = Contacts(
        transport,
        endpoint,
        handlers,
        on_peer,
        config.contact,
        report,
        rng,
        connections=connections,
        on_met=lambda address, peer: keeper.met(address),
        waits_for_others="backbone" in endpoint.settings.roles,
    )
    contacts.add(options.bootstrap)
    contacts.add(book.to_dial(), Source.REMEMBERED)
    return Meeting(connections, contacts, keeper)
