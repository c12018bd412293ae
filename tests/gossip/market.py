"""Small markets for tests: shapes, states, and nodes that hear of each other's records after a while."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from swarmnode.config import MarketConfig
from swarmnode.gossip.coverage import Coverage, MarketView
from swarmnode.gossip.decisions import Decision, Drop, Fetch
from swarmnode.gossip.records import ModelHoldings, OwnState
from swarmnode.gossip.shape import MarketShape
from swarmnode.gossip.volunteering import Volunteer
from swarmnode.identity import NodeId, NodeKey
from swarmnode.weights.slices import ExpertRange

MODEL = hashlib.sha256(b"a model").digest()
CONFIG = MarketConfig()


def even_shape(n_layer: int = 3, n_expert: int = 16, expert_bytes: int = 10) -> MarketShape:
    return MarketShape(n_layer, n_expert, dict.fromkeys(range(n_layer), expert_bytes))


def node_id(number: int) -> NodeId:
    return NodeKey.from_seed(hashlib.sha256(str(number).encode()).digest()).node_id


def state(
    serving: tuple[ExpertRange, ...] = (),
    fetching: tuple[ExpertRange, ...] = (),
    address: str = "",
    relays: tuple[NodeId, ...] = (),
    seeds: bool = False,
    leaving: bool = False,
    shape: MarketShape | None = None,
) -> OwnState:
    """A node's state; without an address it is of no site."""
    shape = shape or even_shape()
    holdings = ModelHoldings(MODEL, shape.n_layer, shape.n_expert, serving, fetching, 512, seeds)
    return OwnState(
        addresses=(address,) if address else (), relays=relays, models=(holdings,), leaving=leaving
    )


@dataclass
class MarketNode:
    """A node with its real coverage; downloads take `download_s`."""

    number: int
    shape: MarketShape
    budget_bytes: int
    download_s: float = 5.0
    node_id: NodeId = field(init=False)
    coverage: Coverage = field(init=False)
    volunteer: Volunteer = field(init=False)
    done: dict[ExpertRange, float] = field(default_factory=dict)
    fetched: list[ExpertRange] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.node_id = node_id(self.number)
        self.coverage = Coverage(MODEL, self.shape, self.node_id, CONFIG)
        self.volunteer = Volunteer(self.node_id.raw, self.shape, self.budget_bytes, CONFIG)
        self.view = MarketView(self.coverage)

    @property
    def state(self) -> OwnState:
        return state(self.volunteer.serving, self.volunteer.fetching, shape=self.shape)

    def turn(self, now_s: float) -> bool:
        """Finish downloads, decide; whether the record changed."""
        before = self.state
        for item in [item for item, done_s in self.done.items() if done_s <= now_s]:
            del self.done[item]
            self.volunteer.served(item)
        self.coverage.advance(now_s)
        for decision in self.volunteer.decide(self.view, now_s):
            self.decisions.append(decision)
            if isinstance(decision, Fetch):
                self.done[decision.item] = now_s + self.download_s
                self.fetched.append(decision.item)
            elif isinstance(decision, Drop):
                self.volunteer.freed(decision.item)
        return self.state != before


class Market:
    """Nodes whose records reach the others `delay_s` after they were published. Steps of `step_s`."""

    def __init__(self, nodes: list[MarketNode], delay_s: float = 1.0, step_s: float = 0.05) -> None:
        self.nodes = nodes
        self.now_s = 0.0
        self._delay_s = delay_s
        self._step_s = step_s
        self._travelling: list[tuple[float, MarketNode, OwnState | None]] = []

    def run(self, seconds: float, starts_s: dict[int, float] | None = None) -> None:
        """`starts_s`: node number -> when it begins to decide."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += self._step_s
            self._deliver()
            for node in self.nodes:
                if self.now_s >= (starts_s or {}).get(node.number, 0.0) and node.turn(self.now_s):
                    self._travelling.append((self.now_s + self._delay_s, node, node.state))
                    node.volunteer.published(self.now_s)

    def kill(self, node: MarketNode) -> None:
        """Gone, and all others hear it at once."""
        self.nodes.remove(node)
        for other in self.nodes:
            other.coverage.remove(node.node_id)
        self._travelling = [entry for entry in self._travelling if entry[1] is not node]

    def replicas(self, flat_or_range: ExpertRange) -> list[int]:
        """How many nodes serve each expert of a range."""
        return [
            sum(
                item.layer == flat_or_range.layer and item.first <= expert < item.stop
                for node in self.nodes
                for item in node.volunteer.serving
            )
            for expert in flat_or_range.experts
        ]

    def all_replicas(self) -> list[int]:
        shape = self.nodes[0].shape
        return [
            count
            for layer in shape.expert_bytes
            for count in self.replicas(ExpertRange(layer, 0, shape.n_expert))
        ]

    def _deliver(self) -> None:
        arrived = [entry for entry in self._travelling if entry[0] <= self.now_s]
        self._travelling = [entry for entry in self._travelling if entry[0] > self.now_s]
        for _, sender, content in arrived:
            for node in self.nodes:
                if node is not sender and content is not None:
                    node.coverage.update(sender.node_id, content, self.now_s)
