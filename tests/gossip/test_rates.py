"""When the next of something may happen."""

from __future__ import annotations

from swarmnode.gossip.rates import Pace, TokenBucket

from .samples import CONFIG


def happenings(pace: Pace, until_s: float, from_s: float = 0.0) -> list[float]:
    """Something happens as often as it may, looked at four times a second."""
    happened = []
    for quarter in range(int(4 * from_s), int(4 * until_s)):
        now_s = quarter / 4
        if now_s >= pace.next_s:
            pace.happened(now_s)
            happened.append(now_s)
    return happened


def configured() -> Pace:
    return Pace(CONFIG.issue_interval_s, CONFIG.issue_burst, CONFIG.have_interval_s)


def test_four_may_follow_each_other_then_one_in_five_seconds() -> None:
    assert happenings(configured(), 25.0) == [0, 1, 2, 3, 5, 10, 15, 20]


def test_who_was_silent_may_say_as_much_again_and_no_more() -> None:
    pace = configured()
    happenings(pace, 30.0)
    assert happenings(pace, 1020.0, 1000.0) == [1000, 1001, 1002, 1003, 1005, 1010, 1015]


def test_without_a_burst_there_is_one_an_interval() -> None:
    assert happenings(Pace(5.0, 1, 1.0), 16.0) == [0, 5, 10, 15]


def test_an_exception_is_one_and_is_paid_for() -> None:
    pace = configured()
    assert happenings(pace, 4.0) == [0, 1, 2, 3]
    pace.next_s = 4.0
    assert happenings(pace, 21.0, 4.0) == [4, 10, 15, 20]


def test_a_bucket_that_owes_gives_nothing_until_it_has_paid() -> None:
    bucket = TokenBucket(2.0, 10, 0.0)
    bucket.spend(16, 0.0)
    assert bucket.left(1.0) == -4
    assert not bucket.take(1, 2.5)
    assert bucket.take(1, 3.5)
    assert bucket.left(100.0) == 10
