"""Reads tool calls out of a model's text, piece by piece. Pure.

Between `<tool_call>` and `</tool_call>` models of the Qwen family write either JSON (Hermes' form)

    {"name": "f", "arguments": {"a": 1}}

or (Qwen3.5, Qwen3-Coder)

    <function=f><parameter=a>1</parameter></function>

with line breaks around names and values. Arguments are passed on as they come. What is neither is text, and stays it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from swarmnode.api.deltas import CallPart
from swarmnode.api.json_scanner import JsonScanner
from swarmnode.api.stop_strings import kept_back

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_JSON_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')


class _Form(Protocol):
    """How one call is written."""

    raw: str
    """Read, and not yet understood."""
    has_begun: bool
    """The call's name was told."""
    unread: str
    """Text that was no call after all."""

    def push(self, text: str) -> str | None:
        """What is left of `text` behind the call; None while the call goes on."""
        ...

    def end(self) -> None:
        """The answer ends within the call, because the model wanted it."""
        ...


Tell = Callable[[str | None, str], None]
"""`tell(name, arguments)`: of the current call; a name begins it."""


class ToolCallReader:
    """Splits one answer's content in text and calls. `tools`: the parameters (JSON schema) of each function."""

    def __init__(
        self, tools: Mapping[str, Mapping[str, Any]], new_id: Callable[[], str], *, most: int | None = None
    ) -> None:
        """`most`: nothing is read behind so many calls; None: any number."""
        self._most = most
        self._tools = tools
        self._new_id = new_id
        self._held = ""
        self._in_call = False
        self._form: _Form | None = None
        self._parts: list[CallPart] = []
        self.n_calls = 0
        """That have begun."""
        self.n_done = 0

    def push(self, text: str) -> tuple[str, tuple[CallPart, ...]]:
        """(text, parts of calls) that have become certain."""
        content = ""
        self._held += text
        while self._held and not self.is_full:
            before = self._held, self._in_call
            content += self._call() if self._in_call else self._text()
            if (self._held, self._in_call) == before:
                break
        return content, self._take_parts()

    @property
    def is_full(self) -> bool:
        """There were as many calls as there may be."""
        return self._most is not None and self.n_done >= self._most

    def finish(self, *, is_complete: bool) -> tuple[str, tuple[CallPart, ...]]:
        """What was held back. `is_complete`: the model ended the answer itself; an open call is closed then."""
        content = self._held
        if self._form is not None:
            if is_complete:
                self._form.end()
            content = "" if self._form.has_begun else OPEN + self._form.raw
        elif self._in_call:
            content = OPEN + self._held
        self._held = ""
        return content, self._take_parts()

    def _take_parts(self) -> tuple[CallPart, ...]:
        parts, self._parts = tuple(self._parts), []
        return parts

    def _text(self) -> str:
        place = self._held.find(OPEN)
        if place >= 0:
            content, self._held = self._held[:place], self._held[place + len(OPEN) :]
            self._in_call = True
            return content.rstrip()
        if self.n_done:  # blanks between calls are nothing
            self._held = self._held.lstrip()
        certain = self._held[: len(self._held) - kept_back(self._held, (OPEN,))].rstrip()
        self._held = self._held[len(certain) :]
        return certain

    def _call(self) -> str:
        if self._form is None:
            start = self._held.lstrip()
            if start.startswith("{"):
                self._form = _JsonCall(self._tell)
            elif start.startswith(_FUNCTION):
                self._form = _TaggedCall(self._tell, self._tools)
            elif _FUNCTION.startswith(start):
                return ""
            else:
                self._in_call = False  # what follows is text, and may have calls in it
                return OPEN
            self._held = start
        form = self._form
        rest = form.push(self._held)
        self._held = rest or ""
        if rest is None:
            return ""
        self.n_done += form.has_begun
        self._in_call, self._form = False, None
        return form.unread

    def _tell(self, name: str | None, arguments: str) -> None:
        if name is not None:
            self.n_calls += 1
            self._parts.append(CallPart(self.n_calls - 1, arguments, self._new_id(), name))
        elif arguments:
            self._parts.append(CallPart(self.n_calls - 1, arguments))


