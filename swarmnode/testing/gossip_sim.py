"""A seeded simulator of many gossip cores in virtual time: latency, loss, churn, partitions, clocks that are off.

    sim = GossipSim(seed=1)
    nodes = sim.add(1000)
    for node in nodes:
        node.publish(OwnState(...))
    sim.run(60.0)
    nodes[0].table.live()

Requests travel over connections that the simulator makes at random between live nodes; what is lost fails at the asker
after `request_timeout_s`, as a silent peer would. `on_round(node)` is called for every live node every `round_s`, each
at its own phase: that is where a market decides. Records are parsed, and signatures checked, once in the whole
simulation (`SharedReader`): the product does both on every node.
"""

from __future__ import annotations

import gc
import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from swarmnode.config import GossipConfig
from swarmnode.errors import ProtocolError
from swarmnode.gossip.core import GossipCore, Outgoing
from swarmnode.gossip.records import OwnState
from swarmnode.gossip.table import Change, RecordTable
from swarmnode.gossip.view import ALL, View
from swarmnode.identity import NodeId, NodeKey
from swarmnode.testing.shared_reader import SharedReader
from swarmnode.wire.messages import Message, encode_header

NETWORK = "simulation"
EPOCH_S = 1_800_000_000.0
"""Unix time at the simulation's start."""
MESSAGE_BYTES = 38
"""What a message costs beside header and body: frame 12, message start 8, seal 16, record length 2. TCP and IP not."""


@dataclass(frozen=True)
class Net:
    """How messages travel."""

    latency_s: tuple[float, float] = (0.01, 0.1)
    """One way, uniform between these."""
    loss: float = 0.0
    """Share of requests, and of replies, that never arrive."""
    connections: int = 16
    """Mean open connections of a node."""
    detect_s: float = 2.0
    """How long until a dead node's peers notice."""


class SimNode:
    """One node: its core, and what the simulator knows of it."""

    def __init__(self, sim: GossipSim, key: NodeKey, core: GossipCore, wall_offset_s: float) -> None:
        self._sim = sim
        self.key = key
        self.core = core
        self.wall_offset_s = wall_offset_s
        self.alive = True
        self.group = 0
        """Of a partition: nodes of different groups do not reach each other."""
        self.peers: set[NodeId] = set()
        self.bytes_out = 0
        self.data: Any = None
        """For the user of the simulation."""

    @property
    def node_id(self) -> NodeId:
        return self.key.node_id

    @property
    def table(self) -> RecordTable:
        """What this node knows."""
        return self.core.table

    @property
    def wall_s(self) -> float:
        """What this node believes the unix time is."""
        return EPOCH_S + self._sim.now_s + self.wall_offset_s

    def publish(self, state: OwnState) -> None:
        """As GossipCore.publish, now."""
        self.core.publish(state, self._sim.now_s, self.wall_s)
        self._sim.drain(self)

    def take_changes(self) -> list[Change]:
        """As GossipCore.take_changes."""
        return self.core.take_changes()

    def live_ids(self) -> set[NodeId]:
        """Nodes it believes to be there."""
        return {record.node_id for record in self.table.live()}


@dataclass
class Traffic:
    """What was sent since the last reset."""

    since_s: float = 0.0
    bytes: int = 0
    messages: Counter[str] = field(default_factory=Counter)
    bytes_by: Counter[str] = field(default_factory=Counter)


