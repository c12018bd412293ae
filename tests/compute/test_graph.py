"""Graphs: ops against numpy, memory, states, and what is refused before ggml would abort."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from swarmnode.compute import ggml
from swarmnode.compute.devices import Device, open_device
from swarmnode.compute.graph import Graph, GraphBuilder, SharedWorkspace, Workspace
from swarmnode.compute.tensors import Tensor, WeightSet, read_part, write_part
from swarmnode.errors import DeviceError, UnsupportedModelError, UsageError

F32Array = npt.NDArray[np.float32]
Op = Callable[[GraphBuilder, Tensor], Tensor]

X = np.random.default_rng(0).standard_normal((3, 5, 8), np.float32)
SIGMOID = 1 / (1 + np.exp(-X))


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (lambda b, x: b.silu(x), X * SIGMOID),
        (lambda b, x: b.sigmoid(x), SIGMOID),
        (lambda b, x: b.softplus(x), np.log1p(np.exp(X))),
        (lambda b, x: b.scale(x, -2.5), X * np.float32(-2.5)),
        (lambda b, x: b.rms_norm(x, 1e-6), X / np.sqrt((X**2).mean(axis=-1, keepdims=True) + 1e-6)),
        (lambda b, x: b.sum_rows(x), X.sum(axis=-1)),
        (lambda b, x: b.clamp(b.scale(x, 1.0), -0.5, 0.25), X.clip(-0.5, 0.25)),
        (lambda b, x: b.soft_max(x), np.exp(X) / np.exp(X).sum(axis=-1, keepdims=True)),
        (lambda b, x: b.add(x, b.mul(x, x)), X + X * X),
        (lambda b, x: b.div(x, b.sigmoid(x)), X / SIGMOID),
        (lambda b, x: b.swiglu_split(x, b.scale(x, 2.0)), 2 * X * X * SIGMOID),
        (lambda b, x: b.reshape(x, 20, 6), X),
        (lambda b, x: b.cont(b.transpose(x)), X.swapaxes(1, 2)),
        (lambda b, x: b.cont(b.permute(x, 1, 2, 0, 3)), X.transpose(1, 2, 0)),
        (lambda b, x: b.concat(x, b.scale(x, 3.0), 1), np.concatenate([X, 3 * X], axis=1)),
        (lambda b, x: b.cont(b.view(x, (4, 2), (x.nb[2],), 16)), X[:2, 0, 4:]),
    ],
)
def test_ops_equal_numpy(device: Device, op: Op, expected: F32Array) -> None:
    builder = GraphBuilder(device, 32)
    builder.output("y", op(builder, builder.input("x", ggml.F32, 8, 5, 3)))
    graph = builder.build()
    graph.set("x", X)
    graph.compute()
    np.testing.assert_allclose(graph.get("y").ravel(), expected.ravel(), rtol=3e-6, atol=2e-6)
    graph.close()


def test_top_k_and_rows(device: Device) -> None:
    builder = GraphBuilder(device, 32)
    scores = builder.input("scores", ggml.F32, 8, 5)
    ids = builder.cont(builder.argsort_top_k(scores, 3))
    builder.output("ids", ids)
    builder.output("picked", builder.get_rows(builder.reshape(scores, 1, 8, 5), ids))
    graph = builder.build()
    graph.inputs["scores"][:] = X[0]
    graph.compute()
    expected = np.argsort(-X[0], axis=-1)[:, :3]
    assert graph.outputs["ids"].tolist() == expected.tolist()
    np.testing.assert_array_equal(
        graph.outputs["picked"].reshape(5, 3), np.take_along_axis(X[0], expected, axis=1)
    )
    graph.close()


@pytest.mark.parametrize("ggml_type", [ggml.F32, ggml.F16, ggml.Q8_0, ggml.Q4_K])
def test_mul_mat_with_bound_weights(device: Device, ggml_type: int) -> None:
    rng = np.random.default_rng(1)
    w, x = rng.standard_normal((24, 256), np.float32), rng.standard_normal((3, 256), np.float32)
    data = ggml.quantize(ggml_type, w)
    weights = WeightSet(device)
    tensor = weights.bind("w", ggml_type, (256, 24), data)
    builder = GraphBuilder(device, 8)
    builder.output("y", builder.mul_mat(tensor, builder.input("x", ggml.F32, 256, 3)))
    graph = builder.build()
    graph.set("x", x)
    graph.compute()
    expected = x @ ggml.dequantize(ggml_type, data, w.size).reshape(w.shape).T
    assert np.abs(graph.get("y") - expected).max() < 0.5
    assert weights.allocated_bytes == 0
    weights.close()
    with pytest.raises(DeviceError, match="closed"):
        graph.compute()
    graph.close()


def test_weights_at_any_address(device: Device) -> None:
    """GGUF files may align tensors less than ggml's buffers."""
    data = np.arange(64, dtype=np.float32)
    for shift in (0, 4, 8, 28):
        room = bytearray(64 * 4 + 32)
        room[shift : shift + 256] = data.tobytes()
        weights = WeightSet(device)
        weights.bind("w", ggml.F32, (64,), memoryview(room)[shift : shift + 256])
        assert weights.read("w").tolist() == data.tolist()
        weights.close()


