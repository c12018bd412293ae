"""Nodes that do nothing but gossip, on the memory network."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial

import trio

from swarmnode.config import Config, GossipConfig
from swarmnode.gossip.core import GossipCore
from swarmnode.gossip.records import NodeRecord, OwnState
from swarmnode.gossip.table import Change
from swarmnode.identity import NodeId, NodeKey
from swarmnode.net.address import PeerAddress
from swarmnode.net.links import dial, serve
from swarmnode.net.peer import Handler, Peer
from swarmnode.services.connections import Connections
from swarmnode.services.gossip import GossipService
from swarmnode.testing.memory_net import MemoryNetwork
from swarmnode.wire.endpoint import Endpoint
from swarmnode.wire.handshake import Credentials
from swarmnode.wire.messages import Message

CONFIG = Config()
WALL_S = 1_700_000_000.0
PORT = 1


def key_of(seed: int) -> NodeKey:
    return NodeKey.from_seed(bytes([seed]) * 32)


def endpoint_of(seed: int) -> Endpoint:
    return Endpoint.create(
        Credentials(key_of(seed)), network="test", agent="test", roles=("worker",), config=CONFIG.wire
    )


class GossipNode:
    """Listens at a host of its `name`. Nodes with one `seed` have one key."""

    def __init__(
        self,
        network: MemoryNetwork,
        seed: int,
        *,
        name: str | None = None,
        incarnation: int = 1,
        config: GossipConfig = CONFIG.gossip,
        keep: Callable[[int], None] | None = None,
    ) -> None:
        self.endpoint = endpoint_of(seed)
        self.node_id: NodeId = self.endpoint.credentials.node_id
        self.host = network.host(name or f"node{seed}")
        self.kept: list[int] = []
        self.changes: list[Change] = []
        self.asleep_s = 5000.0
        """How long its machine has slept since it was started."""
        self.connections = Connections(self.node_id, CONFIG.contact, trio.current_time)
        core = GossipCore(key_of(seed), "test", config, random.Random(seed), incarnation)
        self.service = GossipService(
            core,
            self.connections,
            config,
            lambda: WALL_S,
            self.kept.append if keep is None else keep,
            lambda: self.asleep_s,
        )
        self.service.subscribe(self.changes.append)

    @property
    def address(self) -> PeerAddress:
        return PeerAddress(self.node_id, self.host.name, PORT)

    async def start(self, nursery: trio.Nursery, capacity_bytes: int = 1) -> None:
        """Listen, gossip and publish."""
        attend = self.connections.attended(_nothing)
        await nursery.start(
            partial(
                serve,
                self.host,
                self.endpoint,
                handlers=self.service.handlers,
                host=None,
                port=PORT,
                on_peer=attend,
            )
        )
        await nursery.start(self.service.run)
        self.say(capacity_bytes)

    def say(self, capacity_bytes: int) -> None:
        """Publish a state that differs by this number."""
        self.service.publish(state_of(self.host.name, capacity_bytes))

    async def meet(self, nursery: trio.Nursery, other: PeerAddress) -> Peer:
        """Dial another node, and stay."""
        attend = self.connections.attended(_nothing)
        peer: Peer = await nursery.start(
            partial(dial, self.host, other, self.endpoint, handlers=self.service.handlers, on_peer=attend)
        )
        return peer

    def hears(self, other: NodeId) -> int | None:
        """The number that the other node published last, as far as is known here; None: it is not known."""
        record = self.service.table.get(other)
        return None if record is None else record.state.capacity_bytes

    def heard_of(self, other: NodeId) -> list[int | None]:
        """All that subscribers were told of it; None: that it is gone."""
        return [
            change.record.state.capacity_bytes if isinstance(change.record, NodeRecord) else None
            for change in self.changes
            if change.node_id == other
        ]


def state_of(name: str, capacity_bytes: int, leaving: bool = False) -> OwnState:
    return OwnState((f"{name}:{PORT}",), (), ("worker",), capacity_bytes, "cpu", (), leaving)


async def stranger(
    nursery: trio.Nursery,
    network: MemoryNetwork,
    address: PeerAddress,
    handlers: Mapping[type[Message], Handler],
    seed: int = 66,
) -> Peer:
    """Dial a node as one that answers what a test says."""
    peer: Peer = await nursery.start(
        partial(dial, network.host("stranger"), address, endpoint_of(seed), handlers=handlers)
    )
    return peer


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait in virtual time; TooSlowError after `timeout_s`."""
    with trio.fail_after(timeout_s):
        while not condition():  # noqa: ASYNC110 - nothing to wake us
            await trio.sleep(0.05)


async def _nothing(peer: Peer) -> None:
    """Nothing beside gossip."""
