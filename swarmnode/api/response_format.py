"""`response_format` of a chat request, checked. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swarmnode.api.fields import flag
from swarmnode.errors import UsageError

MAX_NAME_CHARS = 64


@dataclass(frozen=True)
class ResponseFormat:
    """`schema`: what the answer must be valid against, in JSON schema; None: any text."""

    schema: Mapping[str, Any] | None = None


FREE = ResponseFormat()
ANY_OBJECT = ResponseFormat({"type": "object"})


def response_format_of(fields: Mapping[str, Any]) -> ResponseFormat:
    """Of a request; raises UsageError naming the field."""
    value = fields.get("response_format")
    if value is None:
        return FREE
    match value:
        case {"type": "text"}:
            return FREE
        case {"type": "json_object"}:
            return ANY_OBJECT
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)} as given}:
            name = given.get("name", "")
            if not isinstance(name, str) or len(name) > MAX_NAME_CHARS:
                raise UsageError(
                    f"response_format.json_schema.name: up to {MAX_NAME_CHARS} characters are expected"
                )
            flag(given, "strict")  # it always is
            return ResponseFormat(schema)
    raise UsageError(
        'response_format: {"type": "text"}, {"type": "json_object"} or '
        '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}} is expected'
    )
