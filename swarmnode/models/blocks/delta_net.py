"""Linear attention: a causal convolution, then the gated delta rule on a state matrix for each V head."""

from __future__ import annotations

import math
from collections.abc import Mapping

from swarmnode.compute import ggml
from swarmnode.compute.tensors import Tensor
from swarmnode.models.blocks.steps import Projected, StepShapes
from swarmnode.models.hparams import Hparams
from swarmnode.models.layer_builder import LayerBuilder
from swarmnode.models.weight_spec import WeightSpec, matrix, vector

F32_BYTES = 4
CONV_STATE = "conv"
SSM_STATE = "ssm"


def delta_net_weights(hparams: Hparams) -> dict[str, WeightSpec]:
    """The weights by GGUF name (without `blk.N.`); q, k and v are rows of `attn_qkv`."""
    n_embd, n_heads = hparams.n_embd, hparams.ssm_dt_rank
    return {
        "attn_qkv.weight": matrix(n_embd, hparams.ssm_n_channels),
        "attn_gate.weight": matrix(n_embd, hparams.ssm_d_inner),
        "ssm_conv1d.weight": vector(hparams.ssm_d_conv, hparams.ssm_n_channels),
        "ssm_dt.bias": vector(n_heads),
        "ssm_a": vector(n_heads),
        "ssm_beta.weight": matrix(n_embd, n_heads),
        "ssm_alpha.weight": matrix(n_embd, n_heads),
        "ssm_norm.weight": vector(hparams.ssm_d_state),
        "ssm_out.weight": matrix(hparams.ssm_d_inner, n_embd),
    }


def delta_net_state(hparams: Hparams) -> Mapping[str, tuple[int, tuple[int, ...]]]:
    """Name -> (type, sizes) of a slot's state: the convolution's last inputs and the heads' matrices, f32."""
    size, n_heads = hparams.ssm_d_state, hparams.ssm_dt_rank
    return {
        CONV_STATE: (ggml.F32, (hparams.ssm_d_conv - 1, hparams.ssm_n_channels)),
        SSM_STATE: (ggml.F32, (size, size, n_heads, 1)),
    }


def delta_net_shapes(hparams: Hparams) -> StepShapes:
    """What the steps hand on: qkv, decay and beta into the core, its output, and z for the last step."""
    size, n_heads = hparams.ssm_d_state, hparams.ssm_dt_rank
    into = ((hparams.ssm_n_channels,), (1, n_heads), (1, n_heads))
    return StepShapes(into=into, out=(size, n_heads), kept=(size * n_heads,))


def project_delta_net(b: LayerBuilder, cur: Tensor) -> Projected:
    """cur f32 [n_embd, T] -> qkv before the convolution, logarithm of the decay, beta, and z; row by row.

    llama.cpp qwen35moe.cpp, build_layer_attn_linear, up to the convolution.
    """
    g, n_heads, n_tokens = b.g, b.hparams.ssm_dt_rank, b.n_tokens
    qkv = b.cb(b.linear("attn_qkv", cur), "linear_attn_qkv_mixed")
    z = b.cb(b.linear("attn_gate", cur), "z")
    beta = g.reshape(b.linear("ssm_beta", cur), 1, n_heads, n_tokens, 1)
    beta = b.cb(g.sigmoid(beta), "beta_sigmoid")
    return Projected((qkv, _log_decay(b, cur), beta), z)


