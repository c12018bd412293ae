"""What is counted as a mark, against a count that json makes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.api.json_bounds import check_marks_untrusted
from swarmnode.errors import UsageError

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.integers() | st.text(st.sampled_from('a"\\,[{\u0390'), max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=20,
)


def marks_of(value: Any) -> int:
    """Lists, objects, strings and commas."""
    if isinstance(value, str):
        return 1
    if isinstance(value, list):
        return 1 + max(0, len(value) - 1) + sum(map(marks_of, value))
    if isinstance(value, dict):
        inner = sum(1 + marks_of(item) for item in value.values())
        return 1 + max(0, len(value) - 1) + inner
    return 0


@given(value=VALUES)
def test_exactly_the_marks_outside_of_strings(value: Any) -> None:
    n_marks = marks_of(value)
    text = json.dumps(value).encode()
    check_marks_untrusted(text, n_marks)
    if n_marks:
        with pytest.raises(UsageError, match="lists, objects, strings and commas"):
            check_marks_untrusted(text, n_marks - 1)


def test_a_long_program_is_one_string() -> None:
    program = 'x = {"a": [1, 2], "b": "c"}\n' * 3000
    check_marks_untrusted(json.dumps({"prompt": program}).encode(), 3000)


@pytest.mark.parametrize(
    "text",
    [
        b'{"prompt":[' + b"[]," * 50_000 + b"1]}",
        b"[" * 50_000,
        b'["' + b'\\"' * 10**6,
        b'["' + b"a" * 10**6 + b'","' * 20_000,
        b'[""' + b',""' * 20_000,
    ],
    ids=["lists", "nested", "quotes", "open", "strings"],
)
def test_rich_ones_are_refused(text: bytes) -> None:
    with pytest.raises(UsageError):
        check_marks_untrusted(text, 20_000)
