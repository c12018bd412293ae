"""Weights in the order in which the CPU's kernels like them best: ggml's CPU_REPACK buffers.

A repacked matrix is a copy, so it takes memory of its own, and mul_mat alone may read it: `Ops` refuses it anywhere
else, where ggml would take its bytes for the plain order and answer nonsense.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

from swarmnode.compute import ggml
from swarmnode.compute.columns import keeps_columns
from swarmnode.compute.devices import Device
from swarmnode.compute.ggml import Handle, api
from swarmnode.config import Repack

_GET_BUFFER_TYPES = b"ggml_backend_dev_get_extra_bufts"
_NAME = b"CPU_REPACK"
_MAX_BUFFER_TYPES = 16


def repack_buffer_type(device: Device) -> Handle | None:
    """Where repacked weights are kept, or None: not on the CPU, or not with this ggml."""
    if not device.is_host:
        return None
    handle = api.ggml_backend_get_device(device.cpu_backend)
    registry = api.ggml_backend_dev_backend_reg(handle)
    address = api.ggml_backend_reg_get_proc_address(registry, _GET_BUFFER_TYPES)
    if not address:
        return None
    listed = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)(handle)
    for position in range(_MAX_BUFFER_TYPES if listed else 0):
        buffer_type = listed[position]
        if not buffer_type:
            return None
        if api.ggml_backend_buft_name(buffer_type) == _NAME:
            return int(buffer_type)
    return None


def repacked_types(device: Device, buffer_type: Handle, types: Iterable[int], mode: Repack) -> frozenset[int]:
    """Of these ggml types, those whose matrices are to be repacked.

    `auto` leaves out a type whose columns would then depend on how many there are (decision 0028): tried out, about a
    millisecond a type. DeviceError.
    """
    if mode == "never":
        return frozenset()
    quantised = {number for number in types if ggml.type_info(number).is_quantized}
    if mode == "always":
        return frozenset(quantised)
    return frozenset(number for number in quantised if keeps_columns(device, number, buffer_type))
