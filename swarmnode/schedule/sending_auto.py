"""Sends a layer's pairs where they are expected back sooner than they could be computed here. Pure.

`SendAuto` compares what three ways are expected to take, and takes the best: all pairs
here; every pair where it is owned; those here whose experts are in memory, the rest where it is owned.

A layer waits for the slowest of its parts, and being cut out of the pass costs something, too. While several passes
are under way one computes when others wait, so only a part of a wait counts; but if all of them computed here they
would be one pass (schedule/batching.py), which reads an expert once for all rows; and one that waits would be several.

What is not done is not measured. So now and then a layer is done the other way: about one in `explore_layers`, and in
all no more than `explore_share` of the time may go into it.
"""

from __future__ import annotations

import threading
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from swarmnode.config import DispatchConfig
from swarmnode.schedule.cost import CostModel, WorkerCost
from swarmnode.schedule.dispatch import LOCAL, DispatchPlan, Routing, plan_pairs
from swarmnode.schedule.replicas import Replicas
from swarmnode.schedule.residents import Residents
from swarmnode.schedule.sending import Planner
from swarmnode.schedule.ways import Way, count_here, count_way, within

I32: TypeAlias = npt.NDArray[np.int32]
Mask: TypeAlias = npt.NDArray[np.bool_]

_CLEAR_S = 0.05
"""That a layer is sooner here is not worked out again for so long."""


class Dice(Protocol):
    """The part of random.Random that is used; it comes in as an argument."""

    def random(self) -> float:
        """At least 0, less than 1."""
        ...


