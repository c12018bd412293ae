"""Rows of an encoded matrix, decoded one by one: token embeddings, of which a pass needs a few of 248,320."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from swarmnode.compute import ggml
from swarmnode.compute.tensors import BytesLike, byte_view
from swarmnode.errors import UsageError

Decoder: TypeAlias = Callable[[int, int, int], object]
"""(address of the encoded row, address of f32 values, number of values)"""


class RowTable:
    """A matrix [n_rows, n] of any type that ggml decodes, left where it is (a mapped file).

    On the host: some devices cannot gather rows of quantised types, and the matrix may be 1 GB.
    """

    def __init__(self, ggml_type: int, data: BytesLike, n_rows: int, n: int) -> None:
        """UsageError if `data` is not exactly that long, or the type has no decoder."""
        self._data = byte_view(data, "rows")
        self._row_bytes = ggml.row_bytes(ggml_type, n)
        if self._data.size != n_rows * self._row_bytes:
            raise UsageError(f"{n_rows} rows of {self._row_bytes} bytes are not {self._data.size} bytes")
        self._address = self._data.ctypes.data
        self._decode = _decoder(ggml_type)
        self.n_rows = n_rows
        self.n = n

    def rows(self, numbers: Sequence[int]) -> npt.NDArray[np.float32]:
        """f32 [len(numbers), n]; UsageError for a row that is not there."""
        if numbers and not (min(numbers) >= 0 and max(numbers) < self.n_rows):
            raise UsageError(f"rows {min(numbers)} to {max(numbers)} are not all of 0 to {self.n_rows - 1}")
        out = np.empty((len(numbers), self.n), np.float32)
        to = out.ctypes.data
        for position, number in enumerate(map(int, numbers)):  # addresses do not fit numpy's integers
            self._decode(self._address + number * self._row_bytes, to + position * self.n * 4, self.n)
        return out


def _decoder(ggml_type: int) -> Decoder:
    if ggml_type == ggml.F32:
        return _copy_f32
    address = ctypes.cast(ggml.decoder(ggml_type), ctypes.c_void_p).value
    if not address:
        raise UsageError(f"ggml has no decoder for {ggml.type_info(ggml_type).name}")
    # Plain addresses: ctypes takes ten times as long to make typed pointers as ggml to decode a row.
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(address)


def _copy_f32(source: int, target: int, n: int) -> None:
    ctypes.memmove(target, source, 4 * n)
