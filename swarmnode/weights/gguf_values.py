"""Metadata values of a GGUF file: a cursor over its bytes that checks before it moves, and lazy arrays.

A 248,320-token vocabulary is 500,000 strings (tokens and merges). They are stepped over once, so that every
length is known to lie inside the file, and decoded only when somebody looks at them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, overload

import numpy as np

from swarmnode.errors import ModelFileError

MAX_STRING_BYTES = 16 * 1024 * 1024
"""Longest single string; chat templates reach 100 KB."""
MAX_HEADER_STRINGS = 4 * 1024 * 1024
"""Strings in all arrays of one file together: 8x the largest vocabulary with its merges. Bounds the time of
opening.
"""

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class ValueType(IntEnum):
    """GGUF's numbers for the types of metadata values (ggml/docs/gguf.md)."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


_DTYPES: dict[int, np.dtype[Any]] = {
    ValueType.UINT8: np.dtype("<u1"),
    ValueType.INT8: np.dtype("<i1"),
    ValueType.UINT16: np.dtype("<u2"),
    ValueType.INT16: np.dtype("<i2"),
    ValueType.UINT32: np.dtype("<u4"),
    ValueType.INT32: np.dtype("<i4"),
    ValueType.FLOAT32: np.dtype("<f4"),
    ValueType.BOOL: np.dtype("?"),
    ValueType.UINT64: np.dtype("<u8"),
    ValueType.INT64: np.dtype("<i8"),
    ValueType.FLOAT64: np.dtype("<f8"),
}


@dataclass(frozen=True)
class GgufValue:
    """A metadata value with the type it has in the file (`item_type` for arrays), so that it can be written
    again.

    `value`: int, float, bool or str; for arrays a read-only numpy array or, of strings, a StringArray or
    tuple.
    """

    type: ValueType
    item_type: ValueType | None
    value: Any


class StringArray(Sequence[str]):
    """An array of strings inside a mapped file, decoded on first use and kept.

    Raises ModelFileError (naming the file) on first use if a string is not UTF-8.
    """

    def __init__(self, path: Path, buffer: memoryview, offset: int, count: int) -> None:
        self._path = path
        self._buffer = buffer
        self._offset = offset
        self._count = count
        self._decoded: list[str] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self._strings()[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._strings())

    def _strings(self) -> list[str]:
        if self._decoded is None:
            self._decoded = self._decode()
        return self._decoded

    def _decode(self) -> list[str]:
        buffer, position = self._buffer, self._offset
        strings = []
        for index in range(self._count):
            start = position + 8
            position = start + int.from_bytes(buffer[position:start], "little")
            try:
                strings.append(str(buffer[start:position], "utf-8"))
            except UnicodeDecodeError as error:
                raise ModelFileError(
                    f"{self._path}: string {index} of an array is not UTF-8: {error}"
                ) from error
        return strings


class Cursor:
    """Reads a GGUF header front to back. Every method raises ModelFileError, naming the file, instead of
    overrunning.

    `buffer`: the whole mapped file, u8.
    """

    def __init__(self, path: Path, buffer: memoryview) -> None:
        self.path = path
        self.position = 0
        self._buffer = buffer
        self._n_strings_left = MAX_HEADER_STRINGS

    def problem(self, reason: str) -> ModelFileError:
        """The error for this file."""
        return ModelFileError(f"{self.path}: {reason}")

    @property
    def remaining(self) -> int:
        """Bytes behind the cursor."""
        return len(self._buffer) - self.position

    def take(self, n_bytes: int, what: str) -> memoryview:
        """The next `n_bytes` bytes, a view into the file."""
        if n_bytes > self.remaining:
            raise self.problem(f"{what} needs {n_bytes} bytes, but the file ends after {self.remaining}")
        start = self.position
        self.position += n_bytes
        return self._buffer[start : self.position]

    def u32(self, what: str) -> int:
        number: int = _U32.unpack(self.take(4, what))[0]
        return number

    def u64(self, what: str) -> int:
        number: int = _U64.unpack(self.take(8, what))[0]
        return number

    def string(self, what: str, max_bytes: int = MAX_STRING_BYTES) -> str:
        """A length-prefixed UTF-8 string of at most `max_bytes` bytes."""
        n_bytes = self.u64(f"the length of {what}")
        if n_bytes > max_bytes:
            raise self.problem(f"{what} is {n_bytes} bytes long, more than {max_bytes}")
        raw = self.take(n_bytes, what)
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError as error:
            raise self.problem(f"{what} is not UTF-8: {error}") from error

    def value(self, what: str) -> GgufValue:
        """A typed value: u32 type, then the value."""
        kind = self._value_type(what)
        if kind is ValueType.STRING:
            return GgufValue(kind, None, self.string(what))
        if kind is ValueType.ARRAY:
            return self._array(what)
        scalar = self._numbers(kind, 1, what)[0].item()
        return GgufValue(kind, None, scalar)

    def _value_type(self, what: str) -> ValueType:
        number = self.u32(f"the type of {what}")
        try:
            return ValueType(number)
        except ValueError as error:
            raise self.problem(f"{what} has unknown value type {number}") from error

    def _array(self, what: str) -> GgufValue:
        item_type = self._value_type(f"the items of {what}")
        count = self.u64(f"the length of {what}")
        if item_type is ValueType.ARRAY:
            raise self.problem(f"{what} is an array of arrays, which ggml does not know")
        if item_type is ValueType.STRING:
            return GgufValue(ValueType.ARRAY, item_type, self._skip_strings(count, what))
        return GgufValue(ValueType.ARRAY, item_type, self._numbers(item_type, count, what))

    def _numbers(self, kind: ValueType, count: int, what: str) -> np.ndarray[Any, Any]:
        dtype = _DTYPES[kind]
        raw = np.frombuffer(self.take(count * dtype.itemsize, what), np.uint8)
        if kind is ValueType.BOOL and count and int(raw.max()) > 1:
            raise self.problem(f"{what} is a bool that is neither 0 nor 1")
        return raw.view(dtype)

    def _skip_strings(self, count: int, what: str) -> StringArray:
        if count > self._n_strings_left or count * 8 > self.remaining:
            raise self.problem(f"{what} claims {count} strings: too many for the file or at all")
        self._n_strings_left -= count
        start = position = self.position
        unpack, buffer = _U64.unpack_from, self._buffer
        try:
            for _ in range(count):
                position += 8 + unpack(buffer, position)[0]
        except (struct.error, OverflowError) as error:
            raise self.problem(f"a string of {what} reaches past the end of the file") from error
        if position > len(buffer):
            raise self.problem(f"a string of {what} reaches past the end of the file")
        self.position = position
        return StringArray(self.path, buffer, start, count)
