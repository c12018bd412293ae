"""Who shares a step with whom, and what happens to those who leave."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import trio

from swarmnode.config import EngineConfig, Speculate
from swarmnode.errors import DeviceError, EngineStoppedError, UsageError
from swarmnode.services.account import Account
from swarmnode.services.batcher import Batcher, Seat
from swarmnode.services.engine_tasks import EngineTasks
from swarmnode.services.forward import TakeFailure
from swarmnode.services.passes import PassTimes, Rows

STEP_S = 1.0


@dataclass
class FakePasses:
    """A pass takes STEP_S, and gives each slot the number of its tokens."""

    steps: list[dict[int, int]] = field(default_factory=list)
    """Tokens by slot, of each step."""
    began_s: list[float] = field(default_factory=list)
    n_out: list[int] = field(default_factory=list)
    tentative: list[bool] = field(default_factory=list)
    cancelled: int = 0
    error: Exception | None = None
    failures: dict[int, Exception] = field(default_factory=dict)
    """By slot: what its `take` raises."""
    wait_s: float = 0.0

    async def run(self, rows: Sequence[Rows]) -> tuple[list[Any], PassTimes]:
        self.steps.append({item.slot: len(item.tokens) for item in rows})
        self.n_out += [item.n_out for item in rows]
        self.tentative += [item.tentative for item in rows]
        self.began_s.append(trio.current_time())
        try:
            await trio.sleep(STEP_S)
        except trio.Cancelled:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return [self._taken(item) for item in rows], PassTimes(STEP_S, self.wait_s)

    def _taken(self, item: Rows) -> Any:
        if item.slot in self.failures:
            return TakeFailure(self.failures[item.slot])
        return item.slot, tuple(item.tokens), item.n_out


@dataclass
class Bench:
    passes: FakePasses
    batcher: Batcher
    nursery: trio.Nursery

    def start(self, sequence: Callable[[Seat], Awaitable[None]]) -> None:
        """Run a sequence as a task; it has its seat already, so that the next step waits for it."""
        seat = self.batcher.seat()
        self.nursery.start_soon(self._seated, seat, seat.__enter__(), sequence)

    async def _seated(
        self,
        place: AbstractContextManager[Seat],
        seat: Seat,
        sequence: Callable[[Seat], Awaitable[None]],
    ) -> None:
        try:
            await sequence(seat)
        finally:
            place.__exit__(None, None, None)

    def decode(self, slot: int, n: int, log: list[float] | None = None) -> None:
        """Start a sequence of n single tokens in a slot; it writes down when it got each."""

        async def sequence(seat: Seat) -> None:
            for token in range(n):
                assert await seat.run(rows(slot, [token])) == (slot, (token,), 1)
                if log is not None:
                    log.append(trio.current_time())

        self.start(sequence)


def rows(slot: int, tokens: list[int], n_out: int = 1) -> Rows:
    return Rows(slot, tokens, n_out, lambda logits: None, Account())


@asynccontextmanager
async def open_bench(config: EngineConfig | None = None, max_rows: int = 16) -> AsyncIterator[Bench]:
    async with trio.open_nursery() as nursery:

        def start(task: Callable[[], Awaitable[None]]) -> None:
            nursery.start_soon(task)

        passes = FakePasses()
        yield Bench(passes, Batcher(passes, start, config or EngineConfig(mixed_rows=4), max_rows), nursery)


async def test_whoever_is_ready_shares_a_step() -> None:
    async with open_bench() as bench:
        for slot in range(3):
            bench.decode(slot, 4)
    assert bench.passes.steps == [{0: 1, 1: 1, 2: 1}] * 4


async def test_sequences_join_and_leave_between_steps() -> None:
    async with open_bench() as bench:
        bench.decode(0, 5)
        await trio.sleep(1.5)
        bench.decode(1, 2)
    assert bench.passes.steps == [{0: 1}, {0: 1}, {0: 1, 1: 1}, {0: 1, 1: 1}, {0: 1}]
    assert bench.passes.began_s == [STEP_S * n for n in range(5)]


async def test_a_step_waits_for_nobody_who_is_away() -> None:
    async with open_bench() as bench:

        async def slow(seat: Seat) -> None:
            await seat.run(rows(1, [0]))
            with seat.away():
                await trio.sleep(10)
            await seat.run(rows(1, [1]))

        bench.start(slow)
        bench.decode(0, 3)
    assert bench.passes.steps == [{0: 1, 1: 1}, {0: 1}, {0: 1}, {1: 1}]
    assert bench.passes.began_s == [0.0, 1.0, 2.0, 11.0]


async def test_a_prompt_is_cut_beside_answers_and_whole_alone() -> None:
    async with open_bench() as bench:
        got: list[Any] = []

        async def prompt(seat: Seat) -> None:
            got.append(await seat.run(rows(7, list(range(10)))))

        bench.decode(0, 2)
        bench.start(prompt)
    assert bench.passes.steps == [{0: 1, 7: 4}, {0: 1, 7: 4}, {7: 2}]
    assert got == [(7, (8, 9), 1)]


async def test_a_cut_prompt_asks_for_logits_at_its_end_only() -> None:
    async with open_bench() as bench:
        with bench.batcher.seat() as seat:
            await seat.run(rows(0, list(range(40))))
    assert bench.passes.n_out == [0, 0, 1]


def draft(slot: int, n: int) -> Rows:
    return Rows(slot, list(range(n)), n, lambda logits: None, Account(), tentative=True)


async def test_a_draft_rides_along_and_is_never_cut() -> None:
    async with open_bench() as bench:

        async def drafting(seat: Seat) -> None:
            for n in (6, 3):
                assert await seat.run(draft(1, n)) == (1, tuple(range(n)), n)

        async def prompt(seat: Seat) -> None:
            await seat.run(rows(7, list(range(10))))

        bench.start(prompt)
        bench.decode(0, 2)
        bench.start(drafting)
    assert bench.passes.steps == [{0: 1, 1: 6, 7: 4}, {0: 1, 1: 3, 7: 4}, {7: 2}]


async def test_a_draft_has_as_many_guesses_as_there_is_room_for() -> None:
    """It asks once: what it guessed is worth nothing behind another token."""
    got: list[Any] = []
    async with open_bench(EngineConfig(mixed_rows=4), max_rows=8) as bench:

        async def drafting(slot: int, seat: Seat) -> None:
            got.append(await seat.run(draft(slot, 6), may_be_cut=False))

        async def prompt(seat: Seat) -> None:
            await seat.run(rows(7, list(range(5))))

        bench.start(prompt)
        for slot in range(3):
            bench.start(partial(drafting, slot))
    assert [step.pop(7) for step in bench.passes.steps] == [4, 1]
    assert sorted(bench.passes.steps[0].values()) == [1, 1, 2]
    assert sorted((tokens, n_out) for _, tokens, n_out in got) == [((0,), 1), ((0,), 1), ((0, 1), 2)]
    assert sum(bench.passes.tentative) == 1, "one token alone is run for sure"


async def test_rows_that_must_not_be_cut_get_a_step_beside_endless_answers() -> None:
    config = EngineConfig(mixed_rows=4, patience_steps=3)
    async with open_bench(config) as bench:
        for slot in range(2):
            bench.decode(slot, 20)
        with bench.batcher.seat() as seat:
            assert await seat.run(rows(7, list(range(16)), 16), may_be_cut=False) == (7, tuple(range(16)), 16)
        assert trio.current_time() <= (config.patience_steps + 2) * STEP_S
    assert {7: 16} in bench.passes.steps


@pytest.mark.parametrize(
    ("speculate", "wait_s", "n_tokens", "expected"),
    [
        ("auto", 1.5, 1, True),
        ("auto", 0.5, 1, False),
        ("auto", 1.5, 8, True),
        ("auto", 0.05, 8, False),
        ("always", 0.0, 1, True),
        ("never", 9.0, 1, False),
    ],
)
async def test_guesses_are_wanted_where_steps_wait(
    speculate: Speculate, wait_s: float, n_tokens: int, expected: bool
) -> None:
    async with open_bench(EngineConfig(speculate=speculate)) as bench:
        bench.passes.wait_s = wait_s
        with bench.batcher.seat() as seat:
            assert seat.wants_drafts is (speculate == "always")
            for _ in range(3):
                await seat.run(rows(0, [0]) if n_tokens == 1 else draft(0, n_tokens))
            assert seat.wants_drafts is expected


async def test_prompts_say_nothing_about_guesses() -> None:
    async with open_bench() as bench:
        with bench.batcher.seat() as seat:
            bench.passes.wait_s = 9.0
            await seat.run(rows(0, list(range(10))))
            assert not seat.wants_drafts
            await seat.run(rows(0, [1]))
            assert seat.wants_drafts


async def test_cancelled_before_its_step_it_never_runs() -> None:
    async with open_bench() as bench:
        bench.decode(0, 2)
        await trio.sleep(0.5)
        with trio.move_on_after(0.2), bench.batcher.seat() as seat:
            await seat.run(rows(1, [0]))
        assert trio.current_time() == pytest.approx(0.7)
    assert bench.passes.steps == [{0: 1}, {0: 1}]


async def test_cancelled_in_a_step_of_others_it_waits_for_its_end() -> None:
    async with open_bench() as bench:
        log: list[float] = []
        bench.decode(0, 2, log)
        with bench.batcher.seat() as seat, trio.move_on_after(0.5):
            await trio.lowlevel.checkpoint()
            await seat.run(rows(1, [0]))
        assert trio.current_time() == pytest.approx(1.0)
    assert bench.passes.steps == [{0: 1, 1: 1}, {0: 1}]
    assert log == [1.0, 2.0]
    assert not bench.passes.cancelled


async def test_a_step_that_everybody_left_ends_at_once() -> None:
    async with open_bench() as bench:
        with bench.batcher.seat() as seat, bench.batcher.seat() as other, trio.move_on_after(0.5):
            async with trio.open_nursery() as nursery:
                for slot, each in enumerate((seat, other)):
                    nursery.start_soon(each.run, rows(slot, [0]))
        assert trio.current_time() == pytest.approx(0.5)
        assert bench.passes.cancelled == 1
        bench.decode(0, 1)
    assert bench.passes.steps == [{0: 1, 1: 1}, {0: 1}]


async def test_an_error_is_everybodys_in_the_step_and_nobodys_afterwards() -> None:
    errors: list[int] = []

    async def ask(seat: Seat, slot: int) -> None:
        try:
            await seat.run(rows(slot, [0]))
        except DeviceError:
            errors.append(slot)

    async with open_bench() as bench:
        bench.passes.error = DeviceError("broken")
        with bench.batcher.seat() as seat, bench.batcher.seat() as other:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, seat, 0)
                nursery.start_soon(ask, other, 1)
        bench.passes.error = None
        bench.decode(2, 1)
    assert sorted(errors) == [0, 1]
    assert bench.passes.steps[-1] == {2: 1}


async def test_a_failure_of_one_take_is_that_sequences_only() -> None:
    got: dict[int, Any] = {}

    async def ask(slot: int, seat: Seat) -> None:
        try:
            got[slot] = await seat.run(rows(slot, [0]))
        except DeviceError as error:
            got[slot] = error

    async with open_bench() as bench:
        error = DeviceError("bad logits")
        bench.passes.failures[1] = error
        for slot in range(3):
            bench.start(partial(ask, slot))
    assert bench.passes.steps == [{0: 1, 1: 1, 2: 1}]
    assert got == {0: (0, (0,), 1), 1: error, 2: (2, (0,), 1)}


async def test_no_rows_are_refused() -> None:
    async with open_bench() as bench:
        with bench.batcher.seat() as seat, pytest.raises(UsageError, match="no tokens"):
            await seat.run(rows(0, []))
        bench.decode(0, 1)
    assert bench.passes.steps == [{0: 1}]


async def test_where_steps_wait_several_are_under_way() -> None:
    async with open_bench() as bench:
        bench.passes.wait_s = STEP_S
        for slot in range(4):
            bench.decode(slot, 6)
    sizes = [len(step) for step in bench.passes.steps]
    assert sizes[0] == 4  # nothing is known yet
    assert set(sizes[1:]) == {2}
    assert bench.passes.began_s[1] == bench.passes.began_s[2]


async def test_a_shutdown_ends_those_who_wait() -> None:
    passes = FakePasses()
    errors: list[Exception] = []
    async with trio.open_nursery() as outer, trio.open_nursery() as inner:
        batcher = Batcher(passes, inner.start_soon, EngineConfig(), 16)

        async def ask() -> None:
            with batcher.seat() as seat:
                try:
                    await seat.run(rows(0, [0]))
                except EngineStoppedError as error:
                    errors.append(error)

        outer.start_soon(ask)
        await trio.sleep(0.5)
        inner.cancel_scope.cancel()
    assert len(errors) == 1


@pytest.mark.parametrize("seed", range(40))
async def test_a_shutdown_at_any_moment_ends_everything(seed: int) -> None:
    """Nothing waits, shielded, for a step that never begins."""
    rng = random.Random(seed)
    tasks = EngineTasks()

    class Quick(FakePasses):
        async def run(self, asked: Sequence[Rows]) -> tuple[list[Any], PassTimes]:
            await trio.sleep(rng.uniform(0.5, 2.0))
            return [None] * len(asked), PassTimes(1.0, rng.choice([0.0, 4.0]))

    batcher = Batcher(Quick(), tasks.start, EngineConfig(), 16)

    async def sequence(slot: int) -> None:
        with batcher.seat() as seat:
            while True:
                await seat.run(rows(slot, [0]))

    with trio.fail_after(1000):
        async with trio.open_nursery() as nursery:
            await nursery.start(tasks.run)
            for slot in range(1 + seed % 8):
                tasks.start(partial(sequence, slot))
            await trio.sleep(rng.uniform(5.0, 20.0))
            nursery.cancel_scope.cancel()
