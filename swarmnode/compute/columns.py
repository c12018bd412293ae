"""Do a mat-mul's columns come out the same bits in whatever company?

ggml picks other kernels for one column than for several where that is faster: llamafile's for float weights add up in
another order (decision 0002), ARM's take columns in pairs, GPUs change at 9. What must not depend on who else is in a
batch then has to be multiplied column by column, which costs up to twice the time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from swarmnode.compute import ggml
from swarmnode.compute.devices import Device
from swarmnode.compute.graph import GraphBuilder
from swarmnode.compute.tensors import Tensor, WeightSet
from swarmnode.errors import UnsupportedModelError, UsageError

_N_IN, _N_OUT = 512, 64
"""Two blocks of every type, and rows for the widest tiles."""
_WIDTHS = (2, 3, 8, 16, 17)
_SEED = 7


def keeps_columns(device: Device, ggml_type: int) -> bool:
    """Whether the device gives each column of weights of this type times several the bits that it gets alone.

    Tried out, in about a millisecond. False for a type that cannot be quantised here. DeviceError.
    """
    rng = np.random.default_rng(_SEED)
    try:
        data = ggml.quantize(ggml_type, rng.standard_normal((_N_OUT, _N_IN), np.float32))
    except (UnsupportedModelError, UsageError):
        return False
    weights = WeightSet(device)
    try:
        w = weights.bind("w", ggml_type, (_N_IN, _N_OUT), data)
        x = rng.standard_normal((max(_WIDTHS), _N_IN), np.float32)
        alone = np.concatenate([_multiply(device, w, row[None]) for row in x])
        return all(np.array_equal(_multiply(device, w, x[:n]), alone[:n]) for n in _WIDTHS)
    finally:
        weights.close()


def mul_columns(g: GraphBuilder, w: Tensor, x: Tensor) -> Tensor:
    """w [k, n], x f32 [k, m] (contiguous) -> f32 [n, m], each column as if it were alone: m products of one column."""
    k, m = x.ne[:2]
    return g.reshape(g.mul_mat(w, g.reshape(x, k, 1, m)), w.ne[1], m)


def _multiply(device: Device, w: Tensor, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    g = GraphBuilder(device, 4)
    g.output("y", g.mul_mat(w, g.input("x", ggml.F32, x.shape[1], x.shape[0])))
    graph = g.build()
    try:
        graph.set("x", x)
        graph.compute()
        y: npt.NDArray[np.float32] = graph.get("y")
        return y
    finally:
        graph.close()
