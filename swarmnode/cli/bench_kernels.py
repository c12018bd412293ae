"""Rows through experts, by batch, as a worker computes them. Needs nothing of the extra `backbone`."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import numpy as np
import trio

from swarmnode.cli.bench_figures import KernelFigure, kernel_figure
from swarmnode.compute.bank import ExpertBank
from swarmnode.compute.devices import Device
from swarmnode.compute.layout import LayerLayout
from swarmnode.config import Config
from swarmnode.services.runners import ComputeGate
from swarmnode.weights.expert_layers import tensor_name
from swarmnode.weights.index import ModelIndex

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
LEAST_S = 0.02
"""A batch is computed again and again for so long in each round: one of a small model takes 50 us."""
MAX_EXPERTS = 48
"""Of one layer, for the kernels: what a worker of 300 MB holds of a 122B model."""


async def measure_kernels(
    index: ModelIndex, device: Device, gate: ComputeGate, config: Config, rounds: int
) -> list[KernelFigure]:
    """Rows/s of the first layer with experts, in a bank with a worker's settings."""
    layout = next(iter(index.expert_layers.values()))
    n_experts = min(layout.n_expert, MAX_EXPERTS)
    bank = await gate.run(partial(_worker_bank, index, layout, n_experts, device, config))
    try:
        for n_rows in BATCHES:
            await gate.run(partial(_batch_s, bank, layout, n_experts, n_rows, 0))
        times: dict[int, list[float]] = {n_rows: [] for n_rows in BATCHES}
        for seed in range(rounds):
            for n_rows, taken in times.items():
                taken.append(await gate.run(partial(_batch_s, bank, layout, n_experts, n_rows, seed)))
    finally:
        with trio.CancelScope(shield=True):
            await gate.run(bank.close)
    return [kernel_figure(n_rows, taken) for n_rows, taken in times.items()]


def _worker_bank(
    index: ModelIndex, layout: LayerLayout, n_experts: int, device: Device, config: Config
) -> ExpertBank:
    """As services/residence makes it, but on the mapped file."""
    compute = config.compute
    width = compute.worker_cpu_rows if device.is_host else compute.max_rows
    bank = ExpertBank(
        device, max_rows=width, config=replace(compute, graph_cache_bytes=compute.worker_graph_cache_bytes)
    )
    stacked = {
        tensor.kind: index.data(tensor_name(layout.layer, tensor.kind))[: n_experts * tensor.n_bytes]
        for tensor in layout.tensors
    }
    bank.bind(layout, range(n_experts), stacked)
    return bank


def _batch_s(bank: ExpertBank, layout: LayerLayout, n_experts: int, n_rows: int, seed: int) -> float:
    """Seconds of one batch: `n_rows` rows, each through one expert, drawn at random."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((n_rows, layout.n_embd), np.float32)
    pair_row = np.arange(n_rows, dtype=np.int32)
    pair_expert = rng.integers(0, n_experts, n_rows).astype(np.int32)
    n_batches = 0
    started_s = time.perf_counter()
    while (elapsed_s := time.perf_counter() - started_s) < LEAST_S or not n_batches:
        bank.experts(layout.layer, rows, pair_row, pair_expert)
        n_batches += 1
    return elapsed_s / n_batches
