"""Qwen3.5-MoE (`qwen35moe`): gated full attention in every fourth layer, gated delta nets in the others, and in
all of them routed experts beside one gated shared expert.

Same arithmetic in the same order as llama.cpp's src/models/qwen35moe.cpp, text only. Behind the last layer a file may
have an MTP block: a full-attention layer with routed experts, between the ends of blocks/nextn.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

from swarmnode.compute.tensors import Tensor
from swarmnode.models.blocks.attention import (
    attend,
    attention_shapes,
    attention_state,
    attention_weights,
    finish_attention,
    project_attention,
    store_attention,
)
from swarmnode.models.blocks.delta_net import (
    delta_net_shapes,
    delta_net_state,
    delta_net_weights,
    finish_delta_net,
    project_delta_net,
    run_delta_net,
)
from swarmnode.models.blocks.moe import (
    LayerOutput,
    build_router,
    build_shared_expert,
    router_weights,
    shared_expert_weights,
)
from swarmnode.models.blocks.nextn import HEAD, join_nextn, nextn_hidden, nextn_weights
from swarmnode.models.blocks.steps import Projected, StepShapes
from swarmnode.models.hparams import (
    MAX_CHANNELS,
    MAX_CONTEXT,
    MAX_HEAD_SIZE,
    MAX_HEADS,
    MAX_STATE_SIZE,
    Hparams,
    MetadataReader,
    NeutralValue,
)
from swarmnode.models.layer_builder import LayerBuilder
from swarmnode.models.weight_spec import WeightSpec, matrix, vector
from swarmnode.weights.index import ModelIndex
from swarmnode.weights.limits import MAX_WIDTH

ROPE_IMROPE = 40
"""GGML_ROPE_TYPE_IMROPE: the sections of the rotated dimensions are interleaved."""

NEUTRAL_KEYS: Mapping[str, tuple[NeutralValue, ...]] = {
    "rope.scaling.type": ("none",),
    "rope.scale_linear": (1.0,),
    "expert_weights_scale": (0.0, 1.0),
    "expert_weights_norm": (True,),
    "expert_gating_func": (0, 1),  # 1: softmax
    "expert_group_count": (0, 1),
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
}
"""Keys that llama.cpp knows for other models: the values with which they change nothing here."""


class Qwen35Moe:
    """The architecture, as `models.backbone` uses it."""

    name = "qwen35moe"

    def read_hparams(self, index: ModelIndex, *, with_mtp: bool = False) -> Hparams:
        """Read and check the metadata, of an MTP block, too, if it is to be used. ModelFileError or
        UnsupportedModelError naming the key.
        """
        reader = MetadataReader(index)
        reader.refuse_unless(NEUTRAL_KEYS)
        n_mtp = _read_n_mtp(reader) if with_mtp else 0
        recurrent = _read_recurrent(reader, n_mtp)
        n_head, n_head_kv, n_embd_head = _read_heads(reader, recurrent)
        d_state, n_group, dt_rank = _read_ssm(reader)
        n_rot = _read_n_rot(reader, n_embd_head)
        return Hparams(
            n_layer=index.n_layer,
            n_mtp=n_mtp,
            n_embd=index.n_embd,
            n_vocab=index.tensors["token_embd.weight"].ne[1],
            n_ctx_train=reader.integer("context_length", 2, MAX_CONTEXT),
            norm_rms_eps=reader.number("attention.layer_norm_rms_epsilon", 1e-30, 1.0),
            n_head=n_head,
            n_head_kv=n_head_kv,
            n_embd_head=n_embd_head,
            attention_scale=reader.number("attention.scale", 1e-6, 1e3, 1.0 / math.sqrt(n_embd_head)),
            n_rot=n_rot,
            rope_sections=_read_sections(reader, n_rot),
            rope_freq_base=reader.number("rope.freq_base", 1.0, 1e12),
            n_expert=index.n_expert,
            n_expert_used=index.n_expert_used,
            n_ff_shexp=_read_n_ff_shexp(reader),
            ssm_d_conv=reader.integer("ssm.conv_kernel", 2, 64),
            ssm_d_state=d_state,
            ssm_n_group=n_group,
            ssm_dt_rank=dt_rank,
            recurrent=recurrent,
        )

    def weights(self, hparams: Hparams, present: Container[str]) -> dict[str, WeightSpec]:
        """All dense weights by GGUF name; `present`: the names that the file has.

        Without `output.weight` the logits use the embedding matrix.
        """
        tied = "output.weight" not in present
        embedding = matrix(hparams.n_embd, hparams.n_vocab)
        weights = {
            "token_embd.weight": replace(embedding, on_device=tied),
            "output_norm.weight": vector(hparams.n_embd),
            "output.weight": replace(embedding, is_optional=True),
        }
        for layer in range(hparams.n_layer + hparams.n_mtp):
            fused_qkv = f"blk.{layer}.attn_qkv.weight" in present
            for name, spec in _layer_weights(hparams, layer, fused_qkv).items():
                weights[f"blk.{layer}.{name}"] = spec
        return weights

    def layer_states(
        self, hparams: Hparams, layer: int, n_ctx: int
    ) -> Mapping[str, tuple[int, tuple[int, ...]]]:
        """Name -> (ggml type, sizes) of what a slot keeps for a layer."""
        return delta_net_state(hparams) if hparams.recurrent[layer] else attention_state(hparams, n_ctx)

    def step_shapes(self, hparams: Hparams, layer: int) -> StepShapes:
        """What the steps below hand on."""
        return delta_net_shapes(hparams) if hparams.recurrent[layer] else attention_shapes(hparams)

    def build_pre(self, b: LayerBuilder, x: Tensor) -> Projected:
        """x f32 [n_embd, T]: norm and projections."""
        cur = b.cb(b.rms_norm(x, b.weight("attn_norm.weight")), "attn_norm")
        if b.hparams.recurrent[b.layer]:
            return project_delta_net(b, cur)
        return project_attention(b, cur, ROPE_IMROPE)

    def build_core(self, b: LayerBuilder, into: Sequence[Tensor]) -> Tensor:
        """Attention or delta net of one slot."""
        return run_delta_net(b, *into) if b.hparams.recurrent[b.layer] else attend(b, *into)

    def build_post(self, b: LayerBuilder, x: Tensor, out: Tensor, kept: Tensor) -> LayerOutput:
        """Output projection, residual, norm, gate and shared expert."""
        finish = finish_delta_net if b.hparams.recurrent[b.layer] else finish_attention
        cur = finish(b, out, kept)
        residual = b.cb(b.g.add(b.last_tokens(cur), b.last_tokens(x)), "attn_residual")
        cur = b.cb(b.rms_norm(residual, b.weight("post_attention_norm.weight")), "attn_post_norm")
        ids, weights = build_router(b, cur)
        return LayerOutput(cur, ids, weights, build_shared_expert(b, cur), residual)

    def build_hidden(self, b: LayerBuilder, x: Tensor) -> Tensor:
        """x f32 [n_embd, T] -> the last hidden state, of the same sizes."""
        return b.cb(b.rms_norm(x, b.global_weight("output_norm.weight")), "result_norm")

    def build_logits(self, b: LayerBuilder, hidden: Tensor) -> Tensor:
        """What `build_hidden` gave -> logits f32 [n_vocab, T]."""
        name = "output.weight" if b.has_global_weight("output.weight") else "token_embd.weight"
        return b.cb(b.mul_mat(b.global_weight(name), hidden), "result_output")

    def build_nextn_input(self, b: LayerBuilder, embedding: Tensor, hidden: Tensor) -> Tensor:
        """Both norms, side by side, projected."""
        return join_nextn(b, embedding, hidden)

    def build_nextn_fill(self, b: LayerBuilder, x: Tensor) -> None:
        """K and V."""
        _, k, v = self.build_pre(b, x).into
        store_attention(b, k, v)

    def build_nextn_hidden(self, b: LayerBuilder, x: Tensor) -> Tensor:
        """The block's last norm, or the model's."""
        return nextn_hidden(b, x)

    def build_nextn_logits(self, b: LayerBuilder, hidden: Tensor) -> Tensor:
        """By the block's head, or the model's."""
        if b.has_weight(HEAD):
            return b.mul_mat(b.weight(HEAD), hidden)
        return self.build_logits(b, hidden)


def _layer_weights(hparams: Hparams, layer: int, fused_qkv: bool) -> dict[str, WeightSpec]:
    """The dense weights of one layer, names without `blk.N.`."""
    norm = vector(hparams.n_embd)
    norms = {"attn_norm.weight": norm, "post_attention_norm.weight": norm}
    if hparams.recurrent[layer]:
        attention = delta_net_weights(hparams)
    else:
        attention = attention_weights(hparams, fused_qkv=fused_qkv)
    ends = nextn_weights(hparams) if layer >= hparams.n_layer else {}
    return norms | attention | router_weights(hparams) | shared_expert_weights(hparams) | ends


def _read_n_mtp(reader: MetadataReader) -> int:
    name, n_mtp = "nextn_predict_layers", reader.index.n_mtp
    if n_mtp > 1:
        reader.unsupported(name, f"is {n_mtp}; one MTP block is computed at most (--speculate ngram: none)")
    return n_mtp


def _read_recurrent(reader: MetadataReader, n_mtp: int) -> tuple[bool, ...]:
    """Which layers are recurrent: the list if there is one, else all but every n-th; MTP blocks never are."""
    n_layer, name = reader.index.n_layer, "attention.recurrent_layers"
    if reader.has(name):
        flags = reader.flags(name)
        if len(flags) < n_layer + n_mtp:
            reader.fail(name, f"has {len(flags)} entries for {n_layer + n_mtp} layers")
        if any(flags[n_layer : n_layer + n_mtp]):
            reader.unsupported(name, "has a recurrent MTP block (--speculate ngram: none is computed)")
        return tuple(flags[: n_layer + n_mtp])
    interval = reader.integer("full_attention_interval", 1, 1 << 16, 4)
    return *((layer + 1) % interval != 0 for layer in range(n_layer)), *[False] * n_mtp


def _read_heads(reader: MetadataReader, recurrent: Sequence[bool]) -> tuple[int, int, int]:
    """(n_head, n_head_kv, n_embd_head) of full attention."""
    layers = [layer for layer, flag in enumerate(recurrent) if not flag]
    n_head = reader.head_count("attention.head_count", layers)
    n_head_kv = reader.head_count("attention.head_count_kv", layers)
    if n_head % n_head_kv:
        reader.fail("attention.head_count", f"{n_head} is not a multiple of head_count_kv {n_head_kv}")
    default = max(1, reader.index.n_embd // n_head)
    n_embd_head = reader.integer("attention.key_length", 2, MAX_HEAD_SIZE, default)
    if n_embd_head % 2:  # ggml's rope copies the values that it does not rotate in pairs
        reader.fail("attention.key_length", f"is {n_embd_head}, not even")
    if n_head * n_embd_head > MAX_CHANNELS:
        reader.unsupported("attention.head_count", f"{n_head} heads of {n_embd_head} are too many")
    if reader.integer("attention.value_length", 1, MAX_HEAD_SIZE, n_embd_head) != n_embd_head:
        reader.unsupported("attention.value_length", f"is not key_length {n_embd_head}")
    return n_head, n_head_kv, n_embd_head


def _read_ssm(reader: MetadataReader) -> tuple[int, int, int]:
    """(ssm_d_state, ssm_n_group, ssm_dt_rank)"""
    d_state = reader.integer("ssm.state_size", 1, MAX_STATE_SIZE)
    n_group = reader.integer("ssm.group_count", 1, MAX_HEADS)
    dt_rank = reader.integer("ssm.time_step_rank", 1, MAX_HEADS)
    if dt_rank % n_group:
        reader.fail("ssm.time_step_rank", f"{dt_rank} is not a multiple of group_count {n_group}")
    d_inner = reader.integer("ssm.inner_size", 1, MAX_HEADS * MAX_STATE_SIZE)
    if d_inner != d_state * dt_rank:
        reader.unsupported("ssm.inner_size", f"is {d_inner}, not state_size * time_step_rank")
    if d_inner + 2 * n_group * d_state > MAX_CHANNELS:
        reader.unsupported("ssm.inner_size", f"{d_inner} with {n_group} groups is too many channels")
    return d_state, n_group, dt_rank


def _read_n_ff_shexp(reader: MetadataReader) -> int:
    name = "expert_shared_feed_forward_length"
    return reader.integer(name if reader.has(name) else "feed_forward_length", 1, MAX_WIDTH)


def _read_n_rot(reader: MetadataReader, n_embd_head: int) -> int:
    n_rot = reader.integer("rope.dimension_count", 2, n_embd_head, n_embd_head)
    if n_rot % 2:
        reader.fail("rope.dimension_count", f"is {n_rot}, not even")
    return n_rot


def _read_sections(reader: MetadataReader, n_rot: int) -> tuple[int, int, int, int]:
    """How many pairs turn with each of four positions; ggml aborts on more than the head has, or none at all."""
    name = "rope.dimension_sections"
    sections = reader.integers(name, 0, MAX_HEAD_SIZE)
    if len(sections) not in (3, 4) or not any(sections[:3]):
        reader.fail(name, f"is not 3 or 4 sizes of which one of the first 3 is above 0: {sections[:8]}")
    if sum(sections) > n_rot // 2:
        reader.fail(name, f"{sections} are more than the {n_rot // 2} pairs of rope.dimension_count")
    t, h, w, e = (*sections, 0)[:4]
    return t, h, w, e
