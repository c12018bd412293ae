"""What is asked of the market, as runs of the simulator: a cold start, churn, a partition, liars."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from swarmnode.gossip.demand import Demand
from swarmnode.gossip.shape import MarketShape
from swarmnode.testing.market_sim import Figures, MarketPlan, MarketSim, SimNode
from swarmnode.weights.slices import ExpertRange, merge_pairs

SMALL_EXPERT_BYTES = 5_300_000
LARGE_EXPERT_BYTES = 6_100_000


@dataclass(frozen=True)
class Size:
    """`n_nodes` whose budgets hold `n_slots` experts together."""

    name: str
    shape: MarketShape
    budgets_bytes: tuple[int, ...]

    @property
    def n_nodes(self) -> int:
        return len(self.budgets_bytes)

    @property
    def n_slots(self) -> int:
        """Experts of the mean size that fit."""
        mean = sum(self.shape.expert_bytes.values()) / len(self.shape.expert_bytes)
        return round(sum(self.budgets_bytes) / mean)


def slots_of_20(n_nodes: int = 600, n_layer: int = 12) -> Size:
    """Nodes of 20 slots each over `n_layer` x 256 experts of one size."""
    shape = MarketShape(n_layer, 256, dict.fromkeys(range(n_layer), LARGE_EXPERT_BYTES))
    return Size(f"{n_nodes} nodes", shape, (20 * LARGE_EXPERT_BYTES,) * n_nodes)


def real_size(n_nodes: int = 2000, seed: int = 1) -> Size:
    """48 x 256 experts, every other layer with larger ones, and nodes of 42 to 340 MB."""
    sizes = {layer: LARGE_EXPERT_BYTES if layer % 2 else SMALL_EXPERT_BYTES for layer in range(48)}
    budgets = np.random.default_rng(seed).integers(42_000_000, 340_000_001, n_nodes)
    return Size(f"{n_nodes} nodes of 42-340 MB", MarketShape(48, 256, sizes), tuple(map(int, budgets)))


def cold_start(size: Size, plan: MarketPlan, seconds: int, demand: Demand | None = None) -> MarketSim:
    """All nodes start at once with nothing."""
    sim = MarketSim(plan, demand)
    sim.join(size.budgets_bytes)
    sim.run(seconds)
    return sim


def churn(
    sim: MarketSim, budgets: Iterable[int], minutes: int, per_minute: float, crashing: float
) -> list[Figures]:
    """Every minute this share of the nodes goes (`crashing` of them without a word), evenly over the minute, and as
    many new ones come. The figures of every 10 s.
    """
    sizes = list(budgets)
    figures = []
    owed = 0.0
    for second in range(minutes * 60):
        living = sim.living()
        owed += len(sizes) * per_minute / 60
        goers = [living[int(i)] for i in sim.rng.choice(len(living), int(owed), replace=False)]
        owed -= len(goers)
        for node in goers:
            sim.leave([node], crash=bool(sim.rng.random() < crashing))
        for _ in goers:
            contact = living[int(sim.rng.integers(len(living)))]
            while not contact.alive:
                contact = living[int(sim.rng.integers(len(living)))]
            sim.join([sizes[int(sim.rng.integers(len(sizes)))]], contact=contact)
        sim.run(1)
        if second % 10 == 9:
            figures.append(sim.figures())
    return figures


@dataclass(frozen=True)
class Parted:
    """Downloads before, during and after a partition; how many views differ from the truth at the end."""

    before: Figures
    parted: Figures
    halves_covered: tuple[float, float]
    after: Figures
    wrong_views: int


def partition(sim: MarketSim, parted_s: int, after_s: int) -> Parted:
    """A full swarm falls into halves for `parted_s` (longer than records live) and heals."""
    before = sim.figures()
    sim.part()
    sim.run(parted_s)
    halves = tuple(_covered(sim, [n for n in sim.living() if n.side == side]) for side in (0, 1))
    parted = sim.figures()
    sim.heal()
    sim.run(after_s)
    return Parted(before, parted, (halves[0], halves[1]), sim.figures(), wrong_views(sim))


def wrong_views(sim: MarketSim) -> int:
    """Living nodes that lack a record of another living one though it has had the time to reach them."""
    heard_s = sim.now_s - max(sim.plan.delays_s)
    rows = np.array([node.row for node in sim.living()])
    lacking = np.zeros(len(rows), np.bool_)
    for node in sim.living():
        old = [version for version, record in enumerate(node.snapshots) if record.at_s <= heard_s]
        if old:
            lacking |= (sim.seen(rows, node) < old[-1]) & (rows != node.row)
    return int(lacking.sum())


def _covered(sim: MarketSim, nodes: Iterable[SimNode]) -> float:
    held = np.zeros(sim.shape.size, np.bool_)
    for node in nodes:
        for item in node.volunteer.serving:
            held[sim.shape.slice_of(item)] = True
    return float(held[sim.shape.exists].mean())


def with_liars(size: Size, plan: MarketPlan, share: float, kind: str, seconds: int) -> MarketSim:
    """A cold start in which this share of the nodes serves nothing of what it says.

    `kind`: `alike` take part as everybody; `all` say they hold the whole model; `same` all say they hold one and the
    same tenth of it.
    """
    sim = MarketSim(replace(plan, max_rows=size.n_nodes))
    n_liars = round(size.n_nodes * share)
    honest, liars = size.budgets_bytes[n_liars:], size.budgets_bytes[:n_liars]
    sim.join(liars, lies=True, fixed=[_claims(size.shape, kind)] * n_liars if kind != "alike" else ())
    sim.join(honest)
    sim.run(seconds)
    return sim


def _claims(shape: MarketShape, kind: str) -> tuple[ExpertRange, ...]:
    layers = sorted(shape.expert_bytes)
    if kind == "same":
        layers = layers[: max(1, len(layers) // 10)]
    return tuple(ExpertRange(layer, 0, shape.n_expert) for layer in layers)


def ranges_of_flat(flat: npt.NDArray[np.int64], shape: MarketShape) -> tuple[ExpertRange, ...]:
    """The fewest ranges of these flat numbers."""
    return merge_pairs(divmod(int(number), shape.n_expert) for number in flat)
