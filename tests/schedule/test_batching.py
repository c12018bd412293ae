"""Which sequences share a step."""

from __future__ import annotations

import pytest

from swarmnode.config import EngineConfig
from swarmnode.schedule.batching import StepTimes, Wanted, cut_step, may_begin, step_share

CONFIG = EngineConfig()


@pytest.mark.parametrize(
    ("n_tokens", "expected"),
    [
        ([1, 1, 1], [1, 1, 1]),
        ([500], [500]),
        ([700], [512]),
        ([700, 100], [512, 0]),
        ([300, 300], [300, 212]),
        ([1, 700], [1, 64]),
        ([700, 1, 1], [64, 1, 1]),
        ([40, 1, 40], [40, 1, 24]),
        ([1] * 600, [1] * 512 + [0] * 88),
        ([10] + [1] * 511, [1] + [1] * 511),
    ],
)
def test_single_tokens_come_first_and_prompts_fill_the_rest(n_tokens: list[int], expected: list[int]) -> None:
    wanted = [Wanted(n, may_be_cut=True) for n in n_tokens]
    assert cut_step(wanted, 512, 64) == expected


def test_what_must_not_be_cut_waits_for_room_or_runs_alone() -> None:
    whole = Wanted(100, may_be_cut=False)
    assert cut_step([Wanted(1, True), whole], 512, 64) == [1, 0]
    assert cut_step([whole, Wanted(450, True)], 512, 64) == [100, 412]
    assert cut_step([Wanted(900, may_be_cut=False), Wanted(900, may_be_cut=False)], 512, 64) == [900, 0]


def test_drafts_ride_along_and_are_never_cut() -> None:
    draft, token, prompt = Wanted(8, False, is_draft=True), Wanted(1, True), Wanted(700, True)
    assert cut_step([draft, token, prompt], 512, 64) == [8, 1, 64]
    assert cut_step([prompt, token, draft], 512, 64) == [64, 1, 8]
    assert cut_step([draft] * 3, 20, 64) == [8, 8, 0]
    assert cut_step([draft, draft, prompt], 20, 64) == [8, 8, 4]
    assert cut_step([draft, draft, token], 15, 64) == [8, 0, 1]
    assert cut_step([draft], 4, 4) == [8]


@pytest.mark.parametrize(
    ("n_waiting", "n_present", "n_under_way", "n_steps", "expected"),
    [
        (0, 0, 0, 1, False),
        (1, 1, 0, 1, True),
        (1, 64, 0, 1, True),
        (1, 64, 1, 1, False),
        (31, 64, 1, 2, True),
        (16, 64, 1, 2, True),
        (15, 64, 1, 2, False),
        (64, 128, 2, 2, False),
    ],
)
def test_when_a_step_begins(
    n_waiting: int, n_present: int, n_under_way: int, n_steps: int, expected: bool
) -> None:
    assert may_begin(n_waiting, n_present, n_under_way, n_steps) is expected


def test_sequences_are_divided_among_steps() -> None:
    assert [step_share(n, 2) for n in (1, 2, 3, 64)] == [1, 1, 2, 32]


def test_steps_that_wait_are_divided_so_that_others_compute_meanwhile() -> None:
    def n_steps(compute_s: float, wait_s: float) -> int:
        times = StepTimes(CONFIG)
        for _ in range(20):
            times.add(compute_s, wait_s)
        return times.n_steps

    assert StepTimes(CONFIG).n_steps == 1
    assert n_steps(1.0, 0.0) == 1
    assert n_steps(1.0, 0.05) == 1
    assert n_steps(1.0, 0.5) == 2
    assert n_steps(1.0, 1.0) == 2
    assert n_steps(1.0, 1.5) == 3
    assert n_steps(1.0, 100.0) == CONFIG.max_steps
    assert n_steps(0.0, 1.0) == CONFIG.max_steps


def test_whether_the_compute_thread_is_idle() -> None:
    times = StepTimes(CONFIG)
    assert not times.leave_idle(1)
    for _ in range(20):
        times.add(1.0, 4.0)
    assert [n for n in range(1, 5) if times.leave_idle(n)] == [1, 2]
    for _ in range(20):
        times.add(1.0, 0.9)
    assert not times.leave_idle(1)


def test_what_steps_took_long_ago_is_forgotten() -> None:
    times = StepTimes(CONFIG)
    for _ in range(20):
        times.add(1.0, 10.0)
    for _ in range(40):
        times.add(1.0, 0.0)
    assert times.n_steps == 1
