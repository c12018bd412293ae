"""Which experts a joining worker should take: the scarcest that fit its byte budget.

The seam for the gossiped market: the function sees only counts, sizes and a seed, so the same decision can be taken
by the peer that was asked (now) or by the worker itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from swarmnode.weights.slices import ExpertRange

RUN = 4
"""Experts are taken in aligned runs of this many where the budget allows (short records, long reads)."""


def replica_counts(
    n_expert: int, layers: Sequence[int], holdings: Sequence[Mapping[int, frozenset[int]]]
) -> dict[tuple[int, int], int]:
    """How many of `holdings` contain each (layer, expert); every expert of `layers` has an entry."""
    counts = {(layer, expert): 0 for layer in layers for expert in range(n_expert)}
    for held in holdings:
        for layer, experts in held.items():
            for expert in experts:
                if (layer, expert) in counts:
                    counts[layer, expert] += 1
    return counts


def choose_scarcest(
    counts: Mapping[tuple[int, int], int],
    expert_bytes: Mapping[int, int],
    budget_bytes: int,
    seed: bytes,
    run: int = RUN,
) -> list[ExpertRange]:
    """Runs of the least replicated experts whose bytes sum to at most `budget_bytes`.

    `counts` (layer, expert) -> replicas; `expert_bytes` layer -> bytes of one expert. Ties between equally scarce
    runs are broken by a hash of `seed` (the joining node's id) and the run, so that nodes asking at one moment do
    not all want the same. A last run is cut to what still fits. Empty when not even one expert fits.
    """
    runs = _runs(counts, run)

    def rank(item: ExpertRange) -> tuple[float, bytes]:
        scarcity = sum(counts[item.layer, expert] for expert in item.experts) / item.count
        return scarcity, hashlib.sha256(seed + f"{item.layer}:{item.first}".encode()).digest()

    chosen: list[ExpertRange] = []
    left = budget_bytes
    for item in sorted(runs, key=rank):
        fits = min(item.count, left // expert_bytes[item.layer])
        if fits > 0:
            chosen.append(ExpertRange(item.layer, item.first, fits))
            left -= fits * expert_bytes[item.layer]
    return chosen


def _runs(counts: Mapping[tuple[int, int], int], run: int) -> list[ExpertRange]:
    """Aligned runs of experts that are equally often replicated (a run never mixes covered and uncovered)."""
    runs: list[ExpertRange] = []
    for layer, expert in sorted(counts):
        last = runs[-1] if runs else None
        joins = (
            last is not None
            and last.layer == layer
            and last.first + last.count == expert
            and expert % run != 0
            and counts[layer, last.first] == counts[layer, expert]
        )
        if joins and last is not None:
            runs[-1] = ExpertRange(layer, last.first, last.count + 1)
        else:
            runs.append(ExpertRange(layer, expert, 1))
    return runs
