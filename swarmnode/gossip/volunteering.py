"""Which experts a node takes, one decision after another: the market without a centre. Pure.

Every `round_s` (jittered by hash) a node

1. looks at its claims that were published long enough for everybody to have heard of them (also as soon as one was).
   One that others are before on, while something much scarcer is to be had, is withdrawn (nothing was downloaded yet);
   another one becomes a download, if fewer than `max_downloads` are running and there is room;
2. claims the scarcest of a sample of aligned runs that still fit the budget: published as `fetching`, counted half;
3. if it is full, may - seldom - claim a scarce run instead of one that has replicas to spare, which is dropped when the
   claim has settled.

Everything follows from (node id, epoch, view): two runs of one history decide alike, and two nodes of one view differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import numpy as np

from swarmnode.config import MarketConfig
from swarmnode.gossip.decisions import Claim, Decision, Drop, Fetch, View, Withdraw
from swarmnode.gossip.priority import order_of, share_of
from swarmnode.gossip.runs import Runs
from swarmnode.gossip.scarcity import scarcity, target_replicas
from swarmnode.gossip.shape import F32, MarketShape
from swarmnode.weights.slices import ExpertRange, merge_pairs


class _Stage(Enum):
    CLAIMED = "claimed"
    LOADING = "loading"  # a download, or what was on disk on its way into memory


@dataclass
class _Entry:
    """A claim. `published_s`: None until it was. `was_weighed`: looked at when it had settled, and left to the next
    round. `instead_of`: what is dropped for it when it has settled.
    """

    since_s: float
    stage: _Stage
    published_s: float | None = None
    was_weighed: bool = False
    instead_of: tuple[ExpertRange, ...] = ()
    waits_s: float = 0.0
    """How long it is published before it can settle, if that is longer than it takes to reach everybody."""

    @property
    def is_filling(self) -> bool:
        """A claim to room that is free: it is settled as soon as it can be. Exchanges are in no hurry."""
        return self.stage is _Stage.CLAIMED and not self.instead_of


class Volunteer:
    """One node's part in the market of one model. Not a byte more than `budget_bytes` is served, loading or not yet
    freed at any time, and no expert is held twice.

    `epoch`: the first one's number; give it the record's incarnation, so that a restarted node does not repeat itself.
    """

    def __init__(
        self, node_id: bytes, shape: MarketShape, budget_bytes: int, config: MarketConfig, epoch: int = 0
    ) -> None:
        self._node_id = node_id
        self._shape = shape
        self._most_bytes = budget_bytes
        self._budget_bytes = budget_bytes
        self._config = config
        self._epoch = epoch
        self._runs = Runs(shape, budget_bytes, config)
        self._serving: set[ExpertRange] = set()
        self._entries: dict[ExpertRange, _Entry] = {}
        self._dropping: set[ExpertRange] = set()
        self._avoided: dict[ExpertRange, float] = {}
        self._taken = np.zeros(shape.size, np.bool_)
        self._round_s = -math.inf
        """When the next round is due."""
        self._settling_s = self.settle_s(0)

    @property
    def budget_bytes(self) -> int:
        """What may be held now; `limit` changes it."""
        return self._budget_bytes

    # ---- what a record says -------------------------------------------------------------------------------------

    @property
    def serving(self) -> tuple[ExpertRange, ...]:
        """What is served, in the fewest ranges."""
        return _merged(self._serving)

    @property
    def fetching(self) -> tuple[ExpertRange, ...]:
        """What is claimed or on its way, in the fewest ranges."""
        return _merged(self._entries)

    @property
    def loading(self) -> tuple[ExpertRange, ...]:
        """The downloads that run, and what comes from disk."""
        return tuple(sorted(item for item, entry in self._entries.items() if entry.stage is _Stage.LOADING))

    @property
    def occupied_bytes(self) -> int:
        """What is served, loading, or dropped and not freed: never more than the budget."""
        return self._shape.range_bytes([*self._serving, *self.loading, *self._dropping])

    @property
    def next_s(self) -> float:
        """When `decide` wants to be called next; earlier calls decide nothing. After `served`, `failed` and `freed`
        it is now, for what has settled meanwhile may be downloaded. `published` may make it sooner.
        """
        settled_s = (
            entry.published_s + self._settling_s
            for entry in self._entries.values()
            if entry.published_s is not None and entry.is_filling and not entry.was_weighed
        )
        return min((self._round_s, *settled_s))

    @property
    def is_filling(self) -> bool:
        """Whether anything is on its way to room that is free; not what may be exchanged one day."""
        return any(not entry.instead_of for entry in self._entries.values())

    @property
    def full(self) -> bool:
        """Whether the budget has no room for another expert, claims counted."""
        return self._left_bytes() < min(self._shape.expert_bytes.values())

    # ---- what happened --------------------------------------------------------------------------------------------

    def adopt(self, kept: Iterable[ExpertRange], now_s: float) -> tuple[ExpertRange, ...]:
        """At the start: what is on disk is taken up first. Returns the ranges to load (then call `served` for each), in
        the runs that may be given up later; what does not fit the budget, or is not of this model, is not among them.
        """
        taken = []
        for item in [piece for whole in sorted(set(kept)) for piece in whole.aligned(self._runs.run)]:
            if not self._shape.holds(item) or self._taken[self._shape.slice_of(item)].any():
                continue
            fits = min(item.count, self._left_bytes() // self._shape.expert_bytes[item.layer])
            if fits > 0:
                part = ExpertRange(item.layer, item.first, fits)
                self._add(part, _Entry(now_s, _Stage.LOADING))
                taken.append(part)
        return tuple(taken)

    def published(self, now_s: float) -> None:
        """A record with the present `serving` and `fetching` went out."""
        for entry in self._entries.values():
            if entry.published_s is None:
                entry.published_s = now_s

    def served(self, item: ExpertRange) -> None:
        """A range that was loading passed its self-test."""
        self._round_s = -math.inf
        if self._entries[item].stage is _Stage.LOADING:
            del self._entries[item]
            self._serving.add(item)

    def failed(self, item: ExpertRange, now_s: float) -> None:
        """A download (or what was on disk) came to nothing; the range is left alone for `retry_s`."""
        self._round_s = -math.inf
        self._remove(item)
        self._avoided[item] = now_s + self._config.retry_s

    def freed(self, item: ExpertRange) -> None:
        """Memory and disk of a dropped range are free again."""
        self._round_s = -math.inf
        self._dropping.discard(item)
        self._taken[self._shape.slice_of(item)] = False

    # ---- what the owner wants -------------------------------------------------------------------------------------

    def limit(self, view: View, budget_bytes: int) -> list[Decision]:
        """Hold at most so much from now on, and never more than the first budget. What is missed least is given up.

        Downloads that run are not stopped: call it again while they do.
        """
        budget_bytes = min(budget_bytes, self._most_bytes)
        if budget_bytes > self._budget_bytes:
            self._round_s = -math.inf
        self._budget_bytes = budget_bytes
        excess = -self._left_bytes()
        if excess <= 0:
            return []
        decisions = self.withdraw_claims()
        excess = self._shape.range_bytes([*self._serving, *self.loading]) - budget_bytes
        for _, item in sorted((self._worth(view, item), item) for item in self._serving):
            if excess <= 0:
                break
            excess -= self._shape.range_bytes([item])
            self._drop(item)
            decisions.append(Drop(item))
        return decisions

    def withdraw_claims(self) -> list[Decision]:
        """Nothing is claimed any more that is not being downloaded."""
        claimed = [item for item, entry in self._entries.items() if entry.stage is _Stage.CLAIMED]
        for item in claimed:
            self._remove(item)
        return [Withdraw(item) for item in claimed]

    # ---- decisions ------------------------------------------------------------------------------------------------

    def decide(self, view: View, now_s: float) -> list[Decision]:
        """What to do now. In order: all of it goes into one record, then memory is freed, then downloads start."""
        self._settling_s = self.settle_s(view.n_nodes)
        if now_s < self.next_s:
            return []
        is_round = now_s >= self._round_s
        if is_round:
            self._begin_round(now_s)
        decisions = self._settle(view, now_s) if self._entries else []
        if not is_round:
            return decisions
        claims = [] if self.full else self._claim(view, now_s)
        if not claims and len(self._entries) < self._config.max_claims:
            claims = self._exchange(view, now_s)
        return decisions + claims

    def _begin_round(self, now_s: float) -> None:
        self._epoch += 1
        jitter = 0.5 + share_of(self._node_id, self._epoch, "jitter")
        self._round_s = now_s + self._config.round_s * jitter
        self._avoided = {item: until_s for item, until_s in self._avoided.items() if until_s > now_s}

    def settle_s(self, n_nodes: int) -> float:
        """How long a claim must have been published before it becomes a download."""
        return self._config.settle_hop_s * (1.0 + math.log(n_nodes + 1, 8))

    def _settle(self, view: View, now_s: float) -> list[Decision]:
        """Withdraw where something else is much scarcer, or what would be dropped is worth as much; download the rest,
        the scarcest first: what others fetch as well, or have by now, can wait.
        """
        decisions: list[Decision] = []
        settled = self._settled(view, now_s)
        if not settled:
            return decisions
        room_bytes = max(self._shape.range_bytes([item]) for _, item, _ in settled)
        others = self._pick(view, room_bytes, most=1)
        best = others[0][0] if others else 0.0
        for worth, item, entry in settled:
            entry.was_weighed = True
            spared = max((self._worth(view, piece) for piece in entry.instead_of), default=0.0)
            if best > self._config.better * worth or worth <= self._config.exchange_better * spared:
                self._remove(item)
                decisions.append(Withdraw(item))
            elif len(self.loading) < self._config.max_downloads:
                decisions += self._load(item, entry)
        return decisions

    def _settled(self, view: View, now_s: float) -> list[tuple[float, ExpertRange, _Entry]]:
        """(scarcity now that others' claims are known, range, entry) of the claims that everybody has heard of."""
        settle_s = self.settle_s(view.n_nodes)
        ready: list[tuple[float, ExpertRange, _Entry]] = []
        for item, entry in self._entries.items():
            wait_s = max(settle_s, entry.waits_s)
            known = entry.published_s is not None and entry.published_s + wait_s <= now_s
            if known and entry.stage is _Stage.CLAIMED:
                demand = view.demand[self._shape.slice_of(item)]
                replicas = view.settled(item, entry.since_s)
                ready.append((float(scarcity(replicas, demand, self._config).mean()), item, entry))
        return sorted(ready, key=lambda found: (-found[0], found[1]))

    def _load(self, item: ExpertRange, entry: _Entry) -> list[Decision]:
        """Begin the download, or first make room for it."""
        decisions: list[Decision] = [Drop(part) for part in entry.instead_of]
        for part in entry.instead_of:
            self._drop(part)
        entry.instead_of = ()
        if self.occupied_bytes + self._shape.range_bytes([item]) <= self._budget_bytes:
            entry.stage = _Stage.LOADING
            decisions.append(Fetch(item))
        return decisions

    def _worth(self, view: View, item: ExpertRange) -> float:
        """How scarce a range is without us."""
        where = self._shape.slice_of(item)
        return float(scarcity(view.replicas[where], view.demand[where], self._config).mean())

    def _claim(self, view: View, now_s: float) -> list[Decision]:
        decisions: list[Decision] = []
        most = self._config.max_claims - len(self._entries)
        for _, item in self._pick(view, self._left_bytes(), most):
            self._add(item, _Entry(now_s, _Stage.CLAIMED))
            decisions.append(Claim(item))
        return decisions

    def _exchange(self, view: View, now_s: float) -> list[Decision]:
        """Claim something scarce instead of a run with replicas to spare, if it is our turn. Few have it at a time, so
        they look at all runs.
        """
        drawn = share_of(self._node_id, self._epoch, "surplus")
        if drawn >= self._config.max_surplus_share:
            return []
        exists = self._shape.exists
        own = np.zeros(self._shape.size, np.float32)
        for item in self._serving:
            own[self._shape.slice_of(item)] = 1.0
        counts = view.replicas + own
        mean = float(counts[exists].mean())
        lacking = float(np.maximum(min(2.0, math.floor(mean)) - counts[exists], 0).sum())
        if drawn >= self._turn(lacking, view.n_nodes + 1):
            return []
        target = np.zeros(self._shape.size, np.float32)
        target[exists] = target_replicas(view.demand[exists], mean, self._config)
        spare = self._most_spare(view, counts, target)
        if spare is None:
            return []
        worth, piece, ample = spare
        room = self._left_bytes() + self._shape.range_bytes([piece])
        third = float(counts[self._shape.slice_of(piece)].min()) >= 3.0
        for value, item in self._pick(view, room, most=1, n_sample=self._runs.count):
            replicas = float(view.replicas[self._shape.slice_of(item)].mean())
            lacks = replicas < 0.5 or (replicas < 1.5 and third)
            if value > self._config.exchange_better * worth and (ample or lacks):
                waits_s = 0.0 if ample or replicas < 0.5 else self._config.second_wait_s
                self._add(item, _Entry(now_s, _Stage.CLAIMED, instead_of=(piece,), waits_s=waits_s))
                return [Claim(item)]
        return []

    def _turn(self, lacking: float, n_nodes: int) -> float:
        """Chance to give something up this round: so that all nodes together move about what is lacking."""
        needed = lacking / self._runs.run / n_nodes
        return min(max(self._config.surplus_share, needed), self._config.max_surplus_share)

    def _most_spare(self, view: View, counts: F32, target: F32) -> tuple[float, ExpertRange, bool] | None:
        """Of the pieces we serve of which there are `spare_replicas` at least, ours counted, the one that is missed
        least: (its scarcity without us, itself, whether it has more than `surplus` times its target). None if there is
        no such piece.
        """
        found: list[tuple[float, ExpertRange, bool]] = []
        spoken_for = {part for entry in self._entries.values() for part in entry.instead_of}
        for item in sorted(self._serving - spoken_for):
            where = self._shape.slice_of(item)
            if float(counts[where].min()) >= self._config.spare_replicas:
                ample = float(counts[where].mean()) > self._config.surplus * float(target[where].mean())
                found.append((self._worth(view, item), item, ample))
        return min(found, default=None)

    def _pick(
        self, view: View, room_bytes: int, most: int, n_sample: int | None = None
    ) -> list[tuple[float, ExpertRange]]:
        """The scarcest runs of this epoch's sample that fit together into `room_bytes`: (scarcity, range)."""
        order = order_of(self._node_id, self._epoch, self._runs.count)
        if n_sample is None:
            share = math.ceil(self._config.sample_share * self._runs.count / (view.n_claiming + 1))
            n_sample = max(self._config.sample_runs, share)
        free = ~self._taken
        for item in self._avoided:
            free[self._shape.slice_of(item)] = False
        values = scarcity(view.replicas, view.demand, self._config)
        return self._runs.scarcest(values, free, order, n_sample, room_bytes, most)

    # ---- bookkeeping ----------------------------------------------------------------------------------------------

    def _left_bytes(self) -> int:
        """Room for further claims: what will be dropped for a claim counts as gone."""
        instead = {part for entry in self._entries.values() for part in entry.instead_of}
        held = [item for item in self._serving if item not in instead]
        return self._budget_bytes - self._shape.range_bytes([*held, *self._entries])

    def _add(self, item: ExpertRange, entry: _Entry) -> None:
        self._entries[item] = entry
        self._taken[self._shape.slice_of(item)] = True

    def _remove(self, item: ExpertRange) -> None:
        del self._entries[item]
        self._taken[self._shape.slice_of(item)] = False

    def _drop(self, item: ExpertRange) -> None:
        """Its experts stay taken until they are freed: a download of them would be deleted with what was dropped."""
        self._serving.remove(item)
        self._dropping.add(item)


def _merged(ranges: Iterable[ExpertRange]) -> tuple[ExpertRange, ...]:
    return merge_pairs((item.layer, expert) for item in ranges for expert in item.experts)