class _JsonCall:
    """`{"name": ..., "arguments": {...}}`: passed on as it comes if it is written in this order, else when complete."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self.raw = ""
        self._scanner: JsonScanner | None = None
        self.has_begun = False
        self.unread = ""

    def push(self, text: str) -> str | None:
        self.raw += text
        if self._scanner is None:
            head = _JSON_HEAD.match(self.raw)
            if head is None:
                return self._whole()
            self._begin(json.loads(head[1], strict=False), "")
            self.raw = self.raw[head.end() :]
            self._scanner = JsonScanner()
        if not self._scanner.is_done:
            n = self._scanner.push(self.raw)
            self._tell(None, self.raw[:n])
            self.raw = self.raw[n:]
        if not self._scanner.is_done:
            return None
        place = self.raw.find(CLOSE)
        return None if place < 0 else self.raw[place + len(CLOSE) :]

    def end(self) -> None:
        if self._scanner is None:
            self._read(self.raw)

    def _begin(self, name: str, arguments: str) -> None:
        self.has_begun = True
        self._tell(name, arguments)

    def _whole(self) -> str | None:
        place = self.raw.find(CLOSE)
        if place < 0:
            return None
        text = self.raw[:place]
        self._read(text)
        if not self.has_begun:
            self.unread = OPEN + text + CLOSE
        return self.raw[place + len(CLOSE) :]

    def _read(self, text: str) -> None:
        try:
            call = json.loads(text, strict=False)
            arguments = call.get("arguments", {})
            arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            if not isinstance(call["name"], str):
                raise TypeError
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return
        self._begin(call["name"], arguments)


class _TaggedCall:
    """`<function=f><parameter=a>1</parameter></function>`, made into JSON. Texts are passed on as they come."""

    def __init__(self, tell: Tell, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self._tell = tell
        self._tools = tools
        self.raw = ""
        self._schema: Mapping[str, Any] = {}
        self.has_begun = False
        self.unread = ""
        self._has_ended = False
        self._value: _Value | None = None
        self._n_values = 0

    def push(self, text: str) -> str | None:
        self.raw += text
        while True:
            raw = self.raw
            if self._value is not None:
                self.raw = self._value.push(self.raw)
                if self._value.is_done:
                    self._value = None
            elif not self.has_begun:
                self._name()
            else:
                rest = self._between()
                if rest is not None:
                    return rest
            if self.raw == raw:
                return None

    def end(self) -> None:
        if self._value is not None:
            self._value.end(self.raw)
        if self.has_begun and not self._has_ended:
            self._close()

    def _name(self) -> None:
        name, place = _element_name(self.raw, _FUNCTION)
        if place:
            self.raw, self.has_begun = self.raw[place:], True
            properties = self._tools.get(name, {}).get("properties")
            self._schema = properties if isinstance(properties, Mapping) else {}
            self._tell(name, "")

    def _between(self) -> str | None:
        """Up to the next parameter, or to the end."""
        marks = [(self.raw.find(mark), mark) for mark in (_PARAMETER, _FUNCTION_END, CLOSE)]
        found = min(((place, mark) for place, mark in marks if place >= 0), default=None)
        if found is None:
            return None
        place, mark = found
        if mark == _PARAMETER and not self._has_ended:
            name, end = _element_name(self.raw[place:], _PARAMETER)
            if end:
                self.raw = self.raw[place + end :]
                self._parameter(name)
            return None
        self.raw = self.raw[place + len(mark) :]
        if not self._has_ended:
            self._close()
        return self.raw if mark == CLOSE else None

    def _parameter(self, name: str) -> None:
        self._tell(None, ("{" if not self._n_values else ", ") + json.dumps(name, ensure_ascii=False) + ": ")
        self._n_values += 1
        self._value = _Value(self._tell, is_text=_is_text(self._schema.get(name)))

    def _close(self) -> None:
        self._tell(None, "}" if self._n_values else "{}")
        self._has_ended = True


class _Value:
    """Of one parameter: a text, or JSON."""

    def __init__(self, tell: Tell, *, is_text: bool) -> None:
        self._tell = tell
        self._is_text = is_text
        self._has_begun = False
        self.is_done = False

    def push(self, raw: str) -> str:
        """What is left of `raw`."""
        place = raw.find(_PARAMETER_END)
        if place >= 0:
            self.end(raw[:place])
            return raw[place + len(_PARAMETER_END) :]
        if not self._is_text or not raw:
            return raw
        # A line break in front of the end is not part of the value.
        keep = max(kept_back(raw, (_PARAMETER_END,)), kept_back(raw, ("\n" + _PARAMETER_END,)))
        if not self._has_begun and raw == "\n":
            return raw
        self._text(raw[: len(raw) - keep])
        return raw[len(raw) - keep :]

    def end(self, raw: str) -> None:
        """The rest of the value."""
        self.is_done = True
        raw = raw.removesuffix("\n")
        if self._is_text:
            self._text(raw)
            self._tell(None, '"')
            return
        raw = raw.removeprefix("\n")
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError):
            value = raw
        self._tell(None, json.dumps(value, ensure_ascii=False))

    def _text(self, text: str) -> None:
        opening = "" if self._has_begun else '"'
        if not self._has_begun:
            text = text.removeprefix("\n")
            self._has_begun = True
        self._tell(None, opening + json.dumps(text, ensure_ascii=False)[1:-1])


def _element_name(raw: str, mark: str) -> tuple[str, int]:
    """The name in `<mark=NAME>`, and where it ends; ("", 0): it is not complete."""
    end = raw.find(">", len(mark))
    return ("", 0) if end < 0 else (raw[len(mark) : end].strip().strip("\"'"), end + 1)


def _is_text(schema: object) -> bool:
    """Whether a parameter of this schema is a string, so that it needs no quotes and `1` is "1"."""
    return isinstance(schema, Mapping) and schema.get("type") == "string"
