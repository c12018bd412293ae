"""Decode and first token at the real sizes: all experts local, all over two workers, llama.cpp; in one run.

    python -m benchmarks.decode MODEL.gguf [--rounds 5] [--tokens 32] [--threads 2] [--work /tmp/swarmnode-bench]

MODEL is what `python -m benchmarks.big_model MODEL.gguf` writes (4 layers, 6.5 GB). The contestants take turns within
each round, greedy after the same prompt; medians over the rounds are printed. Two real worker processes with one
thread each share the machine with the backbone: what remote costs here is an upper bound of what the wire costs, and
says nothing about the gain of more machines. The peer is left out if `make bench-setup` was not run. Slices stay in
the work folder, so that a second run starts at once.

wait ms, send ms: a token's waits for sockets and its time in the kernel with bytes to send. python us: what remains,
a layer and token, thread wake-ups included. cpu us (with --cpu): CPU time of the two threads that run Python, outside
ggml; less disturbed by a busy machine, but its clocks slow down what is measured.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import trio

from benchmarks.bench_swarm import BenchSwarm, open_bench_swarm
from benchmarks.machine import busy_s, cpu_s, memory_of
from benchmarks.peers import Peer, llama_peers
from benchmarks.real_sizes import REAL_LAYERS
from benchmarks.stopwatch import Stopwatch, Times
from swarmnode.services.account import Account
from swarmnode.services.engine import Engine
from swarmnode.services.remote_experts import EXACT, WireForm
from swarmnode.weights.manifest import Manifest

FORMS = (WireForm(), EXACT)
N_WORKERS = 2
QUIET_CORES = 0.05
"""Threads of a graph meet after every operation: a neighbour that takes a part of one core stops them all."""
LOCAL_TARGET_US, REMOTE_TARGET_US = 60.0, 500.0


@dataclass(frozen=True)
class Sample:
    """One contestant in one round. `times` and `account` are missing for the peer."""

    first_s: float
    decode_per_s: float
    tokens: tuple[int, ...] = ()
    times: Times | None = None
    account: Account | None = None


async def ask(engine: Engine, watch: Stopwatch, prompt: list[int], n_tokens: int) -> Sample:
    """Greedy tokens from an engine: the prompt, then n_tokens - 1 decode steps under the stopwatch."""
    engine.model.reset(0)
    stop_first = watch.start()
    logits = await engine.step(0, prompt, Account())
    tokens = [int(np.argmax(logits[-1]))]
    first_s = stop_first().wall_s
    account = Account()
    stop = watch.start()
    while len(tokens) < n_tokens:
        logits = await engine.step(0, tokens[-1:], account)
        tokens.append(int(np.argmax(logits[-1])))
    times = stop()
    return Sample(first_s, (n_tokens - 1) / times.wall_s, tuple(tokens), times, account)


def name_of(form: WireForm | None) -> str:
    """How a contestant of ours is called in the table."""
    return "all experts local" if form is None else f"2 workers, {form.form} {form.encoding}"


def half_of_experts_bytes(manifest: Manifest) -> int:
    """A budget with which N_WORKERS workers hold everything: their part, and a run of experts to spare."""
    layers = [layer.layout for layer in manifest.layers.values()]
    total = sum(layout.n_expert * layout.expert_bytes for layout in layers)
    return total // N_WORKERS + 8 * max(layout.expert_bytes for layout in layers)


async def compete(options: argparse.Namespace, peers: dict[str, Peer]) -> None:
    """All rounds, then the table."""
    watch = Stopwatch(cpu=options.cpu)
    opening = open_bench_swarm(options.model, options.work, options.threads, FORMS, watch)
    async with watch.running(), opening as swarm:
        for _ in range(N_WORKERS):
            await swarm.join(int(options.room * half_of_experts_bytes(swarm.backbone.manifest)), n_threads=1)
        await swarm.settle()
        prompt = np.random.default_rng(0).integers(swarm.alone.model.n_vocab, size=options.prompt).tolist()
        turns: dict[str, Callable[[], Awaitable[Sample]]] = {}
        for form in (None, *FORMS):
            turns[name_of(form)] = partial(_our_turn, swarm, form, watch, prompt, options.tokens)
        for name, peer in peers.items():
            turns[name] = partial(_peers_turn, peer, prompt, options.tokens)
        samples: dict[str, list[Sample]] = {name: [] for name in turns}
        pids = [os.getpid(), *(node.pid for node in swarm.workers), *(peer.pid for peer in peers.values())]
        for turn in turns.values():
            await turn()  # builds graphs, pages the file in
        began = (time.perf_counter(), busy_s() - cpu_s(pids))
        for _ in range(options.rounds):
            for name, turn in turns.items():
                samples[name].append(await turn())
        others = (busy_s() - cpu_s(pids) - began[1]) / (time.perf_counter() - began[0])
        print_head(options, swarm.backbone.manifest, others)
        print_table(samples, swarm.backbone.manifest.n_layer)
        print_swarm(samples, swarm, peers)


async def _our_turn(
    swarm: BenchSwarm, form: WireForm | None, watch: Stopwatch, prompt: list[int], n_tokens: int
) -> Sample:
    return await ask(swarm.engine(form), watch, prompt, n_tokens)


async def _peers_turn(peer: Peer, prompt: list[int], n_tokens: int) -> Sample:
    return Sample(*await trio.to_thread.run_sync(peer.ask, prompt, n_tokens))


def print_head(options: argparse.Namespace, manifest: Manifest, others: float) -> None:
    """What was measured, and how many cores processes that are not ours kept busy meanwhile."""
    print(
        f"{manifest.name}: {manifest.n_layer} layers, {manifest.n_expert} experts each; {options.threads} threads; "
        f"medians of {options.rounds} rounds of {options.tokens} tokens after {options.prompt}\n"
        f"other processes used {others:.2f} of {os.cpu_count()} cores"
        + ("" if others < QUIET_CORES else ": NOISY, the figures say little")
    )


def print_table(samples: dict[str, list[Sample]], n_layer: int) -> None:
    """One line a contestant; ratios against the first."""
    print(
        f"{'':28}{'decode tok/s':>13}{'ratio':>7}{'first token ms':>16}"
        f"{'ggml ms':>9}{'wait ms':>9}{'send ms':>9}{'python us':>11}{'cpu us':>8}"
    )
    base = median(samples[name_of(None)], lambda sample: sample.decode_per_s)
    for name, taken in samples.items():
        speed = median(taken, lambda sample: sample.decode_per_s)
        first_ms = 1e3 * median(taken, lambda sample: sample.first_s)
        line = f"{name:28}{speed:13.2f}{speed / base:7.2f}{first_ms:16.0f}"
        if taken[0].times is not None:
            line += "".join(_split_of(taken, n_layer))
        print(line)


def _split_of(taken: list[Sample], n_layer: int) -> tuple[str, ...]:
    ggml_ms = 1e3 * median(taken, lambda sample: _times(sample).ggml_s / _steps(sample))
    wait_ms = 1e3 * median(taken, lambda sample: _times(sample).socket_s / _steps(sample))
    send_ms = 1e3 * median(taken, lambda sample: _times(sample).send_s / _steps(sample))
    cpu_us = 1e6 * median(taken, lambda sample: _times(sample).python_cpu_s / (_steps(sample) * n_layer))
    python = f"{python_us(taken, n_layer):11.0f}"
    return f"{ggml_ms:9.2f}", f"{wait_ms:9.2f}", f"{send_ms:9.2f}", python, f"{cpu_us:8.0f}"


def python_us(taken: list[Sample], n_layer: int) -> float:
    """Median microseconds a layer and token that are Python's."""
    return 1e6 * median(taken, lambda sample: _times(sample).python_s / (_steps(sample) * n_layer))


