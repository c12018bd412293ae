"""Tensors outside graphs: weights bound from a mapped file or copied to the device, and persistent state."""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from swarmnode.compute import ggml
from swarmnode.compute.devices import Device
from swarmnode.compute.ggml import Handle, TensorPointer, api
from swarmnode.errors import DeviceError, UsageError

BytesLike: TypeAlias = bytes | bytearray | memoryview | mmap.mmap | npt.NDArray[Any]

MAX_DIMS = 4
MAX_TENSOR_BYTES = 1 << 46
"""Far above any real tensor; keeps products of claimed shapes within what ggml's size_t arithmetic can
hold.
"""
_POINTER_ALIGNMENT = 32
"""ggml aborts on a host buffer that starts at any other address."""


class Arena:
    """A ggml context without data: the room in which tensor structs live, and the buffers that belong to
    it.
    """

    n_closings = 0
    """Of all arenas together: while it stands still, none that was open has been closed."""

    def __init__(self, n_tensors: int, n_graph_nodes: int = 0) -> None:
        n_bytes = n_tensors * api.ggml_tensor_overhead()
        if n_graph_nodes:
            n_bytes += api.ggml_graph_overhead_custom(n_graph_nodes, False)
        params = api.ggml_init_params(mem_size=n_bytes, mem_buffer=None, no_alloc=True)
        self.n_bytes = n_bytes
        self.context = ggml.check_handle(api.ggml_init(params), "making a ggml context")
        self._buffers: list[Handle] = []
        self._close = weakref.finalize(self, _free_arena, self.context, self._buffers)
        self.closed = False

    def adopt(self, buffer: Handle | None, what: str) -> Handle:
        """Own a buffer that ggml just allocated; DeviceError if it is NULL (no memory)."""
        self._buffers.append(ggml.check_handle(buffer, what))
        return self._buffers[-1]

    def new_tensor(self, ggml_type: int, ne: Sequence[int]) -> Tensor:
        """A tensor struct without memory; the caller has checked type and shape."""
        sizes = (ctypes.c_int64 * len(ne))(*ne)
        return Tensor(api.ggml_new_tensor(self.context, ggml_type, len(ne), sizes), self, len(ne))

    def close(self) -> None:
        """Free structs and buffers; tensors of this arena must not be used afterwards."""
        self.closed = True
        Arena.n_closings += 1
        self._close()


def _free_arena(context: Handle, buffers: list[Handle]) -> None:
    for buffer in buffers:
        api.ggml_backend_buffer_free(buffer)
    api.ggml_free(context)


class Tensor:
    """A ggml tensor, opaque to other rooms: pass it back to a GraphBuilder.

    `ne` (4 sizes) and `nb` (4 byte strides) are in ggml's order, fastest dimension first; `type` is the
    ggml type.
    """

    __slots__ = ("arena", "is_repacked", "n_dims", "ne", "pointer", "type")

    def __init__(self, pointer: TensorPointer, arena: Arena, n_dims: int) -> None:
        self.pointer = pointer
        self.arena = arena
        self.n_dims = n_dims
        """As declared; ggml itself forgets trailing dimensions of size 1."""
        self.ne: tuple[int, ...] = tuple(pointer.contents.ne)
        self.type = int(pointer.contents.type)
        self.is_repacked = False
        """Its bytes are in an order of their own (repack.py): for mul_mat only."""

    @property
    def nb(self) -> tuple[int, ...]:
        return tuple(self.pointer.contents.nb)

    @property
    def n_elements(self) -> int:
        return math.prod(self.ne)

    @property
    def n_bytes(self) -> int:
        return int(api.ggml_nbytes(self.pointer))

    @property
    def address(self) -> int:
        """Where its data is; host memory only on the CPU device."""
        return int(self.pointer.contents.data or 0)

    @property
    def numpy_shape(self) -> tuple[int, ...]:
        return self.ne[: self.n_dims][::-1]

    def __repr__(self) -> str:
        return f"Tensor({ggml.type_info(self.type).name}, ne={list(self.ne[: self.n_dims])})"


def address_of(pointer: TensorPointer) -> int:
    """The address of a tensor struct: its identity in C."""
    return int(ctypes.cast(pointer, ctypes.c_void_p).value or 0)


def check_shape(ggml_type: int, ne: Sequence[int], what: str) -> int:
    """Bytes of a contiguous tensor; UsageError or UnsupportedModelError for what ggml would abort on."""
    if not 1 <= len(ne) <= MAX_DIMS or any(not isinstance(n, int) or n < 1 for n in ne):
        raise UsageError(f"{what}: {list(ne)} is not a shape of 1 to {MAX_DIMS} positive sizes")
    if math.prod(ne) > MAX_TENSOR_BYTES:
        raise UsageError(f"{what}: {list(ne)} is too large")
    return ggml.row_bytes(ggml_type, ne[0]) * math.prod(ne[1:])


