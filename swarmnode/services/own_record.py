"""What this node says of itself in its record: where it listens, what it is, what it holds."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from swarmnode.errors import UsageError
from swarmnode.gossip.records import MAX_ADDRESSES, ModelHoldings, OwnState
from swarmnode.net.address import is_loopback, join_host_port
from swarmnode.net.peer import Peer
from swarmnode.services.announcing import MAX_CAPACITY_BYTES
from swarmnode.services.connections import Connections
from swarmnode.services.gossip import GossipService

log = logging.getLogger(__name__)

WILDCARDS = frozenset({"", "0.0.0.0", "::"})


class OwnRecord:
    """Publishes the node's state whenever a part of it changes.

    Addresses are what the operator said (`advertise`), and where the node listens. If it listens on every interface,
    those of its own addresses count that its connections use: one that nobody is met on is of no use to others.
    """

    def __init__(
        self,
        gossip: GossipService,
        connections: Connections,
        roles: tuple[str, ...],
        capacity_bytes: int,
        device: str,
        advertise: Sequence[tuple[str, int]] = (),
    ) -> None:
        self._gossip = gossip
        self._connections = connections
        self._roles = roles
        self._capacity_bytes = min(capacity_bytes, MAX_CAPACITY_BYTES)
        self._device = device
        self._advertise = tuple(advertise)
        self._listening: tuple[tuple[str, int], ...] = ()
        self._models: tuple[ModelHoldings, ...] = ()
        self._is_leaving = False
        connections.subscribe(self._connection_changed)

    @property
    def addresses(self) -> tuple[str, ...]:
        """`host:port`, those first that reach furthest."""
        places = [*self._advertise]
        for host, port in self._listening:
            hosts = self._local_hosts() if host in WILDCARDS else [host]
            places += [(found, port) for found in hosts]
        unique = dict.fromkeys(join_host_port(host, port) for host, port in places)
        return tuple(unique)[:MAX_ADDRESSES]

    @property
    def listens_everywhere(self) -> int | None:
        """The port at which nodes are accepted on every address of this machine; None if there is no such port."""
        return next((port for host, port in self._listening if host in WILDCARDS), None)

    def listening(self, places: Sequence[tuple[str, int]]) -> None:
        """Nodes are accepted there. Publishes."""
        self._listening = tuple(places)
        self.publish()

    def holding(self, models: tuple[ModelHoldings, ...]) -> None:
        """What is held from now on. Publishes."""
        self._models = models
        self.publish()

    def leave(self) -> None:
        """Publish the last record: others forget this node at once."""
        self._is_leaving = True
        self.publish()

    def publish(self) -> None:
        """Hand the whole state to gossip. What no record can hold is not told, and an error logged."""
        state = OwnState(
            addresses=self.addresses,
            roles=self._roles,
            capacity_bytes=self._capacity_bytes,
            device=self._device,
            models=() if self._is_leaving else self._models,
            leaving=self._is_leaving,
        )
        try:
            self._gossip.publish(state)
        except UsageError as error:
            log.error("this node's record is not renewed: %s; give fewer or shorter --advertise", error)

    def _connection_changed(self, peer: Peer, is_connected: bool) -> None:
        if is_connected and not self._is_leaving:
            self.publish()

    def _local_hosts(self) -> list[str]:
        """Our addresses on open connections, loopback only if there is nothing else."""
        hosts = {peer.local_host for peer in self._connections.connected.values() if peer.local_host}
        outside = sorted(host for host in hosts if not is_loopback(host))
        return outside or sorted(hosts)
