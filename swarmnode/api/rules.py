"""What an answer must look like: `response_format`, and tools that must be called, as constraints of the sampler."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from swarmnode.api import thinking
from swarmnode.api.openai import CompletionRequest
from swarmnode.api.prompts import Prompt
from swarmnode.api.tools import ToolUse
from swarmnode.errors import UsageError
from swarmnode.models.chat import ChatTemplate
from swarmnode.models.grammar import SCHEMA_OPTIONS, GrammarConstraint, Grammars
from swarmnode.models.tokenizer import Tokenizer

_UNKEPT = frozenset({"pattern", "format", "const", "anyOf", "oneOf", "allOf", "not"})
"""Of the schema of a string."""


class Rules:
    """Of one model."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._grammars = Grammars(tokenizer)
        self._is_tagged = template is not None and "<function=" in template.source
        """The model's own form of calls (see tool_calls)."""

    def constraint(self, asked: CompletionRequest, prompt: Prompt) -> GrammarConstraint | None:
        """For answers to a request; None: they are free. Blocks. UsageError for what cannot be kept to."""
        schema, use = asked.response_format.schema, asked.tool_use
        if schema is None and use.calling != "required":
            return None
        thought_end = self._thought_end() if prompt.is_thinking else None
        if schema is not None:
            return self._grammars.of_schema(schema, thought_end)
        return self._grammars.of_lark(call_grammar(use, tagged=self._is_tagged), thought_end)

    def _thought_end(self) -> int:
        tokens = self._tokenizer.encode(thinking.CLOSE, parse_special=True, add_bos=False)
        if len(tokens) != 1:
            raise UsageError(
                'this model thinks first, and the end of that is no token: give {"enable_thinking": false} as '
                "chat_template_kwargs"
            )
        return tokens[0]


def call_grammar(use: ToolUse, *, tagged: bool) -> str:
    """A call of one of the tools (of the one that is named), in llguidance's Lark form."""
    parameters = use.parameters
    names = list(parameters) if use.name is None else [use.name]
    calls = [f"call{number}" for number in range(len(names))]
    rules = [f'start: "<tool_call>\\n" ({" | ".join(calls)}) "\\n</tool_call>"']
    for call, name in zip(calls, names, strict=True):
        form = _tagged_call if tagged else _json_call
        rules += form(call, name, parameters[name])
    return "\n".join(rules) + "\n"


def _json_call(call: str, name: str, schema: Mapping[str, Any]) -> list[str]:
    head = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
    return [f'{call}: {head} {call}_arguments "}}"', f"{call}_arguments: %json {_schema(schema)}"]


def _tagged_call(call: str, name: str, schema: Mapping[str, Any]) -> list[str]:
    properties = schema.get("properties") or {}
    required = schema.get("required") or ()
    parts, rules = [], []
    for number, (key, inner) in enumerate(properties.items()):
        part = f"{call}_p{number}"
        parts.append(part if key in required else f"{part}?")
        opening = json.dumps(f"<parameter={key}>\n", ensure_ascii=False)
        rules += _tagged_value(part, opening, key, inner if isinstance(inner, Mapping) else {})
    head = json.dumps(f"<function={name}>\n")
    return [f'{call}: {head} {" ".join(parts)} "</function>"', *rules]


def _tagged_value(part: str, opening: str, key: str, schema: Mapping[str, Any]) -> list[str]:
    """Strings stand there without quotes; everything else is JSON."""
    if schema.get("type") != "string":
        return [
            f'{part}: {opening} {part}_value "\\n</parameter>\\n"',
            f"{part}_value: %json {json.dumps(schema)}",
        ]
    if "enum" in schema:
        choices = " | ".join(json.dumps(str(value), ensure_ascii=False) for value in schema["enum"])
        return [f'{part}: {opening} ({choices}) "\\n</parameter>\\n"']
    if unkept := sorted(_UNKEPT & set(schema)):
        raise UsageError(
            f"tools: {', '.join(unkept)} of the parameter {key} cannot be kept to in this model's form of calls; leave "
            'it out, or give tool_choice "auto"'
        )
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    text = f"(?s:.{{{least},{most}}})" if least or most else "(?s:.*)"
    return [f"{part}: {opening} {part}_text", f'{part}_text[suffix="\\n</parameter>\\n"]: /{text}/']


def _schema(schema: Mapping[str, Any]) -> str:
    """Arguments are an object, whatever the tool's author left out."""
    return _inner({"type": "object", **schema})


def _inner(schema: Mapping[str, Any]) -> str:
    """A schema within a grammar."""
    return json.dumps({**schema, "x-guidance": SCHEMA_OPTIONS})
