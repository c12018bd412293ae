"""Rows/s of a worker's ExpertServer when several backbones ask for the same layer: coalesced against one by one.

    python -m benchmarks.coalesce [--model FILE.gguf] [--layer 0] [--held 256 16] [--backbones 1 4 16]
        [--rounds 7] [--rows 64]

Each backbone asks for one row of top-8 (`partial`, f16) and, when it is answered, for the next; its eight experts are
drawn anew each time among those held. Requests go to the server's handler, without sockets. Both ways are measured in
turns (coalesced, alone, coalesced, ...), medians; ratio = coalesced / alone. `pairs` is how many pairs a call of the
bank had on average, coalesced. CPU time a row is less disturbed by others who use the machine. `--model` takes a file
of `benchmarks.big_model` and its mapped experts; without it, as many as the largest of `--held` are made in memory
(1.6 GB for 256).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import trio

from benchmarks.kernels import make_layer
from benchmarks.machine import busy_s, cpu_s
from swarmnode.compute.bank import ExpertBank
from swarmnode.compute.combine import Ids, Rows
from swarmnode.compute.devices import Device, open_device
from swarmnode.compute.layout import LayerLayout
from swarmnode.compute.tensors import BytesLike
from swarmnode.compute.thread import ComputeThread
from swarmnode.config import ComputeConfig, ServeConfig
from swarmnode.net.peer import Peer
from swarmnode.services.expert_server import ExpertServer
from swarmnode.services.runners import ComputeGate, Runner
from swarmnode.weights.expert_layers import tensor_name
from swarmnode.weights.index import ModelIndex
from swarmnode.wire.messages import Experts
from swarmnode.wire.tensors import encode_experts_body

N_USED = 8
MODEL = bytes(32)


class CountingBank(ExpertBank):
    """Counts the calls of `experts` and `partial`, and their pairs."""

    calls = 0
    pairs = 0

    def experts(self, layer: int, rows: Rows, pair_row: Ids, pair_expert: Ids) -> Rows:
        self._count(pair_row)
        return super().experts(layer, rows, pair_row, pair_expert)

    def partial(self, layer: int, rows: Rows, pair_row: Ids, pair_expert: Ids, pair_weight: Rows) -> Rows:
        self._count(pair_row)
        return super().partial(layer, rows, pair_row, pair_expert, pair_weight)

    def _count(self, pair_row: Ids) -> None:
        self.calls += 1
        self.pairs += pair_row.size


@dataclass(frozen=True)
class FromBackbone:
    """All that the server asks of a Peer."""

    node_id: int


@contextmanager
def expert_layer(
    path: Path | None, layer: int, n_expert: int
) -> Iterator[tuple[LayerLayout, Mapping[str, BytesLike]]]:
    """A layer and its stacked experts: mapped from a file, or made."""
    if path is None:
        yield make_layer(3072, 1024, n_expert)
        return
    with ModelIndex.open(path) as index:
        layout = index.expert_layers[layer]
        yield layout, {kind: index.data(tensor_name(layer, kind)) for kind in layout.kinds}


def open_bank(device: Device, layout: LayerLayout, stacked: Mapping[str, BytesLike]) -> CountingBank:
    """As a worker on a CPU has it (services/residence)."""
    config = ComputeConfig()
    config = replace(config, graph_cache_bytes=config.worker_graph_cache_bytes)
    bank = CountingBank(device, max_rows=config.worker_cpu_rows, config=config)
    bank.bind(layout, range(layout.n_expert), stacked)
    return bank


@dataclass(frozen=True)
class Speed:
    """One figure of a round."""

    rows_per_s: float
    cpu_ms: float
    """CPU time of this process for a row."""


class Backbones:
    """Several, which ask one server for rows of one layer."""

    def __init__(self, layout: LayerLayout, n_held: int, n_backbones: int) -> None:
        self._layout = layout
        self._n_held = n_held
        self._n_backbones = n_backbones
        self._rng = np.random.default_rng(n_backbones)

    async def ask(self, server: ExpertServer, n_rows: int) -> Speed:
        """About so many rows in all, as many by each."""
        each = max(1, n_rows // self._n_backbones)
        began_s, cpu_began_s = time.perf_counter(), time.process_time()
        async with trio.open_nursery() as nursery:
            for number in range(self._n_backbones):
                nursery.start_soon(self._backbone, server, number, each)
        spent_s, cpu_spent_s = time.perf_counter() - began_s, time.process_time() - cpu_began_s
        rows = server.served.rows
        return Speed(rows / spent_s, 1e3 * cpu_spent_s / rows)

    async def _backbone(self, server: ExpertServer, number: int, n_rows: int) -> None:
        handler, peer = server.handlers[Experts], cast(Peer, FromBackbone(number))
        rows = self._rng.standard_normal((1, self._layout.n_embd), np.float32)
        weights = np.full(N_USED, 1 / N_USED, np.float32)
        message = Experts(MODEL, self._layout.layer, "partial", "f16", 1, N_USED)
        for _ in range(n_rows):
            experts = self._rng.choice(self._n_held, N_USED, replace=False).astype(np.int32)
            parts = encode_experts_body(rows, np.zeros(N_USED, np.int32), experts, weights, "f16")
            await handler(peer, message, memoryview(b"".join(parts)))


async def compare(
    bank: CountingBank,
    compute: Runner,
    layout: LayerLayout,
    n_held: int,
    n_backbones: int,
    rounds: int,
    n_rows: int,
) -> None:
    """Print one line."""
    backbones = Backbones(layout, n_held, n_backbones)
    together = ServeConfig(max_queue_s=600)  # a busy machine is no reason to refuse here
    found: list[tuple[Speed, Speed]] = []
    pairs_a_call: list[float] = []
    for _ in range(rounds):
        speeds = []
        for config in (together, replace(together, coalesced_requests=1)):
            server = ExpertServer(MODEL, layout.n_embd, layout.n_expert, bank, compute, config, 512)
            bank.calls = bank.pairs = 0
            speeds.append(await backbones.ask(server, n_rows))
            if config is together:
                pairs_a_call.append(bank.pairs / bank.calls)
        found.append((speeds[0], speeds[1]))
    _print_line(n_held, n_backbones, statistics.median(pairs_a_call), found)


def _print_line(n_held: int, n_backbones: int, n_pairs: float, found: Sequence[tuple[Speed, Speed]]) -> None:
    speed, speed_alone = (statistics.median(pair[way].rows_per_s for pair in found) for way in (0, 1))
    cpu_ms, cpu_ms_alone = (statistics.median(pair[way].cpu_ms for pair in found) for way in (0, 1))
    print(
        f"{n_held:5} {n_backbones:10} {n_pairs:6.1f} {speed:17.1f} {speed_alone:13.1f} {speed / speed_alone:6.2f}"
        f" {cpu_ms:17.2f} {cpu_ms_alone:13.2f} {cpu_ms_alone / cpu_ms:6.2f}",
        flush=True,
    )


async def measure(options: argparse.Namespace, device: Device, compute: Runner) -> None:
    """Print the table, and how much of the machine was somebody else's."""
    held: Sequence[int] = options.held
    with expert_layer(options.model, options.layer, max(held)) as (layout, stacked):
        bank = await compute.run(partial(open_bank, device, layout, stacked))
        everything = np.arange(layout.n_expert, dtype=np.int32)
        row = np.zeros((1, layout.n_embd), np.float32)
        await compute.run(  # reads the file into memory
            lambda: bank.experts(layout.layer, row, np.zeros_like(everything), everything)
        )
        print(
            f"{'held':>5} {'backbones':>10} {'pairs':>6} {'coalesced rows/s':>17} {'alone rows/s':>13} {'ratio':>6}"
            f" {'coalesced cpu ms':>17} {'alone cpu ms':>13} {'ratio':>6}"
        )
        began_s, busy_before_s, own_before_s = trio.current_time(), busy_s(), cpu_s([os.getpid()])
        for n_held in held:
            for n_backbones in options.backbones:
                await compare(bank, compute, layout, n_held, n_backbones, options.rounds, options.rows)
        others_s = (busy_s() - busy_before_s) - (cpu_s([os.getpid()]) - own_before_s)
        print(f"other processes used {max(0.0, others_s) / (trio.current_time() - began_s):.2f} cores")
        await compute.run(bank.close)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--layer", type=int, default=0)
    parser.add_argument("--held", type=int, nargs="+", default=[256, 16], help="experts that rows are for")
    parser.add_argument("--backbones", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=64, help="for each figure of a round")
    options = parser.parse_args()
    thread = ComputeThread()
    try:
        device = open_device("CPU", n_threads=options.threads)
        print(f"{device.info.name} ({device.info.description}), {device.n_threads} threads")
        trio.run(measure, options, device, ComputeGate(thread))
    finally:
        thread.close()


if __name__ == "__main__":
    main()
