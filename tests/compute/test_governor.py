"""The thread governor on invented clocks."""

from __future__ import annotations

from swarmnode.compute.governor import ThreadGovernor


class Clocks:
    """Wall and CPU time of a process that gets `share` of the CPU time it asks for."""

    def __init__(self) -> None:
        self.wall = 100.0
        self.cpu = 0.0

    def governor(self, n_threads: int) -> ThreadGovernor:
        return ThreadGovernor(n_threads, wall_s=lambda: self.wall, cpu_s=lambda: self.cpu)

    def run(self, governor: ThreadGovernor, wall_s: float, share: float) -> int:
        n_threads = governor.begin()
        self.wall += wall_s
        self.cpu += wall_s * n_threads * (share if n_threads > 1 else 1.0)
        governor.end(n_threads)
        return n_threads


def test_keeps_all_threads_while_they_run() -> None:
    clocks = Clocks()
    governor = clocks.governor(2)
    assert {clocks.run(governor, 0.0005, 0.9) for _ in range(1000)} == {2}
    assert not governor.contended


def test_one_thread_when_another_process_has_the_core() -> None:
    clocks = Clocks()
    governor = clocks.governor(2)
    assert [clocks.run(governor, 0.032, 0.52) for _ in range(3)] == [2, 2, 2]
    assert governor.contended
    assert {clocks.run(governor, 0.0004, 1.0) for _ in range(500)} == {1}


def test_tries_again_less_and_less_often_and_recovers() -> None:
    clocks = Clocks()
    governor = clocks.governor(2)
    tries = 0
    for _ in range(50_000):
        busy = clocks.run(governor, 0.032 if not governor.contended else 0.0004, 0.52) == 2
        tries += busy
    elapsed = clocks.wall - 100.0
    assert elapsed > 16
    assert tries * 0.032 / elapsed < 0.03
    while clocks.run(governor, 0.0004, 0.95) == 1:
        pass
    for _ in range(30):
        clocks.run(governor, 0.0004, 0.95)
    assert not governor.contended
    assert clocks.run(governor, 0.0004, 0.95) == 2


def test_a_short_hiccup_within_a_window_changes_nothing() -> None:
    clocks = Clocks()
    governor = clocks.governor(4)
    clocks.run(governor, 0.001, 0.3)
    for _ in range(20):
        assert clocks.run(governor, 0.002, 0.95) == 4


def test_a_core_that_is_gone_for_a_graph_or_two_is_waited_for() -> None:
    clocks = Clocks()
    governor = clocks.governor(2)
    for _ in range(200):
        shares = (0.52, 0.52, 0.95)
        assert [clocks.run(governor, 0.012, share) for share in shares] == [2, 2, 2]
    assert not governor.contended


def test_one_thread_needs_no_governor() -> None:
    clocks = Clocks()
    governor = clocks.governor(1)
    assert clocks.run(governor, 5.0, 1.0) == 1
    assert not governor.contended
