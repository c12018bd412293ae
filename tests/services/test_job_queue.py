"""The order of computing, what is admitted, and that nothing cancelled is ever computed.

Coalescing: test_coalescing.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import TypeVar

import pytest
import trio
import trio.testing

from swarmnode.errors import DeviceError, RequestRefusedError
from swarmnode.services import job_queue
from swarmnode.services.job_queue import JobQueue
from swarmnode.services.runners import Brief
from tests.services.jobs import QUEUE_CONFIG as CONFIG
from tests.services.jobs import Bench, NamedJob, Names

T = TypeVar("T")


async def test_small_jobs_go_before_large_ones() -> None:
    bench = Bench()
    async with trio.open_nursery() as nursery:
        await bench.start(nursery, ("A", 500), ("B", 65), ("c", 64), ("D", 100), ("e", 1))
        assert bench.queue.queued_pairs == 730
        await bench.runner.step(5)
    assert bench.done == ["A", "c", "e", "B", "D"]
    assert bench.queue.queued_pairs == 0


async def test_what_answers_wait_for_goes_before_prompts_whatever_its_size() -> None:
    """Nine rows of eight experts are 72 pairs: a step of nine answers, and no prompt."""
    bench = Bench()
    async with trio.open_nursery() as nursery:
        for name, n_pairs, urgent in [("A", 100, False), ("b", 8, False), ("C", 72, True), ("d", 1, True)]:
            nursery.start_soon(bench.job, name, n_pairs, name, None, urgent)
            await trio.testing.wait_all_tasks_blocked()
        await bench.runner.step(4)
    assert bench.done == ["A", "C", "d", "b"]


async def test_calling_everything_urgent_brings_no_more_than_a_turn() -> None:
    bench = Bench(replace(CONFIG, max_queued_pairs=10_000, small_before_large=8))
    async with trio.open_nursery() as nursery:
        for number in range(4):
            nursery.start_soon(bench.job, f"liar{number}", 512, "liar", None, True)
            await trio.testing.wait_all_tasks_blocked()
        for owner in ("one", "other"):
            nursery.start_soon(bench.job, f"prompt of {owner}", 512, owner, None, False)
            await trio.testing.wait_all_tasks_blocked()
        for number in range(3):
            nursery.start_soon(bench.job, f"token{number}", 8, "me", None, True)
            await trio.testing.wait_all_tasks_blocked()
        await bench.runner.step(9)
    tokens = ["token0", "token1", "token2"]
    assert bench.done == ["liar0", *tokens, "liar1", "prompt of one", "liar2", "prompt of other", "liar3"]


async def test_owners_take_turns_by_pairs() -> None:
    bench = Bench(replace(CONFIG, max_queued_pairs=10_000))
    async with trio.open_nursery() as nursery:
        for name, n_pairs, owner in [("A", 100, "x"), ("B", 200, "x"), ("C", 100, "x"), ("D", 100, "y")]:
            nursery.start_soon(bench.job, name, n_pairs, owner)
            await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(bench.job, "E", 100, "y")
        await trio.testing.wait_all_tasks_blocked()
        await bench.runner.step(5)
        assert bench.done == ["A", "D", "B", "E", "C"]
        nursery.start_soon(bench.job, "F", 100, "x")
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(bench.job, "G", 100, "z")
        await trio.testing.wait_all_tasks_blocked()
        await bench.runner.step(2)
    assert bench.done[5:] == ["F", "G"], "what was before nothing waited is forgotten"


async def test_what_was_not_computed_has_not_been_had() -> None:
    bench = Bench()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.job, "A", 100, "x")
        await trio.testing.wait_all_tasks_blocked()
        async with trio.open_nursery() as impatient:
            impatient.start_soon(bench.job, "B", 300, "y")
            await trio.testing.wait_all_tasks_blocked()
            impatient.cancel_scope.cancel()
        for name, owner in [("C", "y"), ("D", "z")]:
            nursery.start_soon(bench.job, name, 100, owner)
            await trio.testing.wait_all_tasks_blocked()
        await bench.runner.step(3)
    assert bench.done == ["A", "C", "D"]


async def test_who_has_had_its_turn_is_forgotten_though_the_queue_is_never_empty() -> None:
    """Identities are free, and a worker may be busy for days."""
    bench = Bench()
    async with trio.open_nursery() as nursery:
        for number in range(2000):
            await bench.start(nursery, (f"{number}", 8))
            if number:
                await bench.runner.step(1)
        assert len(bench.queue._ends) < 200
        assert len(bench.done) == 1999
        await bench.runner.step(1)


async def test_ever_new_owners_do_not_starve_one_that_has_had_a_turn() -> None:
    """Each new one would begin where the last job began, which was a new one's, too."""
    bench = Bench(replace(CONFIG, max_queued_pairs=10_000))
    async with trio.open_nursery() as nursery:
        for name in ("A", "B"):
            nursery.start_soon(bench.job, name, 300, "me", None, True)
            await trio.testing.wait_all_tasks_blocked()
        for number in range(100):
            await bench.start(nursery, (f"{number}", 8))
            await bench.runner.step(1)
        assert "B" in bench.done
        assert bench.done.index("B") > 30, "two of them: the other has had 300 pairs, too"
        await bench.runner.step(2)


