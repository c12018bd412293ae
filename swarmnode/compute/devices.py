"""The ggml devices of this machine, and one opened for compute."""

from __future__ import annotations

import ctypes
import os
import weakref
from dataclasses import dataclass
from typing import Literal

from swarmnode.compute import ggml
from swarmnode.compute.ggml import Handle, api
from swarmnode.compute.governor import ThreadGovernor
from swarmnode.errors import DeviceError, UsageError

DeviceKind = Literal["gpu", "igpu", "accel", "cpu"]

_KINDS: dict[int, DeviceKind] = {
    api.GGML_BACKEND_DEVICE_TYPE_GPU: "gpu",
    api.GGML_BACKEND_DEVICE_TYPE_IGPU: "igpu",
    api.GGML_BACKEND_DEVICE_TYPE_ACCEL: "accel",
    api.GGML_BACKEND_DEVICE_TYPE_CPU: "cpu",
}
_RANK: dict[DeviceKind, int] = {"gpu": 0, "igpu": 1, "accel": 2, "cpu": 3}


@dataclass(frozen=True)
class DeviceInfo:
    """A device as ggml's registry describes it."""

    name: str
    """What `--device` takes, for example 'CPU' or 'Vulkan0'."""
    description: str
    kind: DeviceKind
    memory_free_bytes: int
    memory_total_bytes: int


@dataclass(frozen=True)
class BuildReport:
    """How the installed ggml was compiled; `swarmnode doctor` prints it."""

    ggml_version: str
    openmp: bool
    """True is correct but slow as soon as two threads compute; swarmnode computes on one."""
    llamafile: bool
    """False makes float and Q8_0 prefill slower, and its last bits differ from llama.cpp's."""
    repack: bool
    cpu_features: tuple[str, ...]
    """Instruction sets the CPU kernels use: 'AVX2', 'NEON', ..."""
    backends: tuple[str, ...]
    """What it was built for: 'CPU', 'Vulkan', 'CUDA', ...; whether a device is there is another question."""


def build_report() -> BuildReport:
    """Read the feature flags of the CPU backend; DeviceError if there is no CPU backend."""
    registry = ggml.check_handle(api.ggml_backend_cpu_reg(), "finding the CPU backend")
    features = {name for name, value in ggml.backend_features(registry).items() if value not in ("", "0")}
    return BuildReport(
        ggml_version=ggml.version(),
        openmp="OPENMP" in features,
        llamafile="LLAMAFILE" in features,
        repack="REPACK" in features,
        cpu_features=tuple(sorted(features - {"OPENMP", "LLAMAFILE", "REPACK"})),
        backends=tuple(sorted(_backend_names())),
    )


def _backend_names() -> list[str]:
    registries = [api.ggml_backend_reg_get(index) for index in range(api.ggml_backend_reg_count())]
    return [api.ggml_backend_reg_name(registry).decode("utf-8", "replace") for registry in registries]


def list_devices() -> list[DeviceInfo]:
    """Every device that ggml was built for and finds, best first: GPU, integrated GPU, accelerator, CPU."""
    return [info for info, _ in _devices()]


def _devices() -> list[tuple[DeviceInfo, Handle]]:
    found: list[tuple[DeviceInfo, Handle]] = []
    for index in range(api.ggml_backend_dev_count()):
        handle = api.ggml_backend_dev_get(index)
        kind = _KINDS.get(api.ggml_backend_dev_type(handle))
        if kind is not None:
            found.append((_describe(handle, kind), handle))
    return sorted(found, key=lambda pair: _RANK[pair[0].kind])


def _describe(handle: Handle, kind: DeviceKind) -> DeviceInfo:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    api.ggml_backend_dev_memory(handle, ctypes.byref(free), ctypes.byref(total))
    return DeviceInfo(
        name=api.ggml_backend_dev_name(handle).decode("utf-8", "replace"),
        description=api.ggml_backend_dev_description(handle).decode("utf-8", "replace"),
        kind=kind,
        memory_free_bytes=free.value,
        memory_total_bytes=total.value,
    )


