"""A worker's bank filled one expert at a time, in ranges and in segments, in one run.

    python -m benchmarks.slot_ranges [--threads N] [--experts 40] [--n-embd 3072] [--n-ff 1024] [--seconds 2]

Both hold the same experts, which came in the same random order, and get the same calls of `ExpertBank.partial` in
turns; medians. `graphs` is how many of ggml's the last call ran. docs/decisions/0040-slot-ranges.md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from benchmarks.graph_watch import watching_graphs
from benchmarks.kernels import make_layer, timed
from swarmnode.compute.bank import ExpertBank
from swarmnode.compute.devices import Device, open_device
from swarmnode.compute.graph import Graph
from swarmnode.compute.layout import LayerLayout
from swarmnode.config import ComputeConfig

CALLS = ((5, 1), (64, 16), (512, 128))
"""(pairs, rows) of a call: what one worker has of a row of decode, and of prompts."""


class Counted:
    """Counts the graphs that are computed: for `watching_graphs`."""

    def __init__(self) -> None:
        self.n = 0

    def count(self, compute: Callable[[Graph], None], graph: Graph) -> None:
        self.n += 1
        compute(graph)


def filled(
    device: Device, layout: LayerLayout, stacked: dict[str, bytes], config: ComputeConfig
) -> ExpertBank:
    """A bank as a worker's, with room for half as many experts again."""
    bank = ExpertBank(
        device,
        budget_bytes=layout.n_expert * 3 // 2 * layout.expert_bytes,
        max_rows=config.worker_cpu_rows,
        config=replace(config, graph_cache_bytes=config.worker_graph_cache_bytes),
    )
    for expert in np.random.default_rng(0).permutation(layout.n_expert).tolist():
        slabs = {
            tensor.kind: stacked[tensor.kind][expert * tensor.n_bytes : (expert + 1) * tensor.n_bytes]
            for tensor in layout.tensors
        }
        bank.add(layout, expert, slabs)
    return bank


def compare(
    banks: dict[str, ExpertBank],
    layout: LayerLayout,
    n_pairs: int,
    n_rows: int,
    seconds: float,
    counted: Counted,
) -> None:
    """Print a line for each bank."""
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((n_rows, layout.n_embd), np.float32)
    pair_row = np.sort(np.arange(n_pairs, dtype=np.int32) % n_rows).astype(np.int32)
    weights = np.ones(n_pairs, np.float32)
    times: dict[str, list[float]] = {name: [] for name in banks}
    graphs = dict.fromkeys(banks, 0)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 6:
        ids = np.concatenate(
            [rng.permutation(layout.n_expert) for _ in range(-(-n_pairs // layout.n_expert))]
        )
        experts = ids[:n_pairs].astype(np.int32)
        for name, bank in banks.items():
            counted.n = 0
            call = partial(bank.partial, 0, rows, pair_row, experts, weights)
            times[name].append(timed(call))
            graphs[name] = counted.n
    for name in banks:
        median_s = statistics.median(times[name][1:])  # the first one builds graphs
        print(
            f"{n_pairs:6} {n_rows:5} {name:9} {graphs[name]:7} {median_s * 1e3:9.3f} {n_pairs / median_s:9.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--experts", type=int, default=40)
    parser.add_argument("--n-embd", type=int, default=3072)
    parser.add_argument("--n-ff", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each number of pairs")
    options = parser.parse_args()
    device = open_device("CPU", n_threads=options.threads)
    layout, stacked = make_layer(options.n_embd, options.n_ff, options.experts)
    config = ComputeConfig()
    banks = {
        "segments": filled(device, layout, stacked, replace(config, slots_per_range=0)),
        "ranges": filled(device, layout, stacked, config),
    }
    print(
        f"{device.info.name} ({device.info.description}), {device.n_threads} threads; n_embd {layout.n_embd}, "
        f"n_ff {layout.n_ff}, {layout.n_expert} experts of {layout.expert_bytes} bytes"
    )
    print(f"{'pairs':>6} {'rows':>5} {'bank':9} {'graphs':>7} {'ms':>9} {'pairs/s':>9}")
    counted = Counted()
    with watching_graphs(counted.count):
        for n_pairs, n_rows in CALLS:
            compare(banks, layout, n_pairs, n_rows, options.seconds, counted)
    print("cores taken by other processes at the end: " + ("yes" if device.governor.contended else "no"))


if __name__ == "__main__":
    main()