class SendAuto:
    """See the module."""

    def __init__(
        self,
        cost: CostModel,
        residents: Residents,
        config: DispatchConfig,
        n_layer: int,
        n_used: int,
        rng: Dice,
        max_steps: int,
    ) -> None:
        """`n_used`: experts that the gate chooses for a row; `max_steps`: passes that may be under way at once."""
        self.cost = cost
        self.residents = residents
        self.replicas = Replicas(cost, config)
        self.n_passes = 0
        self.n_used = n_used
        self._config = config
        self._n_layer = n_layer
        self.max_steps = max_steps
        self._rng = rng
        self._lock = threading.Lock()
        """One thread earns credit, the other spends it."""
        self._credit_s: float = 0.0
        """What exploring may cost now."""
        self._layers_left = 0.0
        """Layers until the next exploration."""
        self._clear: dict[int, float] = {}
        """By layer, until when it is clear that a row is sooner here."""
        self._clear_for: tuple[Routing, int] | None = None
        """With these workers, and so many passes under way."""

    def begin(self, n_sequences: int) -> Planner:
        """See SendPolicy."""
        now_s = self.cost.now()
        self._layers_left -= min(self._n_layer, self._config.explore_layers / self._config.explore_passes)
        explores = int(self._n_layer * self._rng.random()) if self._layers_left <= 0 else None
        return _AutoPlanner(self, now_s, explores, n_sequences)

    def computed(self, layer: int, experts: I32, seconds: float) -> None:
        """See SendPolicy."""
        n_cold = self.residents.n_cold(layer, experts)
        self.cost.local.add(experts.size, n_cold, seconds, self.cost.now())
        if n_cold:
            self.residents.computed(layer, experts)

    def passed(self, seconds: float) -> None:
        """See SendPolicy."""
        # No more than is worth a deadline: a way that takes longer than that is not tried.
        earned_s = self._config.explore_share * seconds
        with self._lock:
            self._credit_s = min(self._config.deadline_s, self._credit_s + earned_s)

    def clear(self, routing: Routing) -> dict[int, float]:
        """By layer, until when it is clear that a row is sooner here. The caller adds to it."""
        known = self._clear_for
        if known is None or known[0] is not routing or known[1] != self.n_passes:
            self._clear, self._clear_for = {}, (routing, self.n_passes)
        return self._clear

    def here_s(self, layer: int, experts: I32) -> float:
        """See SendPolicy."""
        return self.cost.local.expect(experts.size, self.residents.n_cold(layer, experts), self.cost.now())

    def may_explore(self, excess_s: float, is_unknown: bool) -> bool:
        """Whether a layer may be done in a way that is expected to take so much longer, or nobody knows how much."""
        return self._credit_s >= 0 if is_unknown else excess_s <= self._credit_s

    def spend(self, seconds: float) -> None:
        """An exploration took so much longer than the best way. From either thread."""
        with self._lock:
            # A process that was stopped meanwhile has not explored all the time.
            least_s = -self._config.max_deadline_s
            self._credit_s = max(least_s, self._credit_s - max(0.0, seconds))

    def wait(self) -> None:
        """No exploring for a while."""
        self._layers_left = self._config.explore_layers * (0.5 + self._rng.random())

    def expect(
        self, costs: list[WorkerCost], layer: int, way: Way, now_s: float, n_sequences: int = 1
    ) -> float:
        """Seconds that a layer takes this way, of which each of the passes under way has its part."""
        if not way.remote:
            return self._expect_here(layer, way, now_s)
        here_s = self.cost.local.expect(way.n_local, way.n_cold, now_s)
        if way.n_local:
            here_s += self._config.hop_s
        there_s = max(costs[index].expect(n, now_s) for index, n in way.remote.items())
        seconds = self.cost.cut_s + here_s + max(0.0, there_s - here_s) / max(1, self.n_passes)
        n_steps = min(self.max_steps, n_sequences)
        if self.n_passes > 1 or n_steps == 1:
            return seconds
        # A pass that waits is divided into several that take turns.
        there_s = max(costs[index].expect(-(-n // n_steps), now_s) for index, n in way.remote.items())
        return min(seconds, n_steps * self.cost.cut_s + here_s + max(0.0, there_s - here_s / n_steps))

    def _expect_here(self, layer: int, way: Way, now_s: float) -> float:
        n, n_cold = max(1, self.n_passes), float(way.n_cold)
        if n == 1:
            return self.cost.local.expect(way.n_local, n_cold, now_s)
        if n_cold:  # distinct ones among n times as many draws
            n_all = max(n_cold, self.residents.n_expert - float(self.residents.masks[layer].sum()))
            n_cold = n_all * (1 - (1 - n_cold / n_all) ** n)
        return self.cost.local.expect(n * way.n_local, n_cold, now_s) / n

    def way(self, routing: Routing, ids: I32, owners: I32, is_here: Mask) -> Way:
        """Every pair where `owners` says, unless its worker does not take it: few pairs at a time, few requests, or no
        room now.
        """
        way = count_way(ids, owners, is_here)
        costs, workers = self.replicas.costs(routing), routing.workers
        for index, n_pairs in way.remote.items():
            if n_pairs > workers[index].max_rows or not costs[index].has_room:
                break
        else:
            return way
        n_pieces = self._config.pieces_each(len(way.remote))

        def sizes(index: int) -> tuple[int, int]:
            return workers[index].max_rows, min(n_pieces, costs[index].n_requests_left)

        return count_way(ids, within(ids, owners, sizes), is_here)

    def least_remote_s(self, routing: Routing, layer: int, now_s: float) -> float:
        """The least that a row of this layer could take with anything sent out."""
        costs = self.replicas.costs(routing)
        present = set(routing.owners[layer].tolist()) - {LOCAL}
        wait_s: float = min(costs[index].expect(1, now_s) for index in present)
        return self.cost.cut_s + wait_s / max(1, self.n_passes)


class _AutoPlanner:
    """One pass."""

    def __init__(self, policy: SendAuto, now_s: float, explores: int | None, n_sequences: int) -> None:
        """`explores`: the layer from which on one is to be done the other way; None: none in this pass."""
        self.is_exploring = False
        self._policy = policy
        self._now_s = now_s
        self._explores = explores
        self._n_sequences = n_sequences
        self._cuts_all = False
        """No layer is fused any more: graphs of single layers are kept, odd pieces of passes would be built anew."""
        self._explored: tuple[float, float] | None = None
        """When a layer was done the other way, and what it would have taken; until it is known what it took."""

    def fuses(self, routing: Routing, layer: int) -> bool:
        """See Planner."""
        self._settle()
        if layer not in routing.owners:
            return True
        if self._cuts_all:
            return False
        policy = self._policy
        clear = policy.clear(routing)
        if self._explores is None and clear.get(layer, 0.0) > self._now_s:
            return True
        n_cold = policy.residents.cold_share.get(layer, 0.0) * policy.n_used
        here_s = policy.cost.local.expect(policy.n_used, n_cold, self._now_s)
        excess_s = policy.least_remote_s(routing, layer, self._now_s) - here_s
        if excess_s <= 0:
            return False
        clear[layer] = self._now_s + _CLEAR_S
        if self._explores is not None:
            self._cuts_all = self._may_explore_row(routing, here_s)
            if not self._cuts_all:
                self._explores = None
        return not self._cuts_all

    def _may_explore_row(self, routing: Routing, here_s: float) -> bool:
        """Whether any row's layer may be sent out: then the pass is cut for it."""
        policy = self._policy
        costs = policy.replicas.costs(routing)
        if not policy.cost.local.is_known or any(not cost.is_known for cost in costs):
            return True
        most_s = max(cost.expect(policy.n_used, self._now_s) for cost in costs)
        return policy.may_explore(policy.cost.cut_s + most_s - here_s, False)

    def plan(self, routing: Routing, layer: int, ids: I32) -> DispatchPlan | None:
        """See Planner."""
        self._settle()
        self.is_exploring = False
        if layer not in routing.owners:
            return None
        if self._explores is None and self._is_sooner_here(routing, layer, ids.size):
            return None
        owners = self._policy.replicas.owners(routing, layer, ids)
        is_here = self._policy.residents.masks[layer][ids].ravel()
        mixed = np.where(is_here, LOCAL, owners)
        # What a worker does not take of its share is computed here, but is its in the plan: the market hears of it.
        here = count_here(ids, is_here)
        owned = self._policy.way(routing, ids, owners, is_here)
        resident = self._policy.way(routing, ids, mixed, is_here)
        chosen = self._choose(routing, layer, here, owned, resident)
        if chosen is here:
            return None
        return plan_pairs(owners if chosen is owned else mixed, ids)

    def ended(self) -> None:
        """See Planner."""
        self._settle()

    def _settle(self) -> None:
        """What was explored is over: it is paid for with the time it really took, of which others had their part."""
        if self._explored is None:
            return
        at_s, best_s = self._explored
        self._explored = None
        policy = self._policy
        policy.spend((policy.cost.now() - at_s) / max(1, policy.n_passes) - best_s)

    def _is_sooner_here(self, routing: Routing, layer: int, n_pairs: int) -> bool:
        """Whether that is clear without looking at who owns what: all is in memory, and no worker answers as fast."""
        policy = self._policy
        if not policy.residents.masks[layer].all():
            return False
        here_s = policy.expect([], layer, Way(n_pairs, 0, {}), self._now_s)
        return here_s <= policy.least_remote_s(routing, layer, self._now_s)

    def _choose(self, routing: Routing, layer: int, here: Way, owned: Way, resident: Way) -> Way:
        policy = self._policy
        costs = policy.replicas.costs(routing)
        if not owned.remote:
            return here
        best, best_s = here, policy.expect(costs, layer, here, self._now_s)
        # Of two that are equal the one that sends less.
        for way in (resident, owned) if resident.remote else (owned,):
            way_s = policy.expect(costs, layer, way, self._now_s, self._n_sequences)
            if way_s < best_s:
                best, best_s = way, way_s
        if self._explores is None or layer < self._explores:
            return best
        other = owned if best is here else here
        excess_s = policy.expect(costs, layer, other, self._now_s, self._n_sequences) - best_s
        is_unknown = (
            not policy.cost.local.is_known
            if other is here
            else any(not costs[index].is_known for index in owned.remote)
        )
        self._explores = None
        if not policy.may_explore(excess_s, is_unknown):
            policy.wait()  # else the next pass would be cut for nothing, too
            return best
        self.is_exploring = True
        self._explored = (policy.cost.now(), best_s)
        policy.wait()
        return other