async def test_a_large_job_is_not_starved() -> None:
    bench = Bench()
    async with trio.open_nursery() as nursery:
        await bench.start(nursery, *((letter, 1) for letter in "abcdefg"), ("H", 100), ("I", 100))
        await bench.runner.step(9)
    assert bench.done == list("abcdHefgI")


async def test_a_job_cancelled_before_its_turn_is_never_computed() -> None:
    bench = Bench()
    async with trio.open_nursery() as nursery:
        await bench.start(nursery, ("a", 1))
        async with trio.open_nursery() as impatient:
            await bench.start(impatient, ("b", 2), ("C", 100))
            impatient.cancel_scope.cancel()
        assert bench.queue.queued_pairs == 1
        await bench.start(nursery, ("d", 1))
        await bench.runner.step(2)
    assert bench.done == ["a", "d"]


async def test_a_job_cancelled_while_it_has_the_turn_passes_it_on() -> None:
    bench = Bench()
    async with trio.open_nursery() as nursery:
        async with trio.open_nursery() as impatient:
            await bench.start(impatient, ("a", 1))
            await bench.start(nursery, ("b", 1), ("c", 1))
            impatient.cancel_scope.cancel()
        await bench.runner.step(2)
    assert bench.done == ["b", "c"]
    assert bench.queue.queued_pairs == 0


async def test_a_job_cancelled_in_the_instant_its_turn_comes_passes_it_on() -> None:
    bench = Bench()
    scope = trio.CancelScope()

    async def cancelled() -> None:
        with scope:
            await bench.job("b", 1)

    async with trio.open_nursery() as nursery:
        # Cancels "b" while "a" still has the turn; "a" then gives it to "b", which has not run since.
        nursery.start_soon(bench.queue.run, "me", NamedJob("a", 1, scope.cancel))
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(cancelled)
        await trio.testing.wait_all_tasks_blocked()
        await bench.start(nursery, ("c", 1))
        await bench.runner.step(2)
    assert scope.cancelled_caught
    assert bench.done == ["a", "c"]
    assert bench.queue.queued_pairs == 0


async def test_a_job_that_fails_passes_the_turn_on() -> None:
    bench = Bench()

    def fail() -> None:
        raise DeviceError("broken")

    async def failing() -> None:
        with pytest.raises(DeviceError):
            await bench.queue.run("me", NamedJob("a", 5, fail))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(failing)
        await trio.testing.wait_all_tasks_blocked()
        await bench.start(nursery, ("b", 1))
        await bench.runner.step(2)
    assert bench.done == ["b"]
    assert bench.queue.queued_pairs == 0


