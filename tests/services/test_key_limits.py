"""What a key may ask at a time and in a minute, and what counting it leaves behind."""

from __future__ import annotations

import json
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from swarmnode.errors import StoreError, UsageError
from swarmnode.services.api_keys import ApiKey, KeyRing, new_key, read_keys
from swarmnode.services.key_limits import Counted, Exhausted, KeyLimits

KEY = ApiKey("laptop", "sk-swarm-abcd", "00" * 32, 1)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_requests_at_a_time() -> None:
    limits, key = KeyLimits(Clock(), 5), replace(KEY, max_concurrent=2)
    with ExitStack() as running:
        for _ in range(2):
            assert isinstance(running.enter_context(limits.request(key)), Counted)
        with limits.request(key) as exhausted:
            assert isinstance(exhausted, Exhausted)
            assert exhausted.retry_after_s == 5
            assert "2 answers at a time, and has them" in exhausted.reason
        with limits.request(replace(key, hash="11" * 32)) as counted:
            assert isinstance(counted, Counted), "another key"
    assert len(limits) == 0
    with limits.request(key) as counted:
        assert isinstance(counted, Counted)


def test_each_answer_of_a_request_counts() -> None:
    """One request for 64 answers once counted as one."""
    clock = Clock()
    limits, key = KeyLimits(clock, 5), replace(KEY, max_concurrent=4, per_minute=6)
    with limits.request(key) as first:
        assert isinstance(first, Counted)
        assert first.answers(3) is None
        with limits.request(key) as second:
            assert isinstance(second, Counted)
            exhausted = second.answers(2)
            assert exhausted == Exhausted("this key may have 4 answers at a time, and has 3", 5)
            with limits.request(key) as third:
                assert isinstance(third, Counted), "what was refused does not count"
                assert third.answers(1) is None
        with limits.request(key) as fourth:
            assert isinstance(fourth, Counted), "the third has ended"
    clock.now_s += 20
    with limits.request(key) as fifth:
        assert isinstance(fifth, Counted)
        exhausted = fifth.answers(4)
        assert exhausted == Exhausted("this key may ask for 6 answers a minute, and has", 40)
    clock.now_s += 40
    with limits.request(key) as sixth:
        assert isinstance(sixth, Counted)
        assert sixth.answers(4) is None
    assert len(limits._uses[key.hash].began_s) == 4


@pytest.mark.parametrize(
    ("key", "says"),
    [
        (replace(KEY, max_concurrent=4), "4 answers at a time, and this request is for 5: ask for fewer"),
        (replace(KEY, per_minute=1), "1 answer a minute, and this request is for 5: ask for fewer"),
        (
            replace(KEY, per_minute=3, max_concurrent=4),
            "3 answers a minute, and this request is for 5: ask for fewer",
        ),
    ],
)
def test_more_answers_than_a_key_may_ever_have(key: ApiKey, says: str) -> None:
    limits = KeyLimits(Clock(), 5)
    for _ in range(10):
        with limits.request(key) as counted:
            assert isinstance(counted, Counted)
            exhausted = counted.answers(5)
            assert exhausted is not None
            assert says in exhausted.reason
            assert exhausted.retry_after_s is None
    assert len(limits) == 0


def test_a_body_that_took_longer_than_the_window_counts_from_when_it_is_read() -> None:
    clock = Clock()
    limits, key = KeyLimits(clock, 5), replace(KEY, per_minute=2)
    with limits.request(key) as slow:
        assert isinstance(slow, Counted)
        clock.now_s += 100
        assert slow.answers(2) is None
    with limits.request(key) as exhausted:
        assert isinstance(exhausted, Exhausted)
        assert exhausted.retry_after_s == 60


def test_a_request_that_fails_gives_its_place_back() -> None:
    limits, key = KeyLimits(Clock(), 5), replace(KEY, max_concurrent=1)
    for _ in range(3):
        with suppress(ZeroDivisionError), limits.request(key) as counted:
            assert isinstance(counted, Counted)
            raise ZeroDivisionError


def test_requests_a_minute() -> None:
    """Within any minute, whenever it begins; those that were refused do not count."""
    clock = Clock()
    limits, key = KeyLimits(clock, 5), replace(KEY, per_minute=3)

    def ask() -> int | None:
        with limits.request(key) as exhausted:
            return exhausted.retry_after_s if isinstance(exhausted, Exhausted) else None

    assert ask() is None
    clock.now_s += 50
    assert [ask(), ask()] == [None, None]
    assert [ask() for _ in range(100)] == [10] * 100
    clock.now_s += 9.5
    assert ask() == 1
    clock.now_s += 0.5
    assert [ask(), ask()] == [None, 50]
    clock.now_s += 60
    with limits.request(replace(key, hash="11" * 32)):
        pass
    assert len(limits) == 1, "the first key left nothing"


def test_a_key_without_limits_leaves_nothing() -> None:
    limits = KeyLimits(Clock(), 5)
    for _ in range(1000):
        with limits.request(KEY) as counted:
            assert counted is None
    assert len(limits) == 0


def test_what_is_kept_is_bounded_by_the_limit() -> None:
    limits, key = KeyLimits(Clock(), 5), replace(KEY, per_minute=7)
    for _ in range(1000):
        with limits.request(key):
            pass
    assert len(limits._uses[KEY.hash].began_s) == 7


def test_a_limit_that_was_made_lower_is_waited_for_until_it_has_room() -> None:
    """By hand, in the file, while the backbone runs."""
    clock = Clock()
    limits, key = KeyLimits(clock, 5), replace(KEY, per_minute=3)
    for _ in range(3):
        with limits.request(key):
            clock.now_s += 10
    with limits.request(replace(key, per_minute=1)) as exhausted:
        assert isinstance(exhausted, Exhausted)
        assert exhausted.retry_after_s == 50


def test_limits_are_kept_beside_the_hash_and_old_files_have_none(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = new_key(path, "a", max_concurrent=2, per_minute=60)
    new_key(path, "b")
    first, second = read_keys(path)
    assert (first.max_concurrent, first.per_minute) == (2, 60)
    assert (second.max_concurrent, second.per_minute) == (None, None)
    assert set(json.loads(path.read_text())["keys"][1]) == {"name", "shown", "hash", "created_s"}, "as before"
    entry = KeyRing(path).entry(key)
    assert entry == first
    assert KeyRing(path).entry(key + "x") is None


@pytest.mark.parametrize(
    "limit", [{"max_concurrent": 0}, {"per_minute": 10_001}, {"per_minute": True}], ids=str
)
def test_limits_out_of_range(tmp_path: Path, limit: dict[str, int]) -> None:
    path = tmp_path / "keys.json"
    with pytest.raises(UsageError, match="1 to 1024 answers at a time and 1 to 10000 a minute"):
        new_key(path, "a", **limit)
    assert not path.exists()
    new_key(path, "a")
    entries = json.loads(path.read_text())["keys"]
    path.write_text(json.dumps({"keys": [entries[0] | limit]}))
    with pytest.raises(StoreError, match=f"{next(iter(limit))} .* is no limit of 1 to .*; correct it"):
        read_keys(path)
