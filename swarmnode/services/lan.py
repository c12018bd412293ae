"""Finds nodes of the same network on the LAN by multicast DNS, and is found: `_swarmnode._tcp.local.`

An announcement holds the node's id, the network's tag (wire/secret.py: it gives neither the secret nor a private
network's name away), addresses and port. It is a hint like any line of a bootstrap list: the dial proves the key, the
handshake the network. `services/lan_zeroconf.py` speaks the protocol; here is what it says and what is believed.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import trio

from swarmnode.config import LanConfig
from swarmnode.errors import LocalError, ProtocolError, UsageError
from swarmnode.identity import NodeId
from swarmnode.net.address import PeerAddress
from swarmnode.services.runners import Runner

log = logging.getLogger(__name__)

SERVICE_TYPE = "_swarmnode._tcp.local."
ID_FIELD = "id"
NETWORK_FIELD = "net"


@dataclass(frozen=True)
class LanService:
    """One announcement, ours or another node's."""

    hosts: tuple[str, ...]
    """IP addresses."""
    port: int
    fields: Mapping[str, str]
    """The TXT record."""


class LanBackend(Protocol):
    """Speaks multicast DNS; both methods block."""

    def start(self, own: LanService | None, on_seen: Callable[[LanService], None]) -> None:
        """Announce `own`, and browse: `on_seen` is called, from any thread, for every announcement. Raises LocalError
        if this machine cannot do that.
        """
        ...

    def close(self) -> None:
        """Withdraw the announcement and stop. No `on_seen` after that."""
        ...


def announcement(node_id: NodeId, tag: bytes, hosts: tuple[str, ...], port: int) -> LanService:
    """What a node that listens tells the LAN."""
    return LanService(hosts, port, {ID_FIELD: str(node_id), NETWORK_FIELD: tag.hex()})


def addresses_untrusted(
    service: LanService, own: NodeId, tag: bytes, config: LanConfig
) -> tuple[PeerAddress, ...]:
    """Where the announced node may be dialled; nothing if it is of another network, or ourselves.

    Raises ProtocolError for an announcement that no node of this network makes.
    """
    if service.fields.get(NETWORK_FIELD) != tag.hex():
        return ()
    try:
        node_id = NodeId.parse(service.fields.get(ID_FIELD, ""))
    except UsageError as error:
        raise ProtocolError("bad_field", f"a LAN announcement: {error}") from None
    if node_id == own:
        return ()
    if not 1 <= service.port <= 65_535:
        raise ProtocolError("bad_field", f"a LAN announcement with port {service.port}")
    hosts = [host for host in service.hosts if _is_dialable(host)]
    return tuple(PeerAddress(node_id, host, service.port) for host in hosts[: config.max_hosts])


def _is_dialable(host: str) -> bool:
    """An IP address that means the same here as there: a link-local IPv6 address needs the name of an interface."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    is_local_v6 = address.version == 6 and address.is_link_local
    return not (is_local_v6 or address.is_multicast or address.is_unspecified)


class LanDiscovery:
    """Announces this node and tells of others, until cancelled."""

    def __init__(
        self,
        backend: LanBackend,
        own: NodeId,
        tag: bytes,
        listening: tuple[tuple[str, ...], int] | None,
        on_found: Callable[[tuple[PeerAddress, ...]], None],
        threads: Runner,
        config: LanConfig,
    ) -> None:
        """`listening`: the IP addresses and the port of this node, None if nobody can dial it.

        `on_found` is called on trio's thread with all addresses of one node.
        """
        self._backend = backend
        self._own = own
        self._tag = tag
        self._service = None if listening is None else announcement(own, tag, *listening)
        self._on_found = on_found
        self._threads = threads
        self._config = config
        self._found: set[NodeId] = set()

    async def run(self) -> None:
        """Announce and listen. A machine on which that is impossible costs a warning, not the node."""
        token = trio.lowlevel.current_trio_token()

        def on_seen(service: LanService) -> None:
            try:
                token.run_sync_soon(self._seen, service)
            except trio.RunFinishedError:
                log.debug("a LAN announcement came after the end")

        try:
            await self._threads.run(partial(self._backend.start, self._service, on_seen))
        except LocalError as error:
            log.warning("no nodes are looked for on the LAN: %s", error)
            return
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await self._threads.run(self._backend.close)

    def _seen(self, service: LanService) -> None:
        try:
            addresses = addresses_untrusted(service, self._own, self._tag, self._config)
        except ProtocolError as error:
            log.info("ignored: %s", error)
            return
        if not addresses:
            return
        node_id = addresses[0].node_id
        if node_id not in self._found and len(self._found) >= self._config.max_nodes:
            log.info("more than %d nodes on the LAN; %s is left out", self._config.max_nodes, node_id.short)
            return
        self._found.add(node_id)
        self._on_found(addresses)
