"""Rows/s of the expert bank against ggml's bare mul_mat_id on the same tensors, in one run.

    python -m benchmarks.kernels [--threads N] [--experts N] [--n-embd 3072] [--n-ff 1024] [--seconds 0.5]

The peer is the least that ggml can do for the same pairs: three mul_mat_id and a swiglu in one prebuilt graph, with
inputs already in place and outputs left there. What the bank adds is checks, gathering rows and copying them out.
Measured in turns (bank, bare, bank, ...), medians; ratio = bank / bare rows/s. Also printed: the hop through the
compute thread.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from swarmnode.compute import ggml
from swarmnode.compute.bank import ExpertBank
from swarmnode.compute.devices import Device, build_report, open_device
from swarmnode.compute.graph import Graph, GraphBuilder
from swarmnode.compute.layout import (
    DOWN,
    GATE,
    SEPARATE_KINDS,
    UP,
    ExpertTensor,
    LayerLayout,
    expected_shapes,
)
from swarmnode.compute.tensors import Tensor, WeightSet
from swarmnode.compute.thread import ComputeThread

PAIRS = (1, 2, 4, 8, 9, 16, 32, 64, 128, 256, 512)


def make_layer(n_embd: int, n_ff: int, n_expert: int) -> tuple[LayerLayout, dict[str, bytes]]:
    """Q4_K gate and up, Q6_K down (llama-quantize's Q4_K_M), random; one expert's weights are repeated."""
    rng = np.random.default_rng(0)
    stacked: dict[str, bytes] = {}
    tensors: list[ExpertTensor] = []
    for kind in SEPARATE_KINDS:
        ne0, ne1 = expected_shapes(n_embd, n_ff)[kind]
        ggml_type = ggml.Q6_K if kind == DOWN else ggml.Q4_K
        slab = ggml.quantize(ggml_type, rng.standard_normal((ne1, ne0), np.float32) / np.float32(ne0**0.5))
        stacked[kind] = slab * n_expert
        tensors.append(ExpertTensor(kind, ggml_type, ne0, ne1, len(slab)))
    return LayerLayout(0, n_embd, n_ff, n_expert, tuple(tensors)), stacked


def bare_graph(device: Device, weights: dict[str, Tensor], n_embd: int, n_pairs: int) -> Graph:
    """The mat-muls alone."""
    builder = GraphBuilder(device, 16)
    x = builder.input("x", ggml.F32, n_embd, 1, n_pairs)
    ids = builder.input("ids", ggml.I32, 1, n_pairs)
    gate = builder.mul_mat_id(weights[GATE], x, ids)
    hidden = builder.swiglu_split(gate, builder.mul_mat_id(weights[UP], x, ids))
    builder.output("y", builder.mul_mat_id(weights[DOWN], hidden, ids))
    return builder.build()


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def in_turns(
    first: Callable[[], object], second: Callable[[], object], seconds: float
) -> tuple[float, float]:
    """Median seconds of both, measured alternately."""
    first()
    second()
    end = time.perf_counter() + seconds
    times: list[tuple[float, float]] = []
    while time.perf_counter() < end or len(times) < 5:
        times.append((timed(first), timed(second)))
    return statistics.median(t[0] for t in times), statistics.median(t[1] for t in times)


def hop_us(n: int = 2000) -> float:
    """Median of submit -> run -> on_done on the compute thread, waited for by this one."""
    thread = ComputeThread()
    done = threading.Event()
    times: list[float] = []
    for _ in range(n):
        done.clear()
        start = time.perf_counter()
        thread.submit(int, on_done=lambda _: done.set())
        done.wait()
        times.append(time.perf_counter() - start)
    thread.close()
    return statistics.median(times) * 1e6


def compare(device: Device, layout: LayerLayout, stacked: dict[str, bytes], seconds: float) -> None:
    """Print one line for each number of pairs."""
    bank = ExpertBank(device)
    bank.bind(layout, range(layout.n_expert), stacked)
    weights = WeightSet(device)
    bound = {
        tensor.kind: weights.bind(
            tensor.kind, tensor.ggml_type, (tensor.ne0, tensor.ne1, layout.n_expert), stacked[tensor.kind]
        )
        for tensor in layout.tensors
    }
    rng = np.random.default_rng(1)
    print(f"{'pairs':>6} {'bank rows/s':>12} {'bare rows/s':>12} {'ratio':>6} {'bank ms':>9} {'bare ms':>9}")
    for n_pairs in PAIRS:
        rows = rng.standard_normal((n_pairs, layout.n_embd), np.float32)
        pair_row = np.arange(n_pairs, dtype=np.int32)
        pair_expert = rng.integers(0, layout.n_expert, n_pairs).astype(np.int32)
        graph = bare_graph(device, bound, layout.n_embd, n_pairs)
        graph.set("x", rows[:, None, :])
        graph.set("ids", pair_expert[:, None])
        bank_s, bare_s = in_turns(
            partial(bank.experts, 0, rows, pair_row, pair_expert), graph.compute, seconds
        )
        graph.close()
        print(
            f"{n_pairs:6} {n_pairs / bank_s:12.0f} {n_pairs / bare_s:12.0f} {bare_s / bank_s:6.3f} "
            f"{bank_s * 1e3:9.3f} {bare_s * 1e3:9.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default=None)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--n-embd", type=int, default=3072)
    parser.add_argument("--n-ff", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each line")
    options = parser.parse_args()
    device = open_device(options.device, n_threads=options.threads)
    print(f"{device.info.name} ({device.info.description}), {device.n_threads} threads; {build_report()}")
    layout, stacked = make_layer(options.n_embd, options.n_ff, options.experts)
    print(
        f"n_embd {layout.n_embd}, n_ff {layout.n_ff}, {layout.n_expert} experts of {layout.expert_bytes} bytes"
    )
    compare(device, layout, stacked, options.seconds)
    print(f"hop through the compute thread: {hop_us():.0f} us (median)")
    print("cores taken by other processes at the end: " + ("yes" if device.governor.contended else "no"))


if __name__ == "__main__":
    main()
