"""Tokens and remote rows a second, now and over the last minutes: sampled from counters that others keep."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import trio

from swarmnode.config import DashboardConfig
from swarmnode.identity import NodeId
from swarmnode.services.members import Members


class Throughput:
    """Touched on trio's thread only. `run` must run, else all rates stay 0."""

    def __init__(
        self,
        members: Members,
        n_tokens: Callable[[], int],
        now: Callable[[], float],
        config: DashboardConfig,
    ) -> None:
        """`n_tokens`: tokens generated since the start. `now`: monotonic, in seconds."""
        self._members = members
        self._count_tokens = n_tokens
        self._now = now
        self._config = config
        self._n_tokens = n_tokens()
        self._sampled_s = now()
        self._pairs: dict[NodeId, int] = {}
        """What each worker's tally said at the last sample."""
        self._rates: dict[NodeId, deque[float]] = {}
        self._tokens: deque[float] = deque(maxlen=config.n_samples)
        self._all_pairs: deque[float] = deque(maxlen=config.n_samples)
        self.n_samples = 0
        """Samples taken since the start; the newest of `history` has this number."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all answers in the last sample."""
        return self._tokens[-1] if self._tokens else 0.0

    @property
    def pairs_per_s(self) -> float:
        """(row, expert) pairs that all workers answered in the last sample."""
        return self._all_pairs[-1] if self._all_pairs else 0.0

    def pairs_per_s_of(self, node_id: NodeId) -> float:
        """Of one worker, the mean of the last samples; 0 for who is none."""
        rates = self._rates.get(node_id)
        return round(sum(rates) / len(rates), 1) if rates else 0.0

    def history(self) -> dict[str, Any]:
        """For JSON: `tokens` and `pairs` a second, oldest first, `step_s` apart; `n`: the number of the newest."""
        return {
            "n": self.n_samples,
            "step_s": self._config.sample_s,
            "tokens": list(self._tokens),
            "pairs": list(self._all_pairs),
        }

    def sample(self) -> None:
        """Take one sample of everything now."""
        now_s = self._now()
        elapsed_s = now_s - self._sampled_s
        if elapsed_s <= 0:
            return
        self._sampled_s = now_s
        n_tokens = self._count_tokens()
        self._tokens.append(_rate(n_tokens - self._n_tokens, elapsed_s))
        self._n_tokens = n_tokens
        self._all_pairs.append(_rate(self._sample_workers(elapsed_s), elapsed_s))
        self.n_samples += 1

    def _sample_workers(self, elapsed_s: float) -> int:
        """Pairs that workers answered since the last sample. A tally that is lower than before is a new one."""
        pairs = {worker.node_id: worker.tally.pairs for worker in self._members.workers}
        n_all = 0
        rates = {}
        for node_id, count in pairs.items():
            before = self._pairs.get(node_id, 0)
            n_new = count - before if count >= before else count
            rates[node_id] = self._rates.get(node_id, deque(maxlen=self._config.rate_samples))
            rates[node_id].append(n_new / elapsed_s)
            n_all += n_new
        self._pairs, self._rates = pairs, rates
        return n_all

    async def run(self) -> None:
        """Sample until cancelled. What was missed (a machine that slept) is not made up for."""
        next_s = trio.current_time()
        while True:
            next_s = max(next_s + self._config.sample_s, trio.current_time())
            await trio.sleep_until(next_s)
            self.sample()


def _rate(count: int, elapsed_s: float) -> float:
    """Three digits are enough for a curve."""
    rate = count / elapsed_s
    return round(rate, 1) if math.isfinite(rate) else 0.0
