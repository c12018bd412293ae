"""Messages of a chat request, checked and as chat templates want them. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from swarmnode.errors import UsageError


def messages_of(value: object) -> list[Mapping[str, Any]]:
    """The messages; raises UsageError naming the one that is wrong.

    `content` becomes text, and arguments of tool calls, which OpenAI sends as JSON in a string, become values: the
    templates of Qwen's models go through them by name.
    """
    if not isinstance(value, list) or not value:
        raise UsageError("messages: a list of at least one message is expected")
    messages: list[Mapping[str, Any]] = []
    for position, item in enumerate(value):
        where = f"messages[{position}]"
        if not isinstance(item, dict) or not isinstance(item.get("role"), str):
            raise UsageError(f"{where}: an object with role and content is expected")
        message = {**item, "content": _content(item.get("content"), where)}
        if message.get("tool_calls") is not None:
            message["tool_calls"] = _calls(message["tool_calls"], f"{where}.tool_calls")
        if not isinstance(message.get("reasoning_content") or "", str):
            raise UsageError(f"{where}.reasoning_content: a string is expected")
        message |= _thought(message)
        # Templates ask whether these are defined.
        messages.append(
            {name: given for name, given in message.items() if given is not None or name == "content"}
        )
    return messages


def _thought(message: Mapping[str, Any]) -> dict[str, str]:
    """A thought, however the client names it, under the name that templates know."""
    given = (message.get(name) for name in ("reasoning_content", "thinking", "reasoning"))
    thought = next((value for value in given if isinstance(value, str)), None)
    return {} if thought is None else {"reasoning_content": thought}


def _content(value: object, where: str) -> str:
    """A message's text; lists of text parts are joined."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
            for part in value
        ]
        if all(isinstance(part, str) for part in parts):
            return "".join(str(part) for part in parts)
    raise UsageError(f"{where}.content: text is expected (pictures and sound are not served)")


def _calls(value: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise UsageError(f"{where}: a list is expected")
    return [_call(item, f"{where}[{position}]") for position, item in enumerate(value)]


def _call(item: object, where: str) -> dict[str, Any]:
    function = item.get("function") if isinstance(item, dict) else None
    if (
        not isinstance(item, dict)
        or not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
    ):
        raise UsageError(f"{where}: an object with function.name and function.arguments is expected")
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where}.function.arguments: not valid JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise UsageError(f"{where}.function.arguments: an object in JSON is expected")
    return {**item, "function": {**function, "arguments": arguments}}