class GossipSim:
    """Nodes, connections and a clock."""

    def __init__(
        self,
        seed: int,
        config: GossipConfig | None = None,
        net: Net | None = None,
        *,
        tick_s: float = 0.25,
        round_s: float = 5.0,
        on_round: Callable[[SimNode], None] | None = None,
    ) -> None:
        self.config = config or GossipConfig()
        self.net = net or Net()
        self.rng = random.Random(seed)
        self.now_s = 1000.0
        self.nodes: dict[NodeId, SimNode] = {}
        self.traffic = Traffic(self.now_s)
        self.protocol_errors: list[ProtocolError] = []
        self.hops: dict[NodeId, int] = {}
        """Of the tracked record: node -> hops from its origin."""
        self._on_round = on_round
        self._tick_s = tick_s
        self._round_s = round_s
        self._reader = SharedReader()
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._n_events = 0
        self._n_keys = 0
        self._tracked = b""
        self._seed = seed

    # -- nodes

    def add(
        self,
        count: int = 1,
        *,
        view: View = ALL,
        wall_offset_s: float = 0.0,
        key: NodeKey | None = None,
        config: GossipConfig | None = None,
        incarnation: int | None = None,
    ) -> list[SimNode]:
        """New nodes, connected at random to live ones. `key` and `incarnation` make a node come back."""
        added = []
        for _ in range(count):
            added.append(self._make(view, wall_offset_s, key, config, incarnation))
        for node in added:
            self._dial(node, self.net.connections // 2)
        return added

    def alive(self) -> list[SimNode]:
        """Live nodes, in the order of their making."""
        return [node for node in self.nodes.values() if node.alive]

    def kill(self, node: SimNode) -> None:
        """The node is gone without a word; its peers notice after `detect_s`."""
        node.alive = False
        for peer in list(node.peers):
            self.later(self.net.detect_s, self._close, node.node_id, peer, node.core)

    def leave(self, node: SimNode, linger_s: float = 2.0) -> None:
        """The node says that it leaves and is gone `linger_s` later."""
        node.publish(OwnState(leaving=True))
        self.later(linger_s, self.kill, node)

    def connect(self, a: SimNode, b: SimNode) -> None:
        """Open a connection, if both are alive, in one group and not connected."""
        reachable = a.alive and b.alive and a.group == b.group and a is not b
        if not reachable or b.node_id in a.peers:
            return
        a.peers.add(b.node_id)
        b.peers.add(a.node_id)
        a.core.connected(b.node_id, self.now_s)
        b.core.connected(a.node_id, self.now_s)

    def disconnect(self, a: NodeId, b: NodeId) -> None:
        """Close a connection on both sides."""
        for one, other in ((a, b), (b, a)):
            node = self.nodes.get(one)
            if node is not None and other in node.peers:
                node.peers.discard(other)
                node.core.disconnected(other, self.now_s)

    def partition(self, first: Iterable[SimNode], *, close: bool = True) -> None:
        """Cut these nodes off from all others; with `close` connections end, else they swallow what is sent."""
        for node in first:
            node.group = 1
        if not close:
            return
        for node in self.alive():
            for peer in list(node.peers):
                if self.nodes[peer].group != node.group:
                    self.disconnect(node.node_id, peer)

    def heal(self, redial: int = 4) -> None:
        """End the partition; every node opens `redial` connections anywhere."""
        for node in self.nodes.values():
            node.group = 0
        for node in self.alive():
            self._dial(node, len(node.peers) + redial)

    # -- time

    def later(self, after_s: float, call: Callable[..., None], *args: Any) -> None:
        """Have something done at a later time."""
        self._n_events += 1
        heapq.heappush(self._events, (self.now_s + after_s, self._n_events, call, args))

    def run(self, duration_s: float) -> None:
        """Let virtual time pass. The garbage collector rests meanwhile: it would look at millions of entries."""
        end_s = self.now_s + duration_s
        events = self._events
        collecting = gc.isenabled()
        gc.disable()
        try:
            while events and events[0][0] <= end_s:
                self.now_s, _, call, args = heapq.heappop(events)
                call(*args)
        finally:
            if collecting:
                gc.enable()
        self.now_s = end_s

    def run_until(self, done: Callable[[], bool], limit_s: float, step_s: float = 1.0) -> float:
        """Let time pass until `done()`, looked at every `step_s`; seconds it took, infinity if `limit_s` did not do."""
        start_s = self.now_s
        while self.now_s - start_s < limit_s:
            if done():
                return self.now_s - start_s
            self.run(step_s)
        return self.now_s - start_s if done() else float("inf")

    # -- measuring

    def spread(self, origin: SimNode, state: OwnState, limit_s: float = 30.0) -> dict[NodeId, int]:
        """Publish this state (not the one before) and wait until all live nodes have it: node -> hops."""
        before = origin.table.get(origin.node_id)
        origin.publish(state)
        while (record := origin.table.get(origin.node_id)) is before:
            self.run(self._tick_s)  # changes wait for issue_interval_s
        assert record is not None
        self._tracked = record.id
        self.hops = {origin.node_id: 0}
        self.run_until(lambda: len(self.hops) >= len(self.alive()), limit_s)
        self._tracked = b""
        return self.hops

    def warm(self, share_known: float = 1.0) -> None:
        """Give every node's records to (a random share of) all live nodes without messages: a swarm that has stood."""
        records = [record for node in self.alive() for record in node.table.records()]
        own = {record.id: record for record in records}
        for node in self.alive():
            for record in own.values():
                if self.rng.random() < share_known:
                    node.table.offer(record, self.now_s, record.node_id)
            node.take_changes()

    def reset_traffic(self) -> None:
        """Begin to count anew."""
        self.traffic = Traffic(self.now_s)

    def bytes_per_node_and_s(self) -> float:
        """Sent by a node in a second, since the last reset. As much is received."""
        return self.traffic.bytes / max(1, len(self.alive())) / (self.now_s - self.traffic.since_s)

    # -- how it works

    def drain(self, node: SimNode) -> None:
        """Send what the node's core wants to send."""
        for out in node.core.take_output():
            self._count(node, out.message, out.body)
            if out.peer not in node.peers or self.rng.random() < self.net.loss:
                self.later(self.config.request_timeout_s, self._fail, node, out)
            else:
                self.later(self._latency_s(), self._request, node, out)

    def _make(
        self,
        view: View,
        wall_offset_s: float,
        key: NodeKey | None,
        config: GossipConfig | None,
        incarnation: int | None,
    ) -> SimNode:
        if key is None:
            self._n_keys += 1
            key = NodeKey.from_seed(self._n_keys.to_bytes(16, "big") + self._seed.to_bytes(16, "big"))
        if incarnation is None:
            incarnation = int(1000 * max(0.0, EPOCH_S + self.now_s + wall_offset_s))
        rng = random.Random(self.rng.getrandbits(64))
        core = GossipCore(
            key, NETWORK, config or self.config, rng, incarnation, view=view, reader=self._reader
        )
        node = SimNode(self, key, core, wall_offset_s)
        self.nodes[key.node_id] = node
        self.later(self._tick_s * self.rng.random(), self._tick, node)
        self.later(self._round_s * self.rng.random(), self._round, node)
        return node

    def _dial(self, node: SimNode, wanted: int) -> None:
        others = [other for other in self.nodes.values() if other.alive and other.group == node.group]
        wanted = min(wanted, len(others) - 1)
        for _ in range(8 * wanted):
            if len(node.peers) >= wanted:
                return
            self.connect(node, self.rng.choice(others))

    def _close(self, a: NodeId, b: NodeId, core: GossipCore) -> None:
        """A dead node's connection ends, unless the node came back meanwhile."""
        node = self.nodes.get(a)
        if node is None or node.core is core:
            self.disconnect(a, b)

    def _tick(self, node: SimNode) -> None:
        if not node.alive:
            return
        node.core.tick(self.now_s, node.wall_s)
        self.drain(node)
        self.later(self._tick_s, self._tick, node)

    def _round(self, node: SimNode) -> None:
        if not node.alive:
            return
        if len(node.peers) < self.net.connections // 2:
            self._dial(node, self.net.connections // 2)
        if self._on_round is not None:
            self._on_round(node)
            self.drain(node)
        self.later(self._round_s, self._round, node)

    def _request(self, node: SimNode, out: Outgoing) -> None:
        other = self.nodes[out.peer]
        if not self._reaches(node, other):
            self.later(self.config.request_timeout_s, self._fail, node, out)
            return
        try:
            reply, body = other.core.answer_untrusted(node.node_id, out.message, out.body, self.now_s)
        except ProtocolError as error:
            self._break(other, node, error)
            return
        self._count(other, reply, body)
        self.drain(other)
        if self.rng.random() < self.net.loss:
            self.later(self.config.request_timeout_s, self._fail, node, out)
        else:
            self.later(self._latency_s(), self._reply, node, other, out, reply, body)

    def _reply(self, node: SimNode, other: SimNode, out: Outgoing, reply: Message, body: bytes) -> None:
        if not self._reaches(node, other):
            self._fail(node, out)
            return
        try:
            node.core.receive_untrusted(out, reply, body, self.now_s)
        except ProtocolError as error:
            self._break(node, other, error)
            return
        self._note_hop(node, other)
        self.drain(node)

    def _note_hop(self, node: SimNode, other: SimNode) -> None:
        """Whether this reply brought the tracked record."""
        if not self._tracked or node.node_id in self.hops or node.table.by_id(self._tracked) is None:
            return
        self.hops[node.node_id] = self.hops[other.node_id] + 1

    def _reaches(self, node: SimNode, other: SimNode) -> bool:
        alive = node.alive and other.alive and node.group == other.group
        return alive and other.node_id in node.peers

    def _break(self, offended: SimNode, offender: SimNode, error: ProtocolError) -> None:
        """A peer broke the protocol: the connection ends."""
        self.protocol_errors.append(error)
        self.disconnect(offended.node_id, offender.node_id)

    def _fail(self, node: SimNode, out: Outgoing) -> None:
        if node.alive:
            node.core.failed(out, self.now_s)
            self.drain(node)

    def _latency_s(self) -> float:
        low, high = self.net.latency_s
        return low + (high - low) * self.rng.random()

    def _count(self, node: SimNode, message: Message, body: bytes) -> None:
        n_bytes = MESSAGE_BYTES + len(encode_header(message)) + len(body)
        name = type(message).__name__
        node.bytes_out += n_bytes
        self.traffic.bytes += n_bytes
        self.traffic.messages[name] += 1
        self.traffic.bytes_by[name] += n_bytes


def quick(config: GossipConfig, factor: float) -> GossipConfig:
    """The same with a ttl shorter by `factor`, so that as many records are issued by fewer nodes."""
    return replace(config, ttl_s=max(1, round(config.ttl_s / factor)))
