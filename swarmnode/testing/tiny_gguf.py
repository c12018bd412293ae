"""Small random GGUFs of a Qwen3.5-MoE model (`qwen35moe`), for tests: real tensor names, real rules, 2 MB.

Shapes follow llama.cpp's loader (docs: model facts in docs/models.md); weights are Gaussian with variance
1/width and damped branch outputs, so that activations stay of order 1 through the layers and rounding does
not explode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

from swarmnode.compute import ggml
from swarmnode.weights.ggml_types import GGML_TYPES, TYPE_NUMBERS
from swarmnode.weights.parts import part_name

F32Array = npt.NDArray[np.float32]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
MERGES = ("Ġ t", "h e", "Ġ a", "i n", "r e", "o n", "Ġt he", "e r", "Ġ s", "a t", "Ġ w", "o u", "e n", "Ġ c")
CHAT_TEMPLATE = (
    "{%- for m in messages %}{{'<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n'}}{%- endfor %}"
    "{%- if add_generation_prompt %}{{'<|im_start|>assistant\\n'}}{%- endif %}"
)
_BRANCH_SCALE = 0.3
"""Factor on what a branch adds to the residual stream: numerically calm."""
_NORMAL_TOKEN, _CONTROL_TOKEN, _USER_DEFINED_TOKEN = 1, 3, 4


@dataclass(frozen=True)
class TinyModel:
    """What to write. Types are ggml's names (`F32`, `Q8_0`, `Q4_K` ...); a row that a type's blocks do not
    divide is written as Q8_0 or F32 instead, as llama-quantize falls back.

    `up_type`: of ffn_gate_exps, ffn_up_exps or the fused one; `down_types`: of ffn_down_exps, layer i takes
    entry i % len. `dense_layers`: layers with one plain FFN instead of experts (index and manifest only: no
    qwen35moe model has them). `mtp_block`: one MTP block behind the layers, `mtp_own_head` with embeddings and a head
    of its own (and without a norm), `mtp_copies`: one (without a norm, too) that hands the next token's embedding on,
    so that its guesses are right wherever a token follows from the one before it alone; that is the more often, the
    less branches add (`branch_scale`). `n_mtp_claimed`: what the metadata says instead of 1. `n_parts`: split into that
    many files, the first without tensors if `empty_first_part`.
    """

    n_embd: int = 256
    n_layer: int = 4
    n_expert: int = 8
    n_expert_used: int = 2
    n_ff: int = 256
    n_ff_shared: int = 256
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 64
    n_k_heads: int = 2
    n_v_heads: int = 4
    state_size: int = 64
    n_vocab: int = 288
    n_ctx_train: int = 4096
    full_attention_interval: int = 4
    up_type: str = "F32"
    down_types: tuple[str, ...] = ("F32",)
    dense_type: str = "F32"
    embd_type: str = "F32"
    fused_gate_up: bool = False
    fused_qkv: bool = False
    tied_embeddings: bool = False
    dense_layers: tuple[int, ...] = ()
    mtp_block: bool = False
    mtp_own_head: bool = False
    mtp_copies: bool = False
    n_mtp_claimed: int | None = None
    branch_scale: float = _BRANCH_SCALE
    recurrent_layers_key: bool = False
    n_parts: int = 1
    empty_first_part: bool = False
    name: str = "Tiny Random"
    seed: int = 0

    @property
    def n_blocks(self) -> int:
        """Layers and the MTP block, if any."""
        return self.n_layer + int(self.mtp_block)

    def is_recurrent(self, layer: int) -> bool:
        return layer < self.n_layer and (layer + 1) % self.full_attention_interval != 0


@dataclass(frozen=True)
class _Tensor:
    """To be written: `values` f32 in numpy order [..., ne1, ne0]."""

    name: str
    ggml_type: str
    values: F32Array


def write_tiny_gguf(path: str | Path, model: TinyModel | None = None) -> Path:
    """Write the model and return the file to open: `path`, or the first part `STEM-00001-of-N.gguf` of a
    split one.
    """
    model = model or TinyModel()
    path = Path(path)
    tensors = list(_Weights(model).all_tensors())
    if model.n_parts == 1:
        _write_file(path, model, tensors, split=None)
        return path
    n_full = model.n_parts - int(model.empty_first_part)
    cuts = [len(tensors) * i // n_full for i in range(n_full + 1)]
    groups = [tensors[a:b] for a, b in pairwise(cuts)]
    if model.empty_first_part:
        groups.insert(0, [])
    paths = [path.with_name(part_name(path.stem, n, model.n_parts)) for n in range(1, model.n_parts + 1)]
    for number, (part, group) in enumerate(zip(paths, groups, strict=True)):
        _write_file(part, model, group, split=(number, len(tensors)))
    return paths[0]


class _Weights:
    """Draws the tensors, in the order of llama.cpp's converter; the draw depends only on the seed and the
    shapes.
    """

    def __init__(self, model: TinyModel) -> None:
        self._model = model
        self._rng = np.random.default_rng(model.seed)

    def all_tensors(self) -> Iterator[_Tensor]:
        m = self._model
        if not m.tied_embeddings:
            yield self._matrix("output.weight", m.embd_type, m.n_vocab, m.n_embd, scale=3.0)
        yield self._norm("output_norm.weight", m.n_embd)
        embedding = self._matrix("token_embd.weight", m.embd_type, m.n_vocab, m.n_embd)
        yield _Tensor(embedding.name, embedding.ggml_type, embedding.values * np.float32(m.n_embd**0.5))
        for layer in range(m.n_blocks):
            block = f"blk.{layer}."
            yield self._norm(block + "attn_norm.weight", m.n_embd)
            yield from self._delta_net(block) if m.is_recurrent(layer) else self._attention(block)
            yield self._norm(block + "post_attention_norm.weight", m.n_embd)
            yield from self._dense_ffn(block) if layer in m.dense_layers else self._moe(block, layer)
        if m.mtp_block:
            yield from self._mtp(f"blk.{m.n_layer}.nextn.")

    def _attention(self, block: str) -> Iterator[_Tensor]:
        m = self._model
        q = self._gauss(2 * m.n_head * m.head_dim, m.n_embd)
        k, v = (
            self._gauss(m.n_head_kv * m.head_dim, m.n_embd),
            self._gauss(m.n_head_kv * m.head_dim, m.n_embd),
        )
        if m.fused_qkv:
            yield _Tensor(block + "attn_qkv.weight", m.dense_type, np.concatenate([q, k, v]))
        else:
            for letter, values in zip("qkv", (q, k, v), strict=True):
                yield _Tensor(f"{block}attn_{letter}.weight", m.dense_type, values)
        yield self._norm(block + "attn_q_norm.weight", m.head_dim)
        yield self._norm(block + "attn_k_norm.weight", m.head_dim)
        output = block + "attn_output.weight"
        yield self._matrix(output, m.dense_type, m.n_embd, m.n_head * m.head_dim, scale=m.branch_scale)

    def _delta_net(self, block: str) -> Iterator[_Tensor]:
        m, rng = self._model, self._rng
        inner = m.n_v_heads * m.state_size
        channels = 2 * m.n_k_heads * m.state_size + inner
        yield self._matrix(block + "attn_qkv.weight", m.dense_type, channels, m.n_embd)
        yield self._matrix(block + "attn_gate.weight", m.dense_type, inner, m.n_embd)
        yield _Tensor(block + "ssm_conv1d.weight", "F32", _f32(0.5 * rng.standard_normal((channels, 4))))
        yield _Tensor(block + "ssm_dt.bias", "F32", _f32(rng.uniform(-3.0, 0.5, m.n_v_heads)))
        yield _Tensor(block + "ssm_a", "F32", _f32(-rng.uniform(0.02, 2.0, m.n_v_heads)))
        yield self._matrix(block + "ssm_beta.weight", m.dense_type, m.n_v_heads, m.n_embd)
        yield self._matrix(block + "ssm_alpha.weight", m.dense_type, m.n_v_heads, m.n_embd)
        yield self._norm(block + "ssm_norm.weight", m.state_size)
        yield self._matrix(block + "ssm_out.weight", m.dense_type, m.n_embd, inner, scale=m.branch_scale)

    def _moe(self, block: str, layer: int) -> Iterator[_Tensor]:
        m = self._model
        yield self._matrix(block + "ffn_gate_inp.weight", "F32", m.n_expert, m.n_embd, scale=2.0)
        gate = self._gauss(m.n_expert, m.n_ff, m.n_embd)
        up = self._gauss(m.n_expert, m.n_ff, m.n_embd)
        if m.fused_gate_up:
            yield _Tensor(block + "ffn_gate_up_exps.weight", m.up_type, np.concatenate([gate, up], axis=1))
        else:
            yield _Tensor(block + "ffn_gate_exps.weight", m.up_type, gate)
            yield _Tensor(block + "ffn_up_exps.weight", m.up_type, up)
        down = self._gauss(m.n_expert, m.n_embd, m.n_ff) * np.float32(m.branch_scale)
        yield _Tensor(block + "ffn_down_exps.weight", m.down_types[layer % len(m.down_types)], down)
        yield _Tensor(block + "ffn_gate_inp_shexp.weight", "F32", self._gauss(1, m.n_embd)[0])
        yield self._matrix(block + "ffn_gate_shexp.weight", m.dense_type, m.n_ff_shared, m.n_embd)
        yield self._matrix(block + "ffn_up_shexp.weight", m.dense_type, m.n_ff_shared, m.n_embd)
        name = block + "ffn_down_shexp.weight"
        yield self._matrix(name, m.dense_type, m.n_embd, m.n_ff_shared, scale=m.branch_scale)

    def _dense_ffn(self, block: str) -> Iterator[_Tensor]:
        m = self._model
        yield self._matrix(block + "ffn_gate.weight", m.dense_type, m.n_ff, m.n_embd)
        yield self._matrix(block + "ffn_up.weight", m.dense_type, m.n_ff, m.n_embd)
        yield self._matrix(block + "ffn_down.weight", m.dense_type, m.n_embd, m.n_ff, scale=m.branch_scale)

    def _mtp(self, prefix: str) -> Iterator[_Tensor]:
        m = self._model
        joined, enorm = self._gauss(m.n_embd, 2 * m.n_embd), self._norm(prefix + "enorm.weight", m.n_embd)
        if m.mtp_copies:
            joined = np.eye(m.n_embd, 2 * m.n_embd, dtype=np.float32)
            enorm = replace(enorm, values=np.ones_like(enorm.values))
        yield _Tensor(prefix + "eh_proj.weight", m.dense_type, joined)
        yield enorm
        yield self._norm(prefix + "hnorm.weight", m.n_embd)
        if not m.mtp_own_head and not m.mtp_copies:
            yield self._norm(prefix + "shared_head_norm.weight", m.n_embd)
        if m.mtp_own_head:
            for name in ("embed_tokens", "shared_head_head"):
                yield self._matrix(f"{prefix}{name}.weight", m.embd_type, m.n_vocab, m.n_embd, scale=3.0)

    def _gauss(self, *shape: int) -> F32Array:
        """Variance 1 / (length of a row)."""
        return _f32(self._rng.standard_normal(shape) / shape[-1] ** 0.5)

    def _matrix(self, name: str, ggml_type: str, rows: int, width: int, scale: float = 1.0) -> _Tensor:
        return _Tensor(name, ggml_type, self._gauss(rows, width) * np.float32(scale))

    def _norm(self, name: str, width: int) -> _Tensor:
        return _Tensor(name, "F32", _f32(1 + 0.1 * self._rng.standard_normal(width)))


def _f32(values: npt.NDArray[np.float64]) -> F32Array:
    return values.astype(np.float32)


def _write_file(
    path: Path, model: TinyModel, tensors: Sequence[_Tensor], split: tuple[int, int] | None
) -> None:
    writer = GGUFWriter(path, "qwen35moe")
    if split is None or split[0] == 0:
        add_metadata(writer, model)
        add_vocabulary(writer, model)
    else:
        del writer.kv_data[0]["general.architecture"]  # later parts of a split carry nothing but split.*
    if split is not None:
        writer.add_uint16("split.no", split[0])
        writer.add_uint16("split.count", model.n_parts)
        writer.add_int32("split.tensors.count", split[1])
    for tensor in tensors:
        data, number = _encode(tensor)
        writer.add_tensor(tensor.name, data, raw_dtype=GGMLQuantizationType(number))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _encode(tensor: _Tensor) -> tuple[npt.NDArray[Any], int]:
    """(array as gguf-py wants it, number of the type): quantised rows as u8 bytes."""
    values = np.ascontiguousarray(tensor.values)
    wanted = tensor.ggml_type
    fitting = (kind for kind in (wanted, "Q8_0", "F32") if values.shape[-1] % _block(kind) == 0)
    kind = next(fitting) if values.ndim > 1 else "F32"
    number = TYPE_NUMBERS[kind]
    if kind == "F32":
        return values, number
    encoded = np.frombuffer(ggml.quantize(number, values.reshape(-1, values.shape[-1])), np.uint8)
    return encoded.reshape(*values.shape[:-1], -1), number


def _block(kind: str) -> int:
    return GGML_TYPES[TYPE_NUMBERS[kind]].block_values


def add_metadata(writer: GGUFWriter, m: TinyModel) -> None:
    """Write the hyperparameter keys of the model."""
    p = "qwen35moe."
    writer.add_name(m.name)
    counts = {
        "block_count": m.n_blocks,
        "context_length": m.n_ctx_train,
        "embedding_length": m.n_embd,
        "attention.head_count": m.n_head,
        "attention.head_count_kv": m.n_head_kv,
        "attention.key_length": m.head_dim,
        "attention.value_length": m.head_dim,
        "rope.dimension_count": m.head_dim // 4,
        "expert_count": m.n_expert,
        "expert_used_count": m.n_expert_used,
        "expert_feed_forward_length": m.n_ff,
        "expert_shared_feed_forward_length": m.n_ff_shared,
        "ssm.conv_kernel": 4,
        "ssm.state_size": m.state_size,
        "ssm.group_count": m.n_k_heads,
        "ssm.time_step_rank": m.n_v_heads,
        "ssm.inner_size": m.n_v_heads * m.state_size,
        "full_attention_interval": m.full_attention_interval,
    }
    if m.mtp_block:
        counts["nextn_predict_layers"] = 1 if m.n_mtp_claimed is None else m.n_mtp_claimed
    for key, value in counts.items():
        writer.add_uint32(p + key, value)
    writer.add_float32(p + "attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32(p + "rope.freq_base", 1e7)
    half = (
        m.head_dim // 8
    )  # sections add up to half of the rotated dimensions: 11 + 11 + 10 in the real model
    sections = [-(-half // 3), -(-half // 3), half - 2 * -(-half // 3), 0]
    writer.add_key_value(p + "rope.dimension_sections", sections, GGUFValueType.ARRAY, GGUFValueType.INT32)
    if m.recurrent_layers_key:
        flags = [m.is_recurrent(layer) for layer in range(m.n_blocks)]
        key = p + "attention.recurrent_layers"
        writer.add_key_value(key, flags, GGUFValueType.ARRAY, GGUFValueType.BOOL)
    writer.add_quantization_version(2)


def add_vocabulary(writer: GGUFWriter, model: TinyModel) -> None:
    """Write a byte-level vocabulary filled up to `n_vocab`, its merges and a chat template."""
    tokens = [*_byte_symbols(), *(merge.replace(" ", "") for merge in MERGES)]
    n_filler = model.n_vocab - len(tokens) - len(SPECIAL_TOKENS)
    if n_filler < 0:
        raise ValueError(f"n_vocab must be at least {len(tokens) + len(SPECIAL_TOKENS)}")
    types = [_NORMAL_TOKEN] * len(tokens)
    first_special = len(tokens)
    tokens += [*SPECIAL_TOKENS, *(f"[PAD{i}]" for i in range(n_filler))]
    types += [_USER_DEFINED_TOKEN if "think" in token else _CONTROL_TOKEN for token in SPECIAL_TOKENS]
    types += [_CONTROL_TOKEN] * n_filler
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(list(MERGES))
    writer.add_eos_token_id(first_special + SPECIAL_TOKENS.index("<|im_end|>"))
    writer.add_pad_token_id(first_special)
    writer.add_chat_template(CHAT_TEMPLATE)


def _byte_symbols() -> list[str]:
    """GPT-2's printable stand-in for each of the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]
