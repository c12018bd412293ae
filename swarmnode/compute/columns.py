"""Do a mat-mul's columns come out the same bits in whatever company?

ggml picks other kernels for one column than for several where that is faster: llamafile's for float weights add up in
another order, so that a single column is multiplied as one of two; ARM's take columns in pairs, GPUs change at 9. What
must not depend on who else is in a batch then has to be multiplied column by column, at up to twice the time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from swarmnode.compute import ggml
from swarmnode.compute.devices import Device
from swarmnode.compute.ggml import Handle
from swarmnode.compute.graph import GraphBuilder
from swarmnode.compute.tensors import Tensor, WeightSet
from swarmnode.errors import UnsupportedModelError, UsageError

_N_IN, _N_OUT = 512, 64
"""Two blocks of every type, and rows for the widest tiles."""
_WIDTHS = (2, 3, 8, 16, 17)
_SEED = 7
_TWICE = (ggml.F32, ggml.F16, ggml.BF16)
"""Types for which ggml's CPU has one kernel for a single column and another for several."""


def keeps_columns(device: Device, ggml_type: int, repack: Handle | None = None) -> bool:
    """Whether the device gives each column of weights of this type times several the bits that it gets alone.

    Tried out, in about a millisecond. With a buffer type `repack` the question is about weights in it. False for a type
    that cannot be quantised here, or that has no order there. DeviceError.
    """
    rng = np.random.default_rng(_SEED)
    try:
        data = ggml.quantize(ggml_type, rng.standard_normal((_N_OUT, _N_IN), np.float32))
    except (UnsupportedModelError, UsageError):
        return False
    weights = WeightSet(device)
    try:
        w = weights.bind("w", ggml_type, (_N_IN, _N_OUT), data, repack)
        if repack and not w.is_repacked:
            return False
        x = rng.standard_normal((max(_WIDTHS), _N_IN), np.float32)
        alone = np.concatenate([_multiply(device, w, row[None], mul_column) for row in x])
        return all(
            np.array_equal(_multiply(device, w, x[:n], GraphBuilder.mul_mat), alone[:n]) for n in _WIDTHS
        )
    finally:
        weights.close()


def mul_column(g: GraphBuilder, w: Tensor, x: Tensor) -> Tensor:
    """w [k, n], x f32 [k, 1] -> f32 [n, 1], as it comes out among several: where that takes another kernel it is
    multiplied twice, which takes no longer, as the weights are read once.
    """
    if w.type not in _TWICE:
        return g.mul_mat(w, x)
    both = g.mul_mat(w, g.concat(x, x, 1))
    return g.view(both, (both.ne[0], 1), (both.nb[1],), 0)


def mul_columns(g: GraphBuilder, w: Tensor, x: Tensor) -> Tensor:
    """w [k, n], x f32 [k, m] (contiguous) -> f32 [n, m], each column as `mul_column` has it: m products."""
    k, m = x.ne[:2]
    each = g.reshape(x, k, 1, m)
    if w.type not in _TWICE:
        return g.reshape(g.mul_mat(w, each), w.ne[1], m)
    both = g.mul_mat(w, g.concat(each, each, 1))
    return g.view(both, (both.ne[0], m), (both.nb[2],), 0)


def _multiply(
    device: Device,
    w: Tensor,
    x: npt.NDArray[np.float32],
    multiply: Callable[[GraphBuilder, Tensor, Tensor], Tensor],
) -> npt.NDArray[np.float32]:
    g = GraphBuilder(device, 8)
    g.output("y", g.cont(multiply(g, w, g.input("x", ggml.F32, x.shape[1], x.shape[0]))))
    graph = g.build()
    try:
        graph.set("x", x)
        graph.compute()
        y: npt.NDArray[np.float32] = graph.get("y")
        return y
    finally:
        graph.close()
