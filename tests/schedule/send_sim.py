"""A backbone, its disk, its workers and the links between them, modelled: what passes take in virtual time.

The compute thread does one thing at a time, in the order of asking. A call of it takes a time for each distinct expert
(reading its weights) and each pair; behind a disk also the reading of what is not in a cache of a quarter of all
(least recently used go first; what a budget keeps stays). Workers take as long, one request after the other, and half a
round trip each way; everything varies by a few per cent. Steps are formed as services/batcher.py does.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import OrderedDict
from collections.abc import Generator, Iterable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from swarmnode.config import DispatchConfig, EngineConfig
from swarmnode.identity import NodeKey
from swarmnode.schedule.batching import StepTimes, may_begin, step_share
from swarmnode.schedule.cost import CostModel
from swarmnode.schedule.dispatch import DispatchPlan, Routing, build_routing
from swarmnode.schedule.residents import Residents
from swarmnode.schedule.sending import SendAlways, SendPolicy
from swarmnode.schedule.sending_auto import SendAuto
from swarmnode.schedule.view import SwarmView, WorkerView

N_LAYER, N_EXPERT, K, N_WORKERS = 4, 64, 8, 2
EXPERT_BYTES = 6_000_000
DISK_BYTES_PER_S = 2e9
N_CACHED = N_LAYER * N_EXPERT // 4
DENSE_S, DENSE_ROW_S = 2e-4, 2e-5
READ_S, PAIR_S = 1.2e-4, 3e-5
CUT_S = 5e-4

I32: TypeAlias = npt.NDArray[np.int32]
Mode: TypeAlias = Literal["local", "remote", "auto"]
Busy: TypeAlias = tuple[Literal["compute", "until"], float]
"""What a pass does next: so many seconds of the compute thread, or nothing until then."""


@dataclass(frozen=True)
class Regime:
    """How far workers are, and where the experts of the backbone."""

    rtt_s: float
    has_disk: bool


class Disk:
    """A page cache. While there is no disk everything is in memory."""

    def __init__(self) -> None:
        self.is_there = False
        self._pinned: set[tuple[int, int]] = set()
        self._cached: OrderedDict[tuple[int, int], None] = OrderedDict()

    def read(self, layer: int, experts: Iterable[int]) -> int:
        """How many of these have to be read."""
        wanted = [(layer, expert) for expert in experts if (layer, expert) not in self._pinned]
        missing = sum(expert not in self._cached for expert in wanted)
        for expert in wanted:
            self._cached[expert] = None
            self._cached.move_to_end(expert)
        while len(self._cached) + len(self._pinned) > N_CACHED and self._cached:
            self._cached.popitem(last=False)
        return missing if self.is_there else 0

    def pin(self, enter: Iterable[tuple[int, int]], leave: Iterable[tuple[int, int]]) -> None:
        self._pinned = (self._pinned | set(enter)) - set(leave)


class Sim:
    """One way of sending, from a cold start."""

    def __init__(
        self,
        mode: Mode,
        regime: Regime,
        n_sequences: int,
        seed: int,
        *,
        has_budget: bool = False,
        config: DispatchConfig | None = None,
    ) -> None:
        self.now_s = 0.0
        self.n_tokens = 0
        self.disk = Disk()
        self.set(regime)
        self._mode = mode
        self._rng = random.Random(seed)
        self._gate = _Gate(seed, n_sequences)
        self._config = replace(config or DispatchConfig(), send="auto")
        budget = N_CACHED * EXPERT_BYTES if has_budget else None
        self._residents = Residents(dict.fromkeys(range(N_LAYER), EXPERT_BYTES), N_EXPERT, budget)
        self.policy = self._make_policy()
        self._routing = _routing() if mode != "local" else Routing()
        self._times = StepTimes(EngineConfig())
        self._thread_free_s = 0.0
        self._worker_free_s = [0.0] * N_WORKERS
        self._answered_s = [0.0] * N_WORKERS
        self._events: list[tuple[float, int, Generator[Busy, None, None]]] = []
        self._n_events = 0
        self._waiting = list(range(n_sequences))
        self._n_steps = 0
        self._n_sequences = n_sequences
        self._n_counted = 0
        self._place(range(n_sequences))

    def set(self, regime: Regime) -> None:
        """From now on."""
        self._rtt_s = regime.rtt_s
        self.disk.is_there = regime.has_disk

    def run(self, seconds: float) -> float:
        """Tokens a second."""
        end_s, n_before, started_s = self.now_s + seconds, self.n_tokens, self.now_s
        self._begin()
        while self._events and self._events[0][0] <= end_s:
            self.now_s, _, task = heapq.heappop(self._events)
            self._probe()
            self._advance(task)
        self.now_s = end_s
        return (self.n_tokens - n_before) / (self.now_s - started_s)

    def _make_policy(self) -> SendPolicy:
        cost = CostModel(self._config, EXPERT_BYTES, lambda: self.now_s)
        if self._mode != "auto":
            return SendAlways(cost, self._config)
        for node in _NODES:  # as the prober does before a worker gets any rows
            cost.worker(node).rtt_s = self._rtt_s
            cost.worker(node).probed(self._rtt_s + READ_S + PAIR_S, 0.0)
        max_steps = EngineConfig().max_steps
        return SendAuto(cost, self._residents, self._config, N_LAYER, K, self._rng, max_steps)

    # -- steps

    def _begin(self) -> None:
        n_present = self._n_sequences
        while may_begin(len(self._waiting), n_present, self._n_steps, self._times.n_steps):
            n = step_share(n_present, self._times.n_steps)
            step, self._waiting = self._waiting[:n], self._waiting[n:]
            self._n_steps += 1
            self.policy.n_passes = self._n_steps
            self._advance(self._pass(step))

    def _advance(self, task: Generator[Busy, None, None]) -> None:
        busy = next(task, None)
        if busy is None:
            return
        kind, value = busy
        if kind == "compute":
            self._thread_free_s = max(self.now_s, self._thread_free_s) + value
            value = self._thread_free_s
        self._n_events += 1
        heapq.heappush(self._events, (value, self._n_events, task))

    def _pass(self, step: list[int]) -> Generator[Busy, None, None]:
        began_s, compute_s, wait_s = self.now_s, 0.0, 0.0
        planner = self.policy.begin(len(step))
        chosen: list[tuple[int, I32]] = []
        for layer in range(N_LAYER):
            ids = self._gate.choose(layer, step)
            chosen.append((layer, ids))
            dense_s = self._vary(DENSE_S + DENSE_ROW_S * len(step))
            is_fused = len(step) == 1 and planner.fuses(self._routing, layer)
            yield "compute", dense_s
            plan = None if is_fused else planner.plan(self._routing, layer, ids)
            compute_s += dense_s
            if plan is None:
                spent_s = self._local_s(layer, ids.ravel())
                yield "compute", spent_s
                compute_s += 0 if planner.is_exploring else spent_s
                if not is_fused:
                    self.policy.computed(layer, ids.ravel(), spent_s)
                continue
            is_exploring = planner.is_exploring
            own_s, waited_s = yield from self._remote(layer, ids, plan)
            compute_s += own_s
            wait_s += 0 if is_exploring else waited_s
        planner.ended()
        self.policy.passed((self.now_s - began_s) / self._n_steps)
        self._n_steps -= 1
        self.policy.n_passes = self._n_steps
        self._times.add(compute_s, wait_s)
        self.n_tokens += len(step)
        self._waiting += step
        self._count(chosen)
        self._begin()

    def _remote(self, layer: int, ids: I32, plan: DispatchPlan) -> Generator[Busy, None, tuple[float, float]]:
        """Own compute, and the wait behind it."""
        cost, stopped_s = self.policy.cost, self.now_s
        yield "until", self.now_s + self._vary(CUT_S / 2)
        begun_s = self.now_s
        replies: list[tuple[float, int, int]] = []
        for index, share in plan.remote:
            known = cost.worker(_NODES[index])
            known.in_flight += 1
            came_s = self._ask(index, share.pair_expert)
            replies.append((came_s, index, len(share.flat)))
        own_s = 0.0
        if plan.local is not None:
            own_s = self._local_s(layer, plan.local.pair_expert)
            yield "compute", own_s
            self.policy.computed(layer, plan.local.pair_expert, own_s)
        waiting_from_s = self.now_s
        for came_s, index, n_pairs in sorted(replies):
            if came_s > self.now_s:
                yield "until", came_s
            known = cost.worker(_NODES[index])
            known.in_flight -= 1
            self._answered_s[index] = self.now_s
            known.add(n_pairs, came_s - begun_s, self.now_s)
        waited_s = self.now_s - waiting_from_s
        slowest_s = max(own_s, max(came_s for came_s, _, _ in replies) - begun_s)
        yield "compute", self._vary(CUT_S / 2)
        if self.policy.n_passes == 1:
            cost.add_cut(self.now_s - stopped_s - slowest_s, self.now_s)
        return own_s, waited_s

    def _ask(self, index: int, experts: I32) -> float:
        arrives_s = self.now_s + self._vary(self._rtt_s / 2)
        work_s = self._vary(READ_S * len(set(experts.tolist())) + PAIR_S * experts.size)
        self._worker_free_s[index] = max(arrives_s, self._worker_free_s[index]) + work_s
        return self._worker_free_s[index] + self._vary(self._rtt_s / 2)

    def _local_s(self, layer: int, experts: I32) -> float:
        distinct = sorted(set(experts.tolist()))
        n_missing = self.disk.read(layer, distinct)
        work_s = READ_S * len(distinct) + PAIR_S * experts.size
        return self._vary(work_s + n_missing * EXPERT_BYTES / DISK_BYTES_PER_S)

    def _vary(self, seconds: float) -> float:
        return seconds * math.exp(self._rng.gauss(0, 0.05))

    # -- the resident set, as services/resident_experts.py keeps it

    def _count(self, chosen: list[tuple[int, I32]]) -> None:
        if self._residents.budget_bytes is None:
            return
        for layer, ids in chosen:
            self._residents.count(layer, ids)
        self._n_counted += 1
        if self._n_counted >= 4 * self._config.replace_passes:
            self._n_counted = 0
            self._place([])

    def _probe(self) -> None:
        """As services/prober.py does: whoever has not answered for a while computes a row."""
        if self._mode != "auto":
            return
        for index, node in enumerate(_NODES):
            if self.now_s - self._answered_s[index] > self._config.probe_interval_s:
                self._answered_s[index] = self.now_s
                took_s = self._vary(self._rtt_s) + READ_S + PAIR_S
                self.policy.cost.worker(node).probed(took_s, self.now_s)

    def _place(self, prompts: Iterable[int]) -> None:
        """Behind a prompt of 64 tokens for each of these."""
        for sequence in prompts:
            for layer in range(N_LAYER):
                self._residents.count(layer, self._gate.choose(layer, [sequence] * 64))
        placing = self._residents.place()
        if placing is not None:
            self.disk.pin(placing.enter, placing.leave)
            self._residents.publish(placing)


class _Gate:
    """Each sequence likes some experts of each layer more than others."""

    def __init__(self, seed: int, n_sequences: int) -> None:
        self._rng = np.random.default_rng(seed)
        weights = 1 / (np.arange(N_EXPERT) + 4.0)
        self._liking = np.stack(
            [[self._rng.permutation(np.log(weights)) for _ in range(N_LAYER)] for _ in range(n_sequences)]
        )

    def choose(self, layer: int, sequences: list[int]) -> I32:
        """i32 [T, k], distinct in a row."""
        scores = self._liking[sequences, layer] + self._rng.gumbel(size=(len(sequences), N_EXPERT))
        return np.argpartition(-scores, K, axis=1)[:, :K].astype(np.int32)


_NODES = [NodeKey.from_seed(bytes([number + 1] * 32)).node_id for number in range(N_WORKERS)]


def _routing() -> Routing:
    """Two workers hold all experts between them."""
    views = [
        WorkerView(node, dict.fromkeys(range(N_LAYER), frozenset(range(number, N_EXPERT, N_WORKERS))), 512)
        for number, node in enumerate(_NODES)
    ]
    return build_routing(SwarmView(tuple(views)), N_EXPERT)
