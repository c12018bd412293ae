"""Who computes which (row, expert) pair of a layer.

`build_routing` turns a `SwarmView` into one owner for each expert of each layer, once for every change of the
swarm; `plan_pairs` then splits the pairs of one layer with a handful of numpy operations. -1 means the local replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
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

    Experts with the fewest holders are given first (then by layer and number), each to the holder with the fewest so
    far; ties go to the earlier worker, so equal views give equal routings. The next holder after the owner, round the
    list, is its second.
    """
    if not view.workers:
        return Routing()
    n_layer = max(len(worker.table) for worker in view.workers)
    tables = np.zeros((len(view.workers), n_layer, n_expert), np.bool_)
    for mine, worker in zip(tables, view.workers, strict=True):
        table = worker.table[:, :n_expert]
        mine[: table.shape[0], : table.shape[1]] = table
    held = tables.reshape(len(view.workers), -1)
    n_holders = held.view(np.uint8).sum(0, dtype=np.uint16)
    owners = np.full(n_layer * n_expert, LOCAL, np.int32)
    alone = np.flatnonzero(n_holders == 1)
    owners[alone] = held[:, alone].argmax(0)
    given = np.bincount(owners[alone], minlength=len(view.workers))
    order = np.argsort(n_holders, kind="stable")
    shared = order[np.searchsorted(n_holders[order], 2) :]
    # A holder set is a number with a bit a worker, the first one's lowest: any number of workers in one operation.
    bits = np.packbits(held, axis=0, bitorder="little")[:, shared].T.tobytes()
    size = -(-len(view.workers) // 8)
    sets = [int.from_bytes(bits[at : at + size], "little") for at in range(0, len(bits), size)]
    given_to = _give(sets, given.tolist())
    owners[shared] = given_to
    seconds = np.full_like(owners, LOCAL)
    seconds[shared] = [_next(holders, owner) for holders, owner in zip(sets, given_to, strict=True)]
    return Routing(
        view.workers,
        _by_layer(owners.reshape(n_layer, n_expert)),
        _by_layer(seconds.reshape(n_layer, n_expert)),
    )


def _by_layer(table: I32) -> dict[int, I32]:
    """Rows of a table i32 [n_layer, n_expert] in which anything is not local."""
    return {layer: table[layer] for layer in np.flatnonzero((table != LOCAL).any(1)).tolist()}


def _next(holders: int, owner: int) -> int:
    """The next of a set of at least two holders after the owner, round the list."""
    after = holders >> (owner + 1) << (owner + 1) or holders
    return (after & -after).bit_length() - 1


def without(routing: Routing, lost: Mapping[int, Mapping[int, frozenset[int]]]) -> Routing:
    """The same, with what some workers (by index) lost made local: cheaper than a new one, until there is one.

    `lost[index]`: what that worker still holds.
    """
    return Routing(routing.workers, _left(routing.owners, lost), _left(routing.seconds, lost))


def _left(tables: Mapping[int, I32], lost: Mapping[int, Mapping[int, frozenset[int]]]) -> dict[int, I32]:
    """Owners or seconds by layer, with what is lost made local."""
    owners: dict[int, I32] = {}
    for layer, table in tables.items():
        left = table
        for index, holdings in lost.items():
            gone = left == index
            gone[[expert for expert in holdings.get(layer, ()) if expert < len(gone)]] = False
            left = np.where(gone, np.int32(LOCAL), left)
        if (left != LOCAL).any():
            owners[layer] = left
    return owners


def _give(sets: list[int], given: list[int]) -> list[int]:
    """The owner for each set of holders in turn: of those given the fewest so far, the first."""
    levels: dict[int, int] = {}
    """Who has been given so many, as a set."""
    for index, count in enumerate(given):
        levels[count] = levels.get(count, 0) | 1 << index
    counts = sorted(levels)
    owners: list[int] = []
    for holders, equal in groupby(sets):
        n_left = sum(1 for _ in equal)
        while n_left:
            place = 0
            while not (fewest := levels[counts[place]] & holders):
                place += 1
            count, chosen = counts[place], 0
            while fewest and n_left:  # all of them are given one more before any is given two
                first = fewest & -fewest
                owners.append(first.bit_length() - 1)
                fewest ^= first
                chosen |= first
                n_left -= 1
            if count + 1 not in levels:
                levels[count + 1] = 0
                counts.insert(place + 1, count + 1)
            levels[count + 1] |= chosen
            levels[count] ^= chosen
            if not levels[count]:
                del levels[count], counts[place]
    return owners


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
    """`plan_pairs` for one row: a token of an answer.

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


def split_share(share: Share, ids: I32, max_pairs: int, max_pieces: int) -> tuple[list[Share], Share | None]:
    """Cut a share into pieces of at most `max_pairs` pairs, rows kept whole where k <= max_pairs allows it.

    At most `max_pieces` of them, and what is left of the share then: each costs as much as a large one, and
    `max_pairs` is what a peer says.
    """
    if len(share.flat) <= max_pairs and max_pieces > 0:
        return [share], None
    k, flat_ids = ids.shape[1], ids.ravel()
    ends = piece_ends(share.flat, k, max_pairs, max_pieces)
    if not ends:
        return [], share
    pieces = [
        _share(share.flat[start:end], flat_ids, k) for start, end in zip([0, *ends], ends, strict=False)
    ]
    return pieces, _share(share.flat[ends[-1] :], flat_ids, k) if ends[-1] < len(share.flat) else None


def piece_ends(flat: npt.NDArray[np.int64], k: int, max_pairs: int, max_pieces: int) -> list[int]:
    """Where the pieces of a share end (see `split_share`), as indices into its `flat`; what is behind is left over."""
    ends: list[int] = []
    start = 0
    while start < len(flat) and len(ends) < max_pieces:
        stop = min(start + max_pairs, len(flat))
        if stop < len(flat):
            stop = _row_border(flat, k, start, stop)
        ends.append(stop)
        start = stop
    return ends


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
