"""The whole qwen35moe forward pass in float64 numpy, straight from the formulas: the judge of the graphs.

Slow and plain on purpose: one token after another wherever there is state, one head and one expert at a time. Reads
tensors of an index itself, decoded by gguf-py; shares no code with swarmnode.models. Every intermediate is kept under
the name that the callback uses, with tokens as the first axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from swarmnode.weights.index import ModelIndex

Array = npt.NDArray[np.float64]


def sigmoid(x: Array) -> Array:
    result: Array = 1 / (1 + np.exp(-x))
    return result


def silu(x: Array) -> Array:
    return x * sigmoid(x)


class ForwardOracle:
    """`run(tokens)` fills `named[name, layer]`, arrays [T, ...], and returns logits [T, n_vocab].

    Attributes that tests change to plant a fault: `rope_base`, `moe_factor`, `shared_factor`, `n_used`.
    """

    def __init__(self, index: ModelIndex) -> None:
        self._index = index
        self.named: dict[tuple[str, int], npt.NDArray[Any]] = {}
        self.eps = float(self._key("attention.layer_norm_rms_epsilon"))
        self.n_head, self.n_head_kv = (int(self._key(f"attention.head_count{s}")) for s in ("", "_kv"))
        self.head = int(self._key("attention.key_length"))
        self.n_rot = int(self._key("rope.dimension_count"))
        self.sections = [int(n) for n in self._key("rope.dimension_sections")]
        self.rope_base = float(self._key("rope.freq_base"))
        self.n_used = int(self._key("expert_used_count"))
        self.n_expert = int(self._key("expert_count"))
        self.size, self.n_k, self.n_v = (
            int(self._key(f"ssm.{s}")) for s in ("state_size", "group_count", "time_step_rank")
        )
        self.moe_factor = 1.0
        self.shared_factor = 1.0

    def run(self, tokens: Sequence[int]) -> Array:
        x = self._weight("token_embd.weight")[list(tokens)]
        self._keep("model.input_embed", -1, x)
        for layer in range(self._index.n_layer):
            normed = self._keep("attn_norm", layer, self._norm(x, f"blk.{layer}.attn_norm.weight"))
            attend = self._delta_net if self._has(layer, "ssm_a") else self._attention
            residual = self._keep("attn_residual", layer, attend(layer, normed) + x)
            normed = self._norm(residual, f"blk.{layer}.post_attention_norm.weight")
            self._keep("attn_post_norm", layer, normed)
            moe = self._keep("ffn_moe_out", layer, self._routed(layer, normed) * self.moe_factor)
            out = self._keep("ffn_out", layer, moe + self._shared(layer, normed) * self.shared_factor)
            x = self._keep("l_out", layer, out + residual)
        x = self._keep("result_norm", -1, self._norm(x, "output_norm.weight"))
        tied = "output.weight" not in self._index.tensors
        logits = x @ self._weight("token_embd.weight" if tied else "output.weight").T
        return self._keep("result_output", -1, logits)

    # -- layers

    def _attention(self, layer: int, x: Array) -> Array:
        n_tokens, head = len(x), self.head
        q_rows, kv_rows = 2 * self.n_head * head, self.n_head_kv * head
        if self._has(layer, "attn_qkv.weight"):
            mixed = self._linear(layer, "attn_qkv", x)
            full, k, v = np.split(mixed, [q_rows, q_rows + kv_rows], axis=1)
        else:
            full, k, v = (self._linear(layer, f"attn_{letter}", x) for letter in "qkv")
        self._keep("Qcur_full", layer, full)
        pairs = full.reshape(n_tokens, self.n_head, 2, head)
        q, gate = pairs[:, :, 0], pairs[:, :, 1].reshape(n_tokens, -1)
        self._keep("gate_reshaped", layer, gate)
        k = k.reshape(n_tokens, self.n_head_kv, head)
        q = self._keep("Qcur_normed", layer, self._norm(q, f"blk.{layer}.attn_q_norm.weight"))
        k = self._keep("Kcur_normed", layer, self._norm(k, f"blk.{layer}.attn_k_norm.weight"))
        q, k = self._keep("Qcur", layer, self._rope(q)), self._keep("Kcur", layer, self._rope(k))
        self._keep("Vcur", layer, v)
        v = v.reshape(n_tokens, self.n_head_kv, head)
        out = np.zeros((n_tokens, self.n_head, head))
        for token in range(n_tokens):
            for h in range(self.n_head):
                kv = h // (self.n_head // self.n_head_kv)
                scores = k[: token + 1, kv] @ q[token, h] / math.sqrt(head)
                weights = np.exp(scores - scores.max())
                out[token, h] = weights @ v[: token + 1, kv] / weights.sum()
        flat = self._keep("attn_pregate", layer, out.reshape(n_tokens, -1))
        opening = self._keep("gate_sigmoid", layer, sigmoid(gate))
        gated = self._keep("attn_gated", layer, flat * opening)
        return self._keep("attn_output", layer, self._linear(layer, "attn_output", gated))

    def _rope(self, x: Array) -> Array:
        """Interleaved sections: dimension pair i turns by the position stream that its section belongs to."""
        half = self.n_rot // 2
        rotated = x.copy()
        for token in range(len(x)):
            for i in range(half):
                angle = self._position(i, token) * self.rope_base ** (-i / half)
                a, b = x[token, :, i], x[token, :, i + half]
                rotated[token, :, i] = a * math.cos(angle) - b * math.sin(angle)
                rotated[token, :, i + half] = a * math.sin(angle) + b * math.cos(angle)
        return rotated

    def _position(self, pair: int, token: int) -> int:
        """For a text the time, height and width streams are all the token's position, the fourth is 0."""
        sector = pair % sum(self.sections)
        in_a_stream = sector < 3 * self.sections[(0, 1, 2)[sector % 3]]
        return token if in_a_stream else 0

    def _delta_net(self, layer: int, x: Array) -> Array:
        n_tokens, size = len(x), self.size
        mixed = self._keep("linear_attn_qkv_mixed", layer, self._linear(layer, "attn_qkv", x))
        z = self._keep("z", layer, self._linear(layer, "attn_gate", x))
        beta = self._keep("beta_sigmoid", layer, sigmoid(self._linear(layer, "ssm_beta", x)))
        alpha = self._keep("alpha", layer, self._linear(layer, "ssm_alpha", x))
        softplus = np.log1p(np.exp(alpha + self._weight(f"blk.{layer}.ssm_dt.bias")))
        self._keep("a_softplus", layer, softplus)
        decay = self._keep("gate", layer, softplus * self._weight(f"blk.{layer}.ssm_a"))
        conv = self._keep("conv_output_silu", layer, silu(self._convolve(layer, mixed)))
        q, k, v = np.split(conv, [self.n_k * size, 2 * self.n_k * size], axis=1)
        q, k = (t.reshape(n_tokens, self.n_k, size) for t in (q, k))
        q, k = (t / np.sqrt((t * t).sum(-1, keepdims=True) + self.eps) for t in (q, k))
        self._keep("q_conv_predelta", layer, q)
        self._keep("k_conv_predelta", layer, k)
        v = self._keep("v_conv_predelta", layer, v.reshape(n_tokens, self.n_v, size))
        out = self._keep("attn_output", layer, self._recur(q, k, v, decay, beta))
        normed = self._norm(out, f"blk.{layer}.ssm_norm.weight") * silu(z.reshape(out.shape))
        final = self._keep("final_output", layer, normed.reshape(n_tokens, -1))
        return self._keep("linear_attn_out", layer, self._linear(layer, "ssm_out", final))

    def _convolve(self, layer: int, x: Array) -> Array:
        """Causal, one filter a channel: tap j sees the input n_taps - 1 - j tokens ago."""
        taps = self._weight(f"blk.{layer}.ssm_conv1d.weight")
        n_taps = taps.shape[1]
        padded = np.concatenate([np.zeros((n_taps - 1, x.shape[1])), x])
        out: Array = sum(padded[j : j + len(x)] * taps[:, j] for j in range(n_taps))  # type: ignore[assignment]
        return out

    def _recur(self, q: Array, k: Array, v: Array, decay: Array, beta: Array) -> Array:
        """Gated delta rule: S <- exp(g) S; S <- S + beta (v - S k) k^T; out = S q / sqrt(size)."""
        out = np.zeros_like(v)
        for h in range(self.n_v):
            state = np.zeros((self.size, self.size))
            for token in range(len(v)):
                key, query = k[token, h % self.n_k], q[token, h % self.n_k] / math.sqrt(self.size)
                state = state * math.exp(decay[token, h])
                state = state + beta[token, h] * np.outer(v[token, h] - state @ key, key)
                out[token, h] = state @ query
        return out

    # -- experts

    def _routed(self, layer: int, x: Array) -> Array:
        logits = self._keep("ffn_moe_logits", layer, self._linear(layer, "ffn_gate_inp", x))
        probs = np.exp(logits - logits.max(1, keepdims=True))
        probs = self._keep("ffn_moe_probs", layer, probs / probs.sum(1, keepdims=True))
        ids = np.argsort(-probs, axis=1, kind="stable")[:, : self.n_used]
        self._keep("ffn_moe_topk", layer, ids)
        weights = np.take_along_axis(probs, ids, axis=1)
        self._keep("ffn_moe_weights", layer, weights)
        weights = self._keep("ffn_moe_weights_norm", layer, weights / weights.sum(1, keepdims=True))
        gate, up, down = self._expert_weights(layer)
        out = np.zeros_like(x)
        for token in range(len(x)):
            for expert, weight in zip(ids[token], weights[token], strict=True):
                hidden = silu(gate[expert] @ x[token]) * (up[expert] @ x[token])
                out[token] += weight * (down[expert] @ hidden)
        return out

    def _expert_weights(self, layer: int) -> tuple[Array, Array, Array]:
        down = self._weight(f"blk.{layer}.ffn_down_exps.weight")
        if self._has(layer, "ffn_gate_up_exps.weight"):
            gate, up = np.split(self._weight(f"blk.{layer}.ffn_gate_up_exps.weight"), 2, axis=1)
        else:
            gate, up = (self._weight(f"blk.{layer}.ffn_{name}_exps.weight") for name in ("gate", "up"))
        return gate, up, down

    def _shared(self, layer: int, x: Array) -> Array:
        hidden = silu(self._linear(layer, "ffn_gate_shexp", x)) * self._linear(layer, "ffn_up_shexp", x)
        out = self._keep("ffn_shexp", layer, self._linear(layer, "ffn_down_shexp", hidden))
        row = self._weight(f"blk.{layer}.ffn_gate_inp_shexp.weight").ravel()
        opening = self._keep("shared_expert_gate_sigmoid", layer, sigmoid(x @ row)[:, None])
        return self._keep("ffn_shexp_gated", layer, out * opening)

    # -- plumbing

    def _key(self, name: str) -> Any:
        return self._index.metadata[f"qwen35moe.{name}"]

    def _has(self, layer: int, name: str) -> bool:
        return f"blk.{layer}.{name}" in self._index.tensors

    def _weight(self, name: str) -> Array:
        """A tensor as float64, numpy order: matrices are [rows, columns]."""
        ref = self._index.tensors[name]
        raw = np.frombuffer(self._index.data(name), np.uint8).reshape(*ref.ne[:0:-1], -1)
        return dequantize(raw, GGMLQuantizationType(ref.ggml_type)).astype(np.float64)

    def _linear(self, layer: int, name: str, x: Array) -> Array:
        return x @ self._weight(f"blk.{layer}.{name}.weight").T

    def _norm(self, x: Array, name: str) -> Array:
        result: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * self._weight(name)
        return result

    def _keep(self, name: str, layer: int, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        self.named[name, layer] = values
        return values
