"""The manifest of a model: its shape, and the SHA-256 of every slab and of the dense path. Pure.

Its own hash is the model id, so that a worker that knows the id can check every byte a stranger sends it, and
two quantisations of one model are two models. Encoded as msgpack arrays in one canonical form:

    ["swarmnode-manifest", 1, architecture, name, n_embd, n_layer, n_expert, n_expert_used,
     [[key, value type, item type or nil, value], ...],                    by key
     [[layer, n_ff, [[kind, ggml type, ne0, ne1, hashes], ...]], ...],     by layer; hashes: n_expert * 32 bytes
     dense_sha256]
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import msgpack

from swarmnode.compute.layout import ExpertTensor, LayerLayout, layout_problem
from swarmnode.errors import ProtocolError
from swarmnode.weights.ggml_types import is_weight_type, row_bytes
from swarmnode.weights.gguf_values import GgufValue, ValueType
from swarmnode.weights.limits import MAX_EXPERTS, MAX_LAYERS, MAX_SLAB_BYTES, MAX_WIDTH
from swarmnode.weights.slices import ExpertRange

HASH_BYTES = 32
MAX_MANIFEST_BYTES = 16 * 1024 * 1024
"""Of a 48-layer model with 256 experts: 1.2 MB."""
MAX_METADATA_KEYS = 512
MAX_METADATA_ITEMS = 1024
"""Of one array: a number for each layer."""
MAX_METADATA_STRING_BYTES = 4096
MAX_ARRAY_ITEMS = 1024
"""Of any array in a manifest: as many layers, metadata items."""
MAX_ITEMS = 256 * 1024
"""Of all arrays together: 16 MiB of tiny arrays would otherwise become a gigabyte of objects."""

BytesLike: TypeAlias = bytes | bytearray | memoryview

_MAGIC = "swarmnode-manifest"
_VERSION = 1
_LEFT_OUT = ("general.architecture", "general.alignment")
_ARCHITECTURE = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_TAKEN_PREFIXES = ("general", "split", "swarmnode", "tokenizer")
"""First words of keys that shard files and loaders understand: none of these is an architecture."""


@dataclass(frozen=True)
class LayerManifest:
    """One layer's experts. `hashes`: kind -> the SHA-256 of every expert's slab, expert by expert, 32 bytes
    each.
    """

    layout: LayerLayout
    hashes: Mapping[str, bytes]

    def sha256(self, expert: int, kind: str) -> bytes:
        """Hash of one slab, 32 bytes. KeyError if the layer has no such expert or kind."""
        if not 0 <= expert < self.layout.n_expert:
            raise KeyError(f"layer {self.layout.layer} has no expert {expert}")
        return self.hashes[kind][expert * HASH_BYTES : (expert + 1) * HASH_BYTES]


@dataclass(frozen=True)
class Manifest:
    """What a model is. `layers`: those with routed experts only. `metadata`: the GGUF's `general.*` and
    hyperparameter keys, as far as they are short; no tokenizer. `dense_sha256`: hash over all tensors the
    backbone computes itself.
    """

    architecture: str
    name: str
    n_embd: int
    n_layer: int
    n_expert: int
    n_expert_used: int
    metadata: Mapping[str, GgufValue]
    layers: Mapping[int, LayerManifest]
    dense_sha256: bytes

    @cached_property
    def model_id(self) -> bytes:
        """SHA-256 of `encode()`, 32 bytes."""
        return hashlib.sha256(self.encode()).digest()

    @property
    def least_expert_bytes(self) -> int:
        """Bytes of one expert, of the layer where they are smallest: a smaller budget holds nothing."""
        return min(layer.layout.expert_bytes for layer in self.layers.values())

    def range_bytes(self, item: ExpertRange) -> int:
        """Bytes of these experts' slabs, exact for their layer. KeyError if the layer has no routed experts."""
        return item.count * self.layers[item.layer].layout.expert_bytes

    def holds(self, item: ExpertRange) -> bool:
        """True if the model has all experts of this range."""
        return item.layer in self.layers and item.stop <= self.n_expert

    def check_slab(self, layer: int, expert: int, kind: str, data: BytesLike) -> bool:
        """True if `data` is exactly that slab; False also if the model has no such slab."""
        entry = self.layers.get(layer)
        if entry is None or kind not in entry.hashes or not 0 <= expert < self.n_expert:
            return False
        view = memoryview(data)
        right_length = view.nbytes == entry.layout.tensor(kind).n_bytes
        return right_length and hashlib.sha256(view).digest() == entry.sha256(expert, kind)

    def encode(self) -> bytes:
        """The canonical bytes, the same for the same model however its file is split."""
        layers = [
            [
                number,
                layer.layout.n_ff,
                [[t.kind, t.ggml_type, t.ne0, t.ne1, layer.hashes[t.kind]] for t in layer.layout.tensors],
            ]
            for number, layer in sorted(self.layers.items())
        ]
        metadata = [
            [key, value.type, value.item_type, value.value] for key, value in sorted(self.metadata.items())
        ]
        head = [_MAGIC, _VERSION, self.architecture, self.name]
        numbers = [self.n_embd, self.n_layer, self.n_expert, self.n_expert_used]
        encoded: bytes = msgpack.packb([*head, *numbers, metadata, layers, self.dense_sha256])
        return encoded

    @classmethod
    def decode_untrusted(cls, data: BytesLike, model_id: bytes) -> Manifest:
        """The manifest a peer sent for `model_id`.

        Raises ProtocolError (`bad_manifest`) if the hash is another, or the content is not canonical, breaks
        a cap or contradicts itself.
        """
        view = memoryview(data)
        if view.nbytes > MAX_MANIFEST_BYTES:
            raise _malformed(f"{view.nbytes} bytes, more than {MAX_MANIFEST_BYTES}")
        if hashlib.sha256(view).digest() != model_id:
            raise _malformed("its hash is not the model id")
        manifest = _decode_fields(_unpack(view))
        if manifest.encode() != bytes(view):
            raise _malformed("not in canonical form")
        return manifest


