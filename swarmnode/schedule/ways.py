"""The ways to do a layer, counted: pairs here, experts to be read for them, pairs at each worker. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from swarmnode.schedule.dispatch import LOCAL, piece_ends

I32: TypeAlias = npt.NDArray[np.int32]
Mask: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Way:
    """One way to do a layer: so many pairs here, so many distinct experts of them to be read, the rest by worker."""

    n_local: int
    n_cold: int
    remote: dict[int, int]
    """Pairs by index of the worker."""


Sizes: TypeAlias = Callable[[int], tuple[int, int]]
"""Of a worker by index: pairs in a request at most, and requests that it may get."""


def count_way(ids: I32, owners: I32, is_here: Mask) -> Way:
    """What it takes to do every pair where `owners` i32 [T * k] says.

    `is_here` bool [T * k]: the pair's expert is in memory.
    """
    if len(ids) == 1:
        return _count_row(owners, is_here)
    is_local = owners == LOCAL
    n_cold = np.count_nonzero(np.bincount(ids.ravel()[is_local & ~is_here]))
    return Way(int(is_local.sum()), int(n_cold), count_pairs(ids, owners))


def count_here(ids: I32, is_here: Mask) -> Way:
    """What it takes to do all of it here."""
    if len(ids) == 1:
        return Way(ids.size, is_here.tolist().count(False), {})
    return Way(ids.size, int(np.count_nonzero(np.bincount(ids.ravel()[~is_here]))), {})


def _count_row(owners: I32, is_here: Mask) -> Way:
    """Of one row, in Python: numpy's set operations cost 200 us with cold caches."""
    remote: dict[int, int] = {}
    n_local = n_cold = 0
    for owner, here in zip(owners.tolist(), is_here.tolist(), strict=True):
        if owner == LOCAL:
            n_local += 1
            n_cold += not here
        else:
            remote[owner] = remote.get(owner, 0) + 1
    return Way(n_local, n_cold, remote)


def count_pairs(ids: I32, owners: I32) -> dict[int, int]:
    """Pairs by index of the worker."""
    if len(ids) == 1:
        return dict(Counter(owner for owner in owners.tolist() if owner != LOCAL))
    counts = np.bincount(owners[owners != LOCAL])
    return {int(index): int(counts[index]) for index in np.flatnonzero(counts)}


def within(ids: I32, owners: I32, sizes: Sizes) -> I32:
    """`owners` i32 [T * k], with the pairs that their workers do not take made local.

    A share is cut into requests, of which a worker gets so many; what is left over is computed here
    (`split_share`).
    """
    taken = owners
    for index, n_pairs in count_pairs(ids, owners).items():
        max_pairs, max_pieces = sizes(index)
        if n_pairs <= max_pairs and max_pieces > 0:
            continue
        flat = np.flatnonzero(owners == index)
        ends = piece_ends(flat, ids.shape[1], max_pairs, max_pieces)
        if taken is owners:
            taken = owners.copy()
        taken[flat[ends[-1] if ends else 0 :]] = LOCAL
    return taken
