"""Who may hold a socket of ours: bounds on strangers and on peers (in all and by source), and on connections a node.

Decisions only; no I/O.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Hashable
from typing import TypeVar

from swarmnode.config import WireConfig
from swarmnode.identity import NodeId

Key = TypeVar("Key", bound=Hashable)


class Admission:
    """Counts of one listening node."""

    def __init__(self, config: WireConfig) -> None:
        self._config = config
        self._strangers: Counter[str] = Counter()
        self._nodes: Counter[NodeId] = Counter()
        self._sources: Counter[str] = Counter()

    @property
    def n_strangers(self) -> int:
        """Accepted sockets without a proven identity."""
        return self._strangers.total()

    @property
    def n_peers(self) -> int:
        """Open connections that were accepted."""
        return self._nodes.total()

    def admit_stranger(self, source: str) -> bool:
        """Whether a new socket from this address may begin a handshake; if so it counts until `stranger_done`."""
        block = source_block(source)
        if self.n_strangers >= self._config.max_unauthenticated or self.n_peers >= self._config.max_peers:
            return False
        if block is not None and self._strangers[block] >= self._config.max_unauthenticated_per_ip:
            return False
        self._strangers[block or ""] += 1
        return True

    def stranger_done(self, source: str) -> None:
        """The handshake of an admitted socket is over, either way."""
        _decrement(self._strangers, source_block(source) or "")

    def refuse_node(self, node_id: NodeId, source: str) -> str:
        """Why this node may not have one more connection from this address; "" if it may, and it counts until
        `node_done`."""
        block = source_block(source)
        if self.n_peers >= self._config.max_peers:  # as many may have shaken hands meanwhile
            return "too many connections"
        if self._nodes[node_id] >= self._config.max_connections_per_node:
            return "too many connections of this node"
        if block is not None and self._sources[block] >= self._config.max_peers_per_ip:
            return "too many connections from this address"
        self._nodes[node_id] += 1
        self._sources[block or ""] += 1
        return ""

    def node_done(self, node_id: NodeId, source: str) -> None:
        """A connection of an admitted node has ended."""
        _decrement(self._nodes, node_id)
        _decrement(self._sources, source_block(source) or "")


def _decrement(counter: Counter[Key], key: Key) -> None:
    """Count one less, and keep no zeros: the tables must not grow with everyone who ever came."""
    counter[key] -= 1
    if not counter[key]:
        del counter[key]


def source_block(source: str) -> str | None:
    """What shares a limit: an IPv4 address, an IPv6 /64, another text as it is; None for loopback, which has none."""
    try:
        address = ipaddress.ip_address(source.partition("%")[0])
    except ValueError:
        return source
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        else:
            return None if address.is_loopback else str(ipaddress.ip_network((address, 64), strict=False))
    return None if address.is_loopback else str(address)
