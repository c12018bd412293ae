"""Whose fault is it? What a peer's model cannot do on this machine, told apart from a machine that computes wrong.

A worker outlives a peer with an odd model (UnsuitableModelError), and ends with a clear message when its own device is
at fault (DeviceError).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from swarmnode.compute import oracle
from swarmnode.compute.bank import ExpertBank
from swarmnode.compute.devices import Device
from swarmnode.compute.expert_graph import ExpertShape
from swarmnode.compute.layout import ExpertTensor
from swarmnode.compute.self_test import SelfTestReport, apply_report, check_device, check_expert
from swarmnode.config import Config
from swarmnode.errors import ModelFileError, UnsuitableModelError, UnsupportedModelError, UsageError
from swarmnode.weights.ggml_types import GGML_TYPES, type_name
from swarmnode.weights.manifest import Manifest
from swarmnode.wire.connection import printable


def title(manifest: Manifest) -> str:
    """The model's name as it may be shown: it comes from a peer."""
    return printable(manifest.name)


@contextmanager
def blaming(manifest: Manifest) -> Iterator[None]:
    """Errors about what the model is like become UnsuitableModelError."""
    try:
        yield
    except (UsageError, UnsupportedModelError, ModelFileError) as error:
        raise UnsuitableModelError(f"{title(manifest)} cannot be served here: {error}") from error


def widest_batch(manifest: Manifest, config: Config) -> int:
    """Most (row, expert) pairs in one request: `ComputeConfig.max_rows`, fewer where a wide model would need more than
    `ServeConfig.max_work_bytes`.
    """
    pair_bytes = max(ExpertShape.of(layer.layout).work_bytes(1) for layer in manifest.layers.values())
    return max(1, min(config.compute.max_rows, config.serve.max_work_bytes // pair_bytes))


def widest_graph(manifest: Manifest, device: Device, config: Config) -> int:
    """Most (row, expert) pairs in one graph: `widest_batch`, on the CPU at most `ComputeConfig.worker_cpu_rows`."""
    widest = widest_batch(manifest, config)
    return min(widest, config.compute.worker_cpu_rows) if device.is_host else widest


def check_computable(manifest: Manifest, device: Device, config: Config) -> None:
    """Before anything is fetched: every layer can be computed here, and checked against the float64 reference.

    Raises UnsupportedModelError or UsageError. Compute thread.
    """
    bank = ExpertBank(device, config=config.compute)
    try:
        for layer in manifest.layers.values():
            bank.reserve(layer.layout, 0)
    finally:
        bank.close()
    for ggml_type in {t.ggml_type for layer in manifest.layers.values() for t in layer.layout.tensors}:
        _check_decodable(ggml_type)


def _check_decodable(ggml_type: int) -> None:
    """UnsupportedModelError for a type that the reference does not know, which newer ggmls may have."""
    kind = GGML_TYPES[ggml_type]
    try:
        oracle.Matrix(ggml_type, kind.block_values, 1, bytes(kind.block_bytes)).rows(0, 1)
    except ValueError as error:  # gguf-py has no number for it
        raise UnsupportedModelError(f"the reference cannot decode {type_name(ggml_type)}") from error


class BankTester:
    """Tests the first expert of every combination of tensor types as soon as it is loaded.

    So a device that computes wrong is found before the rest is downloaded, and the test's work memory (on a CPU 12 MB
    at the real sizes) is seldom needed on top of a full budget.
    """

    def __init__(self, bank: ExpertBank, widths: Sequence[int]) -> None:
        self.bank = bank
        self._widths = widths
        self._tested: dict[tuple[int, ...], SelfTestReport] = {}

    @property
    def report(self) -> SelfTestReport:
        """All results so far."""
        results = tuple(result for report in self._tested.values() for result in report.results)
        return SelfTestReport(self.bank.device.info.name, results)

    def loaded(self, layer: int, expert: int) -> None:
        """Test this expert if none of its types was, and cut the bank's batches to what is good.

        When not even single rows come out right: DeviceError if the device is wrong with weights of our own too,
        UnsuitableModelError if only with the peer's (a scale that is not finite, say). Compute thread.
        """
        tensors = self.bank.layout(layer).tensors
        types = tuple(tensor.ggml_type for tensor in tensors)
        if types in self._tested:
            return
        with np.errstate(all="ignore"):  # whatever is in a peer's weights is for the comparison to find
            report = check_expert(self.bank, layer, expert, self._widths)
        if report.widest_good == 0:
            own = self._own_weights(tensors)
            if own.widest_good == 0:
                apply_report(self.bank, own)  # raises: it is the device
            worst = min(result.min_cosine for result in report.results)
            raise UnsuitableModelError(
                f"layer {layer}, expert {expert} comes out wrong (cosine {worst:.6f}), but "
                f"{self.bank.device.info.name} is right with other weights: these are broken or too extreme"
            )
        self._tested[types] = report
        apply_report(self.bank, report)

    def _own_weights(self, tensors: Sequence[ExpertTensor]) -> SelfTestReport:
        device = self.bank.device
        try:
            return check_device(device, ((tensors[0].ggml_type, tensors[-1].ggml_type),), max_rows=1)
        except UsageError:  # a type that cannot be made from numbers here
            return check_device(device, max_rows=1)
