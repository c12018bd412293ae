"""Which experts a joining worker should take: the scarcest that fit its byte budget.

For those who ask over HTTP (services/market_watch); workers decide by themselves (gossip/volunteering).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from swarmnode.weights.slices import ExpertRange, holdings_of, ranges_of

Counts: TypeAlias = Mapping[int, npt.NDArray[np.int32]]
"""Layer -> i32 [n_expert]: replicas of each expert. Layers without routed experts are absent."""

RUN = 4
"""Experts are taken in aligned runs of at least this many where the budget allows (short records, long reads)."""
RUNS = 256
"""About so many runs for any budget: a large one takes longer runs, so that what it holds fits a message."""


def choose_scarcest(
    counts: Counts,
    held: Iterable[ExpertRange],
    expert_bytes: Mapping[int, int],
    budget_bytes: int,
    seed: bytes,
    max_ranges: int,
) -> tuple[ExpertRange, ...]:
    """The least replicated experts that fit beside `held` into `budget_bytes`, in at most `max_ranges` merged ranges.

    `expert_bytes` layer -> bytes of one expert. Experts are taken in aligned runs of equal scarcity; ties between runs
    are broken by a hash of `seed` (the joining node's id) and the run, so that nodes asking at one moment do not all
    want the same. A last run is cut to what still fits. Empty when not even one expert fits.
    """
    holds = holdings_of(held)
    left_bytes = budget_bytes - sum(expert_bytes[layer] * len(experts) for layer, experts in holds.items())
    run = _run_length(left_bytes, expert_bytes)
    ranked = sorted(
        (scarcity, hashlib.sha256(seed + f"{item.layer}:{item.first}".encode()).digest(), item)
        for scarcity, item in _runs(counts, holds, run)
    )
    chosen: list[ExpertRange] = []
    for _, _, item in ranked:
        fits = min(item.count, left_bytes // expert_bytes[item.layer])
        if fits > 0:
            chosen.append(ExpertRange(item.layer, item.first, fits))
            left_bytes -= fits * expert_bytes[item.layer]
    return ranges_of(holdings_of(chosen))[:max_ranges]


def _run_length(budget_bytes: int, expert_bytes: Mapping[int, int]) -> int:
    """RUN, doubled until the budget holds at most RUNS runs."""
    n_experts = max(0, budget_bytes) // min(expert_bytes.values())
    run = RUN
    while n_experts > RUNS * run:
        run *= 2
    return run


def _runs(counts: Counts, held: Mapping[int, frozenset[int]], run: int) -> list[tuple[int, ExpertRange]]:
    """Aligned runs of experts not held that are equally often replicated, each with that number."""
    runs: list[tuple[int, ExpertRange]] = []
    for layer, replicas in counts.items():
        mine = held.get(layer, frozenset())
        start = 0
        for expert in range(1, len(replicas) + 1):
            border = expert == len(replicas) or expert % run == 0 or replicas[expert] != replicas[start]
            if border or (expert in mine) != (start in mine):
                if start not in mine:
                    runs.append((int(replicas[start]), ExpertRange(layer, start, expert - start)))
                start = expert
    return runs
