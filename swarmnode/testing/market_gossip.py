"""The market over real gossip: every node with its own core, table, coverage and volunteer, in virtual time.

Slower than market_sim by far, and without its model of delays: it shows that the two agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from swarmnode.config import MarketConfig
from swarmnode.gossip.coverage import Coverage, MarketView
from swarmnode.gossip.decisions import Drop, Fetch
from swarmnode.gossip.records import ModelHoldings, NodeRecord, OwnState
from swarmnode.gossip.shape import MarketShape
from swarmnode.gossip.volunteering import Volunteer
from swarmnode.testing.gossip_sim import GossipSim, SimNode
from swarmnode.weights.slices import ExpertRange

MODEL = hashlib.sha256(b"the simulated model").digest()


@dataclass
class Trader:
    """One node of the market. `address`: of its own site."""

    gossip: SimNode
    volunteer: Volunteer
    coverage: Coverage
    view: MarketView
    shape: MarketShape
    address: str
    downloads: dict[ExpertRange, float] = field(default_factory=dict)

    @property
    def state(self) -> OwnState:
        """What its record should say."""
        volunteer, shape = self.volunteer, self.shape
        holdings = ModelHoldings(
            MODEL, shape.n_layer, shape.n_expert, volunteer.serving, volunteer.fetching, 512, False
        )
        return OwnState(addresses=(self.address,), roles=("worker",), models=(holdings,))


class GossipMarket:
    """Nodes with these budgets, started at once; every download takes `download_s`."""

    def __init__(
        self,
        shape: MarketShape,
        budgets_bytes: Sequence[int],
        seed: int,
        download_s: float = 10.0,
        config: MarketConfig | None = None,
    ) -> None:
        self.shape = shape
        self.n_downloaded = 0
        self._download_s = download_s
        self._config = config or MarketConfig()
        self.gossip = GossipSim(seed, round_s=0.5, on_round=self._turn)
        nodes = self.gossip.add(len(budgets_bytes))
        self.traders = [
            self._trader(node, budget_bytes, place)
            for place, (node, budget_bytes) in enumerate(zip(nodes, budgets_bytes, strict=True))
        ]

    def run(self, seconds: float) -> None:
        self.gossip.run(seconds)

    def kill(self, traders: Sequence[Trader]) -> None:
        """Gone without a word."""
        for trader in traders:
            self.gossip.kill(trader.gossip)

    def replicas(self) -> npt.NDArray[np.int32]:
        """i32 [experts that exist]: living nodes that serve each."""
        counts = np.zeros(self.shape.size, np.int32)
        for trader in self.traders:
            if trader.gossip.alive:
                for item in trader.volunteer.serving:
                    counts[self.shape.slice_of(item)] += 1
        return counts[self.shape.exists]

    def _trader(self, node: SimNode, budget_bytes: int, place: int) -> Trader:
        coverage = Coverage(MODEL, self.shape, node.node_id, self._config)
        trader = Trader(
            node,
            Volunteer(node.node_id.raw, self.shape, budget_bytes, self._config),
            coverage,
            MarketView(coverage),
            self.shape,
            f"8.{1 + place // 250}.{place % 250}.1:4000",
        )
        node.data = trader
        return trader

    def _turn(self, node: SimNode) -> None:
        """What services/market does, twice a second."""
        trader: Trader = node.data
        now_s = self.gossip.now_s
        for change in node.take_changes():
            if change.record is None:
                trader.coverage.remove(change.node_id)
            elif isinstance(change.record, NodeRecord):
                trader.coverage.update(change.node_id, change.record.state, now_s, change.record.ttl_s)
        trader.coverage.advance(now_s)
        for item in [item for item, done_s in trader.downloads.items() if done_s <= now_s]:
            del trader.downloads[item]
            trader.volunteer.served(item)
        for decision in trader.volunteer.decide(trader.view, now_s):
            if isinstance(decision, Fetch):
                trader.downloads[decision.item] = now_s + self._download_s
                self.n_downloaded += decision.item.count
            elif isinstance(decision, Drop):
                trader.volunteer.freed(decision.item)
        node.publish(trader.state)
        told = node.table.get(node.node_id)
        if told is not None and told.state == trader.state:
            trader.volunteer.published(now_s)
