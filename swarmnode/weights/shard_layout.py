"""What a shard file looks like, byte for byte, before any of it is written: the header, and where every slab lies.

So that a shard can be sent from any byte on without a file of its size: `read` copies some bytes of it, out of
the header or of the source's slabs. The format is shard.py's.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from swarmnode.errors import ModelFileError, UnsupportedModelError
from swarmnode.weights.expert_layers import tensor_name
from swarmnode.weights.gguf_file import DEFAULT_ALIGNMENT, has_key
from swarmnode.weights.manifest import Manifest
from swarmnode.weights.slices import ExpertRange, holdings_of

SHARD_VERSION = 1
VERSION_KEY = "swarmnode.shard_version"
MODEL_KEY = "swarmnode.model_id"
LAYERS_KEY = "swarmnode.layers"
MAX_METADATA_BYTES = 1 << 20
"""Of a shard before `VERSION_KEY`: only short values stand there, no vocabulary, which takes 0.2 s to step over."""


def experts_key(layer: int) -> str:
    """The key under which a layer's held experts stand."""
    return f"swarmnode.layer.{layer}.experts"


def is_shard(path: Path) -> bool:
    """Whether it says that it is a shard, sound or not; False if it cannot be read. Reads a few pages of it."""
    try:
        return has_key(path, VERSION_KEY, MAX_METADATA_BYTES)
    except (ModelFileError, UnsupportedModelError):
        return False


class SlabSource(Protocol):
    """Where slabs come from: a ModelIndex, a ShardFile, a store."""

    def slab(self, layer: int, expert: int, kind: str) -> memoryview: ...


@dataclass(frozen=True)
class StackedTensor:
    """One tensor of a shard: the slabs of `experts` one after the other, from byte `offset` of the file on."""

    offset: int
    layer: int
    kind: str
    experts: tuple[int, ...]
    slab_bytes: int

    @property
    def stop(self) -> int:
        """The byte behind the last slab; zeros follow up to the next tensor."""
        return self.offset + len(self.experts) * self.slab_bytes


@dataclass(frozen=True)
class ShardLayout:
    """`header`: everything before the tensor bytes, aligned. `n_bytes`: size of the file. `tensors`: in file order."""

    header: bytes
    tensors: tuple[StackedTensor, ...]
    n_bytes: int

    @classmethod
    def of(cls, manifest: Manifest, ranges: Iterable[ExpertRange]) -> ShardLayout:
        """The shard of these ranges (which may overlap). ModelFileError if there are none, or the model has no such
        experts."""
        ranges = tuple(ranges)
        if not ranges:
            raise ModelFileError("a shard of no experts")
        for item in ranges:
            if not manifest.holds(item):
                raise ModelFileError(f"{item}: {manifest.name} has no such routed experts")
        holdings = {layer: tuple(sorted(experts)) for layer, experts in sorted(holdings_of(ranges).items())}
        header = _header(manifest, holdings)
        header += bytes(-len(header) % DEFAULT_ALIGNMENT)
        tensors = []
        at = len(header)
        for layer, experts in holdings.items():
            for tensor in manifest.layers[layer].layout.tensors:
                tensors.append(StackedTensor(at, layer, tensor.kind, experts, tensor.n_bytes))
                at = tensors[-1].stop
                at += -at % DEFAULT_ALIGNMENT
        return cls(header, tuple(tensors), at)

    def read(self, source: SlabSource, start: int, stop: int) -> memoryview:
        """A copy of the bytes [start, stop) of the file, which must lie inside it. Blocks: slabs may come from disk.

        Other threads run meanwhile: numpy copies without Python's lock.
        """
        data = np.zeros(stop - start, np.uint8)
        for offset, part in self._parts(source, start, stop):
            data[offset - start : offset - start + len(part)] = np.frombuffer(part, np.uint8)
        return data.data

    def _parts(self, source: SlabSource, start: int, stop: int) -> Iterator[tuple[int, bytes | memoryview]]:
        """(offset in the file, bytes) of all that lies in [start, stop) and is no padding."""
        if start < len(self.header):
            yield start, self.header[start:stop]
        for tensor in self.tensors[max(0, bisect_right(self._offsets, start) - 1) :]:
            if tensor.offset >= stop:
                return
            yield from _slabs(source, tensor, start, stop)

    @cached_property
    def _offsets(self) -> list[int]:
        return [tensor.offset for tensor in self.tensors]


def _slabs(
    source: SlabSource, tensor: StackedTensor, start: int, stop: int
) -> Iterator[tuple[int, memoryview]]:
    """Those of one tensor that reach into [start, stop)."""
    low, high = max(start, tensor.offset), min(stop, tensor.stop)
    while low < high:
        place, inside = divmod(low - tensor.offset, tensor.slab_bytes)
        length = min(high - low, tensor.slab_bytes - inside)
        slab = source.slab(tensor.layer, tensor.experts[place], tensor.kind)
        yield low, slab[inside : inside + length]
        low += length


def _header(manifest: Manifest, holdings: Mapping[int, tuple[int, ...]]) -> bytes:
    """Magic, metadata and tensor list, as gguf-py writes them."""
    from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter  # 130 ms: only for those who write
    from gguf.gguf_writer import WriterState

    with io.BytesIO() as written, closing(GGUFWriter(None, manifest.architecture)) as writer:
        for key, value in manifest.metadata.items():
            item_type = None if value.item_type is None else GGUFValueType(value.item_type)
            writer.add_key_value(key, value.value, GGUFValueType(value.type), item_type)
        writer.add_uint32(VERSION_KEY, SHARD_VERSION)
        writer.add_string(MODEL_KEY, manifest.model_id.hex())
        writer.add_key_value(LAYERS_KEY, list(holdings), GGUFValueType.ARRAY, GGUFValueType.INT32)
        for layer, experts in holdings.items():
            writer.add_key_value(experts_key(layer), list(experts), GGUFValueType.ARRAY, GGUFValueType.INT32)
            for tensor in manifest.layers[layer].layout.tensors:
                writer.add_tensor_info(
                    tensor_name(layer, tensor.kind),
                    (len(experts), tensor.ne1, tensor.ne0),
                    np.dtype(np.float32),  # not looked at when the type is given
                    len(experts) * tensor.n_bytes,
                    raw_dtype=GGMLQuantizationType(tensor.ggml_type),
                )
        writer.fout = [cast(Any, written)]  # instead of a file that it opens
        writer.state = WriterState.EMPTY
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        return written.getvalue()
