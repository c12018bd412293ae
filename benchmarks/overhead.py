"""Python's part of a decode step, piece by piece, without trio: what stands between one ggml graph and the next.

    python -m benchmarks.overhead MODEL.gguf [--threads 2] [--tokens 60] [--flush-mb 0]

`--flush-mb N` reads N MB after each graph, outside the measured time, as the weights of a large model would: what then
differs is the cost of finding code and objects no longer in the caches near the core. Medians over tokens and layers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.graph_watch import watching_graphs
from swarmnode.compute.bank import ExpertBank
from swarmnode.compute.devices import open_device
from swarmnode.compute.graph import Graph
from swarmnode.config import DispatchConfig
from swarmnode.models.base import Part, run_pass
from swarmnode.models.registry import open_model
from swarmnode.schedule.dispatch import Routing
from swarmnode.schedule.sending import send_always
from swarmnode.services.forward import Finished, ForwardPass
from swarmnode.weights.expert_layers import tensor_name
from swarmnode.weights.index import ModelIndex

WARM_UP_TOKENS = 5


class Marks:
    """When each graph began and ended, and a buffer that is read after each."""

    def __init__(self, flush_mb: int) -> None:
        self._buffer = np.ones(flush_mb * 1_000_000 // 8)
        self.spans_ns: list[tuple[int, int]] = []

    def mark(self, compute: Callable[[Graph], None], graph: Graph) -> None:
        """Compute a graph: for `watching_graphs`."""
        began_ns = time.perf_counter_ns()
        compute(graph)
        self._buffer.sum()
        self.spans_ns.append((began_ns, time.perf_counter_ns()))


def measure(path: Path, n_threads: int, n_tokens: int, flush_mb: int) -> dict[str, dict[str, float]]:
    """Median microseconds of each piece of a token: as one graph, and cut at every layer as if workers had experts."""
    marks = Marks(flush_mb)
    found = {}
    with ModelIndex.open(path) as index:
        device = open_device("CPU", n_threads)
        bank = ExpertBank(device)
        for layer, layout in index.expert_layers.items():
            stacked = {kind: index.data(tensor_name(layer, kind)) for kind in layout.kinds}
            bank.bind(layout, range(layout.n_expert), stacked)
        model = open_model(index, device, n_ctx=512, n_slots=1)
        policy = send_always(DispatchConfig(), time.perf_counter)

        def whole(token: int) -> int:
            finished = ForwardPass(model, bank, [Part(0, [token], 1)], [most_probable], policy).advance(
                Routing()
            )
            assert isinstance(finished, Finished)
            assert isinstance(finished.values[0], int)
            return finished.values[0]

        def cut(token: int) -> int:
            experts = run_pass(
                model.forward(0, [token]),
                lambda call: bank.moe(call.layer, call.rows, call.ids, call.weights),
            )
            return most_probable(experts)

        with watching_graphs(marks.mark):
            for name, step in (("one graph", whole), ("cut", cut)):
                model.reset(0)
                found[name] = _pieces(marks, step, n_tokens, model.n_layer)
        model.close()
        bank.close()
        device.close()
    return found


def most_probable(logits: npt.NDArray[np.float32]) -> int:
    """Greedy."""
    return int(np.argmax(logits[-1]))


def _pieces(marks: Marks, step: Callable[[int], int], n_tokens: int, n_layer: int) -> dict[str, float]:
    pieces: dict[str, list[float]] = {"begin token": [], "between graphs, a layer": [], "end token": []}
    totals: list[float] = []
    token = 7
    for number in range(n_tokens + WARM_UP_TOKENS):
        marks.spans_ns.clear()
        began_ns = time.perf_counter_ns()
        token = step(token)
        ended_ns = time.perf_counter_ns()
        if number < WARM_UP_TOKENS:
            continue
        spans = marks.spans_ns
        between = sum(1e-3 * (b[0] - a[1]) for a, b in pairwise(spans))
        first, last = 1e-3 * (spans[0][0] - began_ns), 1e-3 * (ended_ns - spans[-1][1])
        for piece, taken in zip(pieces.values(), (first, between / n_layer, last), strict=True):
            piece.append(taken)
        totals.append((first + between + last) / n_layer)
    pieces["all, a layer and token"] = totals
    return {name: statistics.median(taken) for name, taken in pieces.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--flush-mb", type=int, default=0)
    options = parser.parse_args()
    print(f"{options.model.name}, {options.threads} threads, flush {options.flush_mb} MB")
    found = measure(options.model, options.threads, options.tokens, options.flush_mb)
    for form, pieces in found.items():
        print(f"{form}: " + ", ".join(f"{name} {taken:.0f} us" for name, taken in pieces.items()))


if __name__ == "__main__":
    main()
