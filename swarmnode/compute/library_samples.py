"""Small graphs that use every op of `ops.py` and the experts' path: what two libraries must agree on.

A function that kept its name and got another parameter is found by nothing but its results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from swarmnode.compute import ggml
from swarmnode.compute.bank import ExpertBank
from swarmnode.compute.devices import Device, list_devices
from swarmnode.compute.ggml import api
from swarmnode.compute.graph import GraphBuilder
from swarmnode.compute.self_test import random_expert
from swarmnode.compute.tensors import Tensor, WeightSet

F32Array = npt.NDArray[np.float32]

_MODE = 40
"""GGML_ROPE_TYPE_IMROPE, as the models use it; a number on purpose, the library must know it by the same."""


EXPERT_TYPES = ((ggml.F32, ggml.F32), (ggml.Q4_K, ggml.Q6_K), (ggml.Q8_0, ggml.Q5_K))
"""Gate and up, down."""


class Sample(GraphBuilder):
    """A builder that makes up its inputs' values."""

    def __init__(self, device: Device) -> None:
        super().__init__(device, 128)
        self._values: dict[str, npt.NDArray[np.generic]] = {}

    def wave(self, *ne: int, ggml_type: int = ggml.F32) -> Tensor:
        """A new input of values in -1..1, others for each."""
        n = math.prod(ne)
        phase = 1.0 + len(self._values)
        values = np.sin(0.7 * phase * np.arange(1, n + 1) + phase).reshape(ne[::-1])
        return self.given(values.astype(np.float16 if ggml_type == ggml.F16 else np.float32), ggml_type)

    def ints(self, values: Sequence[object], ggml_type: int = ggml.I32) -> Tensor:
        """A new input of these integers."""
        return self.given(np.asarray(values, np.int64 if ggml_type == ggml.I64 else np.int32), ggml_type)

    def given(self, values: npt.NDArray[np.generic], ggml_type: int) -> Tensor:
        """A new input of these values."""
        name = f"input{len(self._values)}"
        self._values[name] = values
        return self.input(name, ggml_type, *values.shape[::-1])

    def run(self, result: Tensor) -> F32Array:
        """Compute one tensor of f32 or integers, flat."""
        self.output("result", self.cont(result))
        graph = self.build()
        try:
            for name, given in self._values.items():
                graph.set(name, given)
            graph.compute()
            values: F32Array = graph.get("result").astype(np.float32).ravel()
            return values
        finally:
            graph.close()


def _elementwise(s: Sample) -> Tensor:
    x = s.wave(16, 6)
    y = s.swiglu_split(s.silu(x), s.sigmoid(s.softplus(x)))
    y = s.div(s.add(s.mul(y, s.wave(16)), x), s.scale(s.sigmoid(s.wave(16)), 3.0))
    return s.concat(s.rms_norm(y, 1e-6), s.clamp(s.scale(y, 2.0), -0.5, 0.25), 1)


def _shapes(s: Sample) -> Tensor:
    x = s.wave(8, 6, 4)
    turned = s.cont(s.permute(x, 1, 2, 0, 3))
    window = s.cont(s.view(x, (4, 2), (x.nb[2],), 16))
    flat = s.concat(s.reshape(turned, 192), s.reshape(window, 8), 0)
    return s.concat(flat, s.reshape(s.cont(s.transpose(x)), 192), 0)


def _rows(s: Sample) -> Tensor:
    p = s.soft_max(s.wave(8, 5))
    ids = s.cont(s.argsort_top_k(p, 3))
    picked = s.reshape(s.get_rows(s.reshape(p, 1, 8, 5), ids), 3, 5)
    rows = s.wave(16, 5)
    table = s.set_rows(s.wave(16, 8), rows, s.ints([6, 1, 3, 0, 7], ggml.I64))
    half = s.cpy(table, s.wave(16, 8, ggml_type=ggml.F16))
    full = s.get_rows(half, s.ints([7, 0, 6]))
    return s.concat(s.reshape(s.sum_rows(full), 3), s.reshape(picked, 15), 0)


def _products(s: Sample) -> Tensor:
    x = s.wave(32, 1, 4)
    dense = s.mul_mat(s.wave(32, 24, ggml_type=ggml.F16), s.reshape(x, 32, 4))
    routed = s.mul_mat_id(s.wave(32, 24, 5), x, s.ints([[3, 1], [0, 4], [2, 2], [1, 0]]))
    return s.concat(dense, s.reshape(routed, 24, 8), 1)


def _attention(s: Sample) -> Tensor:
    n_tokens, n_kv = 4, 32
    pos = s.ints([*range(7, 7 + n_tokens)] * 3 + [0] * n_tokens)
    q = s.rope_multi(s.wave(32, 4, n_tokens), pos, 16, (3, 3, 2, 0), _MODE, 4096, 1e6)
    k, v = (s.cpy(s.wave(32, n_kv, 2), s.wave(32, n_kv, 2, ggml_type=ggml.F16)) for _ in range(2))
    mask = np.triu(np.full((n_tokens, n_kv), -np.inf, np.float16), n_kv - n_tokens + 1)
    return s.flash_attn_ext(s.permute(q, 0, 2, 1, 3), k, v, s.given(mask, ggml.F16), 0.2)


