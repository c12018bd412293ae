"""Types and caps of header fields, written as annotations: `layer: Annotated[int, Integer(0, MAX_LAYER)]`.

A check takes a decoded msgpack value and returns the field's value, or raises ProtocolError `bad_field`. Nothing is
converted, clamped or defaulted. `str(check)` is what docs/protocol.md says about the field.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, get_type_hints

from swarmnode.errors import ProtocolError


class Check(Protocol):
    """The type and cap of one field."""

    def __call__(self, value: object) -> Any:
        """The checked value. Raises ProtocolError `bad_field`."""
        ...


def _bad(reason: str) -> ProtocolError:
    return ProtocolError("bad_field", reason)


@dataclass(frozen=True)
class Integer:
    """A whole number between two bounds, both allowed. True and 1.0 are not whole numbers."""

    low: int
    high: int

    def __call__(self, value: object) -> int:
        if type(value) is not int:
            raise _bad(f"{_type_name(value)} instead of a whole number")
        if not self.low <= value <= self.high:
            raise _bad(f"{value} is not within {self.low} .. {self.high}")
        return value

    def __str__(self) -> str:
        return f"int {self.low} .. {self.high}"


@dataclass(frozen=True)
class Text:
    """Text of at most `max_bytes` bytes of UTF-8 without control characters (it ends up in logs and terminals)."""

    max_bytes: int

    def __call__(self, value: object) -> str:
        if type(value) is not str:
            raise _bad(f"{_type_name(value)} instead of text")
        if len(value.encode("utf-8", "surrogatepass")) > self.max_bytes:
            raise _bad(f"text of more than {self.max_bytes} bytes")
        if not value.isprintable():
            raise _bad("text with control characters")
        return value

    def __str__(self) -> str:
        return f"text <= {self.max_bytes} B"


@dataclass(frozen=True)
class Code:
    """A word of the letters a-z and `_`, at most 32: an error code. Unknown ones are allowed, for later versions."""

    max_chars: int = 32

    def __call__(self, value: object) -> str:
        if type(value) is not str:
            raise _bad(f"{_type_name(value)} instead of a code")
        plain = value.replace("_", "a")
        if not (0 < len(value) <= self.max_chars and plain.isascii() and plain.isalpha() and plain.islower()):
            raise _bad("a code has 1 to 32 letters a-z or _")
        return value

    def __str__(self) -> str:
        return f"code <= {self.max_chars}"


@dataclass(frozen=True)
class Binary:
    """Exactly `n_bytes` bytes."""

    n_bytes: int

    def __call__(self, value: object) -> bytes:
        if type(value) is not bytes:
            raise _bad(f"{_type_name(value)} instead of bytes")
        if len(value) != self.n_bytes:
            raise _bad(f"{len(value)} bytes instead of {self.n_bytes}")
        return value

    def __str__(self) -> str:
        return f"bin {self.n_bytes} B"


@dataclass(frozen=True)
class Choice:
    """One of a few words."""

    words: tuple[str, ...]

    def __call__(self, value: object) -> str:
        if type(value) is not str or value not in self.words:
            raise _bad(f"not one of {', '.join(self.words)}")
        return value

    def __str__(self) -> str:
        return " \\| ".join(self.words)


@dataclass(frozen=True)
class Items:
    """A list of at most `max_items` values of one kind."""

    item: Check
    max_items: int

    def __call__(self, value: object) -> tuple[Any, ...]:
        if type(value) is not tuple:
            raise _bad(f"{_type_name(value)} instead of a list")
        if len(value) > self.max_items:
            raise _bad(f"{len(value)} items, at most {self.max_items}")
        return tuple([self.item(item) for item in value])

    def __str__(self) -> str:
        return f"list <= {self.max_items} of ({self.item})"


@dataclass(frozen=True)
class Range:
    """`[layer, first expert, count]`; count is at least 1 and the last expert has a legal id."""

    max_layer: int
    max_expert: int

    def __call__(self, value: object) -> tuple[int, int, int]:
        if type(value) is not tuple or len(value) != 3:
            raise _bad("a range is [layer, first, count]")
        layer, first, count = value
        Integer(0, self.max_layer)(layer)
        Integer(0, self.max_expert)(first)
        Integer(1, self.max_expert + 1 - first)(count)
        return layer, first, count

    def __str__(self) -> str:
        return f"[layer 0 .. {self.max_layer}, first 0 .. {self.max_expert}, count >= 1]"


class Schema:
    """The fields of one dataclass, in order, with their checks."""

    def __init__(self, cls: type[Any]) -> None:
        self._cls = cls
        hints = get_type_hints(cls, include_extras=True)
        self.checks: dict[str, Check] = {
            field.name: hints[field.name].__metadata__[0] for field in dataclasses.fields(cls)
        }

    def __call__(self, value: object) -> Any:
        """As a check: a nested map becomes the dataclass."""
        if type(value) is not dict:
            raise _bad(f"{_type_name(value)} instead of a map")
        return self.decode(value)

    def decode(self, fields: Mapping[str, object]) -> Any:
        """The dataclass of exactly these fields. Raises ProtocolError `bad_field` naming the field."""
        return self._cls(*self._checked(fields))

    def encode(self, message: Any) -> dict[str, Any]:
        """The map of a message, checked as the receiver will check it. Raises ProtocolError `bad_field`."""
        fields = {}
        for name in self.checks:
            value = getattr(message, name)
            if type(value) is tuple:
                value = tuple([_plain(item) for item in value])
            fields[name] = value
        self._checked(fields)
        return fields

    def _checked(self, fields: Mapping[str, object]) -> list[Any]:
        try:
            if len(fields) == len(self.checks):
                return [check(fields[name]) for name, check in self.checks.items()]
        except (KeyError, ProtocolError):
            pass  # said below, in full
        raise self._complaint(fields)

    def _complaint(self, fields: Mapping[str, object]) -> ProtocolError:
        """What is wrong with these fields."""
        missing = sorted(self.checks.keys() - fields.keys())
        unknown = sorted(fields.keys() - self.checks.keys())
        if missing or unknown:
            return _bad(f"missing fields {missing}, unknown fields {[name[:32] for name in unknown[:8]]}")
        for name, check in self.checks.items():
            try:
                check(fields[name])
            except ProtocolError as error:
                return _bad(f"{name}: {error.reason}")
        raise AssertionError("a check that fails only once")

    def __str__(self) -> str:
        return "map: " + ", ".join(f"{name} {check}" for name, check in self.checks.items())


def _plain(item: Any) -> Any:
    if dataclasses.is_dataclass(item):
        return {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
    return item


def _type_name(value: object) -> str:
    names = {int: "a number", str: "text", bytes: "bytes", tuple: "a list", dict: "a map", float: "a float"}
    return names.get(type(value), str(value))
