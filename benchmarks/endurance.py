"""Does it get slower or larger with time? (cases.md 34)

    python -m benchmarks.endurance [--model FILE.gguf] [--tokens 10000]

A backbone in this process and one worker process that holds all experts: answers of 200 tokens after prompts of 50, two
at a time, one after another until so many tokens are out. Printed for each tenth: tokens a second, requests to the
worker, and the memory of both processes; then the last tenth beside the first.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import trio

from benchmarks.bench_swarm import BenchSwarm, open_bench_swarm
from benchmarks.machine import memory_of
from benchmarks.stopwatch import Stopwatch
from swarmnode.models.sampling import SamplingParams
from swarmnode.services.account import Account
from swarmnode.services.engine import GenerateRequest, TokenEvent
from swarmnode.services.remote_experts import WireForm
from swarmnode.weights.catalog import resolve_model

N_PROMPT, N_ANSWER, N_AT_ONCE = 50, 200, 2
LEAST_RATIO = 0.95


@dataclass(frozen=True)
class Tenth:
    """A tenth of the tokens."""

    per_s: float
    n_requests: int
    backbone_bytes: int
    worker_bytes: int


class Run:
    """Counts tokens until there are enough."""

    def __init__(self, swarm: BenchSwarm, n_tokens: int) -> None:
        self._swarm = swarm
        self._rng = np.random.default_rng(0)
        self._each = n_tokens // 10
        self._count = 0
        self._requests = 0
        self._began_s = time.perf_counter()
        self.tenths: list[Tenth] = []

    async def sequence(self) -> None:
        """One answer after another."""
        engine = self._swarm.backbone.engine
        while len(self.tenths) < 10:
            prompt = self._rng.integers(engine.model.n_vocab, size=N_PROMPT).tolist()
            job = GenerateRequest(prompt, N_ANSWER, SamplingParams(temperature=0.0))
            seen = 0
            async with aclosing(engine.generate(job)) as events:
                async for event in events:
                    if isinstance(event, TokenEvent) and len(self.tenths) < 10:
                        seen = self._took(event.account, seen)

    def _took(self, account: Account, seen: int) -> int:
        n_requests = sum(worker.requests for worker in account.workers.values())
        self._requests += n_requests - seen
        self._count += 1
        if self._count % self._each == 0:
            now_s = time.perf_counter()
            pids = (os.getpid(), self._swarm.workers[0].pid)
            sizes = [memory_of(pid)["VmRSS"] for pid in pids]
            self.tenths.append(Tenth(self._each / (now_s - self._began_s), self._requests, *sizes))
            self._began_s, self._requests = now_s, 0
        return n_requests


async def run(model: Path, folder: Path, n_tokens: int) -> list[Tenth]:
    """The tenths, after a first part that is not counted."""
    async with open_bench_swarm(model, folder, 1, (WireForm(),), Stopwatch(), n_slots=N_AT_ONCE) as swarm:
        layers = [layer.layout for layer in swarm.backbone.manifest.layers.values()]
        await swarm.join(sum(layout.n_expert * layout.expert_bytes for layout in layers), n_threads=1)
        swarm.engine(WireForm())
        warm, counted = Run(swarm, n_tokens // 10), Run(swarm, n_tokens)
        for part in (warm, counted):
            part._began_s = time.perf_counter()
            async with trio.open_nursery() as nursery:
                for _ in range(N_AT_ONCE):
                    nursery.start_soon(part.sequence)
        return counted.tenths


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tokens", type=int, default=10_000)
    options = parser.parse_args()
    model = options.model or resolve_model(None)
    with tempfile.TemporaryDirectory(prefix="endurance-") as name:
        tenths = trio.run(partial(run, model, Path(name), options.tokens))
    print("tokens     tok/s  requests  backbone MB  worker MB")
    for number, tenth in enumerate(tenths, 1):
        print(
            f"{number * options.tokens // 10:6d} {tenth.per_s:9.1f} {tenth.n_requests:9d} "
            f"{tenth.backbone_bytes / 1e6:12.1f} {tenth.worker_bytes / 1e6:10.1f}"
        )
    first, last = tenths[0], tenths[-1]
    ratio = last.per_s / first.per_s
    verdict = "ok" if ratio >= LEAST_RATIO else f"SLOWER than {LEAST_RATIO}"
    print(f"last tenth / first: {ratio:.2f} {verdict}")
    print(
        f"growth: backbone {(last.backbone_bytes - first.backbone_bytes) / 1e6:+.1f} MB, "
        f"worker {(last.worker_bytes - first.worker_bytes) / 1e6:+.1f} MB"
    )


if __name__ == "__main__":
    main()