def host_view(tensor: Tensor) -> npt.NDArray[Any]:
    """A numpy view of a contiguous tensor in host memory; valid while its arena lives."""
    dtype = np.dtype(ggml.NUMPY_TYPES[tensor.type])
    raw = (ctypes.c_byte * tensor.n_bytes).from_address(tensor.address)
    values: npt.NDArray[Any] = np.frombuffer(memoryview(raw), dtype)
    return values.reshape(tensor.numpy_shape)


def write_tensor(tensor: Tensor, values: npt.NDArray[Any], what: str) -> None:
    """Copy an array into a contiguous tensor wherever it lives; UsageError for another shape or dtype."""
    expected = np.dtype(ggml.NUMPY_TYPES[tensor.type])
    if values.dtype != expected or values.shape != tensor.numpy_shape:
        raise UsageError(
            f"{what} takes {expected}{list(tensor.numpy_shape)}, not {values.dtype}{list(values.shape)}"
        )
    source = np.ascontiguousarray(values)
    api.ggml_backend_tensor_set(tensor.pointer, source.ctypes.data, 0, source.nbytes)


def read_tensor(tensor: Tensor) -> npt.NDArray[Any]:
    """A copy of a contiguous tensor's values, numpy order (last dimension fastest)."""
    values = np.empty(tensor.numpy_shape, np.dtype(ggml.NUMPY_TYPES[tensor.type]))
    api.ggml_backend_tensor_get(tensor.pointer, values.ctypes.data, 0, values.nbytes)
    return values


def write_part(tensor: Tensor, values: npt.NDArray[Any], start: int = 0) -> None:
    """Copy an array over the elements of a contiguous tensor from `start` on, in memory order.

    UsageError for another dtype, or more elements than there are.
    """
    source = np.ascontiguousarray(values)
    item = source.dtype.itemsize
    if source.dtype != ggml.NUMPY_TYPES[tensor.type] or not 0 <= start <= tensor.n_elements - source.size:
        raise UsageError(f"{source.dtype}{list(source.shape)} at {start} does not fit {tensor!r}")
    api.ggml_backend_tensor_set(tensor.pointer, source.ctypes.data, start * item, source.nbytes)


def read_part(tensor: Tensor, *shape: int) -> npt.NDArray[Any]:
    """A copy of the first elements of a contiguous tensor, as many as the shape has. UsageError if it has fewer."""
    values = np.empty(shape, ggml.NUMPY_TYPES[tensor.type])
    if values.size > tensor.n_elements:
        raise UsageError(f"{tensor!r} has no {list(shape)} to read")
    api.ggml_backend_tensor_get(tensor.pointer, values.ctypes.data, 0, values.nbytes)
    return values


