"""`auto` against the better of all here and all at workers, on a modelled machine: six regimes, and changes of them.

The model is send_sim.py's. `python -m benchmarks.regimes` measures the same on a real one.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest

from tests.schedule.send_sim import Regime, Sim

RTTS_S = (0.0003, 0.003, 0.04)
REGIMES = [Regime(rtt_s, has_disk) for has_disk, rtt_s in product((False, True), RTTS_S)]
WITHIN = 0.9
LEARN_S, MEASURE_S = 4.0, 4.0
FOLLOW_S = 8.0
"""How long a change may take to be followed: a token takes up to 0.35 s, and 2 % of the time pays for finding out."""
CHANGES = [
    (Regime(0.0003, True), Regime(0.04, True)),
    (Regime(0.04, True), Regime(0.0003, True)),
    (Regime(0.003, False), Regime(0.003, True)),
    (Regime(0.003, True), Regime(0.003, False)),
    (Regime(0.04, False), Regime(0.0003, True)),
    (Regime(0.0003, True), Regime(0.04, False)),
]


@cache
def better(regime: Regime, n_sequences: int) -> float:
    """Tokens a second."""
    speeds = []
    for mode in ("local", "remote"):
        sim = Sim(mode, regime, n_sequences, 1)
        sim.run(1.0)
        speeds.append(sim.run(MEASURE_S))
    return max(speeds)


@pytest.mark.parametrize("has_budget", [False, True])
@pytest.mark.parametrize("n_sequences", [1, 16])
@pytest.mark.parametrize("regime", REGIMES, ids=str)
def test_auto_is_hardly_worse_than_the_better(regime: Regime, n_sequences: int, has_budget: bool) -> None:
    sim = Sim("auto", regime, n_sequences, 2, has_budget=has_budget)
    sim.run(LEARN_S)
    assert sim.run(MEASURE_S) > WITHIN * better(regime, n_sequences)


@pytest.mark.parametrize("has_budget", [False, True])
@pytest.mark.parametrize("n_sequences", [1, 16])
@pytest.mark.parametrize(("before", "after"), CHANGES, ids=str)
def test_auto_follows_a_change(before: Regime, after: Regime, n_sequences: int, has_budget: bool) -> None:
    sim = Sim("auto", before, n_sequences, 1, has_budget=has_budget)
    sim.run(LEARN_S)
    sim.set(after)
    sim.run(FOLLOW_S)
    assert sim.run(MEASURE_S) > WITHIN * better(after, n_sequences)


def test_neither_way_is_always_the_better() -> None:
    """Else the tests above would say nothing."""
    for regime, is_local in [(Regime(0.04, False), True), (Regime(0.0003, True), False)]:
        speeds = {}
        for mode in ("local", "remote"):
            sim = Sim(mode, regime, 1, 1)
            sim.run(1.0)
            speeds[mode] = sim.run(MEASURE_S)
        assert (speeds["local"] > 2 * speeds["remote"]) is is_local


def test_equal_seeds_give_equal_runs() -> None:
    runs = []
    for _ in range(2):
        sim = Sim("auto", Regime(0.003, True), 16, 5)
        runs.append((sim.run(2.0), sim.run(2.0)))
    assert runs[0] == runs[1]
