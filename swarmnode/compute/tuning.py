"""How many threads a CPU computes fastest with: tried out once, and kept in the cache folder.

All cores are not always best. ggml's threads meet after every node of a graph, so the slowest of them sets the pace:
the small cores of a phone hold up the large ones, two threads of one core share its units, and a container may see 64
cores and be given the time of two. No result depends on the number (docs/decisions/0028-same-bits.md).
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from swarmnode.compute import ggml
from swarmnode.compute.devices import Device
from swarmnode.compute.graph import Graph, GraphBuilder
from swarmnode.compute.tensors import WeightSet
from swarmnode.state_file import read_small, replace_small

logger = logging.getLogger(__name__)

VERSION = 1
"""Counts changes of what is measured: an older number is not believed."""

_N_IN, _N_OUT, _N_WEIGHTS = 2048, 1024, 8
"""Of the trial's graph: as many mat-muls one after the other as a layer has, of a size that threads are worth."""
_WIDTHS = (1, 32)
"""A token of an answer, and rows of a prompt or of many conversations."""
_ROUNDS = 5
_WORTH = 0.95
"""Fewer threads are taken if they are faster than more of them by this: they leave cores to others anyway."""
_MAX_FILE_BYTES = 4096


@dataclass(frozen=True)
class Threads:
    """What was found."""

    n_threads: int
    times_s: Mapping[int, float]
    """Of each number that was tried: the geometric mean over the widths of the fastest round."""


def candidates(n_cores: int) -> list[int]:
    """Numbers worth trying, most first: all, then three quarters, halves and quarters, down to one."""
    fractions = {n_cores, n_cores * 3 // 4, n_cores // 2, n_cores // 4, n_cores // 8, 2, 1}
    return sorted((n for n in fractions if 1 <= n <= n_cores), reverse=True)


def choose(times_s: Mapping[int, float]) -> int:
    """The number of threads to take: the most, unless fewer are clearly faster. `times_s` is not empty."""
    best = max(times_s)
    for n_threads in sorted(times_s, reverse=True):
        if times_s[n_threads] < _WORTH * times_s[best]:
            best = n_threads
    return best


def tune_threads(device: Device, folder: Path) -> Threads | None:
    """Let the device use the best number of threads from now on; from `folder` if it is known there.

    None, and nothing changes, on a device that is not the CPU, or has one thread, or whose cores others are using: what
    is measured then says nothing about another day. Takes a tenth of a second for two cores, the first time. A folder
    that cannot be written costs that at every start, no more. DeviceError.
    """
    if not device.is_host or device.n_threads == 1:
        return None
    path = folder / f"threads-{_key(device)}.json"
    found = _read(path, device.n_threads)
    if found is None:
        found = measure(device)
        if found is None:
            return None
        _keep(path, found)
    device.limit_threads(found.n_threads)
    return found


def measure(device: Device, now: Callable[[], float] = time.perf_counter) -> Threads | None:
    """Try out numbers of threads on a CPU device, which keeps all of them afterwards.

    None as soon as other processes turn out to hold the cores. DeviceError.
    """
    most = device.n_threads
    times_s: dict[int, float] = {}
    with _trials(device) as graphs:
        try:
            for n_threads in candidates(most):
                device.limit_threads(n_threads)
                fastest = [_fastest(device, graph, now) for graph in graphs]
                if device.governor.contended:
                    return None
                times_s[n_threads] = math.exp(sum(map(math.log, fastest)) / len(fastest))
        finally:
            device.limit_threads(most)
    return Threads(choose(times_s), times_s)


def _fastest(device: Device, graph: Graph, now: Callable[[], float]) -> float:
    """Seconds of a graph's fastest round; none that matters once others have the cores."""
    graph.compute()  # the first one wakes the threads
    found_s = math.inf
    for _ in range(_ROUNDS):
        started_s = now()
        graph.compute()
        found_s = min(found_s, now() - started_s)
        if device.governor.contended:
            break
    return max(found_s, 1e-9)


@contextmanager
def _trials(device: Device) -> Iterator[list[Graph]]:
    """A graph a width, of Q8_0 weights: every CPU has a kernel for them."""
    rng = np.random.default_rng(0)
    weights = WeightSet(device)
    graphs: list[Graph] = []
    try:
        data = ggml.quantize(ggml.Q8_0, rng.standard_normal((_N_OUT, _N_IN), np.float32))
        tensors = [weights.bind(f"w{i}", ggml.Q8_0, (_N_IN, _N_OUT), bytes(data)) for i in range(_N_WEIGHTS)]
        for width in _WIDTHS:
            g = GraphBuilder(device, 8 * _N_WEIGHTS)
            x = g.input("x", ggml.F32, _N_IN, width)
            total = g.mul_mat(tensors[0], x)
            for tensor in tensors[1:]:
                total = g.add(total, g.mul_mat(tensor, x))
            g.output("y", total)
            graphs.append(g.build())
            graphs[-1].set("x", rng.standard_normal((width, _N_IN), np.float32))
        yield graphs
    finally:
        for graph in graphs:
            graph.close()
        weights.close()


# -- what is known


def _key(device: Device) -> str:
    """Another machine, CPU, set of cores or ggml is another question."""
    facts = (VERSION, platform.node(), device.info.description, _cores(), ggml.version(), device.n_threads)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _cores() -> tuple[object, ...]:
    """Which cores this process may use, and how much of their time its control group is given."""
    quota = ""
    with suppress(OSError):
        quota = read_small(Path("/sys/fs/cgroup/cpu.max"), 256).decode("ascii", "replace")
    affinity = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [os.cpu_count()]
    return (*affinity, quota)


def _read(path: Path, most: int) -> Threads | None:
    """What stands there, if it makes sense for a pool of `most` threads."""
    try:
        stored = json.loads(read_small(path, _MAX_FILE_BYTES))
        times_s = {int(n): float(seconds) for n, seconds in stored["times_s"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if set(times_s) != set(candidates(most)) or not all(0 < s < math.inf for s in times_s.values()):
        return None
    return Threads(choose(times_s), times_s)


def _keep(path: Path, found: Threads) -> None:
    try:
        replace_small(path, json.dumps({"times_s": found.times_s}).encode(), sync=False)
    except OSError as error:
        logger.warning("%s cannot be written (%s): threads are tuned at every start", path, error.strerror)
