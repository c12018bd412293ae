"""The gated delta rule over whole sequences, chunk by chunk.

The method is that of Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule".
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as fn

CHUNK = 64


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Run the recurrence from a zero state and return its outputs, [B, H, T, S].

    q, k, v: [B, H, T, S] float32, k of unit length; decay: [B, H, T], logarithms (<= 0); beta: [B, H, T] in
    (0, 1). With state M [S, S] per head, each token does

        M <- exp(decay) M ;  M <- M + k (beta (v - M^T k))^T ;  out = M^T q

    Inside a chunk the corrections depend on each other through a unit lower-triangular system, solved at
    once; the Python loop runs over chunks only.
    """
    batch, heads, length, size = q.shape
    pad = -length % CHUNK
    if pad:
        q, k, v = (fn.pad(t, (0, 0, 0, pad)) for t in (q, k, v))
        decay, beta = fn.pad(decay, (0, pad)), fn.pad(beta, (0, pad))
    q, k, v = (t.reshape(batch, heads, -1, CHUNK, size) for t in (q, k, v))
    total = decay.reshape(batch, heads, -1, CHUNK).cumsum(-1)
    beta = beta.reshape(batch, heads, -1, CHUNK, 1)

    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    ratio = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -torch.inf).exp()
    system = (beta * (k @ k.transpose(-1, -2)) * ratio).tril(-1)
    right = torch.cat([beta * v, beta * k * total.exp()[..., None]], dim=-1)
    solved = torch.linalg.solve_triangular(system + torch.eye(CHUNK), right, upper=False, unitriangular=True)
    values, reads = solved.split(size, dim=-1)
    scores = (q @ k.transpose(-1, -2)) * ratio
    q = q * total.exp()[..., None]
    last = total[..., -1:]
    k = k * (last - total).exp()[..., None]

    state = q.new_zeros(batch, heads, size, size)
    outputs = []
    for i in range(q.shape[2]):
        new = values[:, :, i] - reads[:, :, i] @ state
        outputs.append(q[:, :, i] @ state + scores[:, :, i] @ new)
        state = state * last[:, :, i, :, None].exp() + k[:, :, i].transpose(-1, -2) @ new
    return torch.stack(outputs, dim=2).reshape(batch, heads, -1, size)[:, :, :length]
