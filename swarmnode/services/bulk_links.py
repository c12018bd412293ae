"""A second connection to a node for slices, so that rows never share a stream's order, window or losses with them.

Whoever wants slices dials it (class BULK), asks on it, and closes it when it is idle. A node that cannot be dialled
(behind a NAT, say) sends its slices on the connection of the rows, where class BULK goes last.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import trio

from swarmnode.config import StoreConfig
from swarmnode.errors import ConnectionLostError, RemoteError, first_error
from swarmnode.identity import NodeId
from swarmnode.net.address import PeerAddress
from swarmnode.net.links import dial
from swarmnode.net.peer import Peer
from swarmnode.net.transport import Transport
from swarmnode.wire.constants import ConnectionClass
from swarmnode.wire.endpoint import Endpoint
from swarmnode.wire.messages import Message

log = logging.getLogger(__name__)

AddressOf = Callable[[Peer], PeerAddress | None]
"""Where a connected node can be dialled; None if nowhere."""

_MAX_WAITING = 64
"""Nodes that wait for their dial to be begun."""


class BulkLinks:
    """The bulk connections of a node. `run` must be running; otherwise all goes on the rows' connections."""

    def __init__(
        self, transport: Transport, endpoint: Endpoint, address_of: AddressOf, config: StoreConfig
    ) -> None:
        self._transport = transport
        self._endpoint = endpoint
        self._address_of = address_of
        self._config = config
        self._links: dict[NodeId, _Link] = {}
        self._sources: dict[NodeId, BulkSource] = {}
        self._to_dial, self._dials = trio.open_memory_channel["_Link"](_MAX_WAITING)
        self._is_running = False

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Dial and close bulk connections until cancelled."""
        async with trio.open_nursery() as nursery:
            self._is_running = True
            task_status.started()
            try:
                while True:
                    nursery.start_soon(self._serve, await self._dials.receive())
            finally:
                self._is_running = False

    def source(self, peer: Peer) -> BulkSource:
        """The node of this connection as a source of slices; the same object as long as the connection is the same."""
        known = self._sources.get(peer.node_id)
        if known is None or known.peer is not peer:
            self._sources = {
                node: source for node, source in self._sources.items() if source.peer.ended is None
            }
            known = self._sources[peer.node_id] = BulkSource(peer, self)
        return known

    @property
    def connected(self) -> tuple[NodeId, ...]:
        """Nodes with an open bulk connection."""
        return tuple(node for node, link in self._links.items() if link.peer is not None)

    async def link(self, peer: Peer) -> Peer:
        """The connection to ask for slices on: a bulk one if it is there within `bulk_dial_s`, else `peer`."""
        link = self._links.get(peer.node_id)
        if link is None or (
            link.peer is None and link.settled.is_set() and link.retry_at_s <= trio.current_time()
        ):
            link = self._begin(peer)
        if link is None:
            return peer
        if not link.settled.is_set():
            with trio.move_on_after(self._config.bulk_dial_s):
                await link.settled.wait()
        return peer if link.peer is None else link.peer

    def used(self, node: NodeId, change: int) -> None:
        """A request on the node's bulk connection begins (1) or has ended (-1)."""
        link = self._links.get(node)
        if link is not None:
            link.n_requests += change
            link.idle_since_s = trio.current_time()

    def _begin(self, peer: Peer) -> _Link | None:
        address = self._address_of(peer) if self._is_running else None
        if address is None or address.node_id != peer.node_id:
            return None
        now_s = trio.current_time()
        self._links = {node: link for node, link in self._links.items() if not link.is_over(now_s)}
        link = _Link(address)
        try:
            self._to_dial.send_nowait(link)
        except trio.WouldBlock:
            return None
        self._links[peer.node_id] = link
        return link

    async def _serve(self, link: _Link) -> None:
        """Dial, and keep the connection until it breaks or is idle. What goes wrong costs that connection only."""
        try:
            async with trio.open_nursery() as nursery:
                start = partial(
                    dial,
                    self._transport,
                    link.address,
                    self._endpoint,
                    handlers={},
                    connection_class=ConnectionClass.BULK,
                )
                peer: Peer = await nursery.start(start)
                link.peer, link.idle_since_s = peer, trio.current_time()
                link.settled.set()
                await self._close_when_idle(link, peer)
        except* RemoteError as group:
            log.info("no bulk connection to %s: %s", link.address, first_error(group))
        finally:
            was_closed_by_us = link.is_idle
            link.peer = None
            pause_s = 0.0 if was_closed_by_us else self._config.bulk_retry_s
            link.retry_at_s = trio.current_time() + pause_s
            link.settled.set()

    async def _close_when_idle(self, link: _Link, peer: Peer) -> None:
        while peer.ended is None:
            idle_at_s = link.idle_since_s + self._config.bulk_idle_s
            if not link.n_requests and idle_at_s <= trio.current_time():
                link.is_idle = True
                link.peer = None
                peer.close("done")
            with trio.move_on_after(max(idle_at_s - trio.current_time(), self._config.bulk_idle_s / 4)):
                await peer.wait_closed()


@dataclass
class _Link:
    """One node's bulk connection: being dialled, open, or failed."""

    address: PeerAddress
    peer: Peer | None = None
    settled: trio.Event = field(default_factory=trio.Event)
    """Set when the dial has succeeded or failed."""
    retry_at_s: float = math.inf
    n_requests: int = 0
    idle_since_s: float = 0.0
    is_idle: bool = False
    """Closed because nobody needed it."""

    def is_over(self, now_s: float) -> bool:
        """It failed or was closed, and may be tried again."""
        return self.peer is None and self.settled.is_set() and self.retry_at_s <= now_s


class BulkSource:
    """A node as a source of slices (services.fetch.Source): over its bulk connection where there is one."""

    def __init__(self, peer: Peer, links: BulkLinks) -> None:
        self.peer = peer
        """The connection of the rows."""
        self._links = links

    @property
    def node_id(self) -> NodeId:
        """Who it is."""
        return self.peer.node_id

    @property
    def rows_at_s(self) -> float:
        """As `Peer.rows_at_s`."""
        return self.peer.rows_at_s

    async def request(self, message: Message) -> tuple[Message, memoryview]:
        """As `Peer.request`. What was asked on a bulk connection that broke is asked again on the other one."""
        link = await self._links.link(self.peer)
        if link is self.peer:
            return await link.request(message)
        self._links.used(self.node_id, 1)
        try:
            return await link.request(message)
        except ConnectionLostError:
            pass
        finally:
            self._links.used(self.node_id, -1)
        return await self.peer.request(message)