async def test_one_owner_fills_half_of_the_queue() -> None:
    bench = Bench()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.job, "A", 300, "me")
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(RequestRefusedError, match="300 of them yours") as caught:
            await bench.job("B", 201, "me")
        assert caught.value.code == "busy"
        nursery.start_soon(bench.job, "C", 200, "me")
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(bench.job, "D", 500, "other")
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(RequestRefusedError, match="busy"):
            await bench.job("E", 65, "third")
        nursery.start_soon(bench.job, "f", 8, "third")  # decode is not refused because prompts wait
        await trio.testing.wait_all_tasks_blocked()
        await bench.runner.step(4)
    assert bench.done == ["A", "f", "D", "C"], "and whoever had one lets others go first"


async def test_what_cannot_be_done_in_time_is_refused() -> None:
    bench = Bench(replace(CONFIG, max_queue_s=2.0))
    bench.queue._recent_s, bench.queue._recent_pairs = 1.0, 100.0
    assert bench.queue.pair_s == 0.01
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.job, "A", 500, "me")  # nobody before it: taken
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(RequestRefusedError) as caught:
            await bench.job("B", 65, "other")
        assert caught.value.retry_after_ms == 5000
        nursery.start_soon(bench.job, "c", 64, "other")
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(RequestRefusedError):
            await bench.job("d", 64, "other")
        await bench.runner.step(2)
    assert bench.done == ["A", "c"]
    assert bench.queue.pair_s < 0.01, "it learns from what was computed"


async def test_the_seconds_are_those_of_the_function_alone() -> None:
    bench = Bench()
    spent: list[float] = []

    async def job() -> None:
        computed = await bench.queue.run("me", NamedJob("a", 1))
        spent.append(computed.batch_s)
        assert computed.own_s == computed.batch_s

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(job)
        await trio.sleep(100)  # of the mock clock, in the queue
        await bench.runner.step(3)
    assert 0 <= max(spent) < 1


class Kinds:
    """A runner that notes whether what it runs is brief."""

    def __init__(self) -> None:
        self.brief: list[bool] = []

    async def run(self, function: Callable[[], T]) -> T:
        self.brief.append(isinstance(function, Brief))
        await trio.lowlevel.checkpoint()
        return function()


class Timed:
    """A queue whose jobs take so long a pair, and are noted to be brief or not."""

    def __init__(self, pair_s: float, patch: pytest.MonkeyPatch) -> None:
        self._pair_s = pair_s
        self._now_s = 0.0
        patch.setattr(job_queue, "time", SimpleNamespace(perf_counter=lambda: self._now_s))
        self.runner = Kinds()
        self._queue: JobQueue[NamedJob, str] = JobQueue(self.runner, Names(), CONFIG)

    async def ask(self, owner: object, n_pairs: int) -> None:
        def act() -> None:
            self._now_s += n_pairs * self._pair_s

        await self._queue.run(owner, NamedJob("job", n_pairs, act))


@pytest.mark.parametrize(("pair_s", "is_brief"), [(0.0001, True), (0.01, False)])
async def test_little_work_is_brief_once_it_is_known_what_a_pair_takes(
    pair_s: float, is_brief: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = Timed(pair_s, monkeypatch)
    for n_pairs in (4, 4, 200):
        await timed.ask("me", n_pairs)
    assert timed.runner.brief == [False, is_brief, False]


async def test_work_is_not_brief_while_much_more_of_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = Timed(0.001, monkeypatch)
    await timed.ask(0, 4)
    async with trio.open_nursery() as nursery:
        for owner in range(4):
            nursery.start_soon(timed.ask, owner, 4)
    assert timed.runner.brief == [False, True, False, True, True], (
        "nobody else is there yet, then 12, 8 and 4 ms are left"
    )
