"""When a worker steps back, and how far."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.config import RestraintConfig
from swarmnode.errors import UsageError
from swarmnode.schedule.restraint import Conditions, Hours, Restraint, Wishes

CONFIG = RestraintConfig()
GB, MB = 10**9, 10**6
WISHES = Wishes(budget_bytes=400 * MB)
EASY = Conditions(minute=600, available_bytes=4 * GB, total_bytes=8 * GB, stalled_percent=0.0)
RESERVE = int(0.05 * 8 * GB)


def short(available: int) -> Conditions:
    return Conditions(minute=600, available_bytes=available, total_bytes=8 * GB)


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("22:00-07:30", [22 * 60, 0, 449], [450, 21 * 60 + 59, 720]),
        ("9:00-17:00", [540, 1019], [539, 1020]),
        ("00:00-24:00", [0, 720, 1439], []),
    ],
)
def test_hours(text: str, inside: list[int], outside: list[int]) -> None:
    hours = Hours.parse(text)
    assert all(hours.holds(minute) for minute in inside)
    assert not any(hours.holds(minute) for minute in outside)
    assert Hours.parse(str(hours)) == hours


@pytest.mark.parametrize("text", ["", "22-7", "25:00-07:00", "22:60-07:00", "22:00", "٢٢:00-07:00"])
def test_what_are_no_hours(text: str) -> None:
    with pytest.raises(UsageError):
        Hours.parse(text)


def test_nothing_speaks_against_it() -> None:
    stance = Restraint(CONFIG).decide(WISHES, EASY, 400 * MB, 0.0)
    assert (stance.budget_bytes, stance.pause, stance.memory) == (400 * MB, "", "")
    unknown = Restraint(CONFIG).decide(WISHES, Conditions(minute=0), 400 * MB, 0.0)
    assert (unknown.budget_bytes, unknown.pause) == (400 * MB, "")


@pytest.mark.parametrize(
    ("wishes", "conditions", "says"),
    [
        (Wishes(1, is_paused=True), Conditions(0), "told to pause"),
        (Wishes(1), Conditions(0, on_battery=True), "on battery"),
        (Wishes(1, on_battery="serve"), Conditions(0, on_battery=True), ""),
        (Wishes(1), Conditions(0, on_battery=False), ""),
        (Wishes(1, hours=(Hours(0, 60),)), Conditions(59), ""),
        (Wishes(1, hours=(Hours(0, 60),)), Conditions(60), "it is 01:00, and it lends at 00:00-01:00"),
        (Wishes(1, hours=(Hours(0, 60), Hours(60, 120))), Conditions(60), ""),
    ],
)
def test_pauses(wishes: Wishes, conditions: Conditions, says: str) -> None:
    assert Restraint(CONFIG).decide(wishes, conditions, 0, 0.0).pause == says


def test_short_memory_gives_up_what_is_missing_at_least() -> None:
    restraint = Restraint(CONFIG)
    first = restraint.decide(WISHES, short(RESERVE - 50 * MB), 400 * MB, 0.0)
    assert first.budget_bytes == 300 * MB  # a quarter is more than what is missing
    assert "350 MB of memory are available" in first.memory
    again = restraint.decide(WISHES, short(RESERVE - 200 * MB), 300 * MB, CONFIG.settle_s)
    assert again.budget_bytes == 100 * MB


def test_one_step_has_time_to_take_effect() -> None:
    restraint = Restraint(CONFIG)
    conditions = short(RESERVE - 50 * MB)
    assert restraint.decide(WISHES, conditions, 400 * MB, 0.0).budget_bytes == 300 * MB
    assert restraint.decide(WISHES, conditions, 390 * MB, CONFIG.settle_s - 1).budget_bytes == 300 * MB


def test_stalls_count_as_well() -> None:
    stalled = Conditions(600, 4 * GB, 8 * GB, stalled_percent=40.0)
    stance = Restraint(CONFIG).decide(WISHES, stalled, 400 * MB, 0.0)
    assert stance.budget_bytes == 300 * MB
    assert "40 % of the time" in stance.memory


def test_stalls_are_nothing_to_a_worker_whose_experts_would_help_nobody() -> None:
    stalled = Conditions(600, 22 * GB, 24 * GB, stalled_percent=40.0)
    assert Restraint(CONFIG).decide(WISHES, stalled, 3 * MB, 0.0).memory == ""
    assert "wait for memory" in Restraint(CONFIG).decide(Wishes(GB), stalled, 500 * MB, 0.0).memory


def test_it_comes_back_slowly_and_wholly() -> None:
    restraint = Restraint(CONFIG)
    restraint.decide(WISHES, short(RESERVE - 300 * MB), 400 * MB, 0.0)
    assert restraint.decide(WISHES, EASY, 100 * MB, CONFIG.calm_s - 1).budget_bytes == 100 * MB
    budgets = [
        restraint.decide(WISHES, EASY, 0, (1 + step) * CONFIG.calm_s).budget_bytes // MB for step in range(4)
    ]
    assert budgets == [200, 300, 400, 400]
    assert restraint.decide(WISHES, EASY, 0, 9 * CONFIG.calm_s).memory == ""


def test_it_does_not_come_back_into_the_reserve() -> None:
    restraint = Restraint(CONFIG)
    restraint.decide(WISHES, short(0), 400 * MB, 0.0)
    stance = restraint.decide(WISHES, short(RESERVE + 10 * MB), 0, CONFIG.calm_s)
    assert stance.budget_bytes == 10 * MB
    assert restraint.decide(WISHES, short(RESERVE), 0, 3 * CONFIG.calm_s).budget_bytes == 10 * MB


def test_the_reserve_fits_the_machine_or_the_owner() -> None:
    restraint = Restraint(CONFIG)
    assert restraint.reserve_bytes(WISHES, Conditions(0, total_bytes=GB)) == GB // 4
    assert restraint.reserve_bytes(WISHES, Conditions(0, total_bytes=100 * GB)) == 5 * GB
    assert restraint.reserve_bytes(Wishes(1, keep_free_bytes=7), Conditions(0, total_bytes=GB)) == 7
    assert restraint.reserve_bytes(WISHES, Conditions(0)) == 0


@given(
    st.lists(
        st.tuples(st.integers(0, 8 * GB), st.floats(0, 100), st.floats(0, 1000), st.integers(0, 10**9)),
        max_size=30,
    )
)
def test_never_more_than_the_owner_allows(news: list[tuple[int, float, float, int]]) -> None:
    restraint, now_s = Restraint(CONFIG), 0.0
    for available, stalled, wait_s, held in news:
        now_s += wait_s
        stance = restraint.decide(WISHES, Conditions(0, available, 8 * GB, stalled), held, now_s)
        assert 0 <= stance.budget_bytes <= WISHES.budget_bytes
        assert (stance.memory == "") == (stance.budget_bytes == WISHES.budget_bytes)