def run_delta_net(b: LayerBuilder, qkv: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Take a slot's convolution and state on by its new tokens: outputs f32 [size, n_heads, T, 1].

    Both stay as they were if the tokens are tentative.
    V head h reads K head h % ssm_n_group: the converter stores V heads in that order.
    """
    g = b.g
    q, k, v = _convolve(b, qkv)
    result = g.gated_delta_net(q, k, v, decay, beta, b.state(SSM_STATE))
    out, new_state = _split_result(b, result)
    if not b.tentative:
        g.expand(g.cpy(new_state, b.state(SSM_STATE)))
    return b.cb(out, "attn_output")


def finish_delta_net(b: LayerBuilder, out: Tensor, z: Tensor) -> Tensor:
    """What `run_delta_net` gave and z f32 [size * n_heads, T] -> f32 [n_embd, T]; row by row."""
    g, size, n_heads, n_tokens = b.g, b.hparams.ssm_d_state, b.hparams.ssm_dt_rank, b.n_tokens
    gate = g.silu(g.reshape(z, size, n_heads, n_tokens, 1))
    out = g.mul(b.rms_norm(out, b.weight("ssm_norm.weight")), gate)
    out = b.cb(g.reshape(out, size * n_heads, n_tokens), "final_output")
    return b.cb(b.linear("ssm_out", out), "linear_attn_out")


def _log_decay(b: LayerBuilder, cur: Tensor) -> Tensor:
    """softplus(alpha + dt) * a, f32 [1, n_heads, T, 1]: the logarithm of each head's decay, at most 0."""
    g, n_heads = b.g, b.hparams.ssm_dt_rank
    alpha = b.cb(b.linear("ssm_alpha", cur), "alpha")
    softplus = b.cb(g.softplus(g.add(alpha, b.weight("ssm_dt.bias"))), "a_softplus")
    return b.cb(g.reshape(g.mul(softplus, b.weight("ssm_a")), 1, n_heads, b.n_tokens, 1), "gate")


def _convolve(b: LayerBuilder, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Run the convolution over state and new tokens, keep its last inputs, split into unit q, unit k, and v."""
    g, hp = b.g, b.hparams
    n_channels, n_keep, n_tokens = hp.ssm_n_channels, hp.ssm_d_conv - 1, b.n_tokens
    state = g.reshape(b.state(CONV_STATE), n_keep, n_channels, 1)
    columns = g.transpose(g.reshape(qkv, n_channels, n_tokens, 1))
    conv_input = g.concat(state, columns, 0)
    strides = (conv_input.nb[1], conv_input.nb[2])
    last = g.view(conv_input, (n_keep, n_channels, 1), strides, n_tokens * F32_BYTES)
    if not b.tentative:
        g.expand(g.cpy(last, b.state(CONV_STATE)))
    mixed = b.cb(g.silu(g.ssm_conv(conv_input, b.weight("ssm_conv1d.weight"))), "conv_output_silu")
    n_qk = hp.ssm_n_group * hp.ssm_d_state
    q = _heads(b, mixed, hp.ssm_n_group, 0)
    k = _heads(b, mixed, hp.ssm_n_group, n_qk)
    v = b.cb(_heads(b, mixed, hp.ssm_dt_rank, 2 * n_qk), "v_conv_predelta")
    return b.cb(_unit(b, q), "q_conv_predelta"), b.cb(_unit(b, k), "k_conv_predelta"), v


def _heads(b: LayerBuilder, mixed: Tensor, n_heads: int, first_channel: int) -> Tensor:
    """View channels of mixed [n_channels, T, 1] as [size, n_heads, T, 1]."""
    size, token_bytes = b.hparams.ssm_d_state, b.hparams.ssm_n_channels * F32_BYTES
    strides = (size * F32_BYTES, token_bytes, token_bytes * b.n_tokens)
    return b.g.view(mixed, (size, n_heads, b.n_tokens, 1), strides, first_channel * F32_BYTES)


def _unit(b: LayerBuilder, x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + eps) as llama.cpp writes it, so that the last bits agree: rms_norm, then scale."""
    size = b.hparams.ssm_d_state
    return b.g.scale(b.g.rms_norm(x, b.hparams.norm_rms_eps / size), 1.0 / math.sqrt(size))


def _split_result(b: LayerBuilder, result: Tensor) -> tuple[Tensor, Tensor]:
    """The op gives outputs f32 [size, n_heads, T, 1] and, behind them, the state [size, size, n_heads, 1]."""
    size, n_heads, n_tokens = b.hparams.ssm_d_state, b.hparams.ssm_dt_rank, b.n_tokens
    head_bytes, token_bytes = size * F32_BYTES, size * n_heads * F32_BYTES
    out_bytes = token_bytes * n_tokens
    out = b.g.view(result, (size, n_heads, n_tokens, 1), (head_bytes, token_bytes, out_bytes), 0)
    matrix_bytes = size * head_bytes
    strides = (head_bytes, matrix_bytes, matrix_bytes * n_heads)
    return out, b.g.view(result, (size, size, n_heads, 1), strides, out_bytes)
