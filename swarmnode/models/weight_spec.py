"""Which dense weights an architecture needs, and binding them after every check that ggml would abort on."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from swarmnode.compute import ggml
from swarmnode.compute.devices import Device
from swarmnode.compute.host_memory import available_bytes
from swarmnode.compute.repack import repack_buffer_type, repacked_types
from swarmnode.compute.tensors import WeightSet
from swarmnode.config import ModelsConfig
from swarmnode.errors import ModelFileError, UnsupportedModelError
from swarmnode.weights.ggml_types import TYPE_NUMBERS, is_weight_type, type_name
from swarmnode.weights.index import ModelIndex, TensorRef

logger = logging.getLogger(__name__)

MAX_CHECKED_BYTES = 16 << 20
"""Float tensors up to this size are looked through when they are bound: norms, gates, convolutions (a gate of 3,072 x
256 is 3 MB). Larger ones would have to be read from the disk; what is wrong in them shows in the first pass."""


@dataclass(frozen=True)
class WeightSpec:
    """A weight as the graphs use it."""

    ne: tuple[int, ...]
    """Sizes in ggml's order, without trailing 1s."""
    is_matrix: bool
    """Left operand of a mat-mul, of any type that ggml multiplies by; else f32, used value by value."""
    is_optional: bool = False
    on_device: bool = True
    """False: read on the host, never bound."""


def matrix(n_in: int, n_out: int) -> WeightSpec:
    """A mat-mul weight; one output row may be stored as a vector."""
    return WeightSpec((n_in,) if n_out == 1 else (n_in, n_out), is_matrix=True)


def vector(*ne: int) -> WeightSpec:
    """An f32 tensor that is added or multiplied value by value."""
    return WeightSpec(ne, is_matrix=False)


def bind_weights(
    index: ModelIndex,
    device: Device,
    specs: Mapping[str, WeightSpec],
    config: ModelsConfig,
    *,
    with_mtp: bool = False,
) -> WeightSet:
    """Check and bind the dense weights; on the CPU device only what is repacked (`config.repack`) is copied.
    `with_mtp`: `specs` are of MTP blocks, too.

    Raises ModelFileError (missing tensor, wrong shape, numbers that are not finite) or UnsupportedModelError (wrong
    type, or a tensor that the architecture's graphs would leave out), both naming file and tensor; DeviceError if
    memory runs out.
    """
    _check_weights(index, specs, with_mtp)
    repacked = _to_repack(index, device, specs, config)
    buffer_type = repack_buffer_type(device) if repacked else None
    weights = WeightSet(device)
    try:
        for name, spec in specs.items():
            if spec.on_device and name in index.tensors:
                ref = index.tensors[name]
                data = index.data(name)
                weights.bind(name, ref.ggml_type, ref.ne, data, buffer_type if name in repacked else None)
    except BaseException:
        weights.close()
        raise
    return weights


def _to_repack(
    index: ModelIndex, device: Device, specs: Mapping[str, WeightSpec], config: ModelsConfig
) -> frozenset[str]:
    """Names of the matrices to copy into the order that the CPU's kernels like best.

    None of an MTP block: what the model answers must not depend on whether it has one and memory is scarce.
    """
    buffer_type = repack_buffer_type(device)
    if buffer_type is None:
        return frozenset()
    matrices = [
        index.tensors[name]
        for name, spec in specs.items()
        if spec.is_matrix and spec.on_device and name in index.tensors and name not in index.mtp_tensors
    ]
    types = repacked_types(device, buffer_type, {ref.ggml_type for ref in matrices}, config.repack)
    chosen = [ref for ref in matrices if ref.ggml_type in types]
    n_bytes = sum(ref.n_bytes for ref in chosen)
    available = available_bytes()
    if config.repack == "auto" and available is not None and n_bytes > config.repack_memory_share * available:
        logger.info("no weights are repacked: %d bytes, of %d that are available", n_bytes, available)
        return frozenset()
    return frozenset(ref.name for ref in chosen)


def _check_weights(index: ModelIndex, specs: Mapping[str, WeightSpec], with_mtp: bool) -> None:
    file = str(index.paths[0])
    for name in (*index.dense_tensors, *(index.mtp_tensors if with_mtp else ())):
        if name not in specs:
            raise UnsupportedModelError(f"{file}: tensor {name!r} is not part of {index.architecture} here")
    for name, spec in specs.items():
        ref = index.tensors.get(name)
        if ref is not None:
            _check_weight(file, ref, spec)
        elif not spec.is_optional:
            raise ModelFileError(f"{file}: tensor {name!r} is missing")
    for name in specs:
        if name in index.tensors and index.tensors[name].n_bytes <= MAX_CHECKED_BYTES:
            _check_finite(file, index.tensors[name], index.data(name))


def _check_weight(file: str, ref: TensorRef, spec: WeightSpec) -> None:
    ne = ref.ne
    while len(ne) > 1 and ne[-1] == 1:  # the converter writes some vectors as [n, 1]
        ne = ne[:-1]
    if ne != spec.ne:
        raise ModelFileError(
            f"{file}: tensor {ref.name!r} is {list(ref.ne)}, but the metadata means {list(spec.ne)}"
        )
    if not spec.is_matrix and ref.ggml_type != ggml.F32:
        raise UnsupportedModelError(
            f"{file}: tensor {ref.name!r} is {type_name(ref.ggml_type)}; only F32 is computed"
        )
    if not is_weight_type(ref.ggml_type):
        raise UnsupportedModelError(
            f"{file}: tensor {ref.name!r} is {type_name(ref.ggml_type)}, which ggml does not multiply by"
        )


def _check_finite(file: str, ref: TensorRef, data: memoryview) -> None:
    """ModelFileError for NaN or infinity in a float tensor; quantised ones are not looked at."""
    if ref.ggml_type == ggml.F32:
        is_finite = np.isfinite(np.frombuffer(data, "<f4"))
    elif ref.ggml_type == ggml.F16:
        is_finite = np.isfinite(np.frombuffer(data, "<f2"))
    elif (
        ref.ggml_type == TYPE_NUMBERS["BF16"]
    ):  # the upper half of a float: 8 exponent bits, all set in NaN, inf
        is_finite = np.frombuffer(data, "<u2") & 0x7F80 != 0x7F80
    else:
        return
    if not is_finite.all():
        where = int(np.argmin(is_finite))
        raise ModelFileError(f"{file}: tensor {ref.name!r} is damaged: value {where} is not a finite number")
