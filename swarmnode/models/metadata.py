"""Typed access to GGUF metadata: a key of another kind than expected is the file's fault, never a crash.

A file may give any key any type, so a number that should be there can be NaN, a text, or an array.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from swarmnode.errors import ModelFileError, UnsupportedModelError

_SHOWN_CHARS = 60


class Metadata:
    """Values under one prefix. No getter converts: a bool is no integer, an integer no float, a text no list.

    Every getter raises ModelFileError, naming file (if given) and key, for a missing value without default, one of
    another kind, or one out of range.
    """

    def __init__(self, values: Mapping[str, Any], prefix: str = "", file: str = "") -> None:
        """`values`: int, float, bool, str, numpy arrays or sequences, as `ModelIndex.metadata` has them."""
        self._values = values
        self._prefix = prefix
        self._file = file

    def key(self, name: str) -> str:
        return self._prefix + name

    def has(self, name: str) -> bool:
        return self._values.get(self.key(name)) is not None

    def get(self, name: str) -> Any:
        """The value as it is, of any kind; None if there is none."""
        return self._values.get(self.key(name))

    def fail(self, name: str, reason: str) -> NoReturn:
        raise ModelFileError(self._problem(name, reason))

    def unsupported(self, name: str, reason: str) -> NoReturn:
        raise UnsupportedModelError(self._problem(name, reason))

    # -- single values

    def integer(self, name: str, lowest: int, highest: int, default: int | None = None) -> int:
        """An integer of lowest..highest."""
        value = self._value(name, default)
        if not _is_integer(value):
            self.fail(name, f"is {shown(value)}, not an integer")
        if not lowest <= value <= highest:
            self.fail(name, f"is {value}, not {lowest} to {highest}")
        return int(value)

    def number(self, name: str, lowest: float, highest: float, default: float | None = None) -> float:
        """A finite float of lowest..highest."""
        value = self._value(name, default)
        if not isinstance(value, float):
            self.fail(name, f"is {shown(value)}, not a float")
        if not math.isfinite(value) or not lowest <= value <= highest:
            self.fail(name, f"is {value}, not {lowest:g} to {highest:g}")
        return value

    def flag(self, name: str, default: bool | None = None) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            self.fail(name, f"is {shown(value)}, not a bool")
        return value

    def text(self, name: str) -> str:
        value = self._value(name, None)
        if not isinstance(value, str):
            self.fail(name, f"is {shown(value)}, not a string")
        return value

    # -- arrays

    def integers(self, name: str, lowest: int, highest: int) -> list[int]:
        """An array of integers of lowest..highest."""
        items = self._items(name, "iu", "integers")
        if not all(_is_integer(item) for item in items):
            self.fail(name, "is not an array of integers")
        if items and not (lowest <= min(items) and max(items) <= highest):
            self.fail(name, f"holds values that are not {lowest} to {highest}")
        return items

    def flags(self, name: str) -> list[bool]:
        """An array of bools."""
        items = self._items(name, "b", "bools")
        if not all(isinstance(item, bool) for item in items):
            self.fail(name, "is not an array of bools")
        return items

    def strings(self, name: str) -> list[str]:
        """An array of strings."""
        items = self._items(name, "", "strings")
        if not all(isinstance(item, str) for item in items):
            self.fail(name, "is not an array of strings")
        return items

    # -- helpers

    def _items(self, name: str, dtype_kinds: str, what: str) -> list[Any]:
        value = self._value(name, None)
        if isinstance(value, np.ndarray):
            is_right = value.ndim == 1 and value.dtype.kind in dtype_kinds
        else:
            is_right = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
        if not is_right:
            self.fail(name, f"is {shown(value)}, not an array of {what}")
        return value.tolist() if isinstance(value, np.ndarray) else list(value)

    def _value(self, name: str, default: Any) -> Any:
        value = self.get(name)
        if value is None:
            value = default
        if value is None:
            self.fail(name, "is missing")
        return value

    def _problem(self, name: str, reason: str) -> str:
        return f"{self._file}: {self.key(name)} {reason}" if self._file else f"{self.key(name)} {reason}"


def shown(value: object) -> str:
    """A value of any kind and size, short enough for a message."""
    if isinstance(value, (bool, int, float)):
        return repr(value)
    if isinstance(value, str):
        return repr(value if len(value) <= _SHOWN_CHARS else value[:_SHOWN_CHARS] + "...")
    return "an array"


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
