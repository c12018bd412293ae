"""Would weights in ggml's CPU_REPACK order pay for the dense path? Time and bits of both orders, in one run.

    python -m benchmarks.repack [--threads N] [--n-in 3072] [--n-out 4096] [--rounds 9]

A matrix of each type as it stands in the file and repacked, times 1 to 512 columns, in turns, best of the rounds. The
peer is the plain order; ratio = plain / repacked, above 1 where repacking is faster. `of one` says what a single
column costs if it has to be computed as one of four, so that it has the bits that it gets in a batch (decision 0028).
"""

from __future__ import annotations

import argparse
import ctypes
import math
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swarmnode.compute import ggml
from swarmnode.compute.devices import Device, open_device
from swarmnode.compute.ggml import Handle, api
from swarmnode.compute.graph import GraphBuilder
from swarmnode.compute.tensors import Arena, Tensor, WeightSet, byte_view

TYPES = {
    "Q4_0": api.GGML_TYPE_Q4_0,
    "Q8_0": api.GGML_TYPE_Q8_0,
    "Q4_K": api.GGML_TYPE_Q4_K,
    "Q5_K": api.GGML_TYPE_Q5_K,
    "Q6_K": api.GGML_TYPE_Q6_K,
    "IQ4_NL": api.GGML_TYPE_IQ4_NL,
}
WIDTHS = (1, 4, 16, 64, 512)
TOGETHER = 4
"""Columns that the repacked kernels take at once; what is left over goes through another kernel, one by one."""
N_COMPARED = 8

Rows = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Product:
    """What came out, and the fastest round."""

    rows: Rows
    best_s: float


def repack_buffer_type(device: Device) -> Handle | None:
    """ggml's CPU_REPACK, if it was built with it."""
    cpu = api.ggml_backend_get_device(device.cpu_backend)
    registry = api.ggml_backend_dev_backend_reg(cpu)
    address = api.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
    if not address:
        return None
    found = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)(cpu)
    position = 0
    while found and found[position]:
        if api.ggml_backend_buft_name(found[position]) == b"CPU_REPACK":
            return int(found[position] or 0)
        position += 1
    return None


def repacked(buffer_type: Handle, ggml_type: int, ne: tuple[int, int], data: bytes) -> Tensor | None:
    """A repacked copy of a matrix, or None if the type has no such order on this CPU."""
    arena = Arena(1)
    tensor = arena.new_tensor(ggml_type, ne)
    n_bytes = api.ggml_backend_buft_get_alloc_size(buffer_type, tensor.pointer)
    buffer = arena.adopt(api.ggml_backend_buft_alloc_buffer(buffer_type, n_bytes), "allocating")
    base = api.ggml_backend_buffer_get_base(buffer)
    ggml.check_status(api.ggml_backend_tensor_alloc(buffer, tensor.pointer, base), "placing")
    if not tensor.pointer.contents.extra:
        arena.close()
        return None
    view = byte_view(data, "weights")
    api.ggml_backend_tensor_set(tensor.pointer, view.ctypes.data, 0, view.size)
    return tensor


def multiply(device: Device, w: Tensor, x: Rows, rounds: int) -> Product:
    """w times the rows of x."""
    g = GraphBuilder(device, 8)
    g.output("y", g.cont(g.mul_mat(w, g.input("x", ggml.F32, x.shape[1], x.shape[0]))))
    graph = g.build()
    graph.set("x", x)
    best_s = math.inf
    for _ in range(rounds):
        started_s = time.perf_counter()
        graph.compute()
        best_s = min(best_s, time.perf_counter() - started_s)
    rows = graph.get("y")
    graph.close()
    return Product(rows, best_s)


def compare(device: Device, plain: Tensor, other: Tensor, x: Rows, rounds: int) -> None:
    """Print a line a width, and what the bits depend on."""
    alone = np.concatenate([multiply(device, other, row[None], 1).rows for row in x[:N_COMPARED]])
    as_one_of = np.concatenate(
        [multiply(device, other, np.repeat(row[None], TOGETHER, 0), 1).rows[:1] for row in x[:N_COMPARED]]
    )
    one_s = multiply(device, plain, x[:1], rounds).best_s
    for width in WIDTHS:
        ours, theirs = (multiply(device, w, x[:width], rounds) for w in (other, plain))
        same = [np.array_equal(ours.rows[:N_COMPARED], few[:width]) for few in (alone, as_one_of)]
        print(
            f"  {width:4d} columns: plain {1e3 * theirs.best_s:8.2f} ms, repacked {1e3 * ours.best_s:8.2f} ms, "
            f"ratio {theirs.best_s / ours.best_s:5.2f}; a column's bits as alone {yes(same[0])}, "
            f"as one of {TOGETHER} {yes(same[1])}, as plain {yes(np.array_equal(ours.rows, theirs.rows))}"
        )
    padded_s = multiply(device, other, np.repeat(x[:1], TOGETHER, 0), rounds).best_s
    print(
        f"     of one: plain {1e3 * one_s:8.2f} ms, repacked {1e3 * padded_s:8.2f} ms, ratio {one_s / padded_s:5.2f}"
    )


def yes(same: bool) -> str:
    return "yes" if same else "no"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--n-in", type=int, default=3072)
    parser.add_argument("--n-out", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    device = open_device("CPU", args.threads)
    buffer_type = repack_buffer_type(device)
    if buffer_type is None:
        raise SystemExit("this ggml was built without CPU_REPACK")
    rng = np.random.default_rng(0)
    values = rng.standard_normal((args.n_out, args.n_in), np.float32)
    x = rng.standard_normal((max(WIDTHS), args.n_in), np.float32)
    for name, ggml_type in TYPES.items():
        data = ggml.quantize(ggml_type, values)
        weights = WeightSet(device)
        plain = weights.bind("w", ggml_type, (args.n_in, args.n_out), data)
        other = repacked(buffer_type, ggml_type, (args.n_in, args.n_out), data)
        print(f"{name} [{args.n_in}, {args.n_out}]" + ("" if other else ": no such order on this CPU"))
        if other is not None:
            compare(device, plain, other, x, args.rounds)
            other.arena.close()
        weights.close()


if __name__ == "__main__":
    main()
