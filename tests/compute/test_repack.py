"""Repacked weights: the same products, and nothing but mul_mat may read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from swarmnode.compute import ggml
from swarmnode.compute.devices import Device
from swarmnode.compute.ggml import Handle
from swarmnode.compute.graph import GraphBuilder
from swarmnode.compute.host_memory import read_meminfo
from swarmnode.compute.repack import repack_buffer_type, repacked_types
from swarmnode.compute.tensors import Tensor, WeightSet
from swarmnode.errors import UsageError

N_IN, N_OUT = 512, 64
Q4_0, Q4_K, Q8_0 = 2, 12, 8


@pytest.fixture
def buffer_type(device: Device) -> Handle:
    found = repack_buffer_type(device)
    if found is None:
        pytest.fail("the Makefile's ggml is built with CPU_REPACK")
    return found


@pytest.fixture
def weights(device: Device) -> Iterator[WeightSet]:
    opened = WeightSet(device)
    yield opened
    opened.close()


def matrix(ggml_type: int, n_out: int = N_OUT) -> bytes:
    values = np.random.default_rng(0).standard_normal((n_out, N_IN), np.float32)
    return ggml.quantize(ggml_type, values)


@pytest.fixture
def repacked(weights: WeightSet, buffer_type: Handle) -> Tensor:
    tensor = weights.bind("repacked", Q4_0, (N_IN, N_OUT), matrix(Q4_0), buffer_type)
    if not tensor.is_repacked:
        pytest.skip("this CPU has no other order for Q4_0")
    return tensor


@pytest.mark.parametrize("n_rows", [1, 3, 4, 7, 32])
def test_products_are_those_of_the_plain_order(
    device: Device, weights: WeightSet, repacked: Tensor, n_rows: int
) -> None:
    plain = weights.bind("plain", Q4_0, (N_IN, N_OUT), matrix(Q4_0))
    g = GraphBuilder(device)
    x = g.input("x", ggml.F32, N_IN, n_rows)
    g.output("plain", g.mul_mat(plain, x))
    g.output("repacked", g.mul_mat(repacked, x))
    graph = g.build()
    graph.set("x", np.random.default_rng(1).standard_normal((n_rows, N_IN), np.float32))
    graph.compute()
    expected, found = graph.get("plain"), graph.get("repacked")
    graph.close()
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    assert weights.allocated_bytes >= len(matrix(Q4_0))


READERS: dict[str, Callable[[GraphBuilder, Tensor], object]] = {
    "get_rows": lambda g, w: g.get_rows(w, g.input("ids", ggml.I32, 1)),
    "reshape": lambda g, w: g.reshape(w, N_IN * N_OUT),
    "cont": lambda g, w: g.cont(w),
    "permute": lambda g, w: g.permute(w, 1, 0, 2, 3),
    "transpose": lambda g, w: g.transpose(w),
    "as x": lambda g, w: g.mul_mat(g.input("f", ggml.F32, N_IN, 4), w),
    "mul_mat_id": lambda g, w: g.mul_mat_id(
        w, g.input("x", ggml.F32, N_IN, 1, 1), g.input("i", ggml.I32, 1, 1)
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_nothing_else_reads_them(device: Device, repacked: Tensor, name: str) -> None:
    with pytest.raises(UsageError, match="cannot take"):
        READERS[name](GraphBuilder(device), repacked)


def test_what_has_no_order_stays_as_it_is(weights: WeightSet, buffer_type: Handle) -> None:
    assert not weights.bind("f32", ggml.F32, (N_IN, 8), bytes(4 * N_IN * 8), buffer_type).is_repacked
    odd = weights.bind("odd", Q4_0, (N_IN, N_OUT - 1), matrix(Q4_0, N_OUT - 1), buffer_type)
    assert not odd.is_repacked
    vector = weights.bind("vector", Q4_0, (N_IN,), matrix(Q4_0, 1), buffer_type)
    assert not vector.is_repacked
    assert weights.allocated_bytes == 0


def test_which_types(device: Device, buffer_type: Handle) -> None:
    types = (ggml.F32, Q4_0, Q4_K, Q8_0)
    assert repacked_types(device, buffer_type, types, "never") == frozenset()
    assert repacked_types(device, buffer_type, types, "always") == {Q4_0, Q4_K, Q8_0}
    assert repacked_types(device, buffer_type, types, "auto") <= {Q4_0, Q4_K, Q8_0}


def test_only_the_cpu_has_it(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "is_host", False)
    assert repack_buffer_type(device) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("MemTotal: 8 kB\nMemAvailable:   5 kB\n", 5120),
        ("MemTotal: 8 kB\n", None),
        ("MemAvailable:\n", None),
        ("MemAvailable: lots\n", None),
        ("MemAvailable: \xff", None),
    ],
)
def test_available_memory(tmp_path: Path, text: str, expected: int | None) -> None:
    path = tmp_path / "meminfo"
    path.write_text(text, encoding="latin-1")
    assert read_meminfo(path).get("MemAvailable") == expected
    assert read_meminfo(tmp_path / "nothing") == {}
