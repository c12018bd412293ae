"""How many threads a graph gets: all of them, or one while other processes need the cores.

ggml's threads meet at a barrier after every node and spin there. If another process keeps one of them off
its core, the others burn theirs until the scheduler lets it run: with two busy processes on two cores a
graph of 0.35 ms took 32 ms (docs/decisions/0002-ggml-build.md). One thread never waits. `poll` does not
help: it is about idle threads.

The sign is in the clocks. While a graph runs, a process that has its cores spends about n_threads seconds
of CPU time a second, because even waiting spins; one that lacks them spends less. The thread count
changes no result: ggml cuts mat-muls by rows (the exception, see Ops.flash_attn_ext, is pinned).
"""

from __future__ import annotations

import time
from collections.abc import Callable

_WINDOW_S = 0.01
"""Graph time over which the share of CPU time is judged: several scheduler ticks."""
_LEAST_SHARE = 0.6
"""CPU time / (n_threads * wall time) below which threads wait for cores: 0.5-0.55 measured with two
processes on two cores, 0.9 and more alone. In between, several threads are still the faster choice."""
_WINDOWS = 3
"""Such windows in a row before the first hold. Where nodes of one machine take turns, a worker that has just sent its
rows may hold a core for a part of the next graph; one thread for that would cost more than it does. While others keep
the cores, one window is enough to go on.
"""
_FIRST_HOLD_S = 0.25
_LONGEST_HOLD_S = 4.0
"""Time on one thread before trying all again: a try in a contended state costs some 32 ms, under 1 % of
this.
"""


class ThreadGovernor:
    """Decides before each graph, learns after it. For one thread (`n_threads` 1) it does nothing."""

    def __init__(
        self,
        n_threads: int,
        wall_s: Callable[[], float] = time.perf_counter,
        cpu_s: Callable[[], float] = time.process_time,
    ) -> None:
        self._n_threads = n_threads
        self._wall_s = wall_s
        self._cpu_s = cpu_s
        self._started = (0.0, 0.0)
        self._window_wall_s = 0.0
        self._window_cpu_s = 0.0
        self._n_bad = 0
        """Windows without the cores since one with them, _WINDOWS at most."""
        self._hold_s = _FIRST_HOLD_S
        self._single_until_s = 0.0

    @property
    def contended(self) -> bool:
        """True while graphs get one thread because the cores are taken."""
        return self._single_until_s > self._wall_s()

    def begin(self) -> int:
        """Threads for the graph about to run."""
        if self._n_threads == 1:
            return 1
        wall_s = self._wall_s()
        if wall_s < self._single_until_s:
            return 1
        self._started = (wall_s, self._cpu_s())
        return self._n_threads

    def end(self, n_threads: int) -> None:
        """The graph that `begin` gave `n_threads` has run."""
        if n_threads == 1:
            return
        wall_s = self._wall_s()
        self._window_wall_s += wall_s - self._started[0]
        self._window_cpu_s += self._cpu_s() - self._started[1]
        if self._window_wall_s < _WINDOW_S:
            return
        share = self._window_cpu_s / (self._n_threads * self._window_wall_s)
        self._window_wall_s = self._window_cpu_s = 0.0
        if share >= _LEAST_SHARE:
            self._n_bad, self._hold_s = 0, _FIRST_HOLD_S
            return
        self._n_bad = min(self._n_bad + 1, _WINDOWS)
        if self._n_bad == _WINDOWS:
            self._single_until_s = wall_s + self._hold_s
            self._hold_s = min(2 * self._hold_s, _LONGEST_HOLD_S)
