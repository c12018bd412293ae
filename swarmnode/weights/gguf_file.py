"""A strict reader of one GGUF file (version 2 or 3, little-endian) over a read-only mmap.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Reads the header only; tensor bytes are
mapped, not read. Refuses whatever would make ggml abort or read out of bounds later. Why not gguf-py's
reader: docs/decisions/0006-own-gguf-reader.md.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from types import MappingProxyType

import numpy as np

from swarmnode.errors import ModelFileError, UnsupportedModelError
from swarmnode.weights.ggml_types import GGML_TYPES, row_bytes
from swarmnode.weights.gguf_values import Cursor, GgufValue, ValueType

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
"""72x the tensors of a 48-layer model."""
MAX_KEY_BYTES = (1 << 16) - 1
MAX_NAME_BYTES = 63
"""GGML_MAX_NAME without the final zero."""
MAX_DIMS = 4
"""GGML_MAX_DIMS."""

_ALIGNMENT_KEY = "general.alignment"


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: `ne` in ggml order (fastest first), `offset` from the start of the file."""

    name: str
    ggml_type: int
    ne: tuple[int, ...]
    offset: int
    n_bytes: int


class GgufFile:
    """One mapped file: `metadata`, `tensors` (by name, in file order) and the bytes.

    Views handed out stay valid after `close()`; the mapping goes with the last of them. The file must not be
    truncated meanwhile (reading would end the process with SIGBUS).
    """

    def __init__(self, path: Path) -> None:
        """Open and check.

        Raises ModelFileError (cannot be opened, or malformed) or UnsupportedModelError (another GGUF version,
        byte order, alignment or tensor type); both name the file.
        """
        self.path = path
        self._mapping: mmap.mmap | None = _map(path)
        self._address = _address(self._mapping)
        self.n_bytes = len(self._mapping)
        cursor = Cursor(path, memoryview(self._mapping))
        n_tensors, n_keys = _read_preamble(cursor)
        self.metadata: Mapping[str, GgufValue] = MappingProxyType(_read_metadata(cursor, n_keys))
        self.alignment = _alignment(cursor, self.metadata)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            _read_tensors(cursor, n_tensors, self.alignment, self.n_bytes)
        )

    def data(self, name: str) -> memoryview:
        """The tensor's bytes: a read-only view (u8) of the mapping; nothing is read yet."""
        return self.span(self.tensors[name].offset, self.tensors[name].n_bytes)

    def span(self, offset: int, n_bytes: int) -> memoryview:
        """Read-only view of any bytes of the file."""
        return memoryview(self._opened())[offset : offset + n_bytes]

    def address(self, name: str) -> int:
        """Address of the tensor's first byte, for zero-copy binding; valid while this file is open."""
        self._opened()
        return self._address + self.tensors[name].offset

    def close(self) -> None:
        """Let go of the mapping."""
        self._mapping = None

    def release_pages(self) -> None:
        """Give the pages read so far back to the system; they are read again when touched.

        Mapped pages count as this process's memory, and a worker's budget is a promise.
        """
        if hasattr(mmap, "MADV_DONTNEED"):
            self._opened().madvise(mmap.MADV_DONTNEED)

    def advise(self, offset: int, n_bytes: int, advice: int) -> None:
        """Tell the system (`mmap.MADV_*`) about the whole pages within these bytes of the file."""
        start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (offset + n_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
        if length > 0:
            self._opened().madvise(advice, start, length)

    def _opened(self) -> mmap.mmap:
        if self._mapping is None:
            raise ModelFileError(f"{self.path}: the file was closed")
        return self._mapping


def has_key(path: Path, key: str, max_bytes: int) -> bool:
    """Whether the metadata has this key; only the first `max_bytes` of the file are looked at.

    ModelFileError or UnsupportedModelError if they are malformed, or end before the key and before the metadata.
    """
    cursor = Cursor(path, memoryview(_map(path))[:max_bytes])
    _, n_keys = _read_preamble(cursor)
    return any(found == key for found, _ in _metadata_entries(cursor, n_keys))


def _map(path: Path) -> mmap.mmap:
    """Map a regular file, read-only: a private writable mapping (ACCESS_COPY) of a file larger than the
    machine's memory is refused by Linux, and the backbone's file may well be."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ModelFileError(f"{path}: not a regular file")
        with path.open("rb", buffering=0) as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise ModelFileError(f"{path}: no such file") from error
    except ValueError as error:  # mmap of an empty file
        raise ModelFileError(f"{path}: the file is empty or cannot be mapped") from error
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be opened: {error.strerror}") from error


def _address(mapping: mmap.mmap) -> int:
    """Address of the mapped bytes; numpy tells it for read-only memory, ctypes does not."""
    return int(np.frombuffer(mapping, np.uint8).ctypes.data)


def _read_preamble(cursor: Cursor) -> tuple[int, int]:
    """(tensors, keys) of a file with a sound magic and version."""
    if bytes(cursor.take(4, "the magic number")) != MAGIC:
        raise cursor.problem("not a GGUF file: it does not begin with 'GGUF'")
    version = cursor.u32("the version")
    if version & 0xFFFF == 0:
        raise UnsupportedModelError(f"{cursor.path}: a big-endian GGUF; only little-endian ones can be read")
    if version not in (2, 3):
        raise UnsupportedModelError(f"{cursor.path}: GGUF version {version}; only 2 and 3 can be read")
    n_tensors, n_keys = cursor.u64("the number of tensors"), cursor.u64("the number of keys")
    if n_tensors > MAX_TENSORS:
        raise cursor.problem(f"claims {n_tensors} tensors, more than {MAX_TENSORS}")
    if n_keys > MAX_KEYS:
        raise cursor.problem(f"claims {n_keys} metadata keys, more than {MAX_KEYS}")
    return n_tensors, n_keys


def _read_metadata(cursor: Cursor, n_keys: int) -> dict[str, GgufValue]:
    metadata: dict[str, GgufValue] = {}
    for key, value in _metadata_entries(cursor, n_keys):
        if key in metadata:
            raise cursor.problem(f"metadata key {key!r} occurs twice")
        metadata[key] = value
    return metadata


def _metadata_entries(cursor: Cursor, n_keys: int) -> Iterator[tuple[str, GgufValue]]:
    for index in range(n_keys):
        key = cursor.string(f"metadata key {index}", MAX_KEY_BYTES)
        if not key:
            raise cursor.problem(f"metadata key {index} is empty")
        yield key, cursor.value(key)


def _alignment(cursor: Cursor, metadata: Mapping[str, GgufValue]) -> int:
    stored = metadata.get(_ALIGNMENT_KEY)
    if stored is None:
        return DEFAULT_ALIGNMENT
    if stored.type is not ValueType.UINT32:
        raise cursor.problem(f"{_ALIGNMENT_KEY} is a {stored.type.name}, not a UINT32")
    alignment: int = stored.value
    if alignment < 1 or alignment & (alignment - 1):
        raise cursor.problem(f"{_ALIGNMENT_KEY} is {alignment}, not a power of two")
    if alignment < DEFAULT_ALIGNMENT:
        raise UnsupportedModelError(
            f"{cursor.path}: {_ALIGNMENT_KEY} is {alignment}, below the {DEFAULT_ALIGNMENT} ggml needs"
        )
    return alignment


def _read_tensors(cursor: Cursor, n_tensors: int, alignment: int, file_bytes: int) -> dict[str, TensorInfo]:
    raw = [_read_tensor(cursor, index) for index in range(n_tensors)]
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for info in raw:
        if info.name in tensors:
            raise cursor.problem(f"tensor {info.name!r} occurs twice")
        if info.offset % alignment:
            raise cursor.problem(f"tensor {info.name!r}: offset {info.offset} is no multiple of {alignment}")
        offset = data_start + info.offset
        if offset + info.n_bytes > file_bytes:
            raise cursor.problem(
                f"tensor {info.name!r} ends at byte {offset + info.n_bytes}, "
                f"but the file has {file_bytes}: truncated?"
            )
        tensors[info.name] = TensorInfo(info.name, info.ggml_type, info.ne, offset, info.n_bytes)
    _check_overlap(cursor, tensors)
    return tensors


def _read_tensor(cursor: Cursor, index: int) -> TensorInfo:
    """One entry of the tensor list; its offset still counts from the start of the data."""
    name = cursor.string(f"the name of tensor {index}", MAX_NAME_BYTES)
    if not name or "\0" in name:
        raise cursor.problem(f"the name of tensor {index}, {name!r}, is empty or holds a zero byte")
    n_dims = cursor.u32(f"the dimensions of {name!r}")
    if not 1 <= n_dims <= MAX_DIMS:
        raise cursor.problem(f"tensor {name!r} has {n_dims} dimensions, not 1 to {MAX_DIMS}")
    ne = tuple(cursor.u64(f"the shape of {name!r}") for _ in range(n_dims))
    if not all(1 <= n < 1 << 63 for n in ne):
        raise cursor.problem(f"tensor {name!r} has shape {ne}: every dimension must be positive")
    ggml_type = cursor.u32(f"the type of {name!r}")
    offset = cursor.u64(f"the offset of {name!r}")
    if ggml_type not in GGML_TYPES:
        raise UnsupportedModelError(f"{cursor.path}: tensor {name!r} has ggml type {ggml_type}, unknown here")
    n_row_bytes = row_bytes(ggml_type, ne[0])
    if n_row_bytes is None:
        kind = GGML_TYPES[ggml_type]
        raise cursor.problem(
            f"tensor {name!r}: rows of {ne[0]} values do not fit {kind.name}'s blocks of {kind.block_values}"
        )
    return TensorInfo(name, ggml_type, ne, offset, n_row_bytes * prod(ne[1:]))


def _check_overlap(cursor: Cursor, tensors: Mapping[str, TensorInfo]) -> None:
    by_offset = sorted(tensors.values(), key=lambda info: info.offset)
    for before, after in pairwise(by_offset):
        if before.offset + before.n_bytes > after.offset:
            raise cursor.problem(f"tensors {before.name!r} and {after.name!r} overlap")
