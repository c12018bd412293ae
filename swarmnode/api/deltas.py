"""What a piece of an answer adds to it. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CallPart:
    """A part of a tool call: the first has `call_id` and `name`; the `arguments` of all, joined, are its JSON."""

    index: int
    arguments: str
    call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class Delta:
    """Text to be added to an answer's content and reasoning, and parts of calls."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallPart, ...] = ()
