"""The header Range, for one range of bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.api.byte_range import is_fresh, parse_range
from swarmnode.errors import UsageError


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("bytes=0-0", range(1)),
        ("bytes=10-19", range(10, 20)),
        ("bytes=90-", range(90, 100)),
        ("bytes=90-1000", range(90, 100)),
        ("bytes=-10", range(90, 100)),
        ("bytes=-1000", range(100)),
        ("Bytes = 1 - 2", range(1, 3)),
        ("bytes=0-1,5-6", None),
        ("lines=1-2", None),
        ("nonsense", None),
    ],
)
def test_ranges(value: str, found: range | None) -> None:
    assert parse_range(value, 100) == found


@pytest.mark.parametrize(
    "value",
    [
        "bytes=",
        "bytes=-",
        "bytes=-0",
        "bytes=100-",
        "bytes=100-200",
        "bytes=5-4",
        "bytes=a-b",
        "bytes=1-2-3",
        "bytes=--1",
        "bytes=\u0661-\u0662",
        f"bytes=0-{'9' * 30}",
        "bytes=+1-2",
        "bytes=0x1-2",
    ],
)
def test_ranges_that_do_not_exist(value: str) -> None:
    with pytest.raises(UsageError):
        parse_range(value, 100)


@given(st.text(max_size=40) | st.text("bytes=0123456789-,", max_size=40), st.integers(1, 2**40))
def test_a_range_lies_within_the_file(value: str, n_bytes: int) -> None:
    try:
        found = parse_range(value, n_bytes)
    except UsageError:
        return
    assert found is None or 0 <= found.start < found.stop <= n_bytes


@pytest.mark.parametrize(
    ("value", "fresh"),
    [
        ("", False),
        ('"a"', True),
        ('"b", "a"', True),
        ('W/"a"', True),
        ("*", True),
        ('"b"', False),
        ("a", False),
    ],
)
def test_versions_that_a_client_has(value: str, fresh: bool) -> None:
    assert is_fresh(value, '"a"') is fresh