def default_n_threads() -> int:
    """The cores this process may use (its affinity mask where the system has one)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Device:
    """One opened backend, a CPU backend beside it for the ops it lacks, and their persistent threadpool.

    Use it from one thread (see thread.py). Attributes are for the compute room; others pass it on.
    """

    def __init__(self, info: DeviceInfo, handle: Handle, n_threads: int, poll: int) -> None:
        self.info = info
        self.n_threads = n_threads
        """Most threads that a graph gets: those of the pool, unless fewer are faster (tuning.py)."""
        self._n_pool = n_threads
        self._n_threads_now = 0
        self.cpu_backend = ggml.check_handle(api.ggml_backend_cpu_init(), "opening the CPU backend")
        self._threadpool = self._new_threadpool(poll)
        self.set_threads(n_threads)
        self.governor = ThreadGovernor(n_threads)
        api.ggml_backend_cpu_set_threadpool(self.cpu_backend, self._threadpool)
        if info.kind == "cpu":
            self.backend = self.cpu_backend
        else:
            self.backend = ggml.check_handle(api.ggml_backend_dev_init(handle, None), f"opening {info.name}")
        self.buffer_type: Handle = api.ggml_backend_get_default_buffer_type(self.backend)
        self.is_host: bool = self.backend == self.cpu_backend
        """True if graphs run on the CPU alone, with inputs and outputs as plain host memory."""
        self.closed = False
        self._close = weakref.finalize(self, _free_device, self.backend, self.cpu_backend, self._threadpool)

    def _new_threadpool(self, poll: int) -> Handle:
        params = api.ggml_threadpool_params_default(self.n_threads)
        params.poll = poll
        return ggml.check_handle(api.ggml_threadpool_new(ctypes.byref(params)), "starting the threadpool")

    def limit_threads(self, n_threads: int) -> None:
        """Compute with 1..n threads of the pool's n from now on; UsageError for another number."""
        if not 1 <= n_threads <= self._n_pool:
            raise UsageError(f"{n_threads} threads are not 1 to {self._n_pool}, those of the pool")
        self.n_threads = n_threads
        self.governor = ThreadGovernor(n_threads)

    def set_threads(self, n_threads: int) -> None:
        """Let the CPU backend use 1..self.n_threads threads of the pool from now on."""
        if n_threads != self._n_threads_now:
            api.ggml_backend_cpu_set_n_threads(self.cpu_backend, n_threads)
            self._n_threads_now = n_threads

    def close(self) -> None:
        """Free the backends and the threadpool; graphs and weights made for it are unusable afterwards."""
        self.closed = True
        self._close()


def _free_device(backend: Handle, cpu_backend: Handle, threadpool: Handle) -> None:
    if backend != cpu_backend:
        api.ggml_backend_free(backend)
    api.ggml_backend_free(cpu_backend)
    api.ggml_threadpool_free(threadpool)


def open_device(name: str | None = None, n_threads: int = 0, poll: int = 0) -> Device:
    """Open the device of that name, or the best one.

    An accelerator (BLAS and the like) works beside the CPU rather than instead of it, so like ggml's own
    choice the automatic one skips it; by name it opens. `n_threads` 0: every core this process may use.
    `poll` 0..100: how long idle threads of the pool spin before they sleep (config.ComputeConfig.poll).
    UsageError for an unknown name or a number out of range; DeviceError if it does not open.
    """
    if not 0 <= n_threads <= api.GGML_MAX_N_THREADS or not 0 <= poll <= 100:
        raise UsageError(f"n_threads must be 0..{api.GGML_MAX_N_THREADS} and poll 0..100")
    for info, handle in _devices():
        if info.name == name or (name is None and info.kind != "accel"):
            return Device(info, handle, n_threads or default_n_threads(), poll)
    known = ", ".join(info.name for info in list_devices()) or "none"
    if name is None:
        raise DeviceError(f"ggml finds no device to compute on (found: {known})")
    raise UsageError(f"no device named {name!r}; this machine has: {known}")
