"""Shard files: plain GGUFs that hold some experts of some layers, byte for byte as in the model they were cut
from.

A layer's held experts are stacked in the order of their ids, under the names of the full model:
`blk.N.<kind>.weight` is [ne0, ne1, n_held]. Written with gguf-py, so that any GGUF tool opens them. The
model's short metadata is kept; our keys:

    swarmnode.shard_version    u32, 1
    swarmnode.model_id         string, 64 hex digits
    swarmnode.layers           i32[]
    swarmnode.layer.N.experts  i32[], ascending
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from swarmnode.errors import ModelFileError
from swarmnode.weights.disk import replacing
from swarmnode.weights.expert_layers import tensor_name
from swarmnode.weights.gguf_file import DEFAULT_ALIGNMENT, GgufFile
from swarmnode.weights.gguf_values import ValueType
from swarmnode.weights.manifest import Manifest
from swarmnode.weights.shard_layout import (
    LAYERS_KEY,
    MODEL_KEY,
    SHARD_VERSION,
    VERSION_KEY,
    ShardLayout,
    SlabSource,
    experts_key,
)
from swarmnode.weights.slices import ExpertRange


def shard_name(item: ExpertRange) -> str:
    """A file name for one range; never looks like a part of a split model."""
    return f"layer-{item.layer}-experts-{item.first}-to-{item.stop - 1}.gguf"


def write_shard(
    path: Path,
    source: SlabSource,
    manifest: Manifest,
    ranges: Iterable[ExpertRange],
    *,
    check: bool = True,
    sync: bool = True,
) -> None:
    """Write the experts of `ranges` (which may overlap) from `source`; the file appears whole or not at all.

    ModelFileError if the model has no such expert; StoreError if the disk refuses. `check` every slab against the
    manifest (ModelFileError if one differs): for a source whose file the manifest was not just made or loaded for;
    hashing takes three times as long as writing. `sync`: the file survives a power cut, too.
    """
    try:
        layout = ShardLayout.of(manifest, ranges)
    except ModelFileError as error:
        raise ModelFileError(f"{path}: {error}") from None
    with replacing(path, sync=sync) as partial, partial.open("wb") as file:
        file.write(layout.header)
        for piece in _pieces(path, source, manifest, layout, check):
            file.write(piece)


def _pieces(
    path: Path, source: SlabSource, manifest: Manifest, layout: ShardLayout, check: bool
) -> Iterator[memoryview | bytes]:
    """The tensor bytes: slabs, and zeros to align the next tensor."""
    for tensor in layout.tensors:
        for expert in tensor.experts:
            slab = source.slab(tensor.layer, expert, tensor.kind)
            if check and not manifest.check_slab(tensor.layer, expert, tensor.kind, slab):
                raise ModelFileError(
                    f"{path}: layer {tensor.layer}, expert {expert}, {tensor.kind}: not the bytes of the manifest"
                )
            yield slab
        yield bytes(-tensor.stop % DEFAULT_ALIGNMENT)


class ShardFile:
    """An opened shard. `model_id`: 32 bytes; `experts`: layer -> ids of the experts held, ascending."""

    def __init__(self, path: Path) -> None:
        """Open and check the form; the slabs' hashes are for whoever has the manifest (`verify`).

        Raises ModelFileError or UnsupportedModelError, naming the file.
        """
        self.path = path
        self._file = GgufFile(path)
        if self._value(VERSION_KEY, ValueType.UINT32) != SHARD_VERSION:
            raise ModelFileError(f"{path}: a shard of version {self._value(VERSION_KEY, ValueType.UINT32)}")
        self.model_id = self._model_id()
        layers = self._ascending(LAYERS_KEY)
        self.experts: Mapping[int, tuple[int, ...]] = MappingProxyType(
            {layer: self._ascending(experts_key(layer)) for layer in layers}
        )
        self._position = {
            (layer, expert): i for layer, held in self.experts.items() for i, expert in enumerate(held)
        }

    @property
    def n_bytes(self) -> int:
        """Size of the file."""
        return self._file.n_bytes

    def verify(self, manifest: Manifest) -> bool:
        """True if this is a shard of that model and every slab has its hash."""
        if self.model_id != manifest.model_id:
            return False
        return all(
            layer in manifest.layers and self._verify_expert(manifest, layer, expert)
            for layer, expert in self._position
        )

    def read_slab(self, layer: int, expert: int, kind: str) -> bytes:
        """A copy of one expert's bytes, without keeping the file's pages in memory. KeyError as `slab`."""
        data = bytes(self.slab(layer, expert, kind))
        self._file.release_pages()
        return data

    def read_block(self, layer: int, expert: int, kind: str, offset: int, length: int) -> bytes:
        """A copy of some bytes of a slab, as `read_slab`."""
        data = bytes(self.slab(layer, expert, kind)[offset : offset + length])
        self._file.release_pages()
        return data

    def slab(self, layer: int, expert: int, kind: str) -> memoryview:
        """One expert's bytes, a read-only view of the mapping. KeyError if the shard does not hold it."""
        position = self._position[layer, expert]
        name = tensor_name(layer, kind)
        n_bytes = self._file.tensors[name].n_bytes // len(self.experts[layer])
        return self._file.data(name)[position * n_bytes : (position + 1) * n_bytes]

    def close(self) -> None:
        """Let go of the mapping; views handed out stay valid."""
        self._file.close()

    def _verify_expert(self, manifest: Manifest, layer: int, expert: int) -> bool:
        sound = all(
            tensor_name(layer, kind) in self._file.tensors
            and manifest.check_slab(layer, expert, kind, self.slab(layer, expert, kind))
            for kind in manifest.layers[layer].layout.kinds
        )
        self._file.release_pages()
        return sound

    def _value(self, key: str, kind: ValueType) -> Any:
        stored = self._file.metadata.get(key)
        if stored is None or stored.type is not kind:
            raise ModelFileError(f"{self.path}: not a swarmnode shard: {key} is missing or of another type")
        return stored.value

    def _model_id(self) -> bytes:
        text = self._value(MODEL_KEY, ValueType.STRING)
        try:
            model_id = bytes.fromhex(text)
        except ValueError as error:
            raise ModelFileError(f"{self.path}: {MODEL_KEY} is not hexadecimal") from error
        return model_id

    def _ascending(self, key: str) -> tuple[int, ...]:
        array = self._value(key, ValueType.ARRAY)
        numbers = tuple(array.tolist()) if isinstance(array, np.ndarray) and array.dtype == np.int32 else ()
        if not numbers or numbers[0] < 0 or any(a >= b for a, b in pairwise(numbers)):
            raise ModelFileError(f"{self.path}: {key} is not an ascending list of ids")
        return numbers
