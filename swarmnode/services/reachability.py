"""Whether anybody has dialled this node: the only proof that its addresses are of use to others."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass

from swarmnode.errors import UsageError
from swarmnode.net.address import split_host_port
from swarmnode.net.peer import Peer
from swarmnode.services.connections import Connections


@dataclass(frozen=True)
class Dialled:
    """Accepted connections since the start: all, and those from beyond private networks. `last_s`: None for never."""

    n_all: int = 0
    n_from_outside: int = 0
    last_s: float | None = None


class Reachability:
    """Counts connections that others opened. Nodes of a LAN or of this machine prove less than those from outside."""

    def __init__(self, connections: Connections, now: Callable[[], float]) -> None:
        self._now = now
        self.dialled = Dialled()
        connections.subscribe(self._changed)

    def _changed(self, peer: Peer, is_connected: bool) -> None:
        if is_connected and not peer.is_dialer:
            n_outside = self.dialled.n_from_outside + is_from_outside(peer.remote)
            self.dialled = Dialled(self.dialled.n_all + 1, n_outside, self._now())


def is_from_outside(remote: str) -> bool:
    """Whether `host:port` is an address of the public internet."""
    try:
        return ipaddress.ip_address(split_host_port(remote)[0]).is_global
    except (UsageError, ValueError):
        return False
