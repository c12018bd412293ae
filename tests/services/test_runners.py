"""Work for the compute thread: in order, cancellable until it has begun."""

from __future__ import annotations

import threading

import pytest
import trio
import trio.testing

from swarmnode.compute.thread import ComputeThread
from swarmnode.services.runners import ComputeGate

pytestmark = pytest.mark.real_time


async def test_results_and_errors_come_back() -> None:
    thread = ComputeThread()
    gate = ComputeGate(thread)

    def fail() -> None:
        raise ValueError("wrong")

    try:
        assert await gate.run(lambda: 5) == 5
        assert await gate.run(dict) == {}
        with pytest.raises(ValueError, match="wrong"):
            await gate.run(fail)
    finally:
        thread.close()


async def test_what_was_cancelled_before_its_turn_never_runs() -> None:
    thread = ComputeThread()
    gate = ComputeGate(thread)
    begun, go_on = threading.Event(), threading.Event()
    ran: list[int] = []

    def first() -> None:
        begun.set()
        go_on.wait()
        ran.append(0)

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(gate.run, first)
            await trio.to_thread.run_sync(begun.wait)
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as inner:
                    for number in range(1, 5):
                        inner.start_soon(gate.run, lambda number=number: ran.append(number))
                    await trio.testing.wait_all_tasks_blocked()
                    scope.cancel()
            assert scope.cancelled_caught
            go_on.set()
        await gate.run(lambda: ran.append(9))
    finally:
        thread.close()
    assert ran == [0, 9]


async def test_what_has_begun_runs_to_its_end() -> None:
    thread = ComputeThread()
    gate = ComputeGate(thread)
    begun, go_on = threading.Event(), threading.Event()

    def job() -> None:
        begun.set()
        go_on.wait()

    try:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(gate.run, job)
                await trio.to_thread.run_sync(begun.wait)
                scope.cancel()
                go_on.set()
            await trio.lowlevel.checkpoint()
        assert scope.cancelled_caught
    finally:
        thread.close()
