"""Who is computed together: small jobs of one layer that wait anyway, and nobody else is worse off for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio
import trio.testing

from swarmnode.errors import DeviceError
from tests.services.jobs import QUEUE_CONFIG, Bench, NamedJob


async def test_those_that_wait_for_a_layer_are_computed_together() -> None:
    bench = Bench()
    async with trio.open_nursery() as nursery:
        await bench.start(
            nursery, ("a", 8, 1), ("b", 8, 1), ("c", 8, 2), ("d", 8, 1), ("e", 8, 2), ("f", 8, 1)
        )
        assert bench.queue.queued_pairs == 48
        await bench.runner.step()
        assert bench.batches == ["a"], "nobody waits for company"
        await bench.runner.step(2)
        assert bench.queue.queued_pairs == 0
    assert bench.batches == ["a", "bdf", "ce"]
    assert {name: computed.result for name, computed in bench.computed.items()} == {n: n for n in "abcdef"}


async def test_several_of_one_owner_are_computed_together() -> None:
    bench = Bench()
    async with trio.open_nursery() as nursery:
        for name in "abcd":
            nursery.start_soon(bench.job, name, 8, "me", 1)
            await trio.testing.wait_all_tasks_blocked()
        await bench.runner.step(2)
    assert bench.batches == ["a", "bcd"]
    assert bench.queue.queued_pairs == 0


async def test_who_comes_while_a_batch_is_computed_waits_for_the_next() -> None:
    bench = Bench()
    async with trio.open_nursery() as nursery:
        await bench.start(nursery, ("a", 1, 1), ("b", 1, 1))
        await bench.runner.step()
        await bench.start(nursery, ("c", 1, 1))
        await bench.runner.step(2)
    assert bench.batches == ["a", "b", "c"]


async def test_a_batch_is_no_wider_than_what_passed_the_self_test() -> None:
    bench = Bench()
    bench.names.max_width = 20
    async with trio.open_nursery() as nursery:
        await bench.start(
            nursery, ("a", 30, 1), *((name, 8, 1) for name in "bcde"), ("f", 3, 1), ("g", 30, 1)
        )
        await bench.runner.step(4)
    assert bench.batches == ["a", "bcf", "de", "g"], "one that is wider by itself is computed alone"


async def test_one_switch_computes_each_alone() -> None:
    bench = Bench(replace(QUEUE_CONFIG, coalesced_requests=1))
    async with trio.open_nursery() as nursery:
        await bench.start(nursery, *((name, 8, 1) for name in "abc"))
        await bench.runner.step(3)
    assert bench.batches == ["a", "b", "c"]


async def test_a_batch_has_a_most_of_requests() -> None:
    bench = Bench(replace(QUEUE_CONFIG, coalesced_requests=2))
    async with trio.open_nursery() as nursery:
        await bench.start(nursery, *((name, 1, 1) for name in "abcde"))
        await bench.runner.step(3)
    assert bench.batches == ["a", "bc", "de"]


async def test_prompts_are_computed_alone() -> None:
    bench = Bench()
    async with trio.open_nursery() as nursery:
        await bench.start(nursery, ("A", 65, 1), ("B", 65, 1), ("C", 65, 1), ("d", 1, 1))
        await bench.runner.step(4)
    assert bench.batches == ["A", "d", "B", "C"]


# ---- fairness


async def test_the_oldest_decides_the_layer_however_many_wait_for_another() -> None:
    bench = Bench()
    async with trio.open_nursery() as nursery:
        await bench.start(
            nursery, ("a", 8, 1), ("b", 8, 1), ("x", 8, 2), *((name, 8, 1) for name in "cdefghijklm")
        )
        await bench.runner.step(4)
    assert bench.batches == ["a", "bcdefghi", "x", "jklm"]


async def test_a_batch_counts_as_many_before_a_prompt_as_it_has_requests() -> None:
    bench = Bench(replace(QUEUE_CONFIG, small_before_large=3))
    async with trio.open_nursery() as nursery:
        small = [("b", 8, 1), ("c", 8, 1), ("d", 8, 1), ("e", 8, 2), ("f", 8, 2), ("g", 8, 3), ("h", 8, 4)]
        await bench.start(nursery, ("a", 1), *small, ("H", 100), ("I", 100))
        await bench.runner.step(7)
    assert bench.batches == ["a", "bcd", "H", "ef", "g", "I", "h"]


async def test_nobody_is_overtaken_by_more_than_so_many_pairs() -> None:
    bench = Bench(replace(QUEUE_CONFIG, max_overtaking_pairs=20))
    async with trio.open_nursery() as nursery:
        before = [("b", 8, 1), ("c", 8, 2), ("x", 8, 9)]
        behind = [("d", 8, 1), ("e", 8, 1), ("f", 8, 1), ("g", 4, 2), ("h", 1, 2)]
        await bench.start(nursery, ("a", 1), *before, *behind)
        await bench.runner.step(6)
    assert bench.batches == ["a", "bde", "cg", "x", "f", "h"], "x let 16 and 4 pairs pass, and no more"


async def test_the_overtaken_are_passed_over_too() -> None:
    """Whoever is too wide for the room that is left is overtaken by narrower ones, within the same bound."""
    bench = Bench(replace(QUEUE_CONFIG, max_overtaking_pairs=8))
    async with trio.open_nursery() as nursery:
        await bench.start(nursery, ("a", 1), ("b", 8, 1), ("w", 64, 1), ("c", 8, 1), ("d", 8, 1))
        await bench.runner.step(4)
    assert bench.batches == ["a", "bc", "w", "d"]


# ---- cancelled ones and errors


async def test_a_cancelled_one_is_left_out_of_a_batch_that_has_not_begun() -> None:
    bench = Bench()
    async with trio.open_nursery() as nursery:
        await bench.start(nursery, ("a", 1), ("b", 8, 1))
        async with trio.open_nursery() as impatient:
            await bench.start(impatient, ("c", 8, 1))
            await bench.start(nursery, ("d", 8, 1))
            await bench.runner.step()  # the turn is b's, with c and d: it waits for the compute thread
            impatient.cancel_scope.cancel()
        assert bench.queue.queued_pairs == 16
        await bench.runner.step()
    assert bench.batches == ["a", "bd"]
    assert bench.computed["d"].own_s == pytest.approx(bench.computed["d"].batch_s / 2)
    assert bench.queue.queued_pairs == 0


async def test_a_cancelled_leader_leaves_its_company_where_it_was() -> None:
    bench = Bench()
    async with trio.open_nursery() as nursery:
        await bench.start(nursery, ("a", 1))
        async with trio.open_nursery() as impatient:
            await bench.start(impatient, ("b", 8, 1))
            await bench.start(nursery, ("x", 8, 2), ("c", 8, 1), ("y", 8, 2), ("d", 8, 1))
            await bench.runner.step()
            impatient.cancel_scope.cancel()
        assert bench.queue.queued_pairs == 32
        await bench.runner.step(2)
    assert bench.batches == ["a", "xy", "cd"]
    assert bench.queue.queued_pairs == 0


async def test_one_that_is_cancelled_while_it_is_computed_harms_nobody() -> None:
    bench = Bench()
    scope = trio.CancelScope()

    async def cancelled() -> None:
        with scope:
            await bench.job("c", 8, "me", 1)

    async with trio.open_nursery() as nursery:
        await bench.start(nursery, ("a", 1))
        nursery.start_soon(bench.queue.run, "another", NamedJob("b", 8, scope.cancel, 1))
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(cancelled)
        await trio.testing.wait_all_tasks_blocked()
        await bench.start(nursery, ("d", 8, 1), ("e", 8, 1), ("x", 1), ("y", 1))
        await bench.runner.step(2)
        assert set(bench.computed) == {"a", "d", "e"}
        await bench.runner.step(2)  # the turn was passed on once: the runner would notice x and y at a time
    assert scope.cancelled_caught
    assert bench.batches == ["a", "bcde", "x", "y"]
    assert bench.queue.queued_pairs == 0


async def test_the_error_of_one_is_its_own() -> None:
    bench = Bench()
    errors: list[str] = []

    def fail() -> None:
        raise ValueError("mine")

    async def failing() -> None:
        with pytest.raises(ValueError, match="mine") as caught:
            await bench.queue.run("me", NamedJob("c", 8, fail, 1))
        errors.append(str(caught.value))

    async with trio.open_nursery() as nursery:
        await bench.start(nursery, ("a", 1), ("b", 8, 1))
        nursery.start_soon(failing)
        await trio.testing.wait_all_tasks_blocked()
        await bench.start(nursery, ("d", 8, 1))
        await bench.runner.step(2)
    assert bench.batches == ["a", "bcd"]
    assert errors == ["mine"]
    assert set(bench.computed) == {"a", "b", "d"}
    assert bench.queue.queued_pairs == 0


async def test_what_ends_a_batch_ends_its_first_and_the_others_have_their_turn() -> None:
    bench = Bench()

    def fail() -> None:
        raise DeviceError("broken")

    async def failing() -> None:
        with pytest.raises(DeviceError):
            await bench.queue.run("me", NamedJob("b", 8, fail, 1))

    async with trio.open_nursery() as nursery:
        await bench.start(nursery, ("a", 1))
        nursery.start_soon(failing)
        await trio.testing.wait_all_tasks_blocked()
        await bench.start(nursery, ("c", 8, 1), ("d", 8, 1))
        await bench.runner.step(3)
    assert bench.batches == ["a", "cd"]
    assert bench.queue.queued_pairs == 0


async def test_the_parts_of_a_batch_add_up_to_its_time() -> None:
    bench = Bench()
    async with trio.open_nursery() as nursery:
        await bench.start(nursery, ("a", 1), ("b", 8, 1), ("c", 16, 1), ("d", 40, 1))
        await bench.runner.step(2)
    b, c, d = (bench.computed[name] for name in "bcd")
    assert b.batch_s == c.batch_s == d.batch_s
    assert b.own_s + c.own_s + d.own_s == pytest.approx(b.batch_s)
    assert c.own_s == pytest.approx(2 * b.own_s)
    assert bench.queue._recent_pairs == pytest.approx(0.9 * 1 + 64), "each pair counts once"
