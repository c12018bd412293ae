"""ggml's ops as methods, named and ordered as in ggml, each with the checks that ggml would abort on."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

from swarmnode.compute import ggml
from swarmnode.compute.ggml import TensorPointer, api
from swarmnode.compute.tensors import Arena, Tensor, address_of
from swarmnode.errors import UsageError


def need(condition: bool, op: str, *tensors: Tensor) -> None:
    """UsageError naming the op and its operands: a model and its weights disagree, and ggml would abort."""
    if not condition:
        raise UsageError(f"{op} cannot take {', '.join(map(repr, tensors))}")


def _repeats(small: Tensor, large: Tensor) -> bool:
    return all(n % m == 0 for n, m in zip(large.ne, small.ne, strict=True))


def is_contiguous(tensor: Tensor) -> bool:
    return bool(api.ggml_is_contiguous(tensor.pointer))


class Ops:
    """What a graph can compute. Shapes in the docstrings are ggml's (fastest dimension first)."""

    def __init__(self, arena: Arena, max_nodes: int) -> None:
        self._arena = arena
        self._max_nodes = max_nodes
        self._n_tensors = 0
        self._externals: dict[int, Tensor] = {}

    # -- plumbing

    def _call(self, op: str, *arguments: object, n_dims: int = 4, n_new: int = 1) -> Tensor:
        """Append the op; `n_new` is how many tensors ggml makes for it."""
        self._n_tensors += n_new
        if self._n_tensors > self._max_nodes:
            raise UsageError(f"the graph has more than the {self._max_nodes} nodes it was made for")
        tensors = [item for item in arguments if isinstance(item, Tensor)]
        need(not any(item.is_repacked for item in tensors[op == "ggml_mul_mat" :]), op, *tensors)
        taken = [self._take(item) if isinstance(item, Tensor) else item for item in arguments]
        return Tensor(getattr(api, op)(self._arena.context, *taken), self._arena, n_dims)

    def _take(self, tensor: Tensor) -> TensorPointer:
        if tensor.arena is not self._arena:
            self._externals[address_of(tensor.pointer)] = tensor
            if len(self._externals) > self._max_nodes:
                raise UsageError(f"the graph uses more than {self._max_nodes} weights")
        return tensor.pointer

    # -- shapes

    def reshape(self, x: Tensor, *ne: int) -> Tensor:
        """The same values (contiguous) with other sizes."""
        need(is_contiguous(x) and 1 <= len(ne) <= 4 and math.prod(ne) == x.n_elements, "reshape", x)
        return self._call("ggml_reshape_4d", x, *_pad(ne), n_dims=len(ne))

    def view(self, x: Tensor, ne: Sequence[int], nb: Sequence[int], offset_bytes: int) -> Tensor:
        """A window of x: sizes `ne`, byte strides `nb` of the dimensions 1.. (one fewer than `ne`)."""
        need(1 <= len(ne) <= 4 and len(nb) == len(ne) - 1 and min((*ne, 1)) >= 1, "view", x)
        need(min((*nb, 0)) >= 0 and offset_bytes >= 0 and x.type in ggml.NUMPY_TYPES, "view", x)
        row = ggml.row_bytes(x.type, ne[0])
        end = offset_bytes + row + sum((n - 1) * stride for n, stride in zip(ne[1:], nb, strict=True))
        need(end <= x.n_bytes, "view", x)
        strides = list(nb)
        sizes = _pad(ne)
        while len(strides) < 3:
            strides.append((strides[-1] if strides else row) * (sizes[len(strides)] if strides else 1))
        return self._call("ggml_view_4d", x, *sizes, *strides, offset_bytes, n_dims=len(ne))

    def cont(self, x: Tensor) -> Tensor:
        """A contiguous copy."""
        return self._call("ggml_cont", x, n_dims=x.n_dims)

    def permute(self, x: Tensor, axis0: int, axis1: int, axis2: int, axis3: int) -> Tensor:
        """Dimension i of x becomes dimension axis_i."""
        need(sorted((axis0, axis1, axis2, axis3)) == [0, 1, 2, 3], "permute", x)
        return self._call("ggml_permute", x, axis0, axis1, axis2, axis3)

    def transpose(self, x: Tensor) -> Tensor:
        """Swap dimensions 0 and 1 (a view)."""
        return self._call("ggml_transpose", x, n_dims=max(2, x.n_dims))

    def concat(self, a: Tensor, b: Tensor, dim: int) -> Tensor:
        """Join along `dim`; the other sizes and the types agree."""
        need(0 <= dim < 4 and a.type == b.type, "concat", a, b)
        need(all(a.ne[i] == b.ne[i] for i in range(4) if i != dim), "concat", a, b)
        return self._call("ggml_concat", a, b, dim, n_dims=max(a.n_dims, b.n_dims, dim + 1))

    # -- rows

    def get_rows(self, x: Tensor, ids: Tensor) -> Tensor:
        """x [ne0, n, B], ids i32 [m, B] -> f32 [ne0, m, B]. Ids out of range abort: the caller checks
        them.
        """
        need(ids.type == ggml.I32 and ids.ne[3] == 1, "get_rows", x, ids)
        need(x.ne[2] == ids.ne[1] and x.ne[3] == ids.ne[2], "get_rows", x, ids)
        return self._call("ggml_get_rows", x, ids, n_dims=ids.n_dims + 1)

    def set_rows(self, dst: Tensor, src: Tensor, ids: Tensor) -> Tensor:
        """dst[ids[i]] = src[i] for f32 src [ne0, m], ids i64 [m]; needs `expand`. The caller checks the
        ids.
        """
        need(src.type == ggml.F32 and ids.type in (ggml.I64, ggml.I32), "set_rows", dst, src, ids)
        need(dst.ne[0] == src.ne[0] and src.ne[1] == ids.ne[0], "set_rows", dst, src, ids)
        need(dst.ne[2:] == src.ne[2:] and src.ne[2] % ids.ne[1] == 0, "set_rows", dst, src, ids)
        need(src.ne[3] % ids.ne[2] == 0 and ids.ne[3] == 1, "set_rows", dst, src, ids)
        return self._call("ggml_set_rows", dst, src, ids, n_dims=dst.n_dims)

    def cpy(self, src: Tensor, dst: Tensor) -> Tensor:
        """Copy values into dst (converting the type); needs `expand`."""
        need(src.n_elements == dst.n_elements, "cpy", src, dst)
        return self._call("ggml_cpy", src, dst, n_dims=dst.n_dims)

    # -- arithmetic

    def mul_mat(self, w: Tensor, x: Tensor) -> Tensor:
        """w [k, n], x f32 [k, m] -> f32 [n, m]; w repeats over the dimensions 2 and 3 of x."""
        need(w.ne[0] == x.ne[0] and x.ne[2] % w.ne[2] == 0 and x.ne[3] % w.ne[3] == 0, "mul_mat", w, x)
        need(w.nb[0] <= w.nb[1] and x.type == ggml.F32, "mul_mat", w, x)
        return self._call("ggml_mul_mat", w, x, n_dims=max(2, x.n_dims))

    def mul_mat_id(self, w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
        """w [k, n, n_expert], x f32 [k, 1 or u, t], ids i32 [u, t] -> f32 [n, u, t]. The caller checks
        the ids.
        """
        need(ids.type == ggml.I32 and ids.ne[2:] == (1, 1) and x.type == ggml.F32, "mul_mat_id", w, x, ids)
        need(w.ne[0] == x.ne[0] and w.ne[3] == 1 and x.ne[3] == 1, "mul_mat_id", w, x, ids)
        need(ids.ne[1] == x.ne[2] and ids.ne[0] % x.ne[1] == 0, "mul_mat_id", w, x, ids)
        return self._call("ggml_mul_mat_id", w, x, ids, n_dims=3)

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        """a * b, b repeated to the shape of a."""
        return self._binary("mul", a, b)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """a + b, b repeated to the shape of a."""
        return self._binary("add", a, b)

    def div(self, a: Tensor, b: Tensor) -> Tensor:
        """a / b, b repeated to the shape of a."""
        return self._binary("div", a, b)

    def _binary(self, op: str, a: Tensor, b: Tensor) -> Tensor:
        need(_repeats(b, a) and a.type == b.type == ggml.F32, op, a, b)
        return self._call(f"ggml_{op}", a, b, n_dims=a.n_dims)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return self._unary("scale", x, factor)

    def clamp(self, x: Tensor, low: float, high: float) -> Tensor:
        """In place, as ggml does it: x itself is clamped."""
        return self._unary("clamp", x, low, high)

    def sum_rows(self, x: Tensor) -> Tensor:
        """[n, m] -> [1, m]."""
        return self._unary("sum_rows", x)

    def rms_norm(self, x: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2 over dimension 0) + eps)."""
        need(eps >= 0.0, "rms_norm", x)
        return self._unary("rms_norm", x, eps)

    def soft_max(self, x: Tensor) -> Tensor:
        """Over dimension 0."""
        need(is_contiguous(x), "soft_max", x)
        return self._unary("soft_max", x)

    def silu(self, x: Tensor) -> Tensor:
        return self._unary("silu", x)

    def sigmoid(self, x: Tensor) -> Tensor:
        return self._unary("sigmoid", x)

    def softplus(self, x: Tensor) -> Tensor:
        """log(1 + exp(x))"""
        return self._unary("softplus", x)

    def _unary(self, op: str, x: Tensor, *arguments: float) -> Tensor:
        need(x.type == ggml.F32 and x.nb[0] == 4, op, x)
        return self._call(f"ggml_{op}", x, *arguments, n_dims=x.n_dims)

    def swiglu_split(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up"""
        need(gate.ne == up.ne and gate.type == up.type == ggml.F32, "swiglu_split", gate, up)
        need(gate.nb[0] == up.nb[0] == 4, "swiglu_split", gate, up)
        return self._call("ggml_swiglu_split", gate, up, n_dims=gate.n_dims)

    def argsort_top_k(self, x: Tensor, k: int) -> Tensor:
        """Indices i32 [k, m] of the k largest of each row, largest first: a strided view, `cont` it to
        read it.
        """
        need(1 <= k <= x.ne[0] and x.type == ggml.F32, "argsort_top_k", x)
        return self._call("ggml_argsort_top_k", x, k, n_dims=x.n_dims, n_new=2)

    # -- attention and linear attention

    def rope_multi(
        self,
        x: Tensor,
        pos: Tensor,
        n_rot: int,
        sections: Sequence[int],
        mode: int,
        n_ctx_orig: int,
        base: float,
    ) -> Tensor:
        """Rotate the first n_rot values of each head; x [head, n_head, T], pos i32 [4 T] (one run per
        section).
        """
        need(pos.type == ggml.I32 and pos.ne[0] == 4 * x.ne[2] and len(sections) == 4, "rope_multi", x, pos)
        need(0 < n_rot <= x.ne[0] and n_rot % 2 == 0 and x.ne[0] % 2 == 0, "rope_multi", x, pos)
        need(min(sections) >= 0 and 0 < sum(sections) <= x.ne[0], "rope_multi", x, pos)
        c_sections = (ctypes.c_int * 4)(*sections)
        scaling = (
            1.0,
            0.0,
            1.0,
            32.0,
            1.0,
        )  # freq_scale, ext_factor, attn_factor, beta_fast, beta_slow: no yarn
        return self._call(
            "ggml_rope_multi",
            *(x, pos, None, n_rot, c_sections, mode, n_ctx_orig, base, *scaling),
            n_dims=x.n_dims,
        )

    def flash_attn_ext(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        """q f32 [head, T, n_head, B], k and v [head, n_kv, n_head_kv, B], mask f16 [n_kv, T] -> [head, n_head, T, B].

        Accumulates in f32. With T = B = 1 and 512 cells or more ggml divides the cells over the threads: other sums for
        other numbers of threads.
        """
        operands = (q, k, v, mask)
        need(
            q.type == ggml.F32 and mask.type == ggml.F16 and is_contiguous(mask), "flash_attn_ext", *operands
        )
        need(q.ne[0] == k.ne[0] and k.ne[1] == v.ne[1] == mask.ne[0], "flash_attn_ext", *operands)
        need(
            q.ne[2] % k.ne[2] == 0 and k.ne[2:] == v.ne[2:] and q.ne[3] == k.ne[3],
            "flash_attn_ext",
            *operands,
        )
        need(mask.ne[1] >= q.ne[1] and mask.ne[2:] == (1, 1), "flash_attn_ext", *operands)
        attention = self._call("ggml_flash_attn_ext", *operands, scale, 0.0, 0.0)
        api.ggml_flash_attn_ext_set_prec(attention.pointer, api.GGML_PREC_F32)
        return attention

    def ssm_conv(self, x: Tensor, w: Tensor) -> Tensor:
        """Depth-wise causal convolution: x f32 [d_conv - 1 + T, channels, S], w f32 [d_conv, channels] ->
        [channels, T, S].
        """
        need(x.type == w.type == ggml.F32 and x.ne[1] == w.ne[1] and w.ne[2:] == (1, 1), "ssm_conv", x, w)
        need(x.ne[0] >= w.ne[0] and x.ne[3] == 1 and is_contiguous(w), "ssm_conv", x, w)
        need(x.nb[0] == 4 and x.nb[1] == x.ne[0] * 4, "ssm_conv", x, w)
        return self._call("ggml_ssm_conv", x, w, n_dims=3)

    def gated_delta_net(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
    ) -> Tensor:
        """q, k [S, H_k, T, B], v [S, H, T, B], g and beta [1, H, T, B], state [S, S, H, B]: outputs, then
        the new state.

        The result is flat: S*H*T*B outputs followed by S*S*H*B of new state. q is scaled by 1/sqrt(S) inside;
        head h of v reads head h % H_k of q and k.
        """
        operands = (q, k, v, g, beta, state)
        size, n_head, n_tokens, n_seqs = v.ne
        need(all(t.type == ggml.F32 and t.nb[0] == 4 for t in operands), "gated_delta_net", *operands)
        need(q.ne == k.ne and q.ne[0] == size and q.ne[2:] == v.ne[2:], "gated_delta_net", *operands)
        need(n_head % q.ne[1] == 0 and g.ne == beta.ne == (1, *v.ne[1:]), "gated_delta_net", *operands)
        need(state.ne == (size, size, n_head, n_seqs), "gated_delta_net", *operands)
        need(all(is_contiguous(t) for t in (g, beta, state)) and n_tokens > 0, "gated_delta_net", *operands)
        return self._call("ggml_gated_delta_net", *operands, 1, n_dims=2)


def _pad(ne: Sequence[int]) -> tuple[int, ...]:
    return (*ne, *(1,) * (4 - len(ne)))