def print_swarm(samples: dict[str, list[Sample]], swarm: BenchSwarm, peers: dict[str, Peer]) -> None:
    """What the workers did, agreement, memory, targets."""
    alone = samples[name_of(None)][-1].tokens
    for form in FORMS:
        sample = samples[name_of(form)][-1]
        account = sample.account
        assert account is not None
        steps = _steps(sample)
        bytes_out = sum(share.bytes_out for share in account.workers.values()) / steps
        bytes_in = sum(share.bytes_in for share in account.workers.values()) / steps
        pairs = zip(sample.tokens, alone, strict=True)
        n_equal = next((i for i, (ours, local) in enumerate(pairs) if ours != local), len(alone))
        print(
            f"{name_of(form)}: layers remote {account.remote_layers / account.layers:.0%}, "
            f"pairs remote {account.remote_share:.1%} ({account.fallback} late), "
            f"{account.remote_layers / steps:.1f} rounds a token, {bytes_out / 1e3:.1f} kB out and "
            f"{bytes_in / 1e3:.1f} kB in a token, first {n_equal} of {len(alone)} tokens as in the local run"
        )
    rtts = [f"{1e3 * (worker.peer.rtt_s or 0):.2f}" for worker in swarm.backbone.members.workers]
    print(f"RTT of the last ping, ms: {', '.join(rtts)}")
    memory = {"backbone": memory_of(os.getpid())}
    memory |= {worker.name: memory_of(worker.pid) for worker in swarm.workers}
    peaks = {
        name: f"{sizes['VmHWM'] / 1e9:.2f} GB ({sizes['RssAnon'] / 1e9:.2f} not of files)"
        for name, sizes in memory.items()
    }
    peaks |= {name: f"{peer.peak_bytes / 1e9:.2f} GB" for name, peer in peers.items()}
    print("peak RSS: " + "; ".join(f"{name} {peak}" for name, peak in peaks.items()))
    n_layer = swarm.backbone.manifest.n_layer
    targets = {name_of(None): LOCAL_TARGET_US} | {name_of(form): REMOTE_TARGET_US for form in FORMS}
    for name, target in targets.items():
        spent = python_us(samples[name], n_layer)
        verdict = "ok  " if spent <= target else "MISS"
        print(f"{verdict} python a layer and token, {name}: {spent:.0f} us, at most {target:.0f} us wanted")
    alone_us = python_us(samples[name_of(None)], n_layer) * n_layer
    print(
        f"without workers a token is one graph: its {alone_us:.0f} us of Python are the same for any number of layers, "
        f"{alone_us / REAL_LAYERS:.0f} us a layer for {REAL_LAYERS}"
    )


def median(taken: list[Sample], value: Callable[[Sample], float]) -> float:
    """Over the rounds."""
    return statistics.median(value(sample) for sample in taken)


def _times(sample: Sample) -> Times:
    assert sample.times is not None
    return sample.times


def _steps(sample: Sample) -> int:
    return len(sample.tokens) - 1


def main() -> None:
    """Start the peers first: loading them would disturb the workers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--room",
        type=float,
        default=1.0,
        help="of a worker, in halves of all experts: what both hold is divided evenly for each token",
    )
    parser.add_argument("--work", type=Path, default=Path("/tmp/swarmnode-bench"))
    parser.add_argument("--cpu", action="store_true", help="measure CPU time, too")
    parser.add_argument("--repack", action="store_true", help="llama.cpp also with repacked weights (+ 5 GB)")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    flags = {"llama.cpp": (), "llama.cpp, repacked": ("--repack",)} if options.repack else {"llama.cpp": ()}
    with llama_peers(options.model, options.threads, flags) as peers:
        trio.run(compete, options, peers)


if __name__ == "__main__":
    main()
