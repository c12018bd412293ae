"""ggml's C library through ggml-python: the only importer of the bindings, with their traps taken out.

* Which libggml the bindings load is decided in `library.py`, before they are imported.
* Four functions of the bindings declare a restype that cuts pointers to 32 bits; it is mended at import.
* A failed GGML_ASSERT aborts the process; nothing raises. So callers check every shape, type and id
  before they call `api`, with the facts of `type_info`. `GGML_NO_BACKTRACE` keeps an abort from attaching
  a debugger.
* ggml's default logger prints debug lines; here they go to the logger `swarmnode.ggml`.

`api` is the raw bindings, untyped: `graph.py`, `tensors.py` and `devices.py` wrap it in types.
"""

from __future__ import annotations

import ctypes
import logging
import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from swarmnode.compute import library
from swarmnode.errors import DeviceError, UnsupportedModelError, UsageError

os.environ.setdefault("GGML_NO_BACKTRACE", "1")

with library.importable(library.chosen()):  # DeviceError if SWARMNODE_GGML_LIB cannot be used
    from ggml import ggml as _bindings

api: Any = _bindings
Handle: TypeAlias = int
"""An opaque C pointer: backend, buffer, context, threadpool."""
TensorPointer: TypeAlias = Any
"""A ctypes pointer to a ggml_tensor."""

for _name in (
    "ggml_backend_alloc_buffer",
    "ggml_backend_cpu_buffer_from_ptr",
    "ggml_backend_cpu_buffer_type",
    "ggml_backend_sched_get_tensor_backend",
):
    getattr(api, _name).restype = ctypes.c_void_p

F32: int = api.GGML_TYPE_F32
F16: int = api.GGML_TYPE_F16
BF16: int = api.GGML_TYPE_BF16
I32: int = api.GGML_TYPE_I32
I64: int = api.GGML_TYPE_I64
Q8_0: int = api.GGML_TYPE_Q8_0
Q8_1: int = api.GGML_TYPE_Q8_1
Q8_K: int = api.GGML_TYPE_Q8_K
Q4_0: int = api.GGML_TYPE_Q4_0
Q4_K: int = api.GGML_TYPE_Q4_K
Q5_K: int = api.GGML_TYPE_Q5_K
Q6_K: int = api.GGML_TYPE_Q6_K

NUMPY_TYPES: dict[int, npt.DTypeLike] = {F32: np.float32, F16: np.float16, I32: np.int32, I64: np.int64}
"""The tensor types that numpy can hold as they are."""

_log = logging.getLogger("swarmnode.ggml")
_LOG_LEVELS = {
    api.GGML_LOG_LEVEL_DEBUG: logging.DEBUG,
    api.GGML_LOG_LEVEL_INFO: logging.DEBUG,
    api.GGML_LOG_LEVEL_WARN: logging.WARNING,
    api.GGML_LOG_LEVEL_ERROR: logging.ERROR,
}


def _log_line(level: int, text: bytes, user_data: object) -> None:
    _log.log(_LOG_LEVELS.get(level, logging.DEBUG), "%s", text.decode("utf-8", "replace").rstrip())


_log_callback = api.ggml_log_callback(_log_line)  # referenced as long as ggml may call it
api.ggml_log_set(_log_callback, None)


@dataclass(frozen=True)
class TypeInfo:
    """What ggml knows about one tensor type."""

    name: str
    """ggml's name in upper case, as GGUF tools spell it: 'F32', 'Q4_K'."""
    block_size: int
    """Values in a block; rows are whole blocks."""
    block_bytes: int
    is_quantized: bool
    activation_type: int
    """The type to which the CPU's mat-mul kernels round the other operand."""
    multiplies: bool
    """True if it may be the weight of a mat-mul."""


@lru_cache(maxsize=64)
def type_info(ggml_type: int) -> TypeInfo:
    """Facts of a tensor type; UnsupportedModelError if this ggml does not have it."""
    if not 0 <= ggml_type < api.GGML_TYPE_COUNT or api.ggml_blck_size(ggml_type) < 1:
        raise UnsupportedModelError(f"tensor type {ggml_type} is unknown to ggml {version()}")
    traits = api.ggml_get_type_traits(ggml_type).contents
    on_cpu = api.ggml_get_type_traits_cpu(ggml_type).contents
    decodes = bool(traits.to_float) or ggml_type == F32
    return TypeInfo(
        name=traits.type_name.decode().upper(),
        block_size=traits.blck_size,
        block_bytes=traits.type_size,
        is_quantized=traits.is_quantized,
        activation_type=on_cpu.vec_dot_type,
        multiplies=decodes and bool(on_cpu.vec_dot),
    )