def test_states_start_at_zero_and_keep_what_graphs_write(device: Device) -> None:
    weights = WeightSet(device)
    cache = weights.state("cache", ggml.F16, (8, 6))
    builder = GraphBuilder(device, 8)
    rows = builder.input("rows", ggml.F32, 8, 2)
    builder.output("done", builder.set_rows(cache, rows, builder.input("at", ggml.I64, 2)))
    graph = builder.build()
    assert not weights.read("cache").any()
    graph.set("rows", np.array([[1] * 8, [2] * 8], np.float32))
    graph.set("at", np.array([4, 1]))
    graph.compute()
    assert weights.read("cache")[:, 0].tolist() == [0, 2, 0, 0, 1, 0]
    weights.write("cache", np.ones((6, 8), np.float16))
    assert weights.read("cache").all()
    weights.clear("cache")
    assert not weights.read("cache").any()
    assert weights.allocated_bytes == 96
    graph.close()
    weights.close()


def test_kept_inputs_survive_many_computes(device: Device) -> None:
    """ggml reuses an input's memory once it was read; a kept one is written once."""
    builder = GraphBuilder(device, 32)
    mask = builder.input("mask", ggml.F32, 64, 64)
    y = builder.input("x", ggml.F32, 64, 64, keep=False)
    for _ in range(6):
        y = builder.scale(builder.add(y, mask), 1.0)
    builder.output("y", y)
    graph = builder.build()
    graph.inputs["mask"][:] = 1
    for value in range(4):
        graph.inputs["x"][:] = value
        graph.compute()
        assert (graph.outputs["y"] == value + 6).all()
    graph.close()


def test_a_workspace_lets_graphs_take_turns(device: Device) -> None:
    workspace = Workspace(device)
    graphs = []
    for width in (4, 64):
        builder = GraphBuilder(device, 8)
        builder.output("y", builder.silu(builder.input("x", ggml.F32, width)))
        graphs.append(builder.build(workspace))
    graphs[1].set("x", np.zeros(64, np.float32))
    graphs[1].compute()
    with pytest.raises(DeviceError, match="newer graph"):
        graphs[0].compute()
    assert workspace.n_bytes > 0
    for graph in graphs:
        graph.close()
    workspace.close()


def build_small(device: Device) -> Graph:
    builder = GraphBuilder(device, 8)
    builder.output("y", builder.silu(builder.input("x", ggml.F32, 4)))
    return builder.build()


def test_wrong_input_arrays_are_refused(device: Device) -> None:
    graph = build_small(device)
    for bad in (np.zeros(5, np.float32), np.zeros((1, 4), np.float32), np.zeros(4)):
        with pytest.raises(UsageError, match="input x"):
            graph.set("x", bad)
    graph.close()
    with pytest.raises(DeviceError, match="closed"):
        graph.set("x", np.zeros(4, np.float32))


@pytest.mark.parametrize(
    "op",
    [
        lambda b, x: b.mul_mat(x, b.input("w", ggml.F32, 7, 2)),
        lambda b, x: b.mul_mat_id(x, b.input("w", ggml.F32, 8, 1, 2), b.input("ids", ggml.I32, 1, 3)),
        lambda b, x: b.add(x, b.input("w", ggml.F32, 8, 2)),
        lambda b, x: b.reshape(x, 7, 17),
        lambda b, x: b.view(x, (8, 6), (32,), 32 * 15 - 4),
        lambda b, x: b.view(x, (8,), (), -4),
        lambda b, x: b.permute(x, 0, 0, 1, 2),
        lambda b, x: b.concat(x, b.input("w", ggml.F32, 7, 5, 3), 1),
        lambda b, x: b.get_rows(x, b.input("ids", ggml.F32, 2)),
        lambda b, x: b.cpy(x, b.input("w", ggml.F32, 8, 5)),
        lambda b, x: b.soft_max(b.transpose(x)),
        lambda b, x: b.argsort_top_k(x, 9),
        lambda b, x: b.ssm_conv(x, b.input("w", ggml.F32, 4, 6)),
        lambda b, x: b.gated_delta_net(x, x, x, x, x, x),
        lambda b, x: b.rope_multi(x, b.input("pos", ggml.I32, 3), 4, (1, 1, 0, 0), 40, 64, 1e4),
        lambda b, x: b.rope_multi(x, b.input("pos", ggml.I32, 4), 4, (9, 9, 9, 0), 40, 64, 1e4),
        lambda b, x: b.rope_multi(x, b.input("pos", ggml.I32, 4), 4, (2, -1, 0, 0), 40, 64, 1e4),
        lambda b, x: b.flash_attn_ext(x, x, x, b.input("mask", ggml.F16, 5, 4), 1.0),
        lambda b, x: b.output("y", b.transpose(x)),
        lambda b, x: b.input("x", ggml.F32, 4),
        lambda b, x: b.input("q", ggml.Q4_K, 256),
        lambda b, x: b.input("q", ggml.F32, 4, 0),
        lambda b, x: b.build(),
    ],
)
def test_what_would_abort_the_process_is_refused(device: Device, op: Op) -> None:
    """Case 5."""
    builder = GraphBuilder(device, 16)
    x = builder.input("x", ggml.F32, 8, 5, 3)
    with pytest.raises(UsageError):
        op(builder, x)


