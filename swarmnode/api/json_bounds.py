"""How rich a JSON text is, before it is parsed. Pure.

`json.loads` is one call that holds Python's lock: 8 MB of `[],[],` take 1.5 s and 200 MB, and no row leaves meanwhile.
"""

from __future__ import annotations

from swarmnode.errors import UsageError

_OUTSIDE = (b"[", b"{", b",")
_ESCAPED_QUOTES = 16
"""Quotation marks within strings that weigh as one mark: the text of a program has many, and they cost little."""


def check_marks_untrusted(text: bytes, most: int) -> None:
    """UsageError if there are more than `most` lists, objects, strings and commas, not counting within strings.

    Whatever has fewer such characters in all, as nearly every text has, is counted within 1 ms a megabyte.
    """
    if sum(text.count(mark) for mark in (*_OUTSIDE, b'"')) > most and _exceeds(text, most):
        raise UsageError(f"the body has more than {most} lists, objects, strings and commas")


def _exceeds(text: bytes, most: int) -> bool:
    """Goes from quotation mark to quotation mark; in Python, so that others get the lock in between."""
    place = n_marks = n_escaped = 0
    while n_marks + n_escaped // _ESCAPED_QUOTES <= most:
        start = text.find(b'"', place)
        end = start if start >= 0 else len(text)
        n_marks += sum(text.count(mark, place, end) for mark in _OUTSIDE)
        if start < 0:
            return n_marks > most
        n_marks += 1
        place, n_quotes = _end_of_string(text, start + 1, (most + 1) * _ESCAPED_QUOTES - n_escaped)
        n_escaped += n_quotes
    return True


def _end_of_string(text: bytes, start: int, most_escaped: int) -> tuple[int, int]:
    """Behind its last quotation mark, and how many before it are escaped; looks at no more than `most_escaped`."""
    place, n_escaped = start, 0
    while n_escaped < most_escaped:
        quote = text.find(b'"', place)
        if quote < 0:
            return len(text), n_escaped
        before = text[place:quote]
        n_backslashes = len(before) - len(before.rstrip(b"\\"))
        place = quote + 1
        if n_backslashes % 2 == 0:
            break
        n_escaped += 1
    return place, n_escaped
