"""What a backbone asks experts for: counted with decay, told as a coarse sketch, put together against liars. Pure.

A backbone counts every (row, expert) pair that its gate chose, and those among them that it computed itself because no
worker answered for them (*unmet*). The first says what is wanted, the second what claims are worth: nobody can hold an
expert by saying so while those who use it find nobody who computes it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swarmnode.config import MarketConfig
from swarmnode.gossip.shape import MarketShape
from swarmnode.gossip.sketch import MAX_HOT, MAX_UNMET, SHARE_UNIT, DemandSketch

_NO_PAIR = 0.01
"""Less than this is the rest of a pair that was long ago."""
_FOLD_AT = 512
"""Calls of `add` between two foldings: 10 tokens of 48 layers."""

Flat = npt.NDArray[np.int64]


class DemandCounter:
    """Counts of one model's experts, halved every `config.demand_half_life_s` (unmet ones: `unmet_half_life_s`).

    All calls from one thread: what is put aside is folded in by any of them.
    """

    def __init__(self, shape: MarketShape, config: MarketConfig) -> None:
        self._shape = shape
        self._routed = _Decayed(shape.size, config.demand_half_life_s)
        self._lately = _Decayed(shape.size, config.unmet_half_life_s)
        self._unmet = _Decayed(shape.size, config.unmet_half_life_s)
        self._pending: deque[Flat] = deque()
        self._pending_unmet: deque[Flat] = deque()
        self._fold_every_s = config.unmet_half_life_s / 100
        self._fold_s = -math.inf

    def add(self, layer: int, ids: npt.NDArray[np.int32], now_s: float) -> None:
        """The gate chose `ids` (i32, any shape) of `layer`. Cheap: copied and put aside, counted every 512 calls."""
        self._put_aside(self._pending, layer, ids, now_s)

    def add_unmet(self, layer: int, ids: npt.NDArray[np.int32], now_s: float) -> None:
        """These pairs of `add` were computed here, for no worker had them in time (not: because here was faster)."""
        self._put_aside(self._pending_unmet, layer, ids, now_s)

    def counts(self, now_s: float) -> npt.NDArray[np.float64]:
        """f64 [n_layer, n_expert]: decayed pairs."""
        self._fold(now_s)
        return self._routed.sums.reshape(self._shape.n_layer, self._shape.n_expert).copy()

    def sketch(self, now_s: float) -> DemandSketch:
        """What goes into a record. Unmet: the experts with most unmet pairs, and shares over the short half-life, of
        one pair at least: a hole is forgotten, too, where nobody asks again.
        """
        self._fold(now_s)
        counts, unmet = self._routed.sums, self._unmet.sums
        lately = np.maximum(self._lately.sums, 1.0)
        total = max(float(counts.sum()), 1e-9)
        return DemandSketch(
            per_s=float(counts.sum()) * self._routed.decay_per_s,
            hot=_entries(_largest(counts, MAX_HOT), counts / total),
            unmet=_entries(_largest(unmet, MAX_UNMET), np.minimum(unmet / lately, 1.0)),
        )

    def _put_aside(self, pending: deque[Flat], layer: int, ids: npt.NDArray[np.int32], now_s: float) -> None:
        pending.append(ids.ravel() + np.int64(layer * self._shape.n_expert))
        if len(pending) >= _FOLD_AT or now_s >= self._fold_s:
            self._fold(now_s)

    def _fold(self, now_s: float) -> None:
        """Everything that was put aside counts as of now."""
        self._fold_s = now_s + self._fold_every_s
        routed = _counted(self._pending, self._shape.size)
        self._routed.add(routed, now_s)
        self._lately.add(routed, now_s)
        self._unmet.add(_counted(self._pending_unmet, self._shape.size), now_s)


@dataclass(frozen=True)
class Demand:
    """What many backbones want. `weight` f32 [size]: 1 for an expert of average demand, 0 where there is none.
    `unmet` f32 [size]: 0..1, the share of an expert's pairs that found no worker. `per_s`: the median site's pairs.
    """

    weight: npt.NDArray[np.float32]
    unmet: npt.NDArray[np.float32]
    per_s: float


def even_demand(shape: MarketShape) -> Demand:
    """Nobody has said anything: all experts are wanted alike."""
    return Demand(shape.exists.astype(np.float32), np.zeros(shape.size, np.float32), 0.0)


def aggregate(votes: Iterable[tuple[str, DemandSketch]], shape: MarketShape) -> Demand:
    """One demand from (site, sketch) pairs; a site (coverage.site_of) has one vote however many backbones it has.

    Every expert's share is the mean over sites after a quarter of the values at each end (at least one, from three
    sites on) was left out, so that fewer liars than that move it only within what honest sites say. Silent ones (no
    pairs) have no vote. Each sketch takes an array of the whole model: votes.choose_sketches says how many are put
    together.
    """
    sites: dict[str, list[DemandSketch]] = {}
    for site, sketch in votes:
        if sketch.per_s > 0:
            sites.setdefault(site, []).append(sketch)
    if not sites:
        return even_demand(shape)
    chosen = list(sites.values())
    shares = np.stack([_mean([_dense_shares(sketch, shape) for sketch in group]) for group in chosen])
    unmet = np.stack([_mean([_dense_unmet(sketch, shape) for sketch in group]) for group in chosen])
    share = _trimmed_mean(shares)
    mean = float(share.sum()) / shape.n_total
    per_s = float(np.median([sum(sketch.per_s for sketch in group) for group in chosen]))
    return Demand(share / np.float32(max(mean, 1e-30)), _trimmed_mean(unmet), per_s)


class _Decayed:
    """Sums that halve every half-life. `sums` f64 [size]: as of the last `add`."""

    def __init__(self, size: int, half_life_s: float) -> None:
        self.sums = np.zeros(size, np.float64)
        self._half_life_s = half_life_s
        self._as_of_s = -math.inf

    @property
    def decay_per_s(self) -> float:
        """Steady sums times this are the rate: ln 2 / half-life."""
        return math.log(2.0) / self._half_life_s

    def add(self, counts: npt.NDArray[np.int64], now_s: float) -> None:
        if now_s > self._as_of_s:
            self.sums *= 0.5 ** ((now_s - self._as_of_s) / self._half_life_s)
            self._as_of_s = now_s
        self.sums += counts


def _counted(pending: deque[Flat], size: int) -> npt.NDArray[np.int64]:
    """i64 [size], and empties what was put aside."""
    batch: list[Flat] = []
    while pending:
        batch.append(pending.popleft())
    if not batch:
        return np.zeros(size, np.int64)
    return np.bincount(np.concatenate(batch), minlength=size)


def _largest(counts: npt.NDArray[np.float64], most: int) -> Flat:
    order = np.argsort(-counts, kind="stable")[:most]
    return order[counts[order] > _NO_PAIR]


def _entries(chosen: Flat, shares: npt.NDArray[np.float64]) -> dict[int, int]:
    """Flat number -> share in SHARE_UNIT, rounded down; without those that are 0 then."""
    return {int(flat): int(shares[flat] * SHARE_UNIT) for flat in chosen if shares[flat] * SHARE_UNIT >= 1.0}


def _dense_shares(sketch: DemandSketch, shape: MarketShape) -> npt.NDArray[np.float32]:
    """f32 [size]: named shares, and the rest spread evenly over the experts that are not named."""
    flats, hot = _existing(sketch.hot, shape)
    rest = max(0.0, 1.0 - float(hot.sum())) / max(1, shape.n_total - len(flats))
    shares = np.where(shape.exists, np.float32(rest), np.float32(0.0))
    shares[flats] = hot
    return shares


def _dense_unmet(sketch: DemandSketch, shape: MarketShape) -> npt.NDArray[np.float32]:
    """f32 [size]: 0 for what is not named."""
    unmet = np.zeros(shape.size, np.float32)
    flats, shares = _existing(sketch.unmet, shape)
    unmet[flats] = shares
    return unmet


def _existing(entries: Mapping[int, int], shape: MarketShape) -> tuple[Flat, npt.NDArray[np.float64]]:
    """Flat numbers and shares, f64, of experts that the model has."""
    flats = np.fromiter(entries.keys(), np.int64, len(entries))
    shares = np.fromiter(entries.values(), np.float64, len(entries)) / SHARE_UNIT
    exists = flats < shape.size
    exists[exists] = shape.exists[flats[exists]]
    return flats[exists], shares[exists]


def _mean(values: list[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    return values[0] if len(values) == 1 else np.mean(np.stack(values), axis=0, dtype=np.float32)


def _trimmed_mean(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """f32 [sites, size] -> [size]."""
    n = len(values)
    cut = 0 if n < 3 else max(1, n // 4)
    kept = np.sort(values, axis=0)[cut : n - cut]
    mean: npt.NDArray[np.float32] = kept.mean(axis=0, dtype=np.float32)
    return mean