def test_graphs_are_not_larger_than_declared(device: Device) -> None:
    builder = GraphBuilder(device, 4)
    x = builder.input("x", ggml.F32, 8)
    for _ in range(3):
        x = builder.silu(x)
    with pytest.raises(UsageError, match="more than the 4 nodes"):
        builder.silu(x)


def test_an_input_that_leads_nowhere_is_refused(device: Device) -> None:
    builder = GraphBuilder(device, 8)
    builder.input("lost", ggml.F32, 8)
    builder.output("y", builder.silu(builder.input("x", ggml.F32, 8)))
    with pytest.raises(UsageError, match="lost"):
        builder.build()


def test_replace_source_takes_only_weights_of_the_same_shape(device: Device) -> None:
    weights = WeightSet(device)
    a = weights.bind("a", ggml.F32, (8, 2), np.ones((2, 8), np.float32))
    b = weights.bind("b", ggml.F32, (8, 2), np.full((2, 8), 3, np.float32))
    wrong = weights.bind("wrong", ggml.F32, (8, 3), np.ones((3, 8), np.float32))
    builder = GraphBuilder(device, 8)
    product = builder.mul_mat(a, builder.input("x", ggml.F32, 8, 1))
    builder.output("y", product)
    graph = builder.build()
    graph.inputs["x"][:] = 1
    for tensor, expected in ((b, 24), (a, 8), (a, 8), (b, 24)):
        graph.replace_source(product, 0, tensor)
        graph.compute()
        assert graph.outputs["y"].tolist() == [[expected, expected]]
    with pytest.raises(UsageError, match="replace_source"):
        graph.replace_source(product, 0, wrong)
    with pytest.raises(UsageError, match="not a weight"):
        graph.replace_source(product, 1, a)
    graph.close()
    weights.close()


def test_replace_source_after_the_old_weights_are_gone(device: Device) -> None:
    """New tensor structs come to lie where freed ones were, so addresses say nothing about identity."""

    def make(value: float) -> tuple[WeightSet, list[Tensor]]:
        weights = WeightSet(device)
        return weights, [
            weights.bind(name, ggml.F32, (8, 2), np.full((2, 8), value, np.float32)) for name in ("a", "b")
        ]

    held, (first, second) = make(1)
    builder = GraphBuilder(device, 8)
    x = builder.input("x", ggml.F32, 8, 1)
    products = [builder.mul_mat(first, x), builder.mul_mat(second, x)]
    builder.output("y", builder.add(*products))
    graph = builder.build()
    graph.inputs["x"][:] = 1
    for value in range(2, 60):
        held.close()
        held, tensors = make(value)
        for product, tensor in zip(products, reversed(tensors) if value % 2 else tensors, strict=True):
            graph.replace_source(product, 0, tensor)
        graph.compute()
        assert graph.outputs["y"].tolist() == [[16 * value, 16 * value]]
    graph.close()
    held.close()


@pytest.mark.parametrize(
    ("ggml_type", "ne", "n_bytes"),
    [(0, (4,), 15), (0, (4, -1), 16), (0, (), 4), (0, (1, 1, 1, 1, 1), 4), (0, (2**40, 2**40), 16)],
)
def test_bad_weights_are_refused(device: Device, ggml_type: int, ne: tuple[int, ...], n_bytes: int) -> None:
    weights = WeightSet(device)
    with pytest.raises(UsageError):
        weights.bind("w", ggml_type, ne, bytes(n_bytes))
    assert "w" not in weights
    weights.close()


