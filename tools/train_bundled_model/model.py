"""A plain PyTorch `qwen35moe`: llama.cpp's arithmetic, with parameters laid out as in the GGUF file.

Parameter names are GGUF tensor names and a linear layer's weight is [out, in], so writing the file is a loop
over `named_tensors`. Shapes in comments: B sequences, T tokens, E = n_embd, S = ssm state size, H heads.
"""

# mypy: allow-subclassing-any
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as fn

from .delta_rule import gated_delta_rule


@dataclass(frozen=True)
class Config:
    """Sizes of the bundled model, in the words of the GGUF keys they end up in."""

    n_vocab: int = 2048
    n_embd: int = 256
    n_layer: int = 4
    full_attention_interval: int = 4
    context_length: int = 4096
    # Attention: rotary positions cover the first half of each head, as the real models cover a quarter of it.
    head_count: int = 4
    head_count_kv: int = 2
    head_dim: int = 128
    rope_dim: int = 64
    rope_sections: tuple[int, int, int, int] = (11, 11, 10, 0)
    rope_freq_base: float = 1e7
    # Linear attention: two value heads share one key head, so that the tiled head order matters.
    ssm_conv_kernel: int = 4
    ssm_state_size: int = 64
    ssm_group_count: int = 2
    ssm_time_step_rank: int = 4
    # Experts.
    expert_count: int = 16
    expert_used_count: int = 4
    expert_feed_forward_length: int = 256
    expert_shared_feed_forward_length: int = 256
    rms_norm_eps: float = 1e-6

    @property
    def ssm_inner_size(self) -> int:
        return self.ssm_state_size * self.ssm_time_step_rank

    @property
    def conv_channels(self) -> int:
        """Rows of `attn_qkv` on a recurrent layer: q, k (group_count heads each) and v."""
        return self.ssm_inner_size + 2 * self.ssm_group_count * self.ssm_state_size

    def is_recurrent(self, layer: int) -> bool:
        return (layer + 1) % self.full_attention_interval != 0


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def unit_length(x: Tensor) -> Tensor:
    """Scale the last dimension to length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _matrix(rows: int, columns: int, gain: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) * gain / columns**0.5)


class RecurrentAttention(nn.Module):
    """Gated delta net: causal convolution, delta-rule state, gated per-head norm."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        c = self.config = config
        heads = c.ssm_time_step_rank
        self.attn_qkv = _matrix(c.conv_channels, c.n_embd)
        self.attn_gate = _matrix(c.ssm_inner_size, c.n_embd)
        self.ssm_conv1d = nn.Parameter(torch.randn(c.conv_channels, c.ssm_conv_kernel) * 0.3)
        self.ssm_dt = nn.Parameter(torch.empty(heads).uniform_(-4.0, -1.0))
        # Kept as a logarithm while training, so that the decay rate keeps its sign.
        self.a_log = nn.Parameter(torch.empty(heads).uniform_(0.2, 2.0).log())
        self.ssm_beta = _matrix(heads, c.n_embd)
        self.ssm_alpha = _matrix(heads, c.n_embd)
        self.ssm_norm = nn.Parameter(torch.ones(c.ssm_state_size))
        self.ssm_out = _matrix(c.n_embd, c.ssm_inner_size, gain=0.5)

    def forward(self, x: Tensor) -> Tensor:
        """x, result: [B, T, E]; the state starts at zero."""
        c, (batch, length, _) = self.config, x.shape
        size, keys, heads = c.ssm_state_size, c.ssm_group_count, c.ssm_time_step_rank
        qkv = fn.linear(x, self.attn_qkv).float().transpose(1, 2)
        padded = fn.pad(qkv, (c.ssm_conv_kernel - 1, 0))
        mixed = fn.silu(fn.conv1d(padded, self.ssm_conv1d.unsqueeze(1), groups=c.conv_channels)).transpose(
            1, 2
        )
        q, k, v = mixed.split([keys * size, keys * size, heads * size], dim=-1)
        q, k = (unit_length(t.reshape(batch, length, keys, size)).transpose(1, 2) for t in (q, k))
        q, k = (t.repeat(1, heads // keys, 1, 1) for t in (q, k))  # value head h reads key head h % keys
        v = v.reshape(batch, length, heads, size).transpose(1, 2)
        decay = -self.a_log.exp() * fn.softplus(fn.linear(x, self.ssm_alpha).float() + self.ssm_dt)
        beta = fn.linear(x, self.ssm_beta).float().sigmoid()
        with torch.autocast("cpu", enabled=False):  # the state adds up over the text: bfloat16 is too coarse
            out = gated_delta_rule(q * size**-0.5, k, v, decay.transpose(1, 2), beta.transpose(1, 2))
        out = out.transpose(1, 2)
        z = fn.linear(x, self.attn_gate).float().reshape(batch, length, heads, size)
        out = rms_norm(out, self.ssm_norm, c.rms_norm_eps) * fn.silu(z)
        return fn.linear(out.reshape(batch, length, -1), self.ssm_out)


class FullAttention(nn.Module):
    """Causal grouped-query attention with normalised q and k, partial rotary positions and an output gate."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        c = self.config = config
        self.attn_q = _matrix(2 * c.head_count * c.head_dim, c.n_embd)  # per head: query rows, then gate rows
        self.attn_k = _matrix(c.head_count_kv * c.head_dim, c.n_embd)
        self.attn_v = _matrix(c.head_count_kv * c.head_dim, c.n_embd)
        self.attn_q_norm = nn.Parameter(torch.ones(c.head_dim))
        self.attn_k_norm = nn.Parameter(torch.ones(c.head_dim))
        self.attn_output = _matrix(c.n_embd, c.head_count * c.head_dim, gain=0.5)

    def _rotate(self, x: Tensor) -> Tensor:
        """Rotary positions on the first `rope_dim` values of each head; x: [B, H, T, head_dim].

        For text the three position streams of the multi-section form are equal: the plain NEOX form is left.
        """
        c = self.config
        half = c.rope_dim // 2
        frequency = c.rope_freq_base ** (-torch.arange(half, dtype=torch.float32) / half)
        angle = torch.arange(x.shape[2], dtype=torch.float32)[:, None] * frequency
        a, b, rest = x[..., :half], x[..., half : c.rope_dim], x[..., c.rope_dim :]
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        """x, result: [B, T, E]."""
        c, (batch, length, _) = self.config, x.shape
        q_gate = fn.linear(x, self.attn_q).view(batch, length, c.head_count, 2, c.head_dim)
        q, gate = q_gate[..., 0, :], q_gate[..., 1, :].reshape(batch, length, -1)
        k = fn.linear(x, self.attn_k).view(batch, length, c.head_count_kv, c.head_dim)
        v = fn.linear(x, self.attn_v).view(batch, length, c.head_count_kv, c.head_dim).transpose(1, 2)
        q = self._rotate(rms_norm(q, self.attn_q_norm, c.rms_norm_eps).transpose(1, 2))
        k = self._rotate(rms_norm(k, self.attn_k_norm, c.rms_norm_eps).transpose(1, 2))
        out = fn.scaled_dot_product_attention(
            q.to(v.dtype), k.to(v.dtype), v, is_causal=True, enable_gqa=True
        )
        out = out.transpose(1, 2).reshape(batch, length, -1) * gate.float().sigmoid()
        return fn.linear(out, self.attn_output)


class MoE(nn.Module):
    """Routed experts (softmax over all, top-k, weights renormalised) plus one gated shared expert."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        c = self.config = config
        n, ff, shared = c.expert_count, c.expert_feed_forward_length, c.expert_shared_feed_forward_length
        self.ffn_gate_inp = _matrix(n, c.n_embd)
        self.ffn_gate_exps = nn.Parameter(torch.randn(n, ff, c.n_embd) / c.n_embd**0.5)
        self.ffn_up_exps = nn.Parameter(torch.randn(n, ff, c.n_embd) / c.n_embd**0.5)
        self.ffn_down_exps = nn.Parameter(torch.randn(n, c.n_embd, ff) * 0.5 / ff**0.5)
        self.ffn_gate_inp_shexp = nn.Parameter(torch.randn(c.n_embd) / c.n_embd**0.5)
        self.ffn_gate_shexp = _matrix(shared, c.n_embd)
        self.ffn_up_shexp = _matrix(shared, c.n_embd)
        self.ffn_down_shexp = _matrix(c.n_embd, shared, gain=0.5)

    def _routed(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Sum of the chosen experts' answers. rows: [N, E], ids and weights: [N, k], result [N, E]."""
        k = ids.shape[1]
        order = ids.flatten().argsort(stable=True)
        token = order // k
        counts = ids.flatten().bincount(minlength=self.config.expert_count).tolist()
        # unbind once: indexing the stacked tensors in the loop would build a gradient of full size each time
        stacks = (self.ffn_gate_exps.unbind(), self.ffn_up_exps.unbind(), self.ffn_down_exps.unbind())
        answers = []
        for part, gate, up, down in zip(rows[token].split(counts), *stacks, strict=True):
            answers.append(fn.linear(fn.silu(fn.linear(part, gate)) * fn.linear(part, up), down))
        weighted = torch.cat(answers).float() * weights.flatten()[order, None]
        return torch.zeros_like(rows).index_add(0, token, weighted)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [B, T, E] float32. Returns the block's output and the load-balancing loss (1.0 = even)."""
        c = self.config
        rows = x.reshape(-1, c.n_embd)
        with torch.autocast("cpu", enabled=False):
            probabilities = fn.linear(rows, self.ffn_gate_inp).softmax(-1)
        weights, ids = probabilities.topk(c.expert_used_count, dim=-1)
        routed = self._routed(rows, ids, weights / weights.sum(-1, keepdim=True))
        share = ids.flatten().bincount(minlength=c.expert_count) / ids.numel()
        balance = c.expert_count * (share * probabilities.mean(0)).sum()
        hidden = fn.silu(fn.linear(rows, self.ffn_gate_shexp)) * fn.linear(rows, self.ffn_up_shexp)
        openness = (rows @ self.ffn_gate_inp_shexp[:, None]).float().sigmoid()
        shared = fn.linear(hidden, self.ffn_down_shexp).float() * openness
        return (routed + shared).view_as(x), balance


class Layer(nn.Module):
    """norm, attention (of either kind), residual; norm, MoE, residual."""

    def __init__(self, config: Config, index: int) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.attn_norm = nn.Parameter(torch.ones(config.n_embd))
        self.attention = RecurrentAttention(config) if config.is_recurrent(index) else FullAttention(config)
        self.post_attention_norm = nn.Parameter(torch.ones(config.n_embd))
        self.moe = MoE(config)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(rms_norm(x, self.attn_norm, self.eps)).float()
        moe, balance = self.moe(rms_norm(x, self.post_attention_norm, self.eps))
        return x + moe, balance


class BundledModel(nn.Module):
    """The whole network, from token ids to logits."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.token_embd = nn.Parameter(torch.randn(config.n_vocab, config.n_embd) * 0.5)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.n_layer))
        self.output_norm = nn.Parameter(torch.ones(config.n_embd))
        self.output = _matrix(config.n_vocab, config.n_embd, gain=0.5)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """ids: [B, T] int64. Returns logits [B, T, n_vocab] and the layers' mean load-balancing loss."""
        x = fn.embedding(ids, self.token_embd)
        balances = []
        for layer in self.layers:
            x, balance = layer(x)
            balances.append(balance)
        logits = fn.linear(rms_norm(x, self.output_norm, self.config.rms_norm_eps), self.output)
        return logits.float(), torch.stack(balances).mean()


def named_tensors(model: BundledModel) -> dict[str, Tensor]:
    """The model's tensors under their GGUF names, with the folds that the file format asks for."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if parts[0] != "layers":
            tensors[f"{name}.weight"] = parameter.detach()
            continue
        prefix, leaf = f"blk.{parts[1]}.", parts[-1]
        if leaf == "a_log":
            tensors[f"{prefix}ssm_a"] = -parameter.detach().exp()
        elif leaf == "ssm_dt":
            tensors[f"{prefix}ssm_dt.bias"] = parameter.detach()
        else:
            tensors[f"{prefix}{leaf}.weight"] = parameter.detach()
    return tensors
