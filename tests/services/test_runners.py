"""Work for the compute thread: in order, cancellable until it has begun."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest
import trio
import trio.testing

from swarmnode.compute.thread import ComputeThread, check_compute_thread
from swarmnode.errors import DeviceError
from swarmnode.services.runners import Brief, ComputeGate

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


@pytest.fixture
def gate() -> Iterator[ComputeGate]:
    thread = ComputeThread()
    made = ComputeGate(thread)
    made.may_stand_in = True
    yield made
    thread.close()


def computing() -> int:
    """The thread that this runs on, which must be the one that computes."""
    check_compute_thread()
    return threading.get_ident()


async def test_what_is_brief_is_computed_where_it_is_asked_for(gate: ComputeGate) -> None:
    here, there = threading.get_ident(), await gate.run(computing)
    assert there != here
    assert await gate.run(Brief(computing)) == here
    assert await gate.run(computing) == there, "and then it is the other thread's again"
    with pytest.raises(DeviceError, match="owns ggml"):
        check_compute_thread()
    gate.may_stand_in = False
    assert await gate.run(Brief(computing)) == there


async def test_what_is_brief_waits_its_turn_like_the_rest(gate: ComputeGate) -> None:
    there = await gate.run(computing)
    begun, go_on = threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        go_on.wait()

    async def brief() -> None:
        assert await gate.run(Brief(computing)) == there

    async with trio.open_nursery() as nursery:
        nursery.start_soon(gate.run, first)
        await trio.to_thread.run_sync(begun.wait)
        nursery.start_soon(brief)
        await trio.testing.wait_all_tasks_blocked()
        go_on.set()


async def test_what_fails_here_leaves_the_thread_as_it_was(gate: ComputeGate) -> None:
    there = await gate.run(computing)
    with pytest.raises(ZeroDivisionError):
        await gate.run(Brief(lambda: 1 // 0))
    assert await gate.run(computing) == there
    with trio.CancelScope() as scope:
        scope.cancel()
        await gate.run(Brief(lambda: pytest.fail("cancelled before it began")))
    assert scope.cancelled_caught
    assert await gate.run(Brief(computing)) == threading.get_ident()


async def test_ctrl_c_waits_until_the_thread_has_its_right_back(gate: ComputeGate) -> None:
    there = await gate.run(computing)
    await gate.run(Brief(lambda: signal.raise_signal(signal.SIGINT)))
    with pytest.raises(KeyboardInterrupt):
        await trio.lowlevel.checkpoint()
    assert await gate.run(computing) == there
    assert await gate.run(Brief(computing)) == threading.get_ident()