@pytest.mark.parametrize("ggml_type", [-1, 4, 31, 42, 99, 2**31])
def test_unknown_types_are_refused(device: Device, ggml_type: int) -> None:
    weights = WeightSet(device)
    with pytest.raises(UnsupportedModelError, match="unknown to ggml"):
        weights.bind("w", ggml_type, (256,), bytes(144))
    with pytest.raises(UnsupportedModelError, match="whole blocks"):
        weights.bind("w", ggml.Q4_K, (255,), bytes(144))
    weights.close()


def test_dropping_everything_in_any_order_is_safe() -> None:
    opened = open_device("CPU", n_threads=1)
    weights = WeightSet(opened)
    graph = build_small(opened)
    weights.state("s", ggml.F32, (4,))
    del opened
    gc.collect()
    graph.set("x", np.zeros(4, np.float32))
    graph.compute()
    del weights, graph
    gc.collect()


@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_thread_count_changes_no_bit(n_threads: int) -> None:
    """What the governor relies on."""
    results = []
    for count in (1, n_threads):
        opened = open_device("CPU", n_threads=count)
        rng = np.random.default_rng(2)
        weights = WeightSet(opened)
        builder = GraphBuilder(opened, 16)
        x = y = builder.input("x", ggml.F32, 256, 17)
        for index, ggml_type in enumerate((ggml.F32, ggml.Q8_0, ggml.Q4_K, ggml.Q6_K)):
            data = ggml.quantize(ggml_type, rng.standard_normal((256, 256), np.float32) / np.float32(16))
            y = builder.rms_norm(
                builder.mul_mat(weights.bind(str(index), ggml_type, (256, 256), data), y), 1e-6
            )
        builder.output("y", builder.add(y, x))
        graph = builder.build()
        graph.set("x", rng.standard_normal((17, 256), np.float32))
        graph.compute()
        results.append(graph.get("y").tobytes())
        graph.close()
        weights.close()
        opened.close()
    assert results[0] == results[1]


def test_graphs_in_a_shared_workspace_take_turns_until_it_grows(device: Device) -> None:
    states = WeightSet(device)
    x = states.state("x", ggml.F32, (8,))
    y = states.state("y", ggml.F32, (8,))
    workspace = SharedWorkspace(device)

    def graph(n_steps: int, factor: float) -> Graph:
        builder = GraphBuilder(device, 64)
        value = builder.scale(x, factor)
        columns = [value] if n_steps == 0 else [builder.concat(value, value, 1)]
        for _ in range(n_steps - 1):
            columns.append(builder.concat(columns[-1], columns[-1], 1))
        last = columns[-1]
        builder.expand(builder.cpy(builder.view(last, (8,), (), 0), y))
        return builder.build(workspace)

    graphs = [graph(3, 2.0), graph(0, 3.0), graph(2, 5.0)]
    assert not any(built.is_stale for built in graphs)
    n_bytes = workspace.n_bytes
    for turn in range(3):
        states.write("x", np.full(8, 1.0 + turn, np.float32))
        for built, factor in zip(graphs, (2.0, 3.0, 5.0), strict=True):
            built.compute()
            np.testing.assert_array_equal(states.read("y"), np.full(8, factor * (1.0 + turn), np.float32))
    larger = graph(12, 7.0)
    assert workspace.n_bytes > n_bytes
    assert all(built.is_stale for built in graphs)
    with pytest.raises(DeviceError, match="newer graph"):
        graphs[0].compute()
    larger.compute()
    np.testing.assert_array_equal(states.read("y"), np.full(8, 21.0, np.float32))
    workspace.close()
    with pytest.raises(DeviceError, match="closed"):
        larger.compute()
    states.close()


def test_a_graph_in_a_shared_workspace_keeps_nothing_there(device: Device) -> None:
    workspace = SharedWorkspace(device)
    builder = GraphBuilder(device)
    builder.output("y", builder.scale(builder.input("x", ggml.F32, 4), 2.0))
    with pytest.raises(UsageError, match="keeps nothing there"):
        builder.build(workspace)
    workspace.close()


def test_parts_of_a_tensor(device: Device) -> None:
    states = WeightSet(device)
    x = states.state("x", ggml.F32, (4, 3))
    write_part(x, np.arange(6, dtype=np.float32), 4)
    np.testing.assert_array_equal(read_part(x, 2, 4), [[0, 0, 0, 0], [0, 1, 2, 3]])
    np.testing.assert_array_equal(states.read("x")[2], [4, 5, 0, 0])
    for values, start in ((np.zeros(4, np.float32), 9), (np.zeros(1, np.float32), -1), (np.zeros(1), 0)):
        with pytest.raises(UsageError, match="does not fit"):
            write_part(x, values, start)
    with pytest.raises(UsageError, match="has no"):
        read_part(x, 13)
    states.close()
