"""Where the time of a forward pass goes: ggml, waiting for sockets, and the rest, which is Python.

Wraps seams that are public anyway: `Graph.compute`, the compute runner, trio's instruments. Nothing of it is in the
package, so that nobody pays for it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar
from unittest.mock import patch

import trio

from benchmarks.graph_watch import watching_graphs
from swarmnode.compute.graph import Graph
from swarmnode.net.tcp import TcpStream
from swarmnode.services.runners import Brief, Runner

T = TypeVar("T")


@dataclass(frozen=True)
class Times:
    """Seconds of one measured stretch."""

    wall_s: float
    ggml_s: float
    socket_s: float
    """Trio had nothing to do and the compute thread neither: somebody else's turn."""
    send_s: float
    """In the kernel with bytes to send, which on loopback is the receiver's side as well, and waking it."""
    python_cpu_s: float
    """CPU time of trio's and the compute thread outside ggml, sending included: little disturbed by others who use the
    machine, and without the time that a thread takes to wake up. 0 unless asked for."""

    @property
    def python_s(self) -> float:
        """Everything else, hops between the two threads included."""
        return self.wall_s - self.ggml_s - self.socket_s - self.send_s


class Stopwatch(trio.abc.Instrument):
    """Counts while `running`; one a process. `cpu`: also CPU time, whose clocks cost 40 us a layer with cold caches."""

    def __init__(self, *, cpu: bool = False) -> None:
        self._cpu_ns: Callable[[], int] = time.thread_time_ns if cpu else lambda: 0
        self._ggml_ns = 0
        self._ggml_cpu_ns = 0
        self._job_cpu_ns = 0
        self._socket_ns = 0
        self._send_ns = 0
        self._wait_began_ns = 0
        self._jobs = 0

    def watch(self, runner: Runner) -> Runner:
        """The compute runner, watched: while a job of it is due, nobody waits for a socket."""
        return _WatchedRunner(self, runner)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Watch `Graph.compute`, sends and trio's waits inside; before connections are opened."""
        send = TcpStream.send_now

        def timed_send(stream: TcpStream, data: bytes | bytearray | memoryview) -> int:
            started_ns = time.perf_counter_ns()
            n_bytes = send(stream, data)
            if not self._jobs:  # else it is hidden behind compute
                self._send_ns += time.perf_counter_ns() - started_ns
            return n_bytes

        with watching_graphs(self._time_graph), patch.object(TcpStream, "send_now", timed_send):
            trio.lowlevel.add_instrument(self)
            try:
                yield
            finally:
                trio.lowlevel.remove_instrument(self)

    def _time_graph(self, compute: Callable[[Graph], None], graph: Graph) -> None:
        started_ns, started_cpu_ns = time.perf_counter_ns(), self._cpu_ns()
        compute(graph)
        self._ggml_cpu_ns += self._cpu_ns() - started_cpu_ns
        self._ggml_ns += time.perf_counter_ns() - started_ns

    def start(self) -> Callable[[], Times]:
        """Begin a stretch; the function returned ends it. Both on trio's thread."""
        began = self._now()

        def stop() -> Times:
            wall, ggml, socket, send, cpu = (1e-9 * (b - a) for a, b in zip(began, self._now(), strict=True))
            return Times(wall, ggml, socket, send, cpu)

        return stop

    def _now(self) -> tuple[int, ...]:
        python_cpu_ns = self._cpu_ns() + self._job_cpu_ns - self._ggml_cpu_ns
        return time.perf_counter_ns(), self._ggml_ns, self._socket_ns, self._send_ns, python_cpu_ns

    def timed(self, function: Callable[[], T]) -> T:
        """Run a job of the compute thread and count its CPU time."""
        started_ns = self._cpu_ns()
        try:
            return function()
        finally:
            self._job_cpu_ns += self._cpu_ns() - started_ns

    def before_io_wait(self, timeout: float) -> None:
        """Trio's: nothing is runnable now."""
        self._wait_began_ns = 0 if self._jobs else time.perf_counter_ns()

    def after_io_wait(self, timeout: float) -> None:
        """Trio's: something happened."""
        if self._wait_began_ns:
            self._socket_ns += time.perf_counter_ns() - self._wait_began_ns


class _WatchedRunner:
    def __init__(self, watch: Stopwatch, runner: Runner) -> None:
        self._watch = watch
        self._runner = runner

    async def run(self, function: Callable[[], T]) -> T:
        self._watch._jobs += 1
        try:
            timed = partial(self._watch.timed, function)
            return await self._runner.run(Brief(timed) if isinstance(function, Brief) else timed)
        finally:
            self._watch._jobs -= 1
