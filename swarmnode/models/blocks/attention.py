"""Full attention with grouped K/V heads, normalised q and k, partial rotary positions and an output gate."""

from __future__ import annotations

from collections.abc import Mapping

from swarmnode.compute import ggml
from swarmnode.compute.tensors import Tensor
from swarmnode.models.blocks.steps import Projected, StepShapes
from swarmnode.models.hparams import Hparams
from swarmnode.models.layer_builder import LayerBuilder
from swarmnode.models.weight_spec import WeightSpec, matrix, vector

F32_BYTES = 4
F16_BYTES = 2
K_CACHE = "k"
V_CACHE = "v"
QUERIES_AT_ONCE = 32
"""ggml's CPU kernel for 64 and more queries sums in another order than the one for fewer: in pieces, a token comes out
the same bit by bit whatever it is computed with. 16 to 63 take about as long as each other; 512 at once would take 0.9
of the time with 512 cells and half of it with 4,096."""


def attention_weights(hparams: Hparams, *, fused_qkv: bool) -> dict[str, WeightSpec]:
    """The weights by GGUF name (without `blk.N.`); `fused_qkv`: q, k and v rows in one tensor."""
    n_embd, n_embd_q = hparams.n_embd, hparams.n_head * hparams.n_embd_head
    rows = {"q": 2 * n_embd_q, "k": hparams.n_embd_kv, "v": hparams.n_embd_kv}
    if fused_qkv:
        weights = {"attn_qkv.weight": matrix(n_embd, sum(rows.values()))}
    else:
        weights = {f"attn_{name}.weight": matrix(n_embd, n) for name, n in rows.items()}
    return weights | {
        "attn_q_norm.weight": vector(hparams.n_embd_head),
        "attn_k_norm.weight": vector(hparams.n_embd_head),
        "attn_output.weight": matrix(n_embd_q, n_embd),
    }


def attention_state(hparams: Hparams, n_ctx: int) -> Mapping[str, tuple[int, tuple[int, ...]]]:
    """Name -> (type, sizes) of a slot's state: K and V of every token, f16."""
    cache = (ggml.F16, (hparams.n_embd_kv, n_ctx))
    return {K_CACHE: cache, V_CACHE: cache}


def attention_shapes(hparams: Hparams) -> StepShapes:
    """What the steps hand on: q, k and v into the core, its output, and the gate for the last step."""
    q = (hparams.n_embd_head, hparams.n_head)
    k = (hparams.n_embd_head, hparams.n_head_kv)
    return StepShapes(into=(q, k, (hparams.n_embd_kv,)), out=q, kept=(hparams.n_head * hparams.n_embd_head,))


def project_attention(b: LayerBuilder, cur: Tensor, rope_mode: int) -> Projected:
    """cur f32 [n_embd, T] -> q, k (rotated) and v, and the gate before its sigmoid; row by row.

    llama.cpp qwen35moe.cpp, build_layer_attn, up to the cache. Of each head's 2 * n_embd_head rows of q, the first half
    is the query and the second the gate.
    """
    g, hp = b.g, b.hparams
    head, n_head, n_tokens = hp.n_embd_head, hp.n_head, b.n_tokens
    q_full, k, v = _project(b, cur)
    pair_bytes, token_bytes = 2 * head * F32_BYTES, q_full.nb[1]
    q = g.view(q_full, (head, n_head, n_tokens), (pair_bytes, token_bytes), 0)
    gate = g.view(q_full, (head, n_head, n_tokens), (pair_bytes, token_bytes), head * F32_BYTES)
    gate = b.cb(g.reshape(g.cont(gate), head * n_head, n_tokens), "gate_reshaped")
    q = b.cb(b.rms_norm(q, b.weight("attn_q_norm.weight")), "Qcur_normed")
    k = b.cb(b.rms_norm(k, b.weight("attn_k_norm.weight")), "Kcur_normed")
    q = b.cb(_rope(b, q, rope_mode), "Qcur")
    k = b.cb(_rope(b, k, rope_mode), "Kcur")
    return Projected((q, k, b.cb(v, "Vcur")), gate)


