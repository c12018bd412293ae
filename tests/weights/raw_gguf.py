"""GGUF files byte by byte, so that tests can write what no library would."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from swarmnode.weights.ggml_types import row_bytes
from swarmnode.weights.gguf_values import ValueType

_PACK = {
    ValueType.UINT8: "<B",
    ValueType.UINT16: "<H",
    ValueType.UINT32: "<I",
    ValueType.INT32: "<i",
    ValueType.FLOAT32: "<f",
    ValueType.BOOL: "<?",
    ValueType.UINT64: "<Q",
}


def u32(number: int) -> bytes:
    return struct.pack("<I", number)


def u64(number: int) -> bytes:
    return struct.pack("<Q", number)


def text(value: str | bytes) -> bytes:
    """A length-prefixed string."""
    raw = value.encode() if isinstance(value, str) else value
    return u64(len(raw)) + raw


def scalar(kind: ValueType, value: int | float) -> bytes:
    """A typed value as it stands behind its key."""
    return u32(kind) + struct.pack(_PACK[kind], value)


def string(value: str | bytes) -> bytes:
    return u32(ValueType.STRING) + text(value)


def array(kind: int, count: int, items: bytes) -> bytes:
    """A typed array whose claimed count may be a lie."""
    return u32(ValueType.ARRAY) + u32(kind) + u64(count) + items


@dataclass
class RawTensor:
    """An entry of the tensor list. `offset`: None packs it behind the one before."""

    name: str | bytes
    ne: Sequence[int]
    ggml_type: int = 0
    offset: int | None = None
    n_dims: int | None = None


@dataclass
class RawGguf:
    """What to write; a claimed count is None for the truth."""

    keys: dict[str, bytes] = field(default_factory=dict)
    tensors: list[RawTensor] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: int = 3
    n_tensors: int | None = None
    n_keys: int | None = None
    extra_keys: bytes = b""
    n_extra_keys: int = 0
    alignment: int = 32

    def tensor(self, name: str) -> RawTensor:
        return next(tensor for tensor in self.tensors if tensor.name == name)

    def without(self, *names: str) -> RawGguf:
        return replace(self, tensors=[tensor for tensor in self.tensors if tensor.name not in names])

    def header(self) -> bytes:
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_keys = len(self.keys) + self.n_extra_keys if self.n_keys is None else self.n_keys
        parts = [self.magic, u32(self.version), u64(n_tensors), u64(n_keys)]
        parts += [text(key) + value for key, value in self.keys.items()]
        parts.append(self.extra_keys)
        for tensor, offset in zip(self.tensors, self._offsets(), strict=True):
            n_dims = len(tensor.ne) if tensor.n_dims is None else tensor.n_dims
            parts += [
                text(tensor.name),
                u32(n_dims),
                *map(u64, tensor.ne),
                u32(tensor.ggml_type),
                u64(offset),
            ]
        return b"".join(parts)

    def build(self) -> bytes:
        """Header, padding and zeros for the tensors."""
        header = self.header()
        end = max(
            (offset + _n_bytes(t) for t, offset in zip(self.tensors, self._offsets(), strict=True)), default=0
        )
        return header + bytes(-len(header) % self.alignment) + bytes(min(end, 1 << 20))

    def write(self, path: Path) -> Path:
        path.write_bytes(self.build())
        return path

    def _offsets(self) -> list[int]:
        offsets = []
        position = 0
        for tensor in self.tensors:
            offset = position if tensor.offset is None else tensor.offset
            offsets.append(offset)
            position = -(-(offset + _n_bytes(tensor)) // self.alignment) * self.alignment
        return offsets


def _n_bytes(tensor: RawTensor) -> int:
    n_bytes = row_bytes(tensor.ggml_type, tensor.ne[0]) or 0 if tensor.ne else 0
    for n in tensor.ne[1:]:
        n_bytes *= n
    return min(n_bytes, 1 << 40)


N_EMBD, N_FF, N_EXPERT, N_VOCAB = 32, 64, 4, 8


def good_model(n_layer: int = 2) -> RawGguf:
    """The least a mixture of experts needs for the index: 32 wide, 4 experts, F32."""
    counts = {
        "block_count": n_layer,
        "context_length": 64,
        "embedding_length": N_EMBD,
        "expert_count": N_EXPERT,
        "expert_used_count": 2,
        "expert_feed_forward_length": N_FF,
    }
    keys = {"general.architecture": string("qwen35moe"), "general.name": string("raw")}
    keys |= {f"qwen35moe.{key}": scalar(ValueType.UINT32, value) for key, value in counts.items()}
    tokens = b"".join(text(f"token{i}") for i in range(N_VOCAB))
    keys["tokenizer.ggml.tokens"] = array(ValueType.STRING, N_VOCAB, tokens)
    keys["tokenizer.ggml.token_type"] = array(ValueType.INT32, N_VOCAB, struct.pack("<8i", *[1] * N_VOCAB))
    tensors = [RawTensor("token_embd.weight", (N_EMBD, N_VOCAB)), RawTensor("output_norm.weight", (N_EMBD,))]
    for layer in range(n_layer):
        block = f"blk.{layer}."
        tensors += [
            RawTensor(block + "attn_norm.weight", (N_EMBD,)),
            RawTensor(block + "ffn_gate_inp.weight", (N_EMBD, N_EXPERT)),
            RawTensor(block + "ffn_gate_exps.weight", (N_EMBD, N_FF, N_EXPERT)),
            RawTensor(block + "ffn_up_exps.weight", (N_EMBD, N_FF, N_EXPERT)),
            RawTensor(block + "ffn_down_exps.weight", (N_FF, N_EMBD, N_EXPERT)),
        ]
    return RawGguf(keys, tensors)
