"""Tells control tokens that a chat template writes from text of a request that spells one. Pure.

The tokens in the template's own literals are put between two marks before it is compiled. Whatever the template then
does with text, only what comes out between marks is a token; everything else is plain text, also a spelling that comes
about when pieces of a request are joined, or when a part is cut out of one (docs/decisions/0039-control-tokens.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_OPEN, _CLOSE = "\udffe", "\udfff"
"""Halves of characters: text that holds one alone is not valid Unicode and makes no prompt anyway, so nothing is
lost when a request with these two is refused."""
_MARKS = re.compile(f"[{_OPEN}{_CLOSE}]")
_MARK_BYTES = tuple(mark.encode("utf-8", "surrogatepass") for mark in (_OPEN, _CLOSE))


class ControlMarks:
    """Marks for these tokens."""

    def __init__(self, tokens: Iterable[str]) -> None:
        """`tokens`: as they are spelt (`<|im_end|>`)."""
        longest_first = sorted(filter(None, tokens), key=len, reverse=True)
        spelt = "|".join(map(re.escape, longest_first)) or "(?!)"  # (?!): nothing
        self._spelt = re.compile(f"({spelt})")
        self._marked = re.compile(f"{_OPEN}({spelt}){_CLOSE}")

    def mark(self, literal: str) -> str:
        """A literal of the template, each token between marks; of several that begin together the longest counts."""
        return self._spelt.sub(rf"{_OPEN}\1{_CLOSE}", literal)

    def pieces(self, rendered: str) -> tuple[str, ...]:
        """Text, marked token, text, ..., text, without marks. A mark that was torn from its token makes no token."""
        parts = self._marked.split(rendered)
        return tuple(unmarked(part) for part in parts)

    def spelt_pieces(self, text: str) -> tuple[str, ...]:
        """The same of a text in which every spelling were a token."""
        return tuple(self._spelt.split(text))


def unmarked(text: str) -> str:
    """The text without marks."""
    return _MARKS.sub("", text)


def holds_marks(encoded: bytes) -> bool:
    """Whether UTF-8 (surrogates passed) holds a mark."""
    return any(mark in encoded for mark in _MARK_BYTES)
