"""`tools` and `tool_choice` of a chat request, checked. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from swarmnode.api.fields import flag
from swarmnode.errors import UsageError

MAX_TOOLS = 128
"""As OpenAI."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

Calling: TypeAlias = Literal["none", "auto", "required"]


@dataclass(frozen=True)
class ToolUse:
    """What may, or must, be called."""

    tools: Sequence[Mapping[str, Any]] = ()
    """As the chat template gets them; none if nothing may be called."""
    calling: Calling = "none"
    name: str | None = None
    """With "required": the one function to be called; None: any."""
    parallel: bool = True
    """Several calls in one answer."""

    @property
    def parameters(self) -> dict[str, Mapping[str, Any]]:
        """JSON schema of each function's parameters, by name."""
        functions = [tool["function"] for tool in self.tools]
        return {function["name"]: function.get("parameters") or {} for function in functions}


def tool_use_of(fields: Mapping[str, Any]) -> ToolUse:
    """Of a request; raises UsageError naming the field."""
    value, choice = fields.get("tools"), fields.get("tool_choice")
    parallel = flag(fields, "parallel_tool_calls", default=True)
    if value is None:
        if choice not in (None, "none"):
            raise UsageError("tool_choice: there are no tools to choose from; give tools")
        return ToolUse()
    tools = _tools(value)
    calling, name = _choice(choice, [tool["function"]["name"] for tool in tools])
    if calling == "none":
        return ToolUse()
    for position, tool in enumerate(tools):
        if tool["function"].get("strict") and calling == "auto":
            raise UsageError(
                f"tools[{position}].function.strict: served only where a call is certain; give tool_choice "
                '"required", or leave strict out'
            )
    return ToolUse(tools, calling, name, parallel)


def _tools(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_TOOLS:
        raise UsageError(f"tools: a list of 1 to {MAX_TOOLS} functions is expected")
    tools = [_tool(item, f"tools[{position}]") for position, item in enumerate(value)]
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise UsageError("tools: two functions have the same name")
    return tools


def _tool(item: object, where: str) -> dict[str, Any]:
    function = item.get("function") if isinstance(item, dict) else None
    if not isinstance(item, dict) or item.get("type") != "function" or not isinstance(function, dict):
        raise UsageError(f'{where}: {{"type": "function", "function": {{...}}}} is expected')
    name = function.get("name")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise UsageError(f"{where}.function.name: 1 to 64 letters, digits, _, - or . are expected")
    if not isinstance(function.get("parameters") or {}, dict):
        raise UsageError(f"{where}.function.parameters: a JSON schema (an object) is expected")
    if not isinstance(function.get("description") or "", str):
        raise UsageError(f"{where}.function.description: a string is expected")
    flag(function, "strict")
    return item


def _choice(choice: object, names: Sequence[str]) -> tuple[Calling, str | None]:
    match choice:
        case None | "auto":
            return "auto", None
        case "none":
            return "none", None
        case "required":
            return "required", None
        case {"type": "function", "function": {"name": str(name)}}:
            if name not in names:
                raise UsageError(f"tool_choice: {name!r} is none of the tools")
            return "required", name
    raise UsageError(
        'tool_choice: "none", "auto", "required" or {"type": "function", "function": {"name": ...}} is expected'
    )
