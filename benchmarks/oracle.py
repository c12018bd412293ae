"""Experts against the float64 oracle, on the bundled model's layer 0 and the rows its own gate sees.

    python -m benchmarks.oracle [--device NAME]

Prints (1) the layer cut into four shards, each computed alone in float64 and combined, against the whole layer;
(2) ggml's experts against float64, the minimum cosine over rows and the largest difference, for the file's own weights
(Q4_K gate and up, Q6_K down) and for the same weights as F32. Exit code 1 if a bound of the project is missed.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from swarmnode.compute import ggml, oracle
from swarmnode.compute.bank import ExpertBank
from swarmnode.compute.devices import Device, open_device
from swarmnode.compute.layout import LayerLayout
from swarmnode.models.base import ExpertCall
from swarmnode.models.registry import open_model
from swarmnode.models.tokenizer import Tokenizer
from swarmnode.weights.catalog import bundled_model
from swarmnode.weights.index import ModelIndex

TEXT = (
    "To Sherlock Holmes she is always the woman. I have seldom heard him mention her under any other name. "
    "It was a cold morning in the early spring, and we sat after breakfast on either side of a cheery fire."
)
MAX_SHARD_DIFF = 3.6e-12
MIN_COSINE_F32 = 0.999999
MIN_COSINE_QUANTISED = {"cpu": 0.9995}
MIN_COSINE_FLOAT_ACTIVATIONS = 0.9999


@dataclass(frozen=True)
class Layer:
    """A layer's slabs and what the gate asked of it."""

    layout: LayerLayout
    slabs: list[dict[str, bytes]]
    call: ExpertCall


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", help="ggml device; default: CPU", default="CPU")
    options = parser.parse_args()
    layer = layer_zero()
    used = len(np.unique(layer.call.ids))
    rows, k = layer.call.ids.shape
    print(f"layer 0: {rows} rows, top {k}, {used} of {layer.layout.n_expert} experts used")
    good = report("four shards, float64, max|d|", shard_difference(layer), MAX_SHARD_DIFF, at_most=True)
    device = open_device(options.device)
    try:
        quantised = MIN_COSINE_QUANTISED.get(device.info.kind, MIN_COSINE_FLOAT_ACTIVATIONS)
        for name, weights, bound in (
            ("as in the file", layer, quantised),
            ("as F32", as_f32(layer), MIN_COSINE_F32),
        ):
            cosine, difference = against_oracle(device, weights)
            good &= report(
                f"{device.info.name}, weights {name}, minimum cosine", cosine, bound, at_most=False
            )
            print(f"  max|d| {difference:.2e}")
    finally:
        device.close()
    return 0 if good else 1


def report(what: str, value: float, bound: float, *, at_most: bool) -> bool:
    """Print a figure beside its bound; whether it holds."""
    holds = value <= bound if at_most else value >= bound
    shown = f"{value:.2e}" if at_most else f"{value:.7f}"
    print(f"{'ok  ' if holds else 'MISS'} {what}: {shown} (bound {bound:g})")
    return holds


def layer_zero() -> Layer:
    """The first expert call of the bundled model on TEXT."""
    with ModelIndex.open(bundled_model()) as index:
        layout = index.expert_layers[0]
        slabs = [
            {kind: bytes(index.slab(0, expert, kind)) for kind in layout.kinds}
            for expert in range(layout.n_expert)
        ]
        tokens = Tokenizer(index.metadata).encode(TEXT)
        device = open_device("CPU")
        model = open_model(index, device, n_ctx=256, n_slots=1)
        try:
            steps = model.forward(0, tokens, all_logits=True)
            call = next(steps)
            steps.close()
        finally:
            model.close()
            device.close()
    return Layer(layout, slabs, call)


def as_f32(layer: Layer) -> Layer:
    """The same layer with its weights dequantised to F32."""
    tensors = tuple(
        replace(tensor, ggml_type=ggml.F32, n_bytes=4 * tensor.ne0 * tensor.ne1)
        for tensor in layer.layout.tensors
    )
    slabs = [
        {
            tensor.kind: ggml.dequantize(
                tensor.ggml_type, expert[tensor.kind], tensor.ne0 * tensor.ne1
            ).tobytes()
            for tensor in layer.layout.tensors
        }
        for expert in layer.slabs
    ]
    return Layer(replace(layer.layout, tensors=tensors), slabs, layer.call)


def shard_difference(layer: Layer) -> float:
    """max|d| between the whole layer's float64 output and the sum of four shards of its experts."""
    whole = weighted_sum(layer, range(layer.layout.n_expert))
    size = layer.layout.n_expert // 4
    shards = [weighted_sum(layer, range(size * part, size * (part + 1))) for part in range(4)]
    return float(np.abs(sum(shards) - whole).max())


def weighted_sum(layer: Layer, experts: range) -> npt.NDArray[np.float64]:
    """The routed output f64 [T, n_embd] that these experts contribute, computed from their slabs alone."""
    call = layer.call
    total = np.zeros(call.rows.shape, np.float64)
    for expert in experts:
        row, position = np.nonzero(call.ids == expert)
        if len(row):
            matrices = oracle.expert_matrices(layer.layout, layer.slabs[expert])
            outputs = oracle.expert_ffn(call.rows[row], *matrices)
            total[row] += outputs * call.weights[row, position][:, None].astype(np.float64)
    return total


def against_oracle(device: Device, layer: Layer) -> tuple[float, float]:
    """Minimum cosine over all (row, expert) pairs the gate chose, and max|d|, of ggml against float64."""
    bank = ExpertBank(device)
    try:
        for expert, slabs in enumerate(layer.slabs):
            bank.add(layer.layout, expert, slabs)
        lowest, largest = 1.0, 0.0
        for expert in range(layer.layout.n_expert):
            row = np.nonzero(layer.call.ids == expert)[0]
            if len(row) == 0:
                continue
            rows = layer.call.rows[row]
            y = bank.experts(
                0, rows, np.arange(len(row), dtype=np.int32), np.full(len(row), expert, np.int32)
            )
            expected = oracle.expert_ffn(rows, *oracle.expert_matrices(layer.layout, layer.slabs[expert]))
            lowest = min(lowest, float(oracle.row_cosines(y, expected).min()))
            largest = max(largest, float(np.abs(y - expected).max()))
        return lowest, largest
    finally:
        bank.close()


if __name__ == "__main__":
    sys.exit(main())
