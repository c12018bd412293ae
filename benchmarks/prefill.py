"""Prefill at the real sizes, all experts local, beside llama.cpp in both of its layouts; in one run.

    python -m benchmarks.prefill MODEL.gguf [--tokens 512] [--rounds 5] [--threads 2] [--repack always]

MODEL is what `python -m benchmarks.big_model MODEL.gguf` writes. A prompt of random tokens that no slot has seen goes
through each contestant in turn, from the first row to the logits of the last; medians over the rounds. No worker runs:
they would share memory and cores. `llama.cpp` computes on the mapped file, as swarmnode does; `llama.cpp, repacked` is
its default, which copies the weights (so it takes twice the memory). `--repack` is that of `swarmnode backbone`.

    SWARMNODE_GGML_LIB=FOLDER python -m benchmarks.prefill MODEL.gguf --llama-cpp-python PYTHON

is both on one libggml: that of an installed llama-cpp-python, in FOLDER = .../site-packages/llama_cpp/lib, which PYTHON
imports. Then it is the only peer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import get_args

import numpy as np
import trio

from benchmarks.bench_swarm import open_bench_swarm
from benchmarks.decode import QUIET_CORES, ask
from benchmarks.machine import busy_s, cpu_s
from benchmarks.peers import Peer, llama_cpp_python_peer, llama_peers
from benchmarks.stopwatch import Stopwatch
from swarmnode.compute.devices import build_report
from swarmnode.config import Repack
from swarmnode.services.remote_experts import EXACT

OURS = "swarmnode"


async def compete(options: argparse.Namespace, peers: dict[str, Peer]) -> None:
    """All rounds, then a line for each contestant."""
    watch = Stopwatch()
    rng = np.random.default_rng(0)
    taken: dict[str, list[float]] = {name: [] for name in (OURS, *peers)}
    opening = open_bench_swarm(
        options.model, options.work, options.threads, (EXACT,), watch, repack=options.repack
    )
    async with watch.running(), opening as swarm:
        pids = [os.getpid(), *(peer.pid for peer in peers.values())]
        began = (time.perf_counter(), busy_s() - cpu_s(pids))
        for index in range(options.rounds + 1):
            prompt = rng.integers(swarm.alone.model.n_vocab, size=options.tokens).tolist()
            taken[OURS].append((await ask(swarm.alone, watch, prompt, 2)).first_s)
            for name, peer in peers.items():
                taken[name].append(await trio.to_thread.run_sync(peer.first_s, prompt))
            if index == 0:  # builds graphs, pages the file in
                for seconds in taken.values():
                    seconds.clear()
        others = (busy_s() - cpu_s(pids) - began[1]) / (time.perf_counter() - began[0])
        manifest = swarm.backbone.manifest
        print(
            f"{manifest.name}: {manifest.n_layer} layers, {manifest.n_expert} experts each; {options.threads} "
            f"threads; ggml {build_report().ggml_version}; --repack {options.repack}; "
            f"medians of {options.rounds} prompts of {options.tokens} tokens\n"
            f"other processes used {others:.2f} of {os.cpu_count()} cores"
            + ("" if others < QUIET_CORES else ": NOISY, the figures say little")
        )
        print_table(taken, options.tokens)


def peers_of(options: argparse.Namespace) -> AbstractContextManager[dict[str, Peer]]:
    """What ours is compared with."""
    if options.llama_cpp_python is not None:
        return llama_cpp_python_peer(options.llama_cpp_python, options.model, options.threads)
    flags = {"llama.cpp": (), "llama.cpp, repacked": ("--repack",)}
    return llama_peers(options.model, options.threads, flags)


def print_table(taken: dict[str, list[float]], n_tokens: int) -> None:
    """tok/s of each, and ours beside it: round by round, as a neighbour disturbs both of a round alike."""
    print(f"{'':24}{'tok/s':>8}{'ms':>8}{'ours/its':>10}   ms of each round")
    for name, seconds in taken.items():
        ratio = statistics.median(its / ours for its, ours in zip(seconds, taken[OURS], strict=True))
        rounds = " ".join(f"{1e3 * one:.0f}" for one in seconds)
        middle_s = statistics.median(seconds)
        print(f"{name:24}{n_tokens / middle_s:8.1f}{1e3 * middle_s:8.0f}{ratio:10.2f}   {rounds}")


def main() -> None:
    """Start the peers first: loading them would disturb ours."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repack", choices=get_args(Repack), default="auto", help="of ours")
    parser.add_argument("--llama-cpp-python", type=Path, metavar="PYTHON")
    parser.add_argument("--work", type=Path, default=Path("/tmp/swarmnode-bench"))
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    with peers_of(options) as peers:
        trio.run(compete, options, peers)


if __name__ == "__main__":
    main()
