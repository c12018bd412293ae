"""Decode of 1, 4, 16, 64 sequences at once, all experts local, beside what its parts alone take and beside llama.cpp.

    python -m benchmarks.scaling MODEL.gguf [--sequences 1,4,16,64] [--rounds 3] [--tokens 16] [--repack always]

MODEL is what `python -m benchmarks.big_model MODEL.gguf` writes. Routing is what random weights give: rows hit nearly
distinct experts, so little of their memory traffic is shared. Contestants take turns within a round; medians.

dense: the same steps with zeros for the experts' rows, without engine, trio or threads beside ggml's. experts: so many
rows through random experts of each layer. The engine does both, one after the other, so `of parts` is what engine,
hops between threads and sampling leave of 1.00. The peer decodes the same number of sequences in its own slots.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
import trio

from benchmarks.peers import Peer, llama_peers
from swarmnode.cli.bench_figures import Plan
from swarmnode.cli.bench_local import Bench, open_bench
from swarmnode.config import Config, Folders, Repack
from swarmnode.models.base import Part, run_pass
from swarmnode.node.backbone_parts import BackboneOptions, loaded
from swarmnode.node.common import open_compute
from swarmnode.weights.index import ModelIndex

N_CTX = 256
"""Tokens a slot may hold, there and here."""


@dataclass
class Taken:
    """Seconds of each round for one number of sequences."""

    engine: list[float] = field(default_factory=list)
    dense: list[float] = field(default_factory=list)
    experts: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)


def dense_s(bench: Bench, count: int) -> float:
    """Seconds of `n_tokens` steps of so many sequences without their experts. Compute thread."""
    model = bench.model
    for slot in range(count):
        model.reset(slot)
    started_s = time.perf_counter()
    for _ in range(bench.n_tokens):
        parts = [Part(slot, bench.prompts[slot][:1], 1, False) for slot in range(count)]
        run_pass(model.forward_batch(parts), lambda call: np.zeros_like(call.rows))
    return time.perf_counter() - started_s


def experts_s(bench: Bench, count: int, rng: np.random.Generator) -> float:
    """Seconds of the experts of as many steps. Compute thread."""
    n_expert, n_used = bench.model.n_expert, bench.model.n_expert_used
    n_embd = bench.bank.layout(0).n_embd
    rows = rng.standard_normal((count, n_embd), np.float32)
    weights = rng.random((count, n_used), np.float32)
    spent_s = 0.0
    for _ in range(bench.n_tokens):
        for layer in range(bench.model.n_layer):
            chosen = [rng.choice(n_expert, n_used, replace=False) for _ in range(count)]
            ids = np.array(chosen, np.int32)
            started_s = time.perf_counter()
            bench.bank.moe(layer, rows, ids, weights)
            spent_s += time.perf_counter() - started_s
    return spent_s


async def compete(options: argparse.Namespace, peer: Peer | None) -> None:
    """All rounds, then a line for each number of sequences."""
    base = Config()
    config = replace(
        base,
        compute=replace(base.compute, n_threads=options.threads),
        models=replace(base.models, repack=options.repack),
    )
    counts: tuple[int, ...] = options.sequences
    plan = Plan(
        sections=("decode",),
        model=options.model,
        device=None,
        config=config,
        rounds=options.rounds,
        prompt_tokens=1,
        decode_tokens=options.tokens,
        rtts_ms=(),
        sequences=counts,
        n_workers=0,
        worker_threads=1,
        budget_bytes=None,
    )
    folders = Folders.under(options.work / "backbone")
    backbone = BackboneOptions(
        folders,
        "public",
        listen=("127.0.0.1", 0),
        config=config,
        n_ctx=N_CTX,
        n_slots=max(counts),
    )
    rng = np.random.default_rng(0)
    taken = {count: Taken() for count in counts}
    with ModelIndex.open(options.model) as index:
        async with (
            open_compute(backbone) as (gate, device),
            loaded(backbone, index, device, gate) as (model, bank),
            open_bench(index, model, bank, gate, plan) as bench,
        ):
            for index_of_round in range(options.rounds + 1):
                for count, times in taken.items():
                    times.engine.append((await bench.decode_sample(bench.alone, count)).seconds)
                    times.dense.append(await gate.run(partial(dense_s, bench, count)))
                    times.experts.append(await gate.run(partial(experts_s, bench, count, rng)))
                    if peer is not None:
                        prompts = [prompt[:1] for prompt in bench.prompts[:count]]
                        run = partial(peer.together_s, prompts, options.tokens)
                        times.peer.append(await trio.to_thread.run_sync(run))
                if index_of_round == 0:  # builds graphs, pages the file in
                    taken = {count: Taken() for count in counts}
    print_table(taken, options.tokens)


def print_table(taken: dict[int, Taken], n_tokens: int) -> None:
    """Aggregate tokens a second, against one sequence, against the parts, against the peer."""
    print(
        f"{'at once':>8}{'tok/s':>8}{'of one':>8}{'ms/token':>10}{'dense':>8}{'experts':>9}{'of parts':>10}"
        f"{'llama.cpp':>11}{'ours/its':>10}"
    )
    single = statistics.median(next(iter(taken.values())).engine) / next(iter(taken))
    for count, times in taken.items():
        engine, dense, experts = map(statistics.median, (times.engine, times.dense, times.experts))
        of_parts = statistics.median(
            (dense + experts) / engine
            for engine, dense, experts in zip(times.engine, times.dense, times.experts, strict=True)
        )
        ms = [1e3 * seconds / (count * n_tokens) for seconds in (engine, dense, experts)]
        line = (
            f"{count:8}{1e3 / ms[0]:8.1f}{single * count / engine:8.2f}{ms[0]:10.2f}{ms[1]:8.2f}{ms[2]:9.2f}"
        )
        line += f"{of_parts:10.2f}"
        if times.peer:
            ratio = statistics.median(its / ours for its, ours in zip(times.peer, times.engine, strict=True))
            line += f"{count * n_tokens / statistics.median(times.peer):11.1f}{ratio:10.2f}"
        print(line)


def main() -> None:
    """Start the peer first: loading it would disturb ours."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument(
        "--sequences", type=lambda text: tuple(map(int, text.split(","))), default=(1, 4, 16, 64)
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repack", choices=get_args(Repack), default="auto", help="of ours")
    parser.add_argument("--work", type=Path, default=Path("/tmp/swarmnode-bench"))
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    flags = {"llama.cpp": ("--parallel", str(max(options.sequences)))}
    with llama_peers(options.model, options.threads, flags) as peers:
        trio.run(compete, options, peers.get("llama.cpp"))


if __name__ == "__main__":
    main()
