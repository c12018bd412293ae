"""The float64 reference: against plain numpy, against ggml, and cut over shards."""

from __future__ import annotations

import tracemalloc

import numpy as np
import numpy.typing as npt
import pytest

from swarmnode.compute import ggml, oracle
from swarmnode.compute.devices import Device
from swarmnode.compute.self_test import random_expert
from swarmnode.errors import UnsupportedModelError
from tests.compute.layers import RandomLayer, Routing, random_layer, random_routing


def plain_ffn(rows: npt.NDArray[np.float32], layer: RandomLayer, expert: int) -> npt.NDArray[np.float64]:
    matrices = []
    for tensor in layer.layout.tensors:
        values = ggml.dequantize(tensor.ggml_type, layer.slabs(expert)[tensor.kind], tensor.ne0 * tensor.ne1)
        matrices.append(values.reshape(tensor.ne1, tensor.ne0).astype(np.float64))
    gate, up, down = matrices if len(matrices) == 3 else (*np.split(matrices[0], 2), matrices[1])
    x = rows.astype(np.float64)
    hidden = x @ gate.T
    result: npt.NDArray[np.float64] = (hidden / (1 + np.exp(-hidden)) * (x @ up.T)) @ down.T
    return result


def shard_sum(layer: RandomLayer, routing: Routing, experts: range) -> npt.NDArray[np.float64]:
    """The weighted sum over the experts of one shard, in float64, computed from its slabs alone."""
    total = np.zeros(routing.rows.shape, np.float64)
    for expert in experts:
        row, k = np.nonzero(routing.ids == expert)
        if row.size:
            matrices = oracle.expert_matrices(layer.layout, layer.slabs(expert))
            y = oracle.expert_ffn(routing.rows[row], *matrices)
            np.add.at(total, row, y * routing.weights[row, k][:, None].astype(np.float64))
    return total


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("types", [(ggml.F32, ggml.F16), (ggml.BF16, ggml.Q8_0), (ggml.Q4_K, ggml.Q6_K)])
def test_equals_plain_numpy(types: tuple[int, int], fused: bool) -> None:
    layer = random_layer(types, n_expert=2, fused=fused)
    rows = np.random.default_rng(0).standard_normal((5, 256), np.float32)
    matrices = oracle.expert_matrices(layer.layout, layer.slabs(1))
    np.testing.assert_allclose(
        oracle.expert_ffn(rows, *matrices), plain_ffn(rows, layer, 1), rtol=0, atol=1e-12
    )


def test_four_shards_equal_the_whole_layer() -> None:
    """O7: 4 shards computed apart and combined = the monolithic layer, max|d| <= 3.6e-12."""
    layer = random_layer((ggml.Q4_K, ggml.Q6_K), n_expert=28, n_embd=512)
    routing = random_routing(layer.layout, 16, n_used=8)
    whole = np.zeros(routing.rows.shape, np.float64)
    for t, row_ids in enumerate(routing.ids):
        for k, expert in enumerate(row_ids):
            y = plain_ffn(routing.rows[t : t + 1], layer, int(expert))[0]
            whole[t] += float(routing.weights[t, k]) * y
    shards = [range(7), range(7, 14), range(14, 21), range(21, 28)]
    combined = sum(shard_sum(layer, routing, experts) for experts in shards)
    difference = float(np.abs(combined - whole).max())
    print(f"4 shards against the whole layer, float64: max|d| {difference:.1e}")
    assert difference <= 3.6e-12


@pytest.mark.parametrize(
    ("types", "least"), [((ggml.F32, ggml.F32), 0.999999), ((ggml.Q4_K, ggml.Q6_K), 0.9995)]
)
def test_ggml_agrees_with_the_oracle(device: Device, types: tuple[int, int], least: float) -> None:
    """O8, for the combined layer, by the minimum cosine over rows."""
    layer = random_layer(types)
    bank = layer.bound(device)
    routing = random_routing(layer.layout, 64)
    y = bank.moe(0, routing.rows, routing.ids, routing.weights)
    expected = shard_sum(layer, routing, range(8))
    cosine = float(oracle.row_cosines(y, expected).min())
    print(f"{types}: minimum cosine {cosine:.9f}, max|d| {np.abs(y - expected).max():.1e}")
    assert cosine >= least
    bank.close()


@pytest.mark.parametrize(
    ("ggml_type", "rounding", "block"),
    [(ggml.Q8_0, "q8_0", 32), (ggml.BF16, "bf16", 1), (ggml.F16, "f16", 1)],
)
def test_rounding_equals_ggml_s(ggml_type: int, rounding: oracle.Rounding, block: int) -> None:
    x = np.random.default_rng(4).standard_normal((3, 256), np.float32)
    x[1, :block] = 0
    by_ggml = ggml.dequantize(ggml_type, ggml.quantize(ggml_type, x), x.size).reshape(x.shape)
    ours = oracle.round_activations(x.astype(np.float64), rounding)
    np.testing.assert_allclose(ours, by_ggml, rtol=0, atol=1e-6)


def test_scratch_memory_is_bounded() -> None:
    """An expert of the real size needs at most 32 MB beside its rows in and out."""
    layout, slabs = random_expert(3072, 1024, ggml.Q4_K, ggml.Q6_K)
    rows = np.ones((16, 3072), np.float32)
    matrices = oracle.expert_matrices(layout, slabs)
    tracemalloc.start()
    try:
        oracle.expert_ffn(rows, *matrices, ("q8_K", "q8_K"))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes <= 32_000_000


def test_cosines_of_odd_rows() -> None:
    a = np.array([[1, 0], [0, 0], [0, 0], [np.nan, 1], [np.inf, 1], [-2, 0]], np.float32)
    b = np.array([[2, 0], [0, 0], [1, 0], [1, 1], [1, 1], [1, 0]], np.float32)
    assert oracle.row_cosines(a, b).tolist() == [1, 1, 0, -1, -1, -1]


def test_an_unknown_type_is_refused() -> None:
    matrix = oracle.Matrix(ggml.Q8_K, 256, 1, bytes(292))
    with pytest.raises(UnsupportedModelError, match="Q8_K"):
        matrix.rows(0, 1)