def attend(b: LayerBuilder, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Write k and v of the new tokens of a slot into its cache and look at it: f32 [head, n_head, T]."""
    store_attention(b, k, v)
    return _attend(b, q)


def finish_attention(b: LayerBuilder, attended: Tensor, gate: Tensor) -> Tensor:
    """What `attend` gave and the gate f32 [n_embd_q, T] -> f32 [n_embd, T]; row by row."""
    g, hp = b.g, b.hparams
    attended = b.cb(g.reshape(attended, hp.n_head * hp.n_embd_head, b.n_tokens), "attn_pregate")
    gate = b.cb(g.sigmoid(gate), "gate_sigmoid")
    gated = b.cb(g.mul(attended, gate), "attn_gated")
    return b.cb(b.linear("attn_output", gated), "attn_output")


def _project(b: LayerBuilder, cur: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q with gates f32 [2 * n_embd_q, T] (possibly a strided view), k f32 [head, n_head_kv, T], v f32
    [n_embd_kv, T].
    """
    g, hp = b.g, b.hparams
    head, n_kv_rows, n_tokens = hp.n_embd_head, hp.n_embd_kv, b.n_tokens
    if not b.has_weight("attn_qkv.weight"):
        q, k, v = b.linear("attn_q", cur), b.linear("attn_k", cur), b.linear("attn_v", cur)
        return b.cb(q, "Qcur_full"), g.reshape(k, head, hp.n_head_kv, n_tokens), v
    qkv = b.linear("attn_qkv", cur)
    stride, n_q_rows = qkv.nb[1], 2 * hp.n_head * head
    q = g.view(qkv, (n_q_rows, n_tokens), (stride,), 0)
    offset = n_q_rows * F32_BYTES
    k = g.view(qkv, (head, hp.n_head_kv, n_tokens), (head * F32_BYTES, stride), offset)
    v = g.view(qkv, (n_kv_rows, n_tokens), (stride,), offset + n_kv_rows * F32_BYTES)
    return b.cb(q, "Qcur_full"), k, v


def _rope(b: LayerBuilder, x: Tensor, mode: int) -> Tensor:
    hp = b.hparams
    return b.g.rope_multi(x, b.inp_pos(), hp.n_rot, hp.rope_sections, mode, hp.n_ctx_train, hp.rope_freq_base)


def store_attention(b: LayerBuilder, k: Tensor, v: Tensor) -> None:
    """Write k and v of the new tokens, as `project_attention` gave them, into their cells of the cache."""
    g = b.g
    flat_k = g.reshape(k, b.hparams.n_embd_kv, b.n_tokens)
    g.expand(g.set_rows(b.state(K_CACHE), flat_k, b.kv_idx()))
    g.expand(g.set_rows(b.state(V_CACHE), v, b.kv_idx()))


def _attend(b: LayerBuilder, q: Tensor) -> Tensor:
    """q f32 [head, n_head, T] -> f32 [head, n_head, T], over the first n_kv cells; each token comes out the same bit by
    bit whatever T is.
    """
    if b.n_tokens == 1:
        return _attend_one(b, q)
    g, mask = b.g, b.kq_mask()
    k, v = _cached(b, K_CACHE, 1), _cached(b, V_CACHE, 1)
    parts = []
    for start in range(0, b.n_tokens, QUERIES_AT_ONCE):
        n = min(QUERIES_AT_ONCE, b.n_tokens - start)
        some_q = g.view(q, (*q.ne[:2], n), (q.nb[1], q.nb[2]), start * q.nb[2])
        some_mask = g.view(mask, (b.n_kv, n), (mask.nb[1],), start * mask.nb[1])
        parts.append(_flash(b, g.permute(some_q, 0, 2, 1, 3), k, v, some_mask))
    return _joined(b, parts)


def _attend_one(b: LayerBuilder, q: Tensor) -> Tensor:
    """For T = 1, where ggml would divide the cells among threads and add up what they find, in an order that no other T
    has: not if there are two sequences, or two queries.
    """
    g, hp = b.g, b.hparams
    head, n_head = hp.n_embd_head, hp.n_head
    if hp.n_head_kv % 2:
        k, v = _cached(b, K_CACHE, 1), _cached(b, V_CACHE, 1)
        twice = g.permute(g.concat(q, q, 2), 0, 2, 1, 3)
        out = _flash(b, twice, k, v, g.concat(b.kq_mask(), b.kq_mask(), 1))
        return g.view(out, (head, n_head, 1), (out.nb[1], out.nb[2]), 0)
    k, v = _cached(b, K_CACHE, 2), _cached(b, V_CACHE, 2)
    halves = g.view(q, (head, 1, n_head // 2, 2), (q.nb[1], q.nb[1], n_head // 2 * q.nb[1]), 0)
    return g.reshape(_flash(b, halves, k, v, b.kq_mask()), head, n_head, 1)


def _cached(b: LayerBuilder, name: str, n_parts: int) -> Tensor:
    """The first n_kv cells of a cache, f16 [head, n_kv, n_head_kv / n_parts, n_parts]."""
    hp = b.hparams
    head_bytes, cell_bytes = hp.n_embd_head * F16_BYTES, hp.n_embd_kv * F16_BYTES
    n_heads = hp.n_head_kv // n_parts
    sizes = (hp.n_embd_head, b.n_kv, n_heads, n_parts)
    return b.g.view(b.state(name), sizes, (cell_bytes, head_bytes, n_heads * head_bytes), 0)


def _flash(b: LayerBuilder, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return b.g.flash_attn_ext(q, k, v, mask, b.hparams.attention_scale)


def _joined(b: LayerBuilder, parts: list[Tensor]) -> Tensor:
    """Tensors [head, n_head, T_i] along T, in pairs of pairs: each value is copied a few times only."""
    while len(parts) > 1:
        pairs = zip(parts[::2], parts[1::2], strict=False)
        odd = parts[-1:] if len(parts) % 2 else []
        parts = [b.g.concat(first, second, 2) for first, second in pairs] + odd
    return parts[0]
