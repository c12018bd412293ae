"""Does this device compute experts right, and up to which batch width? Run at start and after loading.

Outputs are held against the float64 oracle by the *minimum* cosine over the rows, at widths around the
places where kernels change (mat-vec to mat-mat at 9 columns on many GPUs). A device whose wide kernels
are worse than its narrow ones is used at the widest good width: larger batches are cut.

Two references. "float64" is the truth. "rounded" is float64 on activations rounded as ggml's CPU kernels
round them, which only the CPU can be held to, but tightly. Measured on a CPU (Gaussian weights and rows,
512 columns, n_embd 256 to 3072), 1 - minimum cosine:

    weights       float64          rounded
    F32           4e-14            4e-14
    F16, BF16     1e-6 .. 1e-5     2e-6
    Q4_0 .. Q8_0  9e-5 .. 1.5e-4   7e-7   (Q4_1, Q5_1: 4e-5, their kernels keep a sum in f16)
    K-quants      2.6e-4 .. 4.5e-4 5e-6

GPUs: 5e-5 on Vulkan's mat-mat kernels; a known bad one (a GPU's 8-bit mat-mat) 1.1e-3 at 9 columns.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from swarmnode.compute import ggml, oracle
from swarmnode.compute.bank import ExpertBank
from swarmnode.compute.devices import Device
from swarmnode.compute.layout import (
    FUSED_KINDS,
    SEPARATE_KINDS,
    ExpertTensor,
    LayerLayout,
    expected_shapes,
)
from swarmnode.config import ComputeConfig
from swarmnode.errors import DeviceError, UsageError

Reference = Literal["float64", "rounded"]

_DISTINCT_ROWS = 61
"""Wide batches repeat so many rows, which bounds the reference's time and memory (1 MB each way at the real sizes). A
prime: no kernel's tiles have such a length, so one that mixes up columns still meets another row."""

_ROWS_STREAM = 0x726F7773
"""Keeps the rows independent of weights made from the same seed: a row equal to a gate's row is no Gaussian row."""

_ROUNDINGS: dict[int, oracle.Rounding] = {
    ggml.F32: "exact",
    ggml.F16: "f16",
    ggml.BF16: "bf16",
    ggml.Q8_0: "q8_0",
    ggml.Q8_1: "q8_1",
    ggml.Q8_K: "q8_K",
}


@dataclass(frozen=True)
class WidthResult:
    """One line of the table: one batch width against one reference."""

    width: int
    weights: str
    """The expert's tensor types, for example 'Q4_K+Q6_K'."""
    reference: Reference
    min_cosine: float
    """Over the rows of the batch."""
    max_abs_diff: float
    threshold: float
    passed: bool


@dataclass(frozen=True)
class SelfTestReport:
    """What the self-test saw."""

    device: str
    results: tuple[WidthResult, ...]

    @property
    def passed(self) -> bool:
        """True if every width is good."""
        return all(result.passed for result in self.results)

    @property
    def widest_good(self) -> int:
        """The largest tested width up to which all widths are good; 0 if not even one column is."""
        bad = [result.width for result in self.results if not result.passed]
        limit = min(bad, default=None)
        good = [result.width for result in self.results if limit is None or result.width < limit]
        return max(good, default=0)


def check_expert(
    bank: ExpertBank, layer: int, expert: int, widths: Sequence[int] | None = None, seed: int = 0
) -> SelfTestReport:
    """Compare one held expert's outputs on Gaussian rows with the oracle, at every width; a width above
    bank.max_rows counts as that.

    Beside the bank's graph it needs a copy of the slabs, then one of the widest batch's outputs.
    The weights are read back from the device, so a copy that went wrong is not seen here but by the
    slices' hashes. UsageError if the expert is not held; UnsupportedModelError for weights that the
    oracle cannot decode.
    """
    layout = bank.layout(layer)
    slabs = {kind: bank.slab(layer, expert, kind) for kind in layout.kinds}
    wanted = ComputeConfig().self_test_widths if widths is None else widths
    usable = sorted({min(width, bank.max_rows) for width in wanted})
    if not usable or usable[0] < 1:
        raise UsageError(f"{list(wanted)} are no widths of batches")
    rows = _gaussian((min(usable[-1], _DISTINCT_ROWS), layout.n_embd), seed, layer, expert, _ROWS_STREAM)
    references = _references(bank.device, layout, slabs, rows)
    del slabs
    results: list[WidthResult] = []
    for width in reversed(usable):  # so that the bank's cache is left with small graphs
        pair_row = np.arange(width, dtype=np.int32) % np.int32(len(rows))
        pair_expert = np.full(width, expert, np.int32)
        y = bank.experts(layer, rows, pair_row, pair_expert)
        results += [_judge(bank.device, layout, name, y, expected) for name, expected in references.items()]
        del y
    return SelfTestReport(bank.device.info.name, tuple(sorted(results, key=lambda result: result.width)))


def check_device(
    device: Device, types: Sequence[tuple[int, int]] | None = None, max_rows: int | None = None
) -> SelfTestReport:
    """The same before any weights are loaded: small random experts of the given (gate and up, down) types.

    By default F32 and the mix that most files have, Q4_K with Q6_K. Takes well under a second on a CPU; a driver
    that compiles its kernels on first use may take minutes, of which `max_rows` (widest batch) saves most.
    """
    results: list[WidthResult] = []
    for pair in types or ((ggml.F32, ggml.F32), (ggml.Q4_K, ggml.Q6_K)):
        layout, slabs = random_expert(256, 256, *pair)
        bank = ExpertBank(device, max_rows=max_rows)
        try:
            bank.add(layout, 0, slabs)
            results += check_expert(bank, 0, 0).results
        finally:
            bank.close()
    return SelfTestReport(device.info.name, tuple(results))