def _recurrent(s: Sample) -> Tensor:
    n_tokens, size = 5, 32
    convolved = s.silu(s.ssm_conv(s.wave(3 + n_tokens, 3 * size), s.wave(4, 3 * size)))
    q, k, v = (
        s.view(convolved, (size, 1, n_tokens, 1), (4 * size, convolved.nb[1], convolved.nb[2]), 4 * size * i)
        for i in range(3)
    )
    decay = s.scale(s.sigmoid(s.wave(1, 1, n_tokens, 1)), -1.0)
    beta = s.sigmoid(s.wave(1, 1, n_tokens, 1))
    return s.gated_delta_net(q, k, v, decay, beta, s.wave(size, size, 1, 1))


GRAPHS: dict[str, Callable[[Sample], Tensor]] = {
    "elementwise ops": _elementwise,
    "views and copies": _shapes,
    "top-k and rows": _rows,
    "matrix products": _products,
    "attention": _attention,
    "linear attention": _recurrent,
}


def compute_samples(device: Device) -> dict[str, F32Array]:
    """The results of all graphs, flat f32, by name. DeviceError if the device fails."""
    results = {name: _run(device, make) for name, make in GRAPHS.items()}
    for pair in EXPERT_TYPES:
        results[f"experts in {ggml.type_info(pair[0]).name}"] = _experts(device, *pair)
    results["a product with a bound Q4_0 weight"] = _bound(device)
    scheduled = _scheduled_device()
    results["attention through the scheduler"] = _run(scheduled, _attention)
    results["experts through the scheduler"] = _experts(scheduled, *EXPERT_TYPES[1])
    scheduled.close()
    return results


def _scheduled_device() -> Device:
    """A second CPU backend that is treated as a GPU: own memory, and ggml's scheduler."""
    info = next(info for info in list_devices() if info.kind == "cpu")
    handle = ggml.check_handle(
        api.ggml_backend_dev_by_type(api.GGML_BACKEND_DEVICE_TYPE_CPU), "finding the CPU"
    )
    device = Device(replace(info, name="second CPU", kind="gpu"), handle, 1, 0)
    api.ggml_backend_cpu_set_n_threads(device.backend, 1)
    return device


def _run(device: Device, make: Callable[[Sample], Tensor]) -> F32Array:
    sample = Sample(device)
    return sample.run(make(sample))


def _rows_of(n_rows: int) -> F32Array:
    rows: F32Array = np.sin(np.arange(n_rows * 256) * 0.9).reshape(n_rows, 256).astype(np.float32)
    return rows


def _experts(device: Device, type_in: int, type_out: int) -> F32Array:
    """Nine rows by one expert."""
    with _one_expert(device, type_in, type_out) as compute:
        return compute(_rows_of(9)).ravel()


@contextmanager
def _one_expert(device: Device, type_in: int, type_out: int) -> Iterator[Callable[[F32Array], F32Array]]:
    layout, slabs = random_expert(256, 256, type_in, type_out)
    bank = ExpertBank(device)
    try:
        bank.add(layout, 0, slabs)
        yield lambda rows: bank.experts(
            0, rows, np.arange(len(rows), dtype=np.int32), np.zeros(len(rows), np.int32)
        )
    finally:
        bank.close()


def depends_on_company(device: Device) -> str:
    """The expert types for which a row's result depends on the rows beside it, in words; empty if there are none.

    Experts of one layer are computed here and there, in batches of any size: only a library in which a row comes out
    bit-equal in all of them makes a swarm's answer bit-equal to one machine's.
    """
    found = [pair for pair in EXPERT_TYPES if not _same_in_any_company(device, *pair)]
    return ", ".join("+".join(ggml.type_info(ggml_type).name for ggml_type in pair) for pair in found)


def _same_in_any_company(device: Device, type_in: int, type_out: int) -> bool:
    rows = _rows_of(64)
    with _one_expert(device, type_in, type_out) as compute:
        whole = compute(rows)
        return all(
            compute(rows[start : start + width]).tobytes() == whole[start : start + width].tobytes()
            for width in (1, 2, 8, 33)
            for start in range(0, len(rows), width)
        )


def _bound(device: Device) -> F32Array:
    weights = WeightSet(device)
    try:
        data = ggml.quantize(ggml.Q4_0, _rows_of(24))
        sample = Sample(device)
        return sample.run(sample.mul_mat(weights.bind("w", ggml.Q4_0, (256, 24), data), sample.wave(256, 3)))
    finally:
        weights.close()
