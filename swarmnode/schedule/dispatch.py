"""Who computes which (row, expert) pair of a layer.

`build_routing` turns a `SwarmView` into one owner for each expert of each layer, once for every change of the
swarm; `plan_layer` then splits the pairs of one layer with a handful of numpy operations. -1 means the local replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from swarmnode.schedule.view import SwarmView, WorkerView

LOCAL = -1
_FIRST_ROW = np.zeros(1, np.int64)
_FIRST_ROW.flags.writeable = False

I32: TypeAlias = npt.NDArray[np.int32]
F32: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Routing:
    """Owner of every routed expert. `owners[layer]` is i32 [n_expert] of indices into `workers`, or LOCAL.

    A layer that is absent from `owners` is wholly local. `seconds[layer]`, of the same shape, has another holder of
    each expert, LOCAL where there is none; a layer that is absent has none at all.
    """

    workers: tuple[WorkerView, ...] = ()
    owners: Mapping[int, I32] = field(default_factory=dict)
    seconds: Mapping[int, I32] = field(default_factory=dict)


@dataclass(frozen=True)
class Share:
    """The pairs of one layer that one party computes.

    `flat` i64 [P]: positions in the flattened [T, k] arrays of the call, ascending (so k order is kept within a row);
    `rows` i64 [R]: the distinct rows of the call, ascending; `pair_row` i32 [P]: index into `rows`;
    `pair_expert` i32 [P]: expert ids of the layer.
    """

    flat: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    pair_row: I32
    pair_expert: I32


@dataclass(frozen=True)
class DispatchPlan:
    """One layer's pairs: the local share (None when empty) and each worker's, by index into `Routing.workers`."""

    local: Share | None
    remote: tuple[tuple[int, Share], ...]


def build_routing(view: SwarmView, n_expert: int) -> Routing:
    """Give every held expert one owner, evening out how many experts each worker answers for.

    Experts with the fewest holders are given first, each to the holder with the fewest so far; ties go to the
    earlier worker, so equal views give equal routings. The next holder after the owner, round the list, is its second.
    """
    holders: dict[tuple[int, int], list[int]] = {}
    for index, worker in enumerate(view.workers):
        for layer, experts in worker.holdings.items():
            for expert in experts:
                if 0 <= expert < n_expert:
                    holders.setdefault((layer, expert), []).append(index)
    owners: dict[int, I32] = {}
    seconds: dict[int, I32] = {}
    given = [0] * len(view.workers)
    for (layer, expert), candidates in sorted(holders.items(), key=lambda item: (len(item[1]), item[0])):
        owner = min(candidates, key=lambda index: (given[index], index))
        given[owner] += 1
        table = owners.setdefault(layer, np.full(n_expert, LOCAL, np.int32))
        table[expert] = owner
        if len(candidates) > 1:
            table = seconds.setdefault(layer, np.full(n_expert, LOCAL, np.int32))
            table[expert] = candidates[(candidates.index(owner) + 1) % len(candidates)]
    return Routing(view.workers, owners, seconds)


def plan_layer(routing: Routing, layer: int, ids: I32) -> DispatchPlan | None:
    """Split the pairs of a layer by owner; None when every pair is local.

    `ids` i32 [T, k]: the experts that the gate chose for each row.
    """
    owners = routing.owners.get(layer)
    return None if owners is None else plan_pairs(owners[ids].ravel(), ids)


def unowned(routing: Routing, layer: int, ids: I32) -> I32:
    """Those of the chosen experts, one entry a pair, that no worker answers for."""
    owners = routing.owners.get(layer)
    return ids if owners is None else ids[owners[ids] == LOCAL]


def plan_pairs(owner_of_pair: I32, ids: I32) -> DispatchPlan | None:
    """Split the pairs of a layer by owner, i32 [T * k]; None when every pair is local."""
    if len(ids) == 1:
        return _plan_row(owner_of_pair, ids[0])
    present = np.unique(owner_of_pair)
    if present[-1] == LOCAL:
        return None
    k = ids.shape[1]
    flat_ids = ids.ravel()
    shares = {int(owner): _share(np.flatnonzero(owner_of_pair == owner), flat_ids, k) for owner in present}
    local = shares.pop(LOCAL, None)
    return DispatchPlan(local, tuple(shares.items()))


def _plan_row(owner_of_pair: I32, ids: I32) -> DispatchPlan | None:
    """`plan_layer` for one row: a token of an answer.

    In Python, as numpy's set operations cost 200 us with cold caches, and a token needs one such plan a layer.
    """
    experts = ids.tolist()
    pairs: dict[int, list[int]] = {}
    for position, owner in enumerate(owner_of_pair.tolist()):
        pairs.setdefault(owner, []).append(position)
    positions = pairs.pop(LOCAL, None)
    if not pairs:
        return None
    local = None if positions is None else _row_share(positions, experts)
    return DispatchPlan(local, tuple((owner, _row_share(pairs[owner], experts)) for owner in sorted(pairs)))


def _row_share(positions: list[int], experts: list[int]) -> Share:
    return Share(
        np.array(positions, np.int64),
        _FIRST_ROW,
        np.zeros(len(positions), np.int32),
        np.array([experts[position] for position in positions], np.int32),
    )


def merge_shares(shares: list[Share], ids: I32) -> Share:
    """The share made of all pairs of `shares` (what the local replica computes when several workers failed)."""
    return _share(np.sort(np.concatenate([share.flat for share in shares])), ids.ravel(), ids.shape[1])


def split_share(share: Share, ids: I32, max_pairs: int) -> list[Share]:
    """Cut a share into pieces of at most `max_pairs` pairs, rows kept whole where k <= max_pairs allows it."""
    if len(share.flat) <= max_pairs:
        return [share]
    k = ids.shape[1]
    pieces: list[Share] = []
    start = 0
    while start < len(share.flat):
        stop = min(start + max_pairs, len(share.flat))
        if stop < len(share.flat):
            stop = _row_border(share.flat, k, start, stop)
        pieces.append(_share(share.flat[start:stop], ids.ravel(), k))
        start = stop
    return pieces


def _row_border(flat: npt.NDArray[np.int64], k: int, start: int, stop: int) -> int:
    """The last border between two rows in (start, stop], or `stop` when one row fills the whole piece."""
    row = flat[stop] // k
    border = stop
    while border > start and flat[border - 1] // k == row:
        border -= 1
    return border if border > start else stop


def _share(flat: npt.NDArray[np.int64], flat_ids: I32, k: int) -> Share:
    rows, pair_row = np.unique(flat // k, return_inverse=True)
    return Share(flat, rows, pair_row.astype(np.int32), flat_ids[flat])
