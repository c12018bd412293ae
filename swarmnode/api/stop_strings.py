"""Finds stop strings in a text that comes in pieces, wherever they are cut. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def kept_back(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of `text` that may be the beginning of one of `marks`."""
    longest = max((len(mark) for mark in marks), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[-length:]
        if any(mark.startswith(end) for mark in marks):
            return length
    return 0


class StopFinder:
    """Passes text on up to the first stop string, and holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False
        """A stop string came: nothing passes any more."""

    def push(self, text: str) -> str:
        """The text that has become certain."""
        if self.found or not self._stops:
            return "" if self.found else text
        text = self._held + text
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        cut = len(text) - kept_back(text, self._stops)
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """What was held back: the text ends without a stop string."""
        held, self._held = self._held, ""
        return held
