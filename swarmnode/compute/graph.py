"""Compute graphs: built once from named inputs to named outputs, then run many times."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from swarmnode.compute import ggml
from swarmnode.compute.devices import Device
from swarmnode.compute.ggml import Handle, api
from swarmnode.compute.ops import Ops, is_contiguous, need
from swarmnode.compute.tensors import (
    Arena,
    Tensor,
    address_of,
    check_shape,
    host_view,
    read_tensor,
    write_tensor,
)
from swarmnode.compute.thread import check_compute_thread
from swarmnode.errors import DeviceError, UsageError


class Workspace:
    """Memory that graphs which are built, run and closed one after another share; it grows to the largest.

    Only the graph built in it last can be computed. It must be closed before its device.
    """

    def __init__(self, device: Device) -> None:
        if device.closed:
            raise DeviceError(f"device {device.info.name} is closed")
        self.device = device
        self.closed = False
        self.turn = 0
        """Counts the graphs built here: the last one owns the memory."""
        self._n_slots = 0
        self._scheduler: Handle = 0
        self._allocator: Handle = 0
        if device.is_host:
            self._allocator = ggml.check_handle(
                api.ggml_gallocr_new(device.buffer_type), "making a graph allocator"
            )
        self._close = weakref.finalize(self, _free_memory, self._allocator, 0)

    @property
    def n_bytes(self) -> int:
        """Device and host memory held."""
        return 0 if self.closed else _memory_bytes(self.device, self._allocator, self._scheduler)

    def allocate(self, cgraph: Any) -> Handle:
        """Give the graph the memory; the scheduler to compute it with, 0 on the CPU. DeviceError without."""
        if self.closed:
            raise DeviceError("the graph workspace was closed")
        self.turn += 1
        if self._allocator:
            if not api.ggml_gallocr_alloc_graph(self._allocator, cgraph):
                raise DeviceError("no memory for a graph")
        else:
            self._schedule(cgraph)
        return self._scheduler

    def _schedule(self, cgraph: Any) -> None:
        n_slots = 2 * api.ggml_graph_size(cgraph)  # nodes and leaves
        if n_slots > self._n_slots:
            self._close()
            self._scheduler, self._n_slots = _new_scheduler(self.device, n_slots), n_slots
            self._close = weakref.finalize(self, _free_memory, 0, self._scheduler)
        api.ggml_backend_sched_reset(self._scheduler)
        if not api.ggml_backend_sched_alloc_graph(self._scheduler, cgraph):
            raise DeviceError(f"no memory for a graph on {self.device.info.name}")

    def close(self) -> None:
        """Free the memory; a graph built in it raises DeviceError from then on."""
        self.closed = True
        self._close()


class SharedWorkspace(Workspace):
    """Memory that graphs share which keep nothing in it: all that they read first and leave behind is in tensors of
    their own (weights, states). They may be computed in any order and again and again, until the memory has to grow
    for a new one: then `Graph.is_stale`. Such graphs have no inputs and outputs. On the CPU only: elsewhere, a
    scheduler belongs to one graph at a time.
    """

    def __init__(self, device: Device) -> None:
        if not device.is_host:
            raise UsageError(f"{device.info.name} cannot share the memory of graphs")
        super().__init__(device)

    def allocate(self, cgraph: Any) -> Handle:
        """Give the graph the memory. DeviceError without."""
        turn, n_bytes = self.turn, self.n_bytes
        scheduler = super().allocate(cgraph)
        if self.n_bytes == n_bytes:  # ggml moves the memory only to make it larger
            self.turn = turn
        return scheduler


def _new_scheduler(device: Device, n_slots: int) -> Handle:
    backends = (ctypes.c_void_p * 2)(device.backend, device.cpu_backend)
    return ggml.check_handle(
        api.ggml_backend_sched_new(backends, None, 2, n_slots, False, False), "making a graph scheduler"
    )


def _memory_bytes(device: Device, allocator: Handle, scheduler: Handle) -> int:
    if allocator:
        return int(api.ggml_gallocr_get_buffer_size(allocator, 0))
    if not scheduler:
        return 0
    backends = (device.backend, device.cpu_backend)
    return sum(int(api.ggml_backend_sched_get_buffer_size(scheduler, backend)) for backend in backends)


def _free_memory(allocator: Handle, scheduler: Handle) -> None:
    if allocator:
        api.ggml_gallocr_free(allocator)
    if scheduler:
        api.ggml_backend_sched_free(scheduler)


class GraphBuilder(Ops):
    """Collects ops; `build()` turns them into a Graph. A builder makes one graph.

    `max_nodes` bounds the tensors made here; one more raises UsageError.
    """

    def __init__(self, device: Device, max_nodes: int = 512) -> None:
        if device.closed:
            raise DeviceError(f"device {device.info.name} is closed")
        super().__init__(Arena(max_nodes, max_nodes), max_nodes)
        self._device = device
        self._cgraph = api.ggml_new_graph_custom(self._arena.context, max_nodes, False)
        self._inputs: dict[str, Tensor] = {}
        self._outputs: dict[str, Tensor] = {}
        self._has_effects = False

    def input(self, name: str, ggml_type: int, *ne: int, keep: bool = True) -> Tensor:
        """A tensor to be written before `compute`.

        `keep=False` lets the graph reuse its memory once it is read: smaller, but it must be written
        again before every compute.
        """
        check_shape(ggml_type, ne, name)
        if name in self._inputs or ggml_type not in ggml.NUMPY_TYPES:
            raise UsageError(f"input {name}: the name is taken, or numpy has no such type")
        self._n_tensors += 1
        if self._n_tensors > self._max_nodes:
            raise UsageError(f"the graph has more than the {self._max_nodes} nodes it was made for")
        tensor = self._arena.new_tensor(ggml_type, ne)
        api.ggml_set_input(tensor.pointer)
        if keep:  # ggml never reuses the memory of what is flagged as an output
            api.ggml_set_output(tensor.pointer)
        self._inputs[name] = tensor
        return tensor

    def output(self, name: str, tensor: Tensor) -> None:
        """Compute `tensor` (contiguous) and let it be read after `compute`."""
        need(is_contiguous(tensor) and tensor.type in ggml.NUMPY_TYPES, f"output {name}", tensor)
        if name in self._outputs:
            raise UsageError(f"output {name}: the name is taken")
        api.ggml_set_output(self._take(tensor))
        self.expand(tensor)
        self._outputs[name] = tensor

    def expand(self, tensor: Tensor) -> None:
        """Compute a tensor for its side effect (cpy, set_rows), before what is added later."""
        self._has_effects = True
        api.ggml_build_forward_expand(self._cgraph, self._take(tensor))

    def build(self, workspace: Workspace | None = None) -> Graph:
        """Allocate and return the graph; DeviceError if the device has no memory for it.

        By default it has memory of its own; in a workspace, it may be computed until the next is built there.
        """
        if not self._has_effects:
            raise UsageError("a graph needs an output or an effect")
        if isinstance(workspace, SharedWorkspace) and (self._inputs or self._outputs):
            raise UsageError(
                "a graph in a shared workspace keeps nothing there: it has no inputs and outputs"
            )
        for name, tensor in self._inputs.items():
            if not _in_graph(self._cgraph, tensor):
                raise UsageError(f"input {name} leads to no output")
        parts = (self._arena, self._cgraph, self._inputs, self._outputs, self._externals)
        return Graph(self._device, *parts, workspace)


def _in_graph(cgraph: Any, tensor: Tensor) -> bool:
    """Whether the graph reaches an input (ggml gives no memory to one that it does not)."""
    name = str(address_of(tensor.pointer)).encode()
    api.ggml_set_name(tensor.pointer, name)
    return bool(api.ggml_graph_get_tensor(cgraph, name))


class Graph:
    """A built graph. Write inputs, `compute()`, read outputs; from one thread."""

    def __init__(
        self,
        device: Device,
        arena: Arena,
        cgraph: Any,
        inputs: dict[str, Tensor],
        outputs: dict[str, Tensor],
        externals: dict[int, Tensor],
        workspace: Workspace | None = None,
    ) -> None:
        self._device = device
        self._arena = arena
        self._cgraph = cgraph
        self._input_tensors = inputs
        self._output_tensors = outputs
        self._externals = externals
        self._fixed = set(externals.values())
        self._replaced: dict[tuple[int, int], Tensor] = {}
        """What `replace_source` put in, by (node, index); `_fixed` is what it has not touched."""
        self._arenas = {tensor.arena for tensor in externals.values()}
        self._n_closings = -1
        """Arena.n_closings when all arenas were last seen open."""
        self._borrowed = workspace is not None
        self._memory = Workspace(device) if workspace is None else workspace
        self._scheduler = self._memory.allocate(cgraph)
        self._turn = self._memory.turn
        self._closed = False
        self._close = weakref.finalize(self, _free_graph, None if self._borrowed else self._memory, arena)
        self.inputs: dict[str, npt.NDArray[Any]] = {}
        """Host devices only: numpy views to write, shape = ne reversed. Elsewhere empty: use `set`."""
        self.outputs: dict[str, npt.NDArray[Any]] = {}
        """Host devices only: numpy views, overwritten by the next compute and gone with `close`."""
        if device.is_host:
            self.inputs = {name: host_view(tensor) for name, tensor in inputs.items()}
            self.outputs = {name: host_view(tensor) for name, tensor in outputs.items()}

    @property
    def n_bytes(self) -> int:
        """Memory this graph holds: tensor structs and work buffers (not the weights, not a workspace)."""
        return int(self._arena.n_bytes) + (0 if self._borrowed else self._memory.n_bytes)

    @property
    def is_stale(self) -> bool:
        """Whether its workspace went to a newer graph, so that it cannot be computed any more."""
        return self._turn != self._memory.turn or self._memory.closed

    def set(self, name: str, values: npt.NDArray[Any]) -> None:
        """Write an input; UsageError for another dtype or shape (ne reversed)."""
        self._check_open()
        write_tensor(self._input_tensors[name], values, f"input {name}")

    def get(self, name: str) -> npt.NDArray[Any]:
        """A copy of an output."""
        self._check_open()
        return read_tensor(self._output_tensors[name])

    def compute(self) -> None:
        """Run the graph. DeviceError if the device fails, something it uses was closed, or on a second
        thread.
        """
        check_compute_thread()
        self._check_open()
        if self._scheduler:
            status = api.ggml_backend_sched_graph_compute(self._scheduler, self._cgraph)
        else:
            status = self._compute_on_cpu()
        if status != api.GGML_STATUS_SUCCESS:
            ggml.check_status(status, f"computing a graph on {self._device.info.name}")

    def _compute_on_cpu(self) -> int:
        device = self._device
        governor = device.governor
        n_threads = governor.begin()
        device.set_threads(n_threads)
        status: int = api.ggml_backend_graph_compute(device.backend, self._cgraph)
        governor.end(n_threads)
        return status

    def replace_source(self, node: Tensor, index: int, tensor: Tensor) -> None:
        """Let `node` of this graph read another weight from now on: one graph serves all layers of a shape.

        The new one has the type, the row length and the rows of the old one; it may stack more or fewer
        matrices, because ggml reads sizes when it computes. UsageError otherwise.
        """
        place = (address_of(node.pointer), index)
        old = self._replaced.get(place)
        if (
            old is None
        ):  # addresses tell tensors apart only as long as all of them live: at the first replacement
            old = self._externals.get(address_of(node.pointer.contents.src[index]))
        if old is tensor:
            return
        if old is None or node.arena is not self._arena:
            raise UsageError(f"source {index} of {node!r} is not a weight of this graph")
        need(tensor.type == old.type and tensor.ne[:2] == old.ne[:2], "replace_source", old, tensor)
        need(not tensor.is_repacked and not old.is_repacked, "replace_source", old, tensor)
        if place not in self._replaced:
            self._fixed.discard(old)
        node.pointer.contents.src[index] = tensor.pointer
        self._replaced[place] = tensor
        self._arenas = {external.arena for external in (*self._fixed, *self._replaced.values())}
        self._n_closings = -1

    def close(self) -> None:
        """Free the graph; its numpy views must not be touched afterwards."""
        self.inputs = {}
        self.outputs = {}
        self._closed = True
        self._close()

    def _check_open(self) -> None:
        if self._closed or self._device.closed or not self._arenas_are_open():
            raise DeviceError("the graph, its device or a tensor that it uses was closed")
        if self.is_stale:
            raise DeviceError("the graph's workspace belongs to a newer graph, or was closed")

    def _arenas_are_open(self) -> bool:
        if self._n_closings != Arena.n_closings:
            if any(arena.closed for arena in self._arenas):
                return False
            self._n_closings = Arena.n_closings
        return True


def _free_graph(memory: Workspace | None, arena: Arena) -> None:
    if memory is not None:
        memory.close()
    arena.close()


def output_array(graph: Graph, name: str) -> npt.NDArray[np.float32]:
    """An output, without a copy where memory is shared; valid until the next compute."""
    view = graph.outputs.get(name)
    return graph.get(name) if view is None else view
