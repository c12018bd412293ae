"""The compute thread: order, results, exceptions, close; and one computing thread a process."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from swarmnode.compute.devices import Device
from swarmnode.compute.ggml import F32
from swarmnode.compute.graph import Graph, GraphBuilder
from swarmnode.compute.thread import ComputeThread, check_compute_thread
from swarmnode.errors import DeviceError


class Answers:
    """Collects what `on_done` gets, and waits for it."""

    def __init__(self, expected: int) -> None:
        self.items: list[Any] = []
        self._left = threading.Semaphore(0)
        self._expected = expected

    def __call__(self, result: Any) -> None:
        self.items.append(result)
        self._left.release()

    def wait(self) -> list[Any]:
        for _ in range(self._expected):
            assert self._left.acquire(timeout=10)
        return self.items


def small_graph(device: Device) -> Graph:
    builder = GraphBuilder(device, 8)
    builder.output("y", builder.silu(builder.input("x", F32, 4)))
    graph = builder.build()
    graph.inputs["x"][:] = 1
    return graph


def test_jobs_run_in_order_on_one_thread() -> None:
    thread = ComputeThread()
    answers = Answers(20)
    for number in range(20):
        thread.submit(lambda n: (n, threading.get_ident()), number, on_done=answers)
    items = answers.wait()
    assert [number for number, _ in items] == list(range(20))
    assert len({ident for _, ident in items}) == 1
    assert items[0][1] != threading.get_ident()
    thread.close()


def test_an_exception_is_the_answer_and_the_thread_lives_on() -> None:
    thread = ComputeThread()
    answers = Answers(2)
    thread.submit(int, "x", on_done=answers)
    thread.submit(int, "7", on_done=answers)
    failed, good = answers.wait()
    assert isinstance(failed, ValueError)
    assert good == 7
    thread.close()


def test_close_finishes_what_was_submitted_and_refuses_more() -> None:
    thread = ComputeThread()
    gate = threading.Event()
    answers = Answers(2)
    thread.submit(gate.wait, 10, on_done=answers)
    thread.submit(int, "1", on_done=answers)
    gate.set()
    thread.close()
    assert answers.items == [True, 1]
    thread.close()
    with pytest.raises(DeviceError, match="closed"):
        thread.submit(int, "2", on_done=answers)


def test_only_the_compute_thread_may_compute_while_it_lives(device: Device) -> None:
    graph = small_graph(device)
    graph.compute()
    thread = ComputeThread()
    with pytest.raises(DeviceError, match="owns ggml"):
        graph.compute()
    answers = Answers(1)
    thread.submit(graph.compute, on_done=answers)
    assert answers.wait() == [None]
    with pytest.raises(DeviceError, match="owns ggml"):
        ComputeThread("second")
    thread.close()
    graph.compute()
    graph.close()


def test_a_second_plain_thread_is_refused_while_the_first_lives() -> None:
    check_compute_thread()
    refused: list[DeviceError] = []

    def compute() -> None:
        try:
            check_compute_thread()
        except DeviceError as error:
            refused.append(error)

    other = threading.Thread(target=compute)
    other.start()
    other.join()
    assert len(refused) == 1


def test_whoever_stands_in_has_it_alone() -> None:
    thread = ComputeThread()
    done = Answers(1)
    with thread.stand_in() as is_free:
        assert is_free
        check_compute_thread()
        with thread.stand_in() as is_free_twice:
            assert not is_free_twice
        thread.submit(threading.get_ident, on_done=done)
        assert not done.items, "it waits"
        with thread.stand_in() as is_free_behind_others:
            assert not is_free_behind_others
    assert done.wait() != [threading.get_ident()]
    thread.close()
    with thread.stand_in() as is_free:
        assert not is_free
