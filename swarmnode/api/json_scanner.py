"""Finds the end of a JSON object or list in a text that comes in pieces. Pure."""

from __future__ import annotations


class JsonScanner:
    """Counts brackets outside of strings; what the value says, or whether it is valid, is not its business."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self.is_done = False
        """The bracket that the value began with was closed."""

    def push(self, text: str) -> int:
        """How many characters of `text` still belong to the value."""
        for place, char in enumerate(text):
            if self.is_done:
                return place
            self._step(char)
        return len(text)

    def _step(self, char: str) -> None:
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._in_string = False
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.is_done = self._depth <= 0