def row_bytes(ggml_type: int, ne0: int) -> int:
    """Bytes of a row of `ne0` values; UnsupportedModelError if the row is not whole blocks."""
    info = type_info(ggml_type)
    if ne0 < 1 or ne0 % info.block_size:
        raise UnsupportedModelError(
            f"a {info.name} row of {ne0} values is not whole blocks of {info.block_size}"
        )
    return ne0 // info.block_size * info.block_bytes


def version() -> str:
    """ggml's version, for example '0.15.3'."""
    text: bytes = api.ggml_version()
    return text.decode()


def quantize(ggml_type: int, values: npt.NDArray[np.float32]) -> bytes:
    """f32[..., ne0] -> the bytes of a tensor of that type with rows of ne0 values.

    UsageError for a type that needs an importance matrix or has no encoder, and for values that are not f32.
    """
    if values.dtype != np.float32 or values.ndim < 1 or values.size == 0:
        raise UsageError("quantize takes a non-empty float32 array")
    info = type_info(ggml_type)
    can_encode = info.is_quantized and bool(api.ggml_get_type_traits(ggml_type).contents.from_float_ref)
    if not (can_encode or ggml_type in (F32, F16, BF16)) or ggml_type in (Q8_1, Q8_K):
        raise UsageError(f"ggml has no encoder for {info.name} tensors")
    if api.ggml_quantize_requires_imatrix(ggml_type):
        raise UsageError(f"{info.name} needs an importance matrix")
    rows = np.ascontiguousarray(values).reshape(-1, values.shape[-1])
    n_bytes = row_bytes(ggml_type, rows.shape[1]) * rows.shape[0]
    encoded = ctypes.create_string_buffer(n_bytes)
    source = rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    written = api.ggml_quantize_chunk(ggml_type, source, encoded, 0, rows.shape[0], rows.shape[1], None)
    if written != n_bytes:
        raise DeviceError(f"ggml wrote {written} bytes of {info.name} where {n_bytes} were due")
    return encoded.raw


def dequantize(ggml_type: int, data: bytes | memoryview, n: int) -> npt.NDArray[np.float32]:
    """The `n` values held by `data` (all of it), as ggml decodes them, f32[n].

    UsageError if `data` is not exactly n values long or the type has no decoder.
    """
    info = type_info(ggml_type)
    raw = np.frombuffer(data, np.uint8)
    if raw.size != row_bytes(ggml_type, n):
        raise UsageError(f"{n} values of {info.name} are {row_bytes(ggml_type, n)} bytes, not {raw.size}")
    if ggml_type == F32:
        return raw.view(np.float32).copy()
    decode = decoder(ggml_type)
    if not decode:
        raise UsageError(f"ggml has no decoder for {info.name}")
    values = np.empty(n, np.float32)
    decode(raw.ctypes.data, values.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), n)
    return values


@lru_cache(maxsize=64)
def decoder(ggml_type: int) -> Any:
    """ggml's function from encoded values to f32; a null pointer if there is none."""
    return api.ggml_get_type_traits(ggml_type).contents.to_float


class _Feature(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("value", ctypes.c_char_p))


def backend_features(registry: Handle) -> dict[str, str]:
    """The feature flags a backend was compiled with ('OPENMP', 'LLAMAFILE', 'AVX2', ...); {} if it
    reports none.
    """
    address = api.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_get_features")
    if not address:
        return {}
    get_features = ctypes.CFUNCTYPE(ctypes.POINTER(_Feature), ctypes.c_void_p)(address)
    features = get_features(registry)
    found: dict[str, str] = {}
    for index in range(256):  # the array ends with a NULL name; the bound is against a broken library
        feature = features[index]
        if not feature.name:
            break
        found[feature.name.decode()] = feature.value.decode()
    return found


def check_status(status: int, what: str) -> None:
    """DeviceError unless ggml reported success."""
    if status != api.GGML_STATUS_SUCCESS:
        raise DeviceError(f"{what}: {api.ggml_status_to_string(status).decode()}")


def check_handle(handle: Handle | None, what: str) -> Handle:
    """The handle, or DeviceError if ggml returned NULL (no memory, no such device)."""
    if not handle:
        raise DeviceError(f"{what} failed (out of memory, or not available on this device)")
    return handle
