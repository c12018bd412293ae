"""The two ends of an MTP block, which guesses the token after the next: between them is a layer like any other.

DeepSeek-V3 (2024), section 2.2, in the form of Qwen3-Next and Qwen3.5; with the hidden state h of token p *behind* the
model's last norm, and the embedding e of token p + 1:

    x  = eh_proj . [norm(e) * enorm ; norm(h) * hnorm]        the embedding's half first
    x  = layer(x)                                              full attention over a KV cache of its own, experts
    h' = norm(x) * shared_head_norm                            logits of token p + 2 = head . h'

For another token h' and its embedding go in again. Sources: llama.cpp's src/models/qwen35moe.cpp, graph_mtp (and its
pull request 24025: h is taken behind the norm for Qwen, before it for DeepSeek and GLM), vLLM's qwen3_5_mtp.py.
"""

from __future__ import annotations

from dataclasses import replace

from swarmnode.compute.tensors import Tensor
from swarmnode.models.hparams import Hparams
from swarmnode.models.layer_builder import LayerBuilder
from swarmnode.models.weight_spec import WeightSpec, matrix, vector

EMBEDDING = "nextn.embed_tokens.weight"
HEAD = "nextn.shared_head_head.weight"
HEAD_NORM = "nextn.shared_head_norm.weight"


def nextn_weights(hparams: Hparams) -> dict[str, WeightSpec]:
    """The weights by GGUF name (without `blk.N.`) that a layer does not have; the model's own stand in for those that
    may be missing.
    """
    n_embd, table = hparams.n_embd, matrix(hparams.n_embd, hparams.n_vocab)
    return {
        "nextn.eh_proj.weight": matrix(2 * n_embd, n_embd),
        "nextn.enorm.weight": vector(n_embd),
        "nextn.hnorm.weight": vector(n_embd),
        EMBEDDING: replace(table, is_optional=True, on_device=False),
        HEAD: replace(table, is_optional=True),
        HEAD_NORM: replace(vector(n_embd), is_optional=True),
    }


def join_nextn(b: LayerBuilder, embedding: Tensor, hidden: Tensor) -> Tensor:
    """Embeddings of the next tokens and hidden states, f32 [n_embd, T] each -> what the layer starts from."""
    h_norm = b.cb(b.rms_norm(hidden, b.weight("nextn.hnorm.weight")), "mtp_hnorm")
    e_norm = b.cb(b.rms_norm(embedding, b.weight("nextn.enorm.weight")), "mtp_enorm")
    joined = b.cb(b.g.concat(e_norm, h_norm, 0), "mtp_concat")
    return b.cb(b.linear("nextn.eh_proj", joined), "mtp_eh_proj")


def nextn_hidden(b: LayerBuilder, x: Tensor) -> Tensor:
    """x f32 [n_embd, T] behind the layer -> h'."""
    has_own = b.has_weight(HEAD_NORM)
    return b.rms_norm(x, b.weight(HEAD_NORM) if has_own else b.global_weight("output_norm.weight"))
