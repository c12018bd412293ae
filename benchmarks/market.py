"""The market of experts, simulated: what is covered, how evenly, and what it costs in downloads.

    python -m benchmarks.market [--real] [--rules] [--seed N]

Prints a line a scenario for 600 nodes of 20 slots over 3,072 experts (a few minutes), or with --real for 2,000 nodes of
42-340 MB over 48 x 256 experts (half an hour). With --rules, a cold start under other rules instead. Virtual time, one
process; tests/gossip/test_market_sim.py holds the bounds.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from swarmnode.gossip.demand import Demand
from swarmnode.gossip.shape import MarketShape
from swarmnode.testing import market_runs as runs
from swarmnode.testing.market_sim import Figures, MarketPlan, MarketSim

SETTLE_S = 480
LINE = "{:<54}{:>9}{:>9}{:>7}{:>7}{:>11}{:>8}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--rules", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    size = runs.real_size() if given.real else runs.slots_of_20()
    plan = MarketPlan(size.shape, seed=given.seed)
    print(f"{size.name}, {size.n_slots} slots, {size.shape.n_total} experts, seed {given.seed}")
    print(LINE.format("scenario", "covered", "twice", "peak/x", "mean", "downl/slot", "took s"))
    last = time.perf_counter()
    for name, figures, downloads in (rules if given.rules else scenarios)(size, plan):
        now = time.perf_counter()
        print(
            LINE.format(
                name,
                f"{figures.covered:.2%}",
                f"{figures.twice:.2%}",
                f"{figures.peak:.2f}",
                f"{figures.mean:.2f}",
                f"{downloads:.3f}",
                f"{now - last:.1f}",
            ),
            flush=True,
        )
        last = now


def scenarios(size: runs.Size, plan: MarketPlan) -> Iterator[tuple[str, Figures, float]]:
    """(name, figures at the end or at the worst moment, downloads a slot in this phase)."""
    settled = runs.cold_start(size, plan, 60)
    yield "cold start, after 1 min", settled.figures(), settled.n_downloaded / size.n_slots
    settled.run(SETTLE_S - 60)
    yield f"cold start, after {SETTLE_S // 60} min", settled.figures(), settled.n_downloaded / size.n_slots

    sim = copy.deepcopy(settled)
    halved = runs.partition(sim, 600, 2 * plan.sync_s)
    moved = (halved.parted.downloads - halved.before.downloads) / size.n_slots
    yield f"10 min in halves ({min(halved.halves_covered):.2%} in a half)", halved.parted, moved
    again = (halved.after.downloads - halved.parted.downloads) / size.n_slots
    yield f"2 min after healing ({halved.wrong_views} views differ)", halved.after, again

    for crashing in (0.5, 0.0, 1.0):
        sim = copy.deepcopy(settled)
        figures = runs.churn(sim, size.budgets_bytes, 15, 0.10, crashing)
        worst = min(figures, key=lambda entry: entry.covered)
        name = f"10 %/min for 15 min, {crashing:.0%} crash: the worst"
        yield name, worst, (sim.n_downloaded - settled.n_downloaded) / size.n_slots

    for kind in ("same", "alike", "all"):
        sim = runs.with_liars(size, plan, 0.10, kind, SETTLE_S)
        name = f"10 % liars ({kind}), after {SETTLE_S // 60} min"
        yield name, sim.figures(), sim.n_downloaded / size.n_slots

    demand = skewed(size.shape)
    sim = runs.cold_start(size, plan, SETTLE_S, demand)
    yield f"skewed demand, after {SETTLE_S // 60} min", sim.figures(), sim.n_downloaded / size.n_slots
    print(f"  replicas by demand: {by_demand(sim, demand)}")


def rules(size: runs.Size, plan: MarketPlan) -> Iterator[tuple[str, Figures, float]]:
    """A cold start under this rule and others: claims that settle or not, from a sample or from all runs."""
    ours = plan.config
    at_once = replace(ours, settle_hop_s=0.0, better=1e9)
    others = {
        "this rule": ours,
        "sample of 16 at any time, settling": replace(ours, sample_share=0.0),
        "the scarcest of all runs, settling": replace(ours, sample_runs=1_000_000),
        "sample of 16, downloaded at once": replace(at_once, sample_share=0.0),
        "the scarcest of all runs, at once": replace(at_once, sample_runs=1_000_000),
    }
    for name, config in others.items():
        sim = MarketSim(replace(plan, config=config))
        sim.join(size.budgets_bytes)
        while sim.figures().covered < 0.999 and sim.now_s < SETTLE_S:
            sim.run(5)
        covered_s = sim.now_s
        sim.run(SETTLE_S - sim.now_s)
        yield f"{name} (99.9 % at {covered_s} s)", sim.figures(), sim.n_downloaded / size.n_slots


def skewed(shape: MarketShape) -> Demand:
    """Log-normal: a tenth of the experts has about half of the demand."""
    draw = np.random.default_rng(7).lognormal(0.0, 1.2, shape.size).astype(np.float32) * shape.exists
    weight = (draw / (draw.sum() / shape.n_total)).astype(np.float32)
    return Demand(weight, np.zeros(shape.size, np.float32), 1.0)


def by_demand(sim: MarketSim, demand: Demand) -> str:
    """Mean replicas of tenths of the experts, the least wanted first."""
    exists = sim.shape.exists
    order = np.argsort(demand.weight[exists])
    parts = np.array_split(sim.served[exists][order], 10)
    return " ".join(f"{part.mean():.1f}" for part in parts)


if __name__ == "__main__":
    main()
