"""The backbone's part of a mixture-of-experts layer: the gate's choice of experts, and the shared expert."""

from __future__ import annotations

import math
from dataclasses import dataclass

from swarmnode.compute.tensors import Tensor
from swarmnode.models.hparams import Hparams
from swarmnode.models.layer_builder import LayerBuilder
from swarmnode.models.weight_spec import WeightSpec, matrix

_MIN_WEIGHT_SUM = 6.103515625e-5
"""The smallest normal f16, which llama.cpp puts under the sum of weights (llama-graph.cpp, build_moe_ffn)."""


@dataclass(frozen=True)
class LayerOutput:
    """What a layer's graph leaves for the rest of the layer, for `n_out` tokens."""

    rows: Tensor
    """f32 [n_embd, n_out]: input of the routed experts."""
    ids: Tensor
    """i32 [n_expert_used, n_out], possibly strided."""
    weights: Tensor
    """f32 [n_expert_used, n_out]"""
    shared: Tensor
    """f32 [n_embd, n_out]: the shared expert's output."""
    residual: Tensor
    """f32 [n_embd, n_out]. The layer's output is (routed + shared) + residual, in this order."""


def router_weights(hparams: Hparams) -> dict[str, WeightSpec]:
    """The gate's weight by GGUF name (without `blk.N.`)."""
    return {"ffn_gate_inp.weight": matrix(hparams.n_embd, hparams.n_expert)}


def shared_expert_weights(hparams: Hparams) -> dict[str, WeightSpec]:
    """The weights by GGUF name (without `blk.N.`) of the shared expert."""
    n_embd, n_ff = hparams.n_embd, hparams.n_ff_shexp
    return {
        "ffn_gate_inp_shexp.weight": matrix(n_embd, 1),
        "ffn_gate_shexp.weight": matrix(n_embd, n_ff),
        "ffn_up_shexp.weight": matrix(n_embd, n_ff),
        "ffn_down_shexp.weight": matrix(n_ff, n_embd),
    }


def build_router(b: LayerBuilder, cur: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over all experts, the best n_expert_used, weights scaled to sum 1: (ids, weights) for cur
    f32 [n_embd, n_out].
    """
    g, n_expert, n_used = b.g, b.hparams.n_expert, b.hparams.n_expert_used
    logits = b.cb(b.linear("ffn_gate_inp", cur), "ffn_moe_logits")
    probs = b.cb(g.soft_max(logits), "ffn_moe_probs")
    # NaN, which no order holds for, would make the sort read and choose anything; `weights` still show it.
    ids = b.cb(g.argsort_top_k(g.clamp(g.cont(probs), 0.0, 1.0), n_used), "ffn_moe_topk")
    weights = g.get_rows(g.reshape(probs, 1, n_expert, b.n_out), ids)
    weights = b.cb(g.reshape(weights, n_used, b.n_out), "ffn_moe_weights")
    total = g.clamp(g.sum_rows(weights), _MIN_WEIGHT_SUM, math.inf)
    return ids, b.cb(g.div(weights, total), "ffn_moe_weights_norm")


def build_shared_expert(b: LayerBuilder, cur: Tensor) -> Tensor:
    """down(silu(gate) * up) * sigmoid(w . cur) for cur f32 [n_embd, n_out]."""
    g = b.g
    up, gate = b.linear("ffn_up_shexp", cur), b.linear("ffn_gate_shexp", cur)
    out = b.cb(b.linear("ffn_down_shexp", g.swiglu_split(gate, up)), "ffn_shexp")
    openness = b.cb(g.sigmoid(b.linear("ffn_gate_inp_shexp", cur)), "shared_expert_gate_sigmoid")
    return b.cb(g.mul(out, openness), "ffn_shexp_gated")