def byte_view(data: BytesLike, what: str) -> npt.NDArray[np.uint8]:
    """u8 view of any contiguous buffer, without a copy; it keeps the buffer alive. UsageError if it is
    none.
    """
    try:
        return np.frombuffer(data, np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise UsageError(f"{what}: not a contiguous bytes-like object") from error


class WeightSet:
    """Named tensors that outlive graphs: weights (read-only) and states (zeroed, writable by graphs)."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._tensors: dict[str, Tensor] = {}
        self._states: dict[str, Handle] = {}
        self._keep: dict[str, object] = {}
        self.allocated_bytes = 0
        """Bytes of device or host memory allocated here; zero-copy weights count nothing."""

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def bind(
        self, name: str, ggml_type: int, ne: Sequence[int], data: BytesLike, repack: Handle | None = None
    ) -> Tensor:
        """A weight whose bytes are `data` (any contiguous buffer of exactly the tensor's size).

        On the CPU nothing is copied: `data` (say, a view of a mapped file) is kept and must not change. Other
        devices get a copy, and so does the buffer type `repack`, if it has an order for this matrix. UsageError for a
        wrong size, shape or a name taken; UnsupportedModelError for a type that this ggml lacks; DeviceError if the
        device has no memory left.
        """
        n_bytes = self._check_new(name, ggml_type, ne)
        view = byte_view(data, name)
        if view.size != n_bytes:
            raise UsageError(f"{name}: {view.size} bytes given, the tensor has {n_bytes}")
        tensor = self._bind_repacked(ggml_type, ne, view, repack, name) if repack else None
        self._tensors[name] = tensor or self._bind_plain(ggml_type, ne, view, name)
        return self._tensors[name]

    def _bind_plain(
        self, ggml_type: int, ne: Sequence[int], data: npt.NDArray[np.uint8], name: str
    ) -> Tensor:
        arena = Arena(1)
        tensor = arena.new_tensor(ggml_type, ne)
        if self.device.is_host:
            bind_host_memory(arena, tensor, data.ctypes.data)
            self._keep[name] = data
        else:
            self._allocate(arena, tensor, name)
            api.ggml_backend_tensor_set(tensor.pointer, data.ctypes.data, 0, data.nbytes)
        return tensor

    def _bind_repacked(
        self, ggml_type: int, ne: Sequence[int], data: npt.NDArray[np.uint8], buffer_type: Handle, name: str
    ) -> Tensor | None:
        """None if the buffer type has no order for such a matrix."""
        if len(ne) != 2:
            return None
        arena = Arena(1)
        tensor = arena.new_tensor(ggml_type, ne)
        _, n_bytes = allocate_in(buffer_type, arena, tensor, name)
        if not tensor.pointer.contents.extra:
            arena.close()
            return None
        self.allocated_bytes += n_bytes
        api.ggml_backend_tensor_set(tensor.pointer, data.ctypes.data, 0, data.nbytes)
        tensor.is_repacked = True
        return tensor

    def state(self, name: str, ggml_type: int, ne: Sequence[int]) -> Tensor:
        """A zeroed tensor that graphs read and write (KV cache, recurrent state). Errors as `bind`."""
        self._check_new(name, ggml_type, ne)
        arena = Arena(1)
        tensor = arena.new_tensor(ggml_type, ne)
        self._states[name] = self._allocate(arena, tensor, name)
        self._tensors[name] = tensor
        self.clear(name)
        return tensor

    def clear(self, name: str) -> None:
        """Zero a state."""
        api.ggml_backend_buffer_clear(self._states[name], 0)

    def read(self, name: str) -> npt.NDArray[Any]:
        """A copy of a tensor of a numpy type (F32, F16, I32, I64), shape = ne reversed."""
        return read_tensor(self._tensors[name])

    def write(self, name: str, values: npt.NDArray[Any]) -> None:
        """Overwrite a state; UsageError for another shape or dtype, or if the name is a weight."""
        if name not in self._states:
            raise UsageError(f"{name} is not a state")
        write_tensor(self._tensors[name], values, name)

    def close(self) -> None:
        """Free everything; graphs that use these tensors raise DeviceError from then on."""
        for tensor in self._tensors.values():
            tensor.arena.close()
        self._tensors.clear()
        self._states.clear()
        self._keep.clear()

    def _check_new(self, name: str, ggml_type: int, ne: Sequence[int]) -> int:
        if name in self._tensors:
            raise UsageError(f"a tensor named {name} exists already")
        if self.device.closed:
            raise DeviceError(f"device {self.device.info.name} is closed")
        return check_shape(ggml_type, ne, name)

    def _allocate(self, arena: Arena, tensor: Tensor, name: str) -> Handle:
        buffer, n_bytes = allocate_on(self.device, arena, tensor, name)
        self.allocated_bytes += n_bytes
        return buffer


def bind_host_memory(arena: Arena, tensor: Tensor, address: int) -> None:
    """Point a tensor at host memory that the caller keeps alive.

    The buffer ggml sees starts at the aligned address just below (in the same page, never read), because GGUF
    files may align tensors less than ggml's buffers.
    """
    base = address - address % _POINTER_ALIGNMENT
    buffer = arena.adopt(
        api.ggml_backend_cpu_buffer_from_ptr(base, address - base + tensor.n_bytes), "binding host memory"
    )
    ggml.check_status(api.ggml_backend_tensor_alloc(buffer, tensor.pointer, address), "binding host memory")


def allocation_bytes(device: Device, tensor: Tensor) -> int:
    """Bytes a tensor takes on the device: its own, plus padding that the device wants."""
    return int(api.ggml_backend_buft_get_alloc_size(device.buffer_type, tensor.pointer))


def allocate_on(device: Device, arena: Arena, tensor: Tensor, what: str) -> tuple[Handle, int]:
    """Give a tensor a buffer of its own on the device: (buffer, its bytes). DeviceError without memory."""
    return allocate_in(device.buffer_type, arena, tensor, what)


def allocate_in(buffer_type: Handle, arena: Arena, tensor: Tensor, what: str) -> tuple[Handle, int]:
    """The same in another buffer type of the device."""
    n_bytes = int(api.ggml_backend_buft_get_alloc_size(buffer_type, tensor.pointer))
    buffer = arena.adopt(
        api.ggml_backend_buft_alloc_buffer(buffer_type, n_bytes), f"allocating {n_bytes} bytes for {what}"
    )
    api.ggml_backend_buffer_set_usage(buffer, api.GGML_BACKEND_BUFFER_USAGE_WEIGHTS)
    base = api.ggml_backend_buffer_get_base(buffer)
    ggml.check_status(api.ggml_backend_tensor_alloc(buffer, tensor.pointer, base), f"placing {what}")
    return buffer, n_bytes
