"""The ways to do a layer, counted: pairs here, experts to be read for them, pairs at each worker. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from swarmnode.schedule.dispatch import LOCAL

I32: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Way:
    """One way to do a layer: so many pairs here, so many distinct experts of them to be read, the rest by worker."""

    n_local: int
    n_cold: int
    remote: dict[int, int]
    """Pairs by index of the worker."""


def row_ways(ids: I32, owners: I32, is_here: npt.NDArray[np.bool_]) -> tuple[Way, Way, Way]:
    """`ways` for one row, in Python: numpy's set operations cost 200 us with cold caches."""
    owned: dict[int, int] = {}
    resident: dict[int, int] = {}
    n_owned_here = n_cold_owned = n_resident_here = n_cold_all = 0
    for owner, here in zip(owners.tolist(), is_here.tolist(), strict=True):
        n_cold_all += not here
        if owner == LOCAL:
            n_owned_here += 1
            n_cold_owned += not here
            n_resident_here += 1
        else:
            owned[owner] = owned.get(owner, 0) + 1
            if here:
                n_resident_here += 1
            else:
                resident[owner] = resident.get(owner, 0) + 1
    return (
        Way(len(owners), n_cold_all, {}),
        Way(n_owned_here, n_cold_owned, owned),
        Way(n_resident_here, n_cold_owned, resident),
    )


def ways(ids: I32, owners: I32, is_here: npt.NDArray[np.bool_]) -> tuple[Way, Way, Way]:
    """All pairs here; each where it is owned; those in memory here and the rest where it is owned.

    `owners` i32 [T * k], `is_here` bool [T * k]: whether the pair's expert is in memory.
    """
    flat = ids.ravel()
    is_local = owners == LOCAL
    n_cold_local = _n_distinct(flat[is_local & ~is_here])
    return (
        Way(flat.size, _n_distinct(flat[~is_here]), {}),
        Way(int(is_local.sum()), n_cold_local, _by_worker(owners[~is_local])),
        Way(int((is_local | is_here).sum()), n_cold_local, _by_worker(owners[~is_local & ~is_here])),
    )


def _n_distinct(experts: I32) -> int:
    return int(np.count_nonzero(np.bincount(experts)))


def _by_worker(owners: I32) -> dict[int, int]:
    counts = np.bincount(owners)
    return {int(index): int(counts[index]) for index in np.flatnonzero(counts)}
