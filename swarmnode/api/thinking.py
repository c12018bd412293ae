"""Tells a model's thoughts (`<think>...</think>`) from its answer, piece by piece. Pure.

Thoughts go into `reasoning_content`: shown, and apart from `content`, so that an answer never looks empty while there
was one.
"""

from __future__ import annotations

from enum import Enum, auto

from swarmnode.api.stop_strings import kept_back

OPEN, CLOSE = "<think>", "</think>"


class _State(Enum):
    BEFORE = auto()
    """Nothing but blanks yet: a thought may begin."""
    THINKING = auto()
    BEHIND = auto()
    """The thought has ended; blanks are skipped."""
    CONTENT = auto()


class ThoughtSplitter:
    """Splits one answer. Only a thought at its beginning is one: later `<think>` is text."""

    def __init__(self, *, is_thinking: bool) -> None:
        """`is_thinking`: the prompt has opened a thought already, as templates of thinking models do."""
        self._state = _State.THINKING if is_thinking else _State.BEFORE
        self._held = ""
        self._has_thought = False

    @property
    def is_thinking(self) -> bool:
        """Whether the thought is still open."""
        return self._state is _State.THINKING

    def push(self, text: str) -> tuple[str, str]:
        """(reasoning, content) that have become certain."""
        self._held += text
        reasoning = content = ""
        if self._state is _State.BEFORE:
            content = self._before()
        if self._state is _State.THINKING:
            reasoning = self._thinking()
        if self._state is _State.BEHIND:
            self._held = self._held.lstrip()
            self._state = _State.CONTENT if self._held else self._state
        if self._state is _State.CONTENT:
            content += self._take(len(self._held))
        return reasoning, content

    def finish(self) -> tuple[str, str]:
        """What was held back."""
        held = self._take(len(self._held))
        if self._state is _State.THINKING:
            return held.rstrip(), ""
        return "", "" if self._state is _State.BEHIND else held

    def _before(self) -> str:
        start = self._held.lstrip()
        if start.startswith(OPEN):
            self._held = start[len(OPEN) :]
            self._state = _State.THINKING
        elif not OPEN.startswith(start):
            self._state = _State.CONTENT
        return ""

    def _thinking(self) -> str:
        if not self._has_thought:
            self._held = self._held.lstrip()
        place = self._held.find(CLOSE)
        if place >= 0:
            thought = self._take(place).rstrip()
            self._take(len(CLOSE))
            self._state = _State.BEHIND
            return thought
        # Blanks at the end of a thought are not part of it, so they wait, too.
        certain = self._held[: len(self._held) - kept_back(self._held, (CLOSE,))]
        self._has_thought |= bool(certain.rstrip())
        return self._take(len(certain.rstrip()))

    def _take(self, n: int) -> str:
        taken, self._held = self._held[:n], self._held[n:]
        return taken
