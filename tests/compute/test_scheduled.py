"""The path of GPUs (own memory, ggml's scheduler, fallback to the CPU), on a second CPU backend that plays the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from swarmnode.compute import ggml
from swarmnode.compute.bank import ExpertBank
from swarmnode.compute.devices import Device, list_devices
from swarmnode.compute.ggml import api
from swarmnode.compute.graph import GraphBuilder
from swarmnode.compute.self_test import check_expert
from swarmnode.compute.tensors import WeightSet
from swarmnode.errors import BudgetError
from tests.compute.layers import random_layer, random_routing


@pytest.fixture(scope="module")
def scheduled() -> Iterator[Device]:
    info = replace(list_devices()[-1], name="second CPU", kind="gpu")
    handle = api.ggml_backend_dev_by_type(api.GGML_BACKEND_DEVICE_TYPE_CPU)
    opened = Device(info, handle, n_threads=1, poll=0)
    api.ggml_backend_cpu_set_n_threads(opened.backend, 1)
    assert not opened.is_host
    yield opened
    opened.close()


@pytest.mark.parametrize("fused", [False, True])
def test_a_bank_on_a_device_equals_one_on_the_cpu(device: Device, scheduled: Device, fused: bool) -> None:
    layers = [random_layer((ggml.Q4_K, ggml.Q6_K), layer=number, fused=fused) for number in range(2)]
    budget = 2 * 8 * layers[0].layout.expert_bytes
    bank = ExpertBank(scheduled, budget_bytes=budget)
    for layer in layers:
        bank.bind(layer.layout, range(8), layer.stacked)
    assert bank.used_bytes == budget
    with pytest.raises(BudgetError):
        bank.reserve(layers[0].layout, 1)
    for number, layer in enumerate(layers):
        good = ExpertBank(device)
        good.bind(layer.layout, range(8), layer.stacked)
        routing = random_routing(layer.layout, 7)
        expected = good.moe(number, routing.rows, routing.ids, routing.weights)
        for _ in range(2):
            got = bank.moe(number, routing.rows, routing.ids, routing.weights)
            assert got.tobytes() == expected.tobytes()
        pairs = (routing.pair_row, routing.pair_expert)
        assert (
            bank.experts(number, routing.rows, *pairs).tobytes()
            == good.experts(number, routing.rows, *pairs).tobytes()
        )
        assert bank.partial(number, routing.rows, *pairs, routing.pair_weight).tobytes() == expected.tobytes()
        assert bytes(bank.slab(number, 5, "ffn_down_exps")) == layer.slabs(5)["ffn_down_exps"]
        good.close()
    assert bank.graph_bytes > 0
    bank.close()


def test_an_expert_named_twice_is_well_defined_there_too(scheduled: Device) -> None:
    """Case 25: GPU kernels assume distinct experts in a row, so such rows go as pairs."""
    layer = random_layer()
    bank = layer.bound(scheduled)
    row = np.random.default_rng(0).standard_normal((1, 256), np.float32)
    ids, weights = np.array([[3, 3]], np.int32), np.array([[0.25, 0.5]], np.float32)
    y = bank.experts(0, row, np.zeros(1, np.int32), ids[0, :1])
    expected = np.float32(0.25) * y + np.float32(0.5) * y
    assert bank.moe(0, row, ids, weights).tobytes() == expected.tobytes()
    bank.close()


def test_the_self_test_holds_devices_to_plain_float64(scheduled: Device) -> None:
    bank = random_layer().bound(scheduled)
    report = check_expert(bank, 0, 0, widths=(1, 9))
    assert report.passed
    assert {result.reference for result in report.results} == {"float64"}
    bank.close()


def test_weights_and_states(scheduled: Device) -> None:
    weights = WeightSet(scheduled)
    w = weights.bind("w", ggml.F32, (4, 2), np.arange(8, dtype=np.float32).reshape(2, 4))
    state = weights.state("s", ggml.F32, (2, 3))
    assert weights.allocated_bytes >= 8 * 4 + 6 * 4
    builder = GraphBuilder(scheduled, 8)
    y = builder.mul_mat(w, builder.input("x", ggml.F32, 4, 3))
    builder.expand(builder.cpy(y, state))
    builder.output("y", builder.scale(y, 2.0))
    graph = builder.build()
    assert graph.inputs == graph.outputs == {}
    for value in (1, 2):
        graph.set("x", np.full((3, 4), value, np.float32))
        graph.compute()
        assert graph.get("y").tolist() == [[12 * value, 44 * value]] * 3
        assert weights.read("s").tolist() == [[6 * value, 22 * value]] * 3
    graph.close()
    weights.close()
