"""Tools for models whose chat template knows none: told in the system message, in Hermes' form. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_INTRODUCTION = "You can call these functions. Each line describes one, its parameters as a JSON schema:"
_FORM = (
    "To call one, write nothing but this, with its name and arguments:\n"
    '<tool_call>\n{"name": "NAME", "arguments": {}}\n</tool_call>\n'
    "What it returns comes in the next message."
)


def told_in_messages(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Messages of plain text that say what `tools`, calls and results would have said to another template."""
    told = [_plain(message) for message in messages]
    if not tools:
        return told
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    text = "\n".join([_INTRODUCTION, *lines, _FORM])
    if told[0]["role"] == "system":
        return [{**told[0], "content": f"{told[0]['content']}\n\n{text}".strip()}, *told[1:]]
    return [{"role": "system", "content": text}, *told]


def _plain(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [
        f"<tool_call>\n{json.dumps(_call(call), ensure_ascii=False)}\n</tool_call>"
        for call in message.get("tool_calls", ())
    ]
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join(filter(None, [message["content"], *calls]))}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
