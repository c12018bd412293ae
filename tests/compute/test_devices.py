"""Devices and types as ggml reports them."""

from __future__ import annotations

import os

import numpy as np
import pytest

from swarmnode.compute import ggml
from swarmnode.compute.devices import build_report, default_n_threads, list_devices, open_device
from swarmnode.errors import UnsupportedModelError, UsageError


def test_the_cpu_is_there_and_last() -> None:
    devices = list_devices()
    assert devices[-1].kind == "cpu"
    assert devices[-1].name == "CPU"
    assert devices[-1].memory_total_bytes > 0


def test_open_by_name_and_by_default() -> None:
    opened = open_device("CPU")
    assert opened.n_threads == default_n_threads() == len(os.sched_getaffinity(0))
    assert opened.is_host
    assert not opened.closed
    opened.close()
    opened.close()
    assert opened.closed
    best = open_device(n_threads=1)
    assert best.info == list_devices()[0]
    best.close()


def test_an_unknown_device_is_named_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"'CUDA7'.*CPU"):
        open_device("CUDA7")


@pytest.mark.parametrize(("n_threads", "poll"), [(-1, 0), (513, 0), (1, -1), (1, 101)])
def test_numbers_out_of_range_are_refused(n_threads: int, poll: int) -> None:
    with pytest.raises(UsageError):
        open_device("CPU", n_threads=n_threads, poll=poll)


def test_build_report() -> None:
    report = build_report()
    assert report.ggml_version.count(".") == 2
    assert not report.openmp
    assert report.llamafile
    assert "CPU" in report.backends
    assert not {"OPENMP", "LLAMAFILE", "REPACK"} & set(report.cpu_features)


@pytest.mark.parametrize(
    "ggml_type", [ggml.F32, ggml.F16, ggml.BF16, ggml.Q8_0, ggml.Q4_0, ggml.Q4_K, ggml.Q6_K]
)
def test_quantize_and_back(ggml_type: int) -> None:
    values = np.random.default_rng(0).standard_normal((3, 2, 256), np.float32)
    data = ggml.quantize(ggml_type, values)
    assert len(data) == 6 * ggml.row_bytes(ggml_type, 256)
    back = ggml.dequantize(ggml_type, data, values.size).reshape(values.shape)
    assert np.abs(back - values).max() < 0.3


def test_quantize_refuses_what_it_cannot_do() -> None:
    values = np.zeros((2, 256), np.float32)
    for ggml_type in (ggml.Q8_K, ggml.Q8_1, ggml.I32, 16):
        with pytest.raises(UsageError):
            ggml.quantize(ggml_type, values)
    with pytest.raises(UsageError, match="float32"):
        ggml.quantize(ggml.Q4_K, values.astype(np.float64))
    with pytest.raises(UnsupportedModelError, match="whole blocks"):
        ggml.quantize(ggml.Q4_K, values[:, :100])
    with pytest.raises(UsageError, match="not 100"):
        ggml.dequantize(ggml.Q4_K, bytes(100), 256)
    with pytest.raises(UsageError, match="no decoder"):
        ggml.dequantize(ggml.Q8_K, bytes(292), 256)


def test_type_facts() -> None:
    assert ggml.type_info(ggml.Q4_K).activation_type == ggml.Q8_K
    assert ggml.type_info(ggml.Q4_K).multiplies
    assert not ggml.type_info(ggml.I32).multiplies
    assert not ggml.type_info(ggml.Q8_K).multiplies