def apply_report(bank: ExpertBank, report: SelfTestReport) -> None:
    """Cut the bank's batches at the widest width that was tested and is good; DeviceError if there is none."""
    if report.widest_good == 0:
        worst = min(report.results, key=lambda result: result.min_cosine)
        raise DeviceError(
            f"device {report.device} computes wrong results: cosine {worst.min_cosine:.6f} against float64 at "
            f"width {worst.width} with {worst.weights} weights (at least {worst.threshold} is needed)"
        )
    bank.limit_rows(min(bank.max_rows, report.widest_good))


def random_expert(
    n_embd: int, n_ff: int, type_in: int, type_out: int, *, fused: bool = False, seed: int = 0
) -> tuple[LayerLayout, dict[str, bytes]]:
    """A layer 0 with one expert of Gaussian weights: its layout and slabs."""
    shapes = expected_shapes(n_embd, n_ff)
    slabs: dict[str, bytes] = {}
    tensors: list[ExpertTensor] = []
    kinds = FUSED_KINDS if fused else SEPARATE_KINDS
    for kind in kinds:
        ne0, ne1 = shapes[kind]
        ggml_type = type_out if kind == kinds[-1] else type_in
        values = _gaussian((ne1, ne0), seed, len(tensors)) / np.float32(ne0**0.5)
        slabs[kind] = ggml.quantize(ggml_type, values)
        tensors.append(ExpertTensor(kind, ggml_type, ne0, ne1, len(slabs[kind])))
    return LayerLayout(0, n_embd, n_ff, 1, tuple(tensors)), slabs


def _gaussian(shape: tuple[int, int], *seed: int) -> npt.NDArray[np.float32]:
    """Independent standard normal f32 numbers, the same for the same seed (Box-Muller).

    Importing numpy's generators takes 2.4 MB and 20 ms, for this alone.
    """
    n_values = shape[0] * shape[1]
    words = np.frombuffer(random.Random(repr(seed)).randbytes(8 * n_values), "<u4").reshape(2, n_values)
    uniform = (words + np.float64(0.5)) / 2.0**32
    values = np.sqrt(-2.0 * np.log(uniform[0])) * np.cos(2.0 * np.pi * uniform[1])
    gaussian: npt.NDArray[np.float32] = values.astype(np.float32).reshape(shape)
    return gaussian


def _references(
    device: Device,
    layout: LayerLayout,
    slabs: dict[str, bytearray],
    rows: npt.NDArray[np.float32],
) -> dict[Reference, npt.NDArray[np.float32]]:
    matrices = oracle.expert_matrices(layout, slabs)
    roundings: dict[Reference, tuple[oracle.Rounding, oracle.Rounding]] = {"float64": ("exact", "exact")}
    if device.is_host:
        gate, _, down = matrices
        roundings["rounded"] = (_rounding(gate.ggml_type), _rounding(down.ggml_type))
    found: dict[Reference, npt.NDArray[np.float32]] = {}
    for name, activations in roundings.items():
        found[name] = oracle.expert_ffn(rows, *matrices, activations).astype(np.float32)
    return found


def _rounding(ggml_type: int) -> oracle.Rounding:
    return _ROUNDINGS.get(ggml.type_info(ggml_type).activation_type, "exact")


def _judge(
    device: Device,
    layout: LayerLayout,
    reference: Reference,
    y: npt.NDArray[np.float32],
    expected: npt.NDArray[np.float32],
) -> WidthResult:
    """Row t of y against row t % len(expected)."""
    types = {tensor.ggml_type for tensor in layout.tensors}
    limit = min(threshold(ggml_type, device, reference) for ggml_type in types)
    pieces = [y[start : start + len(expected)] for start in range(0, len(y), len(expected))]
    min_cosine = min(
        float(oracle.row_cosines(piece, expected[: len(piece)]).min()) for piece in pieces
    )  # never NaN
    with np.errstate(invalid="ignore"):  # a broken device may answer inf or NaN
        diffs = [np.abs(piece - expected[: len(piece)]).max() for piece in pieces]
    max_abs_diff = float(np.max(diffs))
    return WidthResult(
        width=y.shape[0],
        weights="+".join(sorted(ggml.type_info(ggml_type).name for ggml_type in types)),
        reference=reference,
        min_cosine=min_cosine,
        max_abs_diff=max_abs_diff,
        threshold=limit,
        passed=min_cosine >= limit,
    )


def threshold(ggml_type: int, device: Device, reference: Reference) -> float:
    """Least minimum cosine for weights of a type: about ten times the error in the table above.

    GPUs may multiply in f16, TF32 or with 8-bit activations, F32 weights too: 5e-4 lets those pass and stops the
    known bad kernel (1.1e-3). The CPU rounds activations to 8 bit for quantised weights, as llama.cpp does; how
    far that is from the truth depends on outliers in the data (3e-3 seen with one), so 1e-2 only stops wrong
    weights, and the rounded reference decides with 1e-4.
    """
    info = ggml.type_info(ggml_type)
    if not device.is_host:
        return 0.9995
    if ggml_type == ggml.F32:
        return 0.999999
    if not info.is_quantized or reference == "rounded":
        return 0.9999
    return 0.99
