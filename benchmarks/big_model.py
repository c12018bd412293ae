"""Write a GGUF with the sizes of Qwen3.5-122B-A10B and few layers: random weights, quantised as real files are.

    python -m benchmarks.big_model OUT.gguf [--layers 4] [--experts 256] [--attention-every 4] [--vocab 8192]

4 layers take 6.5 GB, 1 layer 1.7 GB. llama.cpp aborts on a model that lacks one of the two kinds of layers, so the
smallest that it runs is `--layers 2 --attention-every 2` (1.7 GB with `--experts 128`).

Routed experts: gate and up Q4_K, down Q6_K; the rest Q4_K, with the exceptions that llama-quantize makes. The
vocabulary is short, so that the layers dominate as they do in the 48-layer model (`--vocab 248320` is the real one).
A matrix is one quantised block of rows, repeated with another rotation each time: no two experts are equal, and the
file is written as fast as the disk takes it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter

from swarmnode.compute import ggml
from swarmnode.testing.tiny_gguf import TinyModel, add_metadata, add_vocabulary
from swarmnode.weights.ggml_types import TYPE_NUMBERS
from swarmnode.weights.gguf_file import DEFAULT_ALIGNMENT

BASE_ROWS = 1024
"""Rows that are drawn and quantised; longer matrices repeat them rotated."""
ROTATION_ROWS = 7
"""Each repetition starts this many rows later: 1024 different ones, because 7 and 1024 have no common factor."""
BRANCH_SCALE = 0.3
"""Factor on what a branch adds to the residual stream, as in the tiny models: rounding does not explode."""

Fill = Literal["matrix", "ones", "decay", "dt_bias"]


@dataclass(frozen=True)
class BigTensor:
    """One tensor: `ne` in ggml order; a "matrix" is Gaussian with variance scale^2 / ne[0]."""

    name: str
    ggml_type: str
    ne: tuple[int, ...]
    fill: Fill = "matrix"
    scale: float = 1.0

    @property
    def n_rows(self) -> int:
        """Rows of ne[0] values."""
        return prod(self.ne[1:])

    @property
    def n_bytes(self) -> int:
        """Encoded size."""
        return self.n_rows * ggml.row_bytes(TYPE_NUMBERS[self.ggml_type], self.ne[0])


def big_model(
    n_layer: int, n_expert: int = 256, n_vocab: int = 8192, *, attention_every: int = 4
) -> TinyModel:
    """The hyperparameters of Qwen3.5-122B-A10B with fewer layers (and experts, and tokens)."""
    return TinyModel(
        n_embd=3072,
        n_layer=n_layer,
        n_expert=n_expert,
        n_expert_used=8,
        n_ff=1024,
        n_ff_shared=1024,
        n_head=32,
        n_head_kv=2,
        head_dim=256,
        n_k_heads=16,
        n_v_heads=64,
        state_size=128,
        n_vocab=n_vocab,
        n_ctx_train=262_144,
        full_attention_interval=attention_every,
        name=f"Big Random {n_layer}x{n_expert}",
    )


def tensors_of(m: TinyModel) -> Iterator[BigTensor]:
    """Every tensor of the file, in file order (names and shapes: docs/models.md)."""
    yield BigTensor("token_embd.weight", "Q4_K", (m.n_embd, m.n_vocab), scale=m.n_embd**0.5)
    yield BigTensor("output.weight", "Q6_K", (m.n_embd, m.n_vocab), scale=3.0)
    yield BigTensor("output_norm.weight", "F32", (m.n_embd,), "ones")
    for layer in range(m.n_layer):
        block = f"blk.{layer}."
        yield BigTensor(block + "attn_norm.weight", "F32", (m.n_embd,), "ones")
        yield BigTensor(block + "post_attention_norm.weight", "F32", (m.n_embd,), "ones")
        yield from _delta_net(block, m) if m.is_recurrent(layer) else _attention(block, m)
        yield from _experts(block, m)
        yield from _shared_expert(block, m)


def _delta_net(block: str, m: TinyModel) -> Iterator[BigTensor]:
    inner = m.n_v_heads * m.state_size
    channels = 2 * m.n_k_heads * m.state_size + inner
    yield BigTensor(block + "attn_qkv.weight", "Q4_K", (m.n_embd, channels))
    yield BigTensor(block + "attn_gate.weight", "Q4_K", (m.n_embd, inner))
    yield BigTensor(block + "ssm_conv1d.weight", "F32", (4, channels))
    yield BigTensor(block + "ssm_dt.bias", "F32", (m.n_v_heads,), "dt_bias")
    yield BigTensor(block + "ssm_a", "F32", (m.n_v_heads,), "decay")
    yield BigTensor(block + "ssm_beta.weight", "Q8_0", (m.n_embd, m.n_v_heads))
    yield BigTensor(block + "ssm_alpha.weight", "Q8_0", (m.n_embd, m.n_v_heads))
    yield BigTensor(block + "ssm_norm.weight", "F32", (m.state_size,), "ones")
    yield BigTensor(block + "ssm_out.weight", "Q4_K", (inner, m.n_embd), scale=BRANCH_SCALE)


def _attention(block: str, m: TinyModel) -> Iterator[BigTensor]:
    q, kv = m.n_head * m.head_dim, m.n_head_kv * m.head_dim
    yield BigTensor(block + "attn_q.weight", "Q4_K", (m.n_embd, 2 * q))
    yield BigTensor(block + "attn_k.weight", "Q4_K", (m.n_embd, kv))
    yield BigTensor(block + "attn_v.weight", "Q6_K", (m.n_embd, kv))
    yield BigTensor(block + "attn_q_norm.weight", "F32", (m.head_dim,), "ones")
    yield BigTensor(block + "attn_k_norm.weight", "F32", (m.head_dim,), "ones")
    yield BigTensor(block + "attn_output.weight", "Q4_K", (q, m.n_embd), scale=BRANCH_SCALE)


def _experts(block: str, m: TinyModel) -> Iterator[BigTensor]:
    yield BigTensor(block + "ffn_gate_inp.weight", "F32", (m.n_embd, m.n_expert), scale=2.0)
    yield BigTensor(block + "ffn_gate_exps.weight", "Q4_K", (m.n_embd, m.n_ff, m.n_expert))
    yield BigTensor(block + "ffn_up_exps.weight", "Q4_K", (m.n_embd, m.n_ff, m.n_expert))
    yield BigTensor(
        block + "ffn_down_exps.weight", "Q6_K", (m.n_ff, m.n_embd, m.n_expert), scale=BRANCH_SCALE
    )


def _shared_expert(block: str, m: TinyModel) -> Iterator[BigTensor]:
    yield BigTensor(block + "ffn_gate_inp_shexp.weight", "F32", (m.n_embd,))
    yield BigTensor(block + "ffn_gate_shexp.weight", "Q4_K", (m.n_embd, m.n_ff_shared))
    yield BigTensor(block + "ffn_up_shexp.weight", "Q4_K", (m.n_embd, m.n_ff_shared))
    yield BigTensor(block + "ffn_down_shexp.weight", "Q6_K", (m.n_ff_shared, m.n_embd), scale=BRANCH_SCALE)


def write_big_model(path: Path, model: TinyModel, seed: int = 1) -> Path:
    """Write the file (it appears whole or not at all) and return its path. Equal arguments give equal bytes."""
    tensors = list(tensors_of(model))
    partial = path.with_name(path.name + ".partial")
    _write_header(partial, model, tensors)
    rng = np.random.default_rng(seed)
    with partial.open("ab") as file:
        _pad(file)
        for tensor in tensors:
            _write_tensor(file, tensor, rng)
            _pad(file)
    partial.rename(path)
    return path


def _write_header(path: Path, model: TinyModel, tensors: list[BigTensor]) -> None:
    with closing(GGUFWriter(path, "qwen35moe")) as writer:
        add_metadata(writer, model)
        add_vocabulary(writer, model)
        for tensor in tensors:
            number = TYPE_NUMBERS[tensor.ggml_type]
            writer.add_tensor_info(
                tensor.name,
                tensor.ne[::-1],
                np.dtype(np.float32),  # not looked at when the type is given
                tensor.n_bytes,
                raw_dtype=GGMLQuantizationType(number),
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()


def _write_tensor(file: BinaryIO, tensor: BigTensor, rng: np.random.Generator) -> None:
    n_base = min(tensor.n_rows, BASE_ROWS)
    encoded = ggml.quantize(TYPE_NUMBERS[tensor.ggml_type], _rows(tensor, n_base, rng))
    twice = memoryview(encoded + encoded)  # a rotation of the block is then a plain slice
    row_bytes = len(encoded) // n_base
    for repetition, first in enumerate(range(0, tensor.n_rows, n_base)):
        count = min(n_base, tensor.n_rows - first)
        start = repetition * ROTATION_ROWS % n_base
        file.write(twice[start * row_bytes : (start + count) * row_bytes])


def _rows(tensor: BigTensor, n_rows: int, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """f32 [n_rows, ne[0]]."""
    shape = (n_rows, tensor.ne[0])
    match tensor.fill:
        case "ones":
            return np.ones(shape, np.float32)
        case "decay":
            return -rng.uniform(0.02, 2.0, shape).astype(np.float32)
        case "dt_bias":
            return rng.uniform(-3.0, 0.5, shape).astype(np.float32)
        case "matrix":
            return rng.standard_normal(shape, np.float32) * np.float32(tensor.scale / tensor.ne[0] ** 0.5)


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % DEFAULT_ALIGNMENT))


def main() -> None:
    """Write one file and say how large it became."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--attention-every", type=int, default=4, help="every n-th layer has full attention")
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    started_s = time.perf_counter()
    model = big_model(options.layers, options.experts, options.vocab, attention_every=options.attention_every)
    path = write_big_model(options.out, model, options.seed)
    spent_s = time.perf_counter() - started_s
    print(f"{path}: {path.stat().st_size / 1e9:.2f} GB in {spent_s:.1f} s")


if __name__ == "__main__":
    main()
