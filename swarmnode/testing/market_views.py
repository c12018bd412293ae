"""What the nodes of a simulated market have heard of one another, and what each believes from it.

Replicas of all experts in all views are two arrays, and a row hears of a record by adding what its new version changes,
so a second of 2,000 nodes takes milliseconds. Sites, suspects and lapsing are not modelled: tests/gossip holds
`Coverage` to that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swarmnode.config import MarketConfig
from swarmnode.gossip.priority import is_before
from swarmnode.gossip.shape import F32, MarketShape
from swarmnode.weights.slices import ExpertRange

Rows = npt.NDArray[np.int64]


@dataclass
class Snapshot:
    """A published record. `claims`: aligned piece -> the version that first named it. `delays_s` of that version."""

    at_s: int
    serving: Rows
    fetching: Rows
    claims: dict[ExpertRange, int]
    delays_s: npt.NDArray[np.int8] | None

    @property
    def holds(self) -> bool:
        """Whether it says anything at all."""
        return bool(len(self.serving) or len(self.fetching))

    def heard_s(self, row: int) -> float:
        """When a row heard of this version; of an old one it is enough to know that it was long ago."""
        return -1.0 if self.delays_s is None else self.at_s + float(self.delays_s[row])


_NOTHING = np.zeros(0, np.int64)
_EMPTY = Snapshot(0, _NOTHING, _NOTHING, {}, None)


def flat_of(ranges: Iterable[ExpertRange], shape: MarketShape) -> Rows:
    """Flat numbers of all experts of these ranges."""
    parts = [np.arange(where.start, where.stop) for where in map(shape.slice_of, ranges)]
    return np.concatenate(parts) if parts else _NOTHING


class MarketViews:
    """One row for each node that is there. Nodes have numbers that are never used again; rows are."""

    def __init__(self, shape: MarketShape, config: MarketConfig, n_rows: int) -> None:
        self._shape = shape
        self._run = config.run_experts
        self.serving = np.zeros((n_rows, shape.size), np.int16)
        self.fetching = np.zeros((n_rows, shape.size), np.int16)
        self.known = np.zeros(n_rows, np.int64)
        """Nodes of which a row knows that they hold or fetch something."""
        self.claiming = np.zeros(n_rows, np.int64)
        self._talked_away: F32 | None = None
        self._seen = np.full((n_rows, 4 * n_rows), -1, np.int16)
        """[row, number]: the version known of a node's record, -1: none."""
        self._node_ids: list[bytes] = []
        self._records: list[list[Snapshot]] = []
        self._claimants: dict[tuple[int, int], set[int]] = defaultdict(set)
        self._changes: dict[tuple[int, int, int], tuple[Rows, Rows, Rows, Rows]] = {}
        """(node, old version, new version) -> experts (gone, come) of serving, and of fetching."""

    def add(self, node_id: bytes, records: list[Snapshot]) -> None:
        """A new node; its number is how many there were. `records`: all versions of its record, added by the caller."""
        number = len(self._records)
        self._node_ids.append(node_id)
        self._records.append(records)
        if number >= self._seen.shape[1]:
            more = np.full_like(self._seen, -1)
            self._seen = np.concatenate([self._seen, more], axis=1)

    def begin(self, row: int, contact: tuple[int, int] | None) -> None:
        """The row's view is empty, or that of `contact` (number, row), of whom it knows the last record, too."""
        if contact is None:
            self.serving[row], self.fetching[row], self._seen[row] = 0, 0, -1
            self.known[row], self.claiming[row] = 0, 0
            return
        number, theirs = contact
        self.serving[row], self.fetching[row] = self.serving[theirs], self.fetching[theirs]
        self.known[row], self._seen[row] = self.known[theirs], self._seen[theirs]
        self.claiming[row] = self.claiming[theirs]
        if self._records[number]:
            self._apply(number, -1, len(self._records[number]) - 1, np.array([row]))

    def claims(self, number: int, ranges: Iterable[ExpertRange]) -> dict[ExpertRange, int]:
        """`Snapshot.claims` of the node's next version, if it says that it fetches these."""
        records = self._records[number]
        before = records[-1].claims if records else {}
        claims: dict[ExpertRange, int] = {}
        for piece in [part for item in ranges for part in item.aligned(self._run)]:
            claims[piece] = before.get(piece, len(records))
            self._claimants[piece.layer, piece.first // self._run].add(number)
        return claims

    def hear(self, number: int, version: int, rows: Rows) -> None:
        """Rows that know an older version (or any, at -1: the version they know is late) get this one."""
        seen = self._seen[rows, number]
        for old in {*seen.tolist()}:
            if old == version or (version >= 0 and old > version):
                continue
            self._apply(number, old, version, rows[seen == old])

    def seen(self, rows: Rows, number: int) -> Rows:
        """The versions of a node's record that these rows know, -1: none."""
        versions: Rows = self._seen[rows, number].astype(np.int64)
        return versions

    def talk_away(self, unmet: F32) -> None:
        """`unmet`, f32 [size]: the share of what is served now that did not answer; all views take it into account."""
        some = unmet.any()
        self._talked_away = (self.serving * unmet).astype(np.float32) if some else None

    def replicas(self, row: int, where: slice) -> F32:
        """f32: what a node believes, besides its own."""
        counts = self.serving[row, where] + np.float32(0.5) * self.fetching[row, where]
        if self._talked_away is not None:
            counts = np.maximum(counts - self._talked_away[row, where], np.float32(0))
        seen: F32 = counts.astype(np.float32)
        return seen

    def settled(self, own: int, row: int, item: ExpertRange, since_s: float) -> F32:
        """As Coverage.settled, for the node of this number and row."""
        counts = self.replicas(row, self._shape.slice_of(item))
        for place in range(item.first // self._run, (item.stop - 1) // self._run + 1):
            for number in self._claimants[item.layer, place]:
                version = self._seen[row, number]
                if number == own or version < 0:
                    continue
                records = self._records[number]
                for claim, first_version in records[version].claims.items():
                    if claim.layer != item.layer or claim.first // self._run != place:
                        continue
                    first, stop = max(claim.first, item.first), min(claim.stop, item.stop)
                    if first < stop:
                        ahead = records[first_version].heard_s(row) < since_s or is_before(
                            self._node_ids[number], self._node_ids[own], claim, item
                        )
                        counts[first - item.first : stop - item.first] += 0.5 if ahead else -0.5
        settled: F32 = np.maximum(counts, 0)
        return settled

    def _apply(self, number: int, old: int, new: int, rows: Rows) -> None:
        before, after = self._snapshot(number, old), self._snapshot(number, new)
        key = (number, old, new)
        if key not in self._changes:
            if len(self._changes) >= 4096:
                self._changes.clear()
            self._changes[key] = (
                *_difference(before.serving, after.serving),
                *_difference(before.fetching, after.fetching),
            )
        gone, come, unclaimed, claimed = self._changes[key]
        column = rows[:, None]
        for counts, places, step in (
            (self.serving, gone, -1),
            (self.serving, come, 1),
            (self.fetching, unclaimed, -1),
            (self.fetching, claimed, 1),
        ):
            if len(places):
                counts[column, places] += np.int16(step)
        self.known[rows] += int(after.holds) - int(before.holds)
        self.claiming[rows] += (len(after.fetching) > 0) - (len(before.fetching) > 0)
        self._seen[rows, number] = new

    def _snapshot(self, number: int, version: int) -> Snapshot:
        return self._records[number][version] if version >= 0 else _EMPTY


def _difference(before: Rows, after: Rows) -> tuple[Rows, Rows]:
    """(gone, come)."""
    old, new = {*before.tolist()}, {*after.tolist()}
    return np.array(sorted(old - new), np.int64), np.array(sorted(new - old), np.int64)
