"""From an answer's text to what a client is told: thoughts, content up to a stop string, tool calls. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from swarmnode.api.deltas import CallPart, Delta
from swarmnode.api.stop_strings import StopFinder
from swarmnode.api.thinking import ThoughtSplitter
from swarmnode.api.tool_calls import ToolCallReader


@dataclass(frozen=True)
class Reading:
    """How answers to one request are read."""

    chat: bool = True
    """Completions are text and nothing else."""
    stops: tuple[str, ...] = ()
    is_thinking: bool = False
    """The prompt has opened a thought."""
    tools: Mapping[str, Mapping[str, Any]] | None = None
    """Parameters (JSON schema) of the functions that may be called; None: calls are text."""
    one_call: bool = False
    """The answer ends with its first call."""


def new_call_id() -> str:
    """As OpenAI's look."""
    return f"call_{secrets.token_hex(12)}"


class AnswerReader:
    """Reads one answer."""

    def __init__(self, reading: Reading, new_id: Callable[[], str] = new_call_id) -> None:
        self._thoughts = ThoughtSplitter(is_thinking=reading.is_thinking) if reading.chat else None
        self._calls: ToolCallReader | None = None
        if reading.tools is not None:
            self._calls = ToolCallReader(reading.tools, new_id, most=1 if reading.one_call else None)
        self._stops = StopFinder(reading.stops)

    @property
    def is_thinking(self) -> bool:
        """Whether a thought is open."""
        return self._thoughts is not None and self._thoughts.is_thinking

    @property
    def has_ended(self) -> bool:
        """By a stop string, or by the only call that there may be: what comes now is nothing."""
        return self._stops.found or (self._calls is not None and self._calls.is_full)

    def push(self, text: str) -> Delta:
        """What this text adds for certain."""
        if self.has_ended:
            return Delta()
        reasoning, content = self._thoughts.push(text) if self._thoughts is not None else ("", text)
        calls: tuple[CallPart, ...] = ()
        if self._calls is not None:
            content, calls = self._calls.push(content)
        return Delta(self._stops.push(content), reasoning, calls)

    def finish(self, reason: str) -> Delta:
        """What was held back; `reason`: the engine's ("stop" or "length")."""
        if self.has_ended:
            return Delta()
        reasoning, content = self._thoughts.finish() if self._thoughts is not None else ("", "")
        calls: tuple[CallPart, ...] = ()
        if self._calls is not None:
            before, first = self._calls.push(content)
            after, second = self._calls.finish(is_complete=reason == "stop")
            content, calls = before + after, first + second
        content = self._stops.push(content)
        return Delta(content + self._stops.finish(), reasoning, calls)

    def finish_reason(self, reason: str) -> str:
        """OpenAI's, for the engine's."""
        if reason == "stop" and self._calls is not None and self._calls.n_calls:
            return "tool_calls"
        return reason

    def ends(self, text: str) -> bool:
        """For GenerateRequest.ends, by a reader of its own: `push`, and whether that was the end."""
        self.push(text)
        return self.has_ended
