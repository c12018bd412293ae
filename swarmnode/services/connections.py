"""Which nodes are connected, whoever dialled: at most one connection of class LATENCY with each.

Both ends must keep the same one of two. When two nodes dial each other at once, the dial of the lower id stays; a
connection that comes later than `ContactConfig.simultaneous_s` comes because the peer has lost the one before, so the
newer stays. The end of a connection removes that connection only, never the one that took its place.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from swarmnode.config import ContactConfig
from swarmnode.identity import NodeId
from swarmnode.net.peer import OnPeer, Peer
from swarmnode.wire.constants import ConnectionClass

log = logging.getLogger(__name__)

OnChange = Callable[[Peer, bool], None]
"""Called with a connection and True when it has entered, False when it has left. Must not raise."""


@dataclass(frozen=True)
class _Entry:
    peer: Peer
    since_s: float


class Connections:
    """The registry of a node. Synchronous, so that nothing happens in between; touched on trio's thread only."""

    def __init__(self, own: NodeId, config: ContactConfig, now: Callable[[], float]) -> None:
        self._own = own
        self._config = config
        self._now = now
        self._entries: dict[NodeId, _Entry] = {}
        self._peers: dict[NodeId, Peer] = {}
        self._listeners: list[OnChange] = []

    @property
    def connected(self) -> Mapping[NodeId, Peer]:
        """The peer of each connected node; a view that follows."""
        return MappingProxyType(self._peers)

    def rows_at_s(self) -> float:
        """When rows of a decode travelled last on any of the connections; -inf for never."""
        return max((peer.rows_at_s for peer in self._peers.values()), default=-math.inf)

    def subscribe(self, on_change: OnChange) -> Callable[[], None]:
        """Be told of every connection that enters or leaves from now on. Call what is returned to hear no more."""
        self._listeners.append(on_change)
        return partial(self._listeners.remove, on_change)

    def attended(self, on_peer: OnPeer) -> OnPeer:
        """`on_peer` for `net.links.serve`, run only for the connection that is kept, and kept on the books meanwhile.

        Bulk connections are passed through: they come and go beside the one that counts.
        """

        async def attend(peer: Peer) -> None:
            if peer.connection_class is not ConnectionClass.LATENCY:
                await on_peer(peer)
                return
            if not self.enter(peer):
                return
            try:
                await on_peer(peer)
                await peer.wait_closed()
            finally:
                self.leave(peer)

        return attend

    def enter(self, peer: Peer) -> bool:
        """Whether this open connection is the one to keep. The other one, if there is one, is closed as `replaced`."""
        old = self._entries.get(peer.node_id)
        if old is not None and old.peer is not peer:
            if not self._is_better(peer, old):
                log.info("%r is one too many", peer)
                peer.close("replaced")
                return False
            old.peer.close("replaced")
            self.leave(old.peer)
        self._entries[peer.node_id] = _Entry(peer, self._now())
        self._peers[peer.node_id] = peer
        for listener in tuple(self._listeners):
            listener(peer, True)
        return True

    def leave(self, peer: Peer) -> None:
        """This connection has ended; another one of the same node stays. Does nothing when it has left already."""
        entry = self._entries.get(peer.node_id)
        if entry is None or entry.peer is not peer:
            return
        del self._entries[peer.node_id]
        del self._peers[peer.node_id]
        for listener in tuple(self._listeners):
            listener(peer, False)

    def _is_better(self, new: Peer, old: _Entry) -> bool:
        is_crossing = new.is_dialer != old.peer.is_dialer
        is_fresh = self._now() - old.since_s < self._config.simultaneous_s
        if old.peer.ended is None and is_crossing and is_fresh:
            return new.is_dialer == (self._own < new.node_id)
        return True