def kept_metadata(architecture: str, values: Mapping[str, GgufValue]) -> dict[str, GgufValue]:
    """The part of a GGUF's metadata that a manifest keeps: short `general.*` and `{architecture}.*` values.

    `general.architecture` is a field of its own; `general.alignment` belongs to a file, not to a model.
    """
    prefixes = _kept_prefixes(architecture)
    short = {
        key: _plain(value)
        for key, value in values.items()
        if key.startswith(prefixes) and key not in _LEFT_OUT and _is_short(value)
    }
    return dict(sorted(short.items()))


def _kept_prefixes(architecture: str) -> tuple[str, str]:
    return ("general.", f"{architecture}.")


def _is_short(value: GgufValue) -> bool:
    if value.type is ValueType.STRING:
        return len(value.value.encode()) <= MAX_METADATA_STRING_BYTES
    if value.type is ValueType.ARRAY:
        return value.item_type is not ValueType.STRING and 0 < len(value.value) <= MAX_METADATA_ITEMS
    return True


def _plain(value: GgufValue) -> GgufValue:
    if value.type is not ValueType.ARRAY:
        return value
    return GgufValue(value.type, value.item_type, tuple(value.value.tolist()))


# ---- decoding what a peer sent ----------------------------------------------------------------------------------

_Fields: TypeAlias = tuple[Any, ...]

_INTEGERS = {
    ValueType.UINT8: (0, 2**8 - 1),
    ValueType.INT8: (-(2**7), 2**7 - 1),
    ValueType.UINT16: (0, 2**16 - 1),
    ValueType.INT16: (-(2**15), 2**15 - 1),
    ValueType.UINT32: (0, 2**32 - 1),
    ValueType.INT32: (-(2**31), 2**31 - 1),
    ValueType.UINT64: (0, 2**64 - 1),
    ValueType.INT64: (-(2**63), 2**63 - 1),
}


def _malformed(reason: str) -> ProtocolError:
    return ProtocolError("bad_manifest", reason)


