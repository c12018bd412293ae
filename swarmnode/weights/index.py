"""The index of a model: metadata and tensors over all parts of its GGUF, and every expert's slab as a byte
range.

Opening reads headers only (0.2 s for a 248,320-token vocabulary); tensor bytes are mapped and paged in when
touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import numpy as np

from swarmnode.compute.layout import LayerLayout
from swarmnode.counts import counted
from swarmnode.errors import ModelFileError, UnsupportedModelError
from swarmnode.weights.expert_layers import (
    find_block_experts,
    find_expert_layers,
    is_expert_tensor,
    tensor_name,
)
from swarmnode.weights.gguf_file import GgufFile
from swarmnode.weights.gguf_values import GgufValue, ValueType
from swarmnode.weights.limits import MAX_EXPERTS, MAX_LAYERS, MAX_WIDTH
from swarmnode.weights.parts import open_parts
from swarmnode.weights.shard_layout import VERSION_KEY


@dataclass(frozen=True)
class TensorRef:
    """A tensor: `ne` in ggml order (fastest first), `offset` from the start of the file `part_path`."""

    name: str
    ggml_type: int
    ne: tuple[int, ...]
    n_bytes: int
    part_path: Path
    offset: int


class ModelIndex:
    """An opened model. A context manager; views handed out stay valid after `close()`.

    `paths`: its parts in order. `metadata`: the first part's values (int, float, bool, str, numpy array,
    StringArray). `tensors`: all tensors by name, in file order. `architecture`; `n_layer`: without the `n_mtp`
    MTP blocks behind it; `n_embd`, `n_expert`, `n_expert_used`. `expert_layers`: layouts of the layers that have
    routed experts (dense layers are absent, MTP blocks left out). `dense_tensors`: names of everything the
    backbone computes itself, that is, no routed experts and no MTP block; `mtp_tensors`: of the MTP blocks, without
    their routed experts.
    """

    def __init__(self, parts: tuple[GgufFile, ...]) -> None:
        """Use `ModelIndex.open`."""
        first = parts[0]
        self._parts = parts
        self._path = first.path
        self.paths = tuple(part.path for part in parts)
        self.metadata_values: Mapping[str, GgufValue] = first.metadata
        """As `metadata`, with the types the values have in the file."""
        self.metadata: Mapping[str, Any] = MappingProxyType({k: v.value for k, v in first.metadata.items()})
        if VERSION_KEY in self.metadata:
            raise ModelFileError(
                f"{self._path}: a shard, with some of a model's experts (`swarmnode inspect` says which); to run or "
                "to look through a model takes its own file"
            )
        self.architecture = self._read_architecture()
        self._home = {name: part for part in parts for name in part.tensors}
        self.tensors: Mapping[str, TensorRef] = MappingProxyType(
            {
                info.name: TensorRef(info.name, info.ggml_type, info.ne, info.n_bytes, part.path, info.offset)
                for part in parts
                for info in part.tensors.values()
            }
        )
        self.n_embd = self.integer("embedding_length", 1, MAX_WIDTH)
        n_blocks = self.integer("block_count", 1, MAX_LAYERS)
        self.n_mtp = self.integer("nextn_predict_layers", 0, n_blocks - 1, default=0)
        self.n_layer = n_blocks - self.n_mtp
        self.n_expert = self._n_expert()
        self.n_expert_used = self.integer("expert_used_count", 1, self.n_expert)
        self._check_promises(n_blocks)
        self.expert_layers: Mapping[int, LayerLayout] = MappingProxyType(
            find_expert_layers(
                self._path, self.tensors, n_layer=self.n_layer, n_expert=self.n_expert, n_embd=self.n_embd
            )
        )
        self._check_n_ff(n_blocks)
        self._slab_bytes = {
            (layer, tensor.kind): tensor.n_bytes
            for layer, layout in self.expert_layers.items()
            for tensor in layout.tensors
        }

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open a model by its file, or by any part of a split one.

        Raises ModelFileError (missing, truncated, malformed, contradicts itself) or UnsupportedModelError (no
        mixture of experts, or a layout this version cannot run); both name the file.
        """
        return cls(open_parts(Path(path)))

    @property
    def n_bytes(self) -> int:
        """Size of all parts."""
        return sum(part.n_bytes for part in self._parts)

    @cached_property
    def dense_tensors(self) -> tuple[str, ...]:
        return tuple(name for name in self.tensors if not is_expert_tensor(name) and not self._is_mtp(name))

    @cached_property
    def mtp_tensors(self) -> tuple[str, ...]:
        return tuple(name for name in self.tensors if not is_expert_tensor(name) and self._is_mtp(name))

    def mtp_experts(self, block: int) -> LayerLayout:
        """Layout of the routed experts of an MTP block. ModelFileError, UnsupportedModelError as `open`: here, because
        a model runs without the block, and workers never see it.
        """
        return find_block_experts(
            self._path, self.tensors, block=block, n_expert=self.n_expert, n_embd=self.n_embd
        )

    def data(self, name: str) -> memoryview:
        """A tensor's bytes, u8 [n_bytes]: a read-only view of the mapping. KeyError if there is no such
        tensor.
        """
        return self._home[name].data(name)

    def address(self, name: str) -> int:
        """Address of the first byte of `data(name)`, a multiple of 32; valid while a view of it is alive."""
        return self._home[name].address(name)

    def slab(self, layer: int, expert: int, kind: str) -> memoryview:
        """One expert's bytes of one stacked tensor, read-only u8. KeyError if there is no such expert."""
        n_bytes = self._slab_bytes[layer, kind]
        if not 0 <= expert < self.n_expert:
            raise KeyError(f"layer {layer} has no expert {expert}")
        return self.data(tensor_name(layer, kind))[expert * n_bytes : (expert + 1) * n_bytes]

    def advise(self, layer: int, expert: int, advice: int) -> None:
        """Tell the system (`mmap.MADV_*`) about the pages that hold nothing but this expert."""
        for kind in self.expert_layers[layer].kinds:
            name, n_bytes = tensor_name(layer, kind), self._slab_bytes[layer, kind]
            part = self._home[name]
            part.advise(part.tensors[name].offset + expert * n_bytes, n_bytes, advice)

    def read_block(self, layer: int, expert: int, kind: str, offset: int, length: int) -> bytes:
        """A copy of some bytes of a slab, which may come from disk. KeyError as `slab`."""
        return bytes(self.slab(layer, expert, kind)[offset : offset + length])

    def integer(self, key: str, lowest: int, highest: int, default: int | None = None) -> int:
        """The integer `{architecture}.{key}` of the metadata; ModelFileError if none or out of range."""
        key = f"{self.architecture}.{key}"
        value = self.metadata.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelFileError(f"{self._path}: {key} is missing or not an integer")
        if not lowest <= value <= highest:
            raise ModelFileError(f"{self._path}: {key} is {value}, not {lowest} to {highest}")
        return value

    def close(self) -> None:
        """Let go of the mappings; they go with the last view."""
        for part in self._parts:
            part.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_architecture(self) -> str:
        stored = self._parts[0].metadata.get("general.architecture")
        if stored is None or stored.type is not ValueType.STRING or not stored.value:
            raise ModelFileError(f"{self._path}: general.architecture is missing or not a name")
        for part in self._parts[1:]:
            other = part.metadata.get("general.architecture", stored)
            if other.value != stored.value:
                raise ModelFileError(f"{part.path}: is a {other.value!r}, the first part a {stored.value!r}")
        return str(stored.value)

    def _n_expert(self) -> int:
        n_expert = self.integer("expert_count", 0, MAX_EXPERTS, default=0)
        if n_expert == 0:
            raise UnsupportedModelError(
                f"{self._path}: a {self.architecture} model without routed experts; "
                "only mixtures of experts are served"
            )
        return n_expert

    def _check_promises(self, n_blocks: int) -> None:
        blocks = {int(name.split(".")[1]) for name in self.tensors if _is_block_name(name)}
        if blocks != set(range(n_blocks)):
            missing, extra = sorted(set(range(n_blocks)) - blocks), sorted(blocks - set(range(n_blocks)))
            problem = (
                f"layer {missing[0]} has no tensors" if missing else f"there are tensors of layer {extra[0]}"
            )
            raise ModelFileError(f"{self._path}: block_count is {n_blocks}, but {problem}")
        embedding = self.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.ne) != 2 or embedding.ne[0] != self.n_embd:
            shape = "missing" if embedding is None else f"of shape {embedding.ne}"
            raise ModelFileError(f"{self._path}: token_embd.weight is {shape}, not [{self.n_embd}, n_vocab]")
        self._check_vocabulary(embedding.ne[1])

    def _check_vocabulary(self, n_rows: int) -> None:
        """One row of embeddings a token: ids of more tokens would be read behind the matrix, and of fewer rows some
        would be drawn that have no text.
        """
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        if tokens is None:
            return
        if isinstance(tokens, str) or not hasattr(tokens, "__len__"):
            raise ModelFileError(
                f"{self._path}: tokenizer.ggml.tokens is no list with a token for each of the {n_rows} rows of "
                "token_embd.weight"
            )
        if len(tokens) != n_rows:
            raise ModelFileError(
                f"{self._path}: the tokenizer has {counted(len(tokens), 'token')}, "
                f"but token_embd.weight has {counted(n_rows, 'row')}, not "
                "one a token: the file was converted or edited wrongly; get another one, or convert the model again"
            )

    def _check_n_ff(self, n_blocks: int) -> None:
        key = f"{self.architecture}.expert_feed_forward_length"
        promised = self.metadata.get(key)
        if promised is None:
            return
        is_list = (
            isinstance(promised, np.ndarray)
            and promised.shape == (n_blocks,)
            and np.issubdtype(promised.dtype, np.integer)
        )
        if not is_list and not isinstance(promised, int):
            raise ModelFileError(f"{self._path}: {key} is neither an integer nor {n_blocks} of them")
        for layer, layout in self.expert_layers.items():
            n_ff = int(promised[layer]) if is_list else promised
            if layout.n_ff != n_ff:
                raise ModelFileError(f"{self._path}: {key} is {n_ff}, but layer {layer} has {layout.n_ff}")

    def _is_mtp(self, name: str) -> bool:
        return _is_block_name(name) and int(name.split(".")[1]) >= self.n_layer


def _is_block_name(name: str) -> bool:
    parts = name.split(".", 2)
    return len(parts) == 3 and parts[0] == "blk" and parts[1].isdecimal() and len(parts[1]) <= 9
