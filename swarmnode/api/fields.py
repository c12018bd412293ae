"""Fields of a JSON object, checked one by one; every UsageError names the field. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swarmnode.errors import UsageError

MAX_NAMES = 8
MAX_NAME_CHARS = 64


def object_of(body: object, known: frozenset[str] | set[str]) -> dict[str, Any]:
    """The body, which may have these fields only; others may be there as null."""
    if not isinstance(body, dict):
        raise UsageError("the body must be a JSON object")
    unknown = sorted(name for name, value in body.items() if name not in known and value is not None)
    if unknown:
        names = ", ".join(name[:MAX_NAME_CHARS] for name in unknown[:MAX_NAMES])
        raise UsageError(f"not served: {names}; served are {', '.join(sorted(known))}")
    return body


def flag(fields: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """True or false."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise UsageError(f"{name}: true or false is expected")
    return value


def integer(fields: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    """A whole number from `low` to `high`; None if it is not given."""
    value = fields.get(name)
    if value is None:
        return None
    if type(value) is not int or not low <= value <= high:
        raise UsageError(f"{name}: an integer from {low} to {high} is expected")
    return value


def mapping(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An object; empty if it is not given."""
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UsageError(f"{name}: an object is expected")
    return value


def text(value: object, name: str) -> str:
    """A string."""
    if not isinstance(value, str):
        raise UsageError(f"{name}: a string is expected")
    return value
