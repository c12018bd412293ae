"""A dashboard's view of a large swarm that does not exist: real records, table, market and members, no network.

For tests and benchmarks of what is shown; deterministic.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from swarmnode.compute.layout import ExpertTensor, LayerLayout
from swarmnode.config import Config
from swarmnode.gossip.records import ModelHoldings, OwnState, network_id, sign_record
from swarmnode.gossip.table import Change, RecordTable
from swarmnode.identity import NodeId, NodeKey
from swarmnode.net.peer import Peer
from swarmnode.services.dashboard_view import DashboardView
from swarmnode.services.gossip_state import GossipState
from swarmnode.services.market_watch import MarketWatch
from swarmnode.services.members import Members, Standing
from swarmnode.services.throughput import Throughput
from swarmnode.weights.manifest import LayerManifest, Manifest
from swarmnode.weights.slices import ExpertRange

NETWORK = network_id("many nodes")
DEVICES = ("cpu", "cuda", "vulkan", "metal")
RUN_EXPERTS = 8
TTL_S = 86_400
BUDGET_BYTES = 300_000_000


def manifest_of(n_layer: int, n_expert: int) -> Manifest:
    """Layers of experts of 48 KiB; nothing is computed with them."""
    shapes = (("ffn_gate_exps", 64, 64), ("ffn_up_exps", 64, 64), ("ffn_down_exps", 64, 64))
    tensors = tuple(ExpertTensor(kind, 0, ne0, ne1, 4 * ne0 * ne1) for kind, ne0, ne1 in shapes)
    hashes = {kind: bytes(32 * n_expert) for kind, _, _ in shapes}
    layers = {
        layer: LayerManifest(LayerLayout(layer, 64, 64, n_expert, tensors), hashes)
        for layer in range(n_layer)
    }
    return Manifest("qwen35moe", "Many Experts", 64, n_layer, n_expert, 2, {}, layers, bytes(32))


@dataclass
class FakePeer:
    """As much of a peer as is looked at."""

    node_id: NodeId
    rtt_s: float | None = None
    ended: None = None


@dataclass
class FakeDialled:
    """As much of services.reachability as is looked at."""

    n_all: int = 3
    n_from_outside: int = 1
    last_s: float | None = None


@dataclass
class FakeGossip:
    """A table and its listeners."""

    table: RecordTable
    neighbours: int = 8
    incarnation: int = 1
    own_conflict: bool = False
    _listeners: list[Callable[[Change], None]] = field(default_factory=list)

    def subscribe(self, on_change: Callable[[Change], None]) -> None:
        """Tell of every change from now on."""
        self._listeners.append(on_change)

    def tell(self) -> None:
        """Pass on what changed."""
        for change in self.table.take_changes():
            for listener in self._listeners:
                listener(change)


class _Services:
    """Attributes of services that nothing else is asked of."""

    def __init__(self, **values: object) -> None:
        self.__dict__.update(values)


class ManyNodes:
    """`n_nodes` workers, each with a few runs of experts; every fifth is connected and computes."""

    def __init__(
        self,
        n_layer: int = 48,
        n_expert: int = 256,
        n_nodes: int = 500,
        *,
        config: Config | None = None,
        seed: int = 0,
        has_chat: bool = True,
    ) -> None:
        self.config = config or Config()
        self.now_s = 0.0
        self.n_tokens = 0
        self._n_nodes = n_nodes
        self.manifest = manifest_of(n_layer, n_expert)
        self._rng = random.Random(seed)
        self._counter = 0
        self._keys: dict[int, NodeKey] = {}
        own = self.key(0)
        self.gossip = FakeGossip(RecordTable(self.config.gossip, NETWORK, own.node_id, random.Random(seed)))
        self.peers: dict[NodeId, FakePeer] = {}
        self.members = Members(n_expert, self.config.dispatch, self.now)
        market = MarketWatch(self.manifest, own.node_id, self.gossip, self.config, self.now)
        self.market = market
        self.throughput = Throughput(self.members, lambda: self.n_tokens, self.now, self.config.dashboard)
        known: Any = GossipState(
            own.node_id,
            cast(Any, self.gossip),
            cast(Any, _Services(connected=self.peers)),
            cast(Any, _Services(addresses=("203.0.113.9:4790",))),
            cast(Any, _Services(dialled=FakeDialled())),
            market,
            self.config,
            self.now,
        )
        self.view = DashboardView(
            known, self.members, self.throughput, lambda: 0, self.config.dashboard, has_chat=has_chat
        )
        self._says(0, OwnState(("203.0.113.9:4790",), (), ("backbone",), 0, "cpu", (self._seeds(),)))
        for number in range(1, n_nodes + 1):
            self.join(number, self._some_runs(n_layer, n_expert))

    def now(self) -> float:
        """The clock of all of it, in seconds."""
        return self.now_s

    def key(self, number: int) -> NodeKey:
        """Of node `number`; 0 is the node whose page it is."""
        if number not in self._keys:
            self._keys[number] = NodeKey.from_seed(number.to_bytes(32, "big"))
        return self._keys[number]

    def join(
        self,
        number: int,
        serving: tuple[ExpertRange, ...],
        *,
        device: str | None = None,
        connected: bool | None = None,
    ) -> None:
        """A worker's record comes in, the first or a newer one. `device`: what it says that it is."""
        rng = random.Random(number)
        address = (
            f"{rng.randrange(11, 120)}.{rng.randrange(256)}.{rng.randrange(256)}.{rng.randrange(256)}:4790"
        )
        holdings = self._holdings(serving)
        kind = rng.choice(DEVICES) if device is None else device
        self._says(number, OwnState((address,), (), ("worker",), BUDGET_BYTES, kind[:32], (holdings,)))
        if number % 5 == 0 if connected is None else connected:
            self.connect(number, serving, kind)

    def connect(self, number: int, serving: tuple[ExpertRange, ...], device: str) -> None:
        """It is connected, and gets rows."""
        node_id = self.key(number).node_id
        peer = self.peers.setdefault(node_id, FakePeer(node_id, 0.005 + 0.001 * (number % 40)))
        worker = self.members.announce(cast(Peer, peer), serving, 512, device)
        worker.standing = Standing.SERVING

    def leave(self, number: int) -> None:
        """It says goodbye."""
        node_id = self.key(number).node_id
        self._says(number, OwnState(leaving=True))
        peer = self.peers.pop(node_id, None)
        if peer is not None:
            self.members.disconnected(cast(Peer, peer))

    def step(self, seconds: float = 1.0) -> None:
        """Time passes: rows are computed, round trips differ a little, a node holds something else."""
        rng = self._rng
        self.now_s += seconds
        self.n_tokens += round(rng.uniform(8, 24) * seconds)
        for worker in self.members.workers:
            worker.tally.pairs += round(rng.uniform(20, 60) * seconds)
        for peer in self.peers.values():
            peer.rtt_s = 0.005 + 0.04 * rng.random()
        if self._n_nodes:
            number = rng.randrange(1, self._n_nodes + 1)
            self.join(number, self._some_runs(self.manifest.n_layer, self.manifest.n_expert))
        self.throughput.sample()

    def _some_runs(self, n_layer: int, n_expert: int) -> tuple[ExpertRange, ...]:
        rng = self._rng
        layers = rng.sample(range(n_layer), min(n_layer, rng.randrange(4, 11)))
        n_runs = -(-n_expert // RUN_EXPERTS)
        runs = ((layer, RUN_EXPERTS * rng.randrange(n_runs)) for layer in sorted(layers))
        return tuple(ExpertRange(layer, first, min(RUN_EXPERTS, n_expert - first)) for layer, first in runs)

    def _holdings(self, serving: tuple[ExpertRange, ...]) -> ModelHoldings:
        shape = self.manifest
        return ModelHoldings(shape.model_id, shape.n_layer, shape.n_expert, serving, (), 1, seeds=False)

    def _seeds(self) -> ModelHoldings:
        shape = self.manifest
        return ModelHoldings(shape.model_id, shape.n_layer, shape.n_expert, (), (), 1, seeds=True)

    def _says(self, number: int, state: OwnState) -> None:
        self._counter += 1
        key = self.key(number)
        record = sign_record(key, NETWORK, (1, self._counter), TTL_S, 0, state)
        self.gossip.table.offer(record, self.now_s, None if number == 0 else key.node_id)
        self.gossip.tell()