def _unpack(view: memoryview) -> object:
    """The msgpack value, of which the arrays together have at most MAX_ITEMS items."""
    left = MAX_ITEMS

    def counted(items: _Fields) -> _Fields:
        nonlocal left
        left -= 1 + len(items)
        if left < 0:
            raise ValueError("too many items")
        return items

    try:
        return msgpack.unpackb(
            view, use_list=False, list_hook=counted, max_array_len=MAX_ARRAY_ITEMS, max_map_len=0
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise _malformed(f"not msgpack: {error}") from error


def _decode_fields(fields: object) -> Manifest:
    magic, version, architecture, name, *numbers, metadata, layers, dense = _tuple(fields, 11, "the manifest")
    if magic != _MAGIC or version != _VERSION:
        raise _malformed(f"starts with {magic!r}, {version!r}")
    n_embd = _integer(numbers[0], 1, MAX_WIDTH, "n_embd")
    n_layer = _integer(numbers[1], 1, MAX_LAYERS, "n_layer")
    n_expert = _integer(numbers[2], 1, MAX_EXPERTS, "n_expert")
    architecture = _string(architecture, "the architecture")
    if not _ARCHITECTURE.fullmatch(architecture) or architecture in _TAKEN_PREFIXES:
        raise _malformed(f"{architecture!r} is no architecture")
    experts = dict(
        _decode_layer(entry, n_embd, n_layer, n_expert) for entry in _many(layers, n_layer, "layers")
    )
    if not experts:
        raise _malformed("no layer has experts")
    return Manifest(
        architecture=architecture,
        name=_string(name, "the name"),
        n_embd=n_embd,
        n_layer=n_layer,
        n_expert=n_expert,
        n_expert_used=_integer(numbers[3], 1, n_expert, "n_expert_used"),
        metadata=_decode_metadata(metadata, architecture),
        layers=experts,
        dense_sha256=_bytes(dense, HASH_BYTES, "dense_sha256"),
    )


def _decode_layer(entry: object, n_embd: int, n_layer: int, n_expert: int) -> tuple[int, LayerManifest]:
    number, n_ff, tensors = _tuple(entry, 3, "a layer")
    number = _integer(number, 0, n_layer - 1, "a layer's number")
    n_ff = _integer(n_ff, 1, MAX_WIDTH, "n_ff")
    slabs = []
    hashes = {}
    for tensor in _many(tensors, 3, f"tensors of layer {number}"):
        kind, ggml_type, ne0, ne1, digest = _tuple(tensor, 5, "a tensor")
        slab = _decode_slab(_string(kind, "a kind"), ggml_type, ne0, ne1)
        slabs.append(slab)
        hashes[slab.kind] = _bytes(digest, n_expert * HASH_BYTES, f"hashes of {slab.kind}")
    layout = LayerLayout(number, n_embd, n_ff, n_expert, tuple(slabs))
    problem = layout_problem(layout)
    if problem is not None:
        raise _malformed(problem)
    return number, LayerManifest(layout, hashes)


def _decode_slab(kind: str, ggml_type: object, ne0: object, ne1: object) -> ExpertTensor:
    number = _integer(ggml_type, 0, 2**32 - 1, "a ggml type")
    width = _integer(ne0, 1, 2 * MAX_WIDTH, "ne0")
    rows = _integer(ne1, 1, 2 * MAX_WIDTH, "ne1")
    n_row_bytes = row_bytes(number, width)
    if n_row_bytes is None or not is_weight_type(number) or n_row_bytes * rows > MAX_SLAB_BYTES:
        raise _malformed(f"{kind}: type {number} with rows of {width} x {rows} cannot be computed")
    return ExpertTensor(kind, number, width, rows, n_row_bytes * rows)


def _decode_metadata(metadata: object, architecture: str) -> dict[str, GgufValue]:
    """Only keys that `kept_metadata` keeps: others could change what a shard file with them means."""
    values = dict(_decode_value(entry) for entry in _many(metadata, MAX_METADATA_KEYS, "metadata"))
    for key in values:
        if not key.startswith(_kept_prefixes(architecture)) or key in _LEFT_OUT or not key.isprintable():
            raise _malformed(f"{key!r} does not belong into a manifest")
    return values


def _decode_value(entry: object) -> tuple[str, GgufValue]:
    key, kind, item_kind, value = _tuple(entry, 4, "a metadata entry")
    key = _string(key, "a metadata key")
    if kind == ValueType.ARRAY:
        item_type = _value_type(item_kind, key)
        if item_type is ValueType.STRING:
            raise _malformed(f"{key} is an array of strings")
        items = tuple(_scalar(item, item_type, key) for item in _many(value, MAX_METADATA_ITEMS, key))
        if not items:
            raise _malformed(f"{key} is an empty array")
        return key, GgufValue(ValueType.ARRAY, item_type, items)
    if item_kind is not None:
        raise _malformed(f"{key} has an item type but is no array")
    scalar_type = _value_type(kind, key)
    return key, GgufValue(scalar_type, None, _scalar(value, scalar_type, key))


def _value_type(number: object, key: str) -> ValueType:
    if (
        isinstance(number, bool)
        or not isinstance(number, int)
        or not 0 <= number <= 12
        or number == ValueType.ARRAY
    ):
        raise _malformed(f"{key} has value type {number!r}")
    return ValueType(number)


def _scalar(value: object, kind: ValueType, key: str) -> int | float | bool | str:
    if kind is ValueType.STRING:
        return _string(value, key)
    if kind is ValueType.BOOL and isinstance(value, bool):
        return value
    if kind is ValueType.FLOAT32 and isinstance(value, float) and _is_f32(value):
        return value
    if kind is ValueType.FLOAT64 and isinstance(value, float):
        return value
    if kind in _INTEGERS:
        return _integer(value, *_INTEGERS[kind], key)
    raise _malformed(f"{key} is {value!r}, not a {kind.name}")


def _is_f32(value: float) -> bool:
    """Whether a GGUF can hold it in 4 bytes."""
    try:
        packed = struct.pack("<f", value)
    except OverflowError:
        return False
    return math.isnan(value) or struct.unpack("<f", packed)[0] == value


def _tuple(value: object, length: int, what: str) -> _Fields:
    if not isinstance(value, tuple) or len(value) != length:
        raise _malformed(f"{what} is not an array of {length}")
    return value


def _many(value: object, most: int, what: str) -> Iterable[object]:
    if not isinstance(value, tuple) or len(value) > most:
        raise _malformed(f"{what}: not an array of at most {most}")
    return value


def _integer(value: object, lowest: int, highest: int, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
        raise _malformed(f"{what} is {value!r}, not an integer from {lowest} to {highest}")
    return value


def _string(value: object, what: str) -> str:
    if not isinstance(value, str) or len(value.encode()) > MAX_METADATA_STRING_BYTES:
        raise _malformed(f"{what} is not a string of at most {MAX_METADATA_STRING_BYTES} bytes")
    return value


def _bytes(value: object, length: int, what: str) -> bytes:
    if not isinstance(value, bytes) or len(value) != length:
        raise _malformed(f"{what} is not {length} bytes")
    return value
