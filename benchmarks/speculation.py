"""What guessed tokens bring: one sequence over worker processes behind a proxy that gives every connection an RTT.

    python -m benchmarks.speculation [--model FILE.gguf] [--rtt 0,40] [--tokens N] [--rounds N] [--workers N]

Peer: the same answers without guesses, in turns with them. `known`: a text, what the model answers to it, and the text
again, so that the answer is guessed from what came the first time if the model repeats it; `partly`: the same with a
text to which it says something else the second time, with phrases of the first; `new`: a text that does not repeat
itself. The bundled model knows the first by heart, and does not repeat lists. Times are from an answer's first token
to its last. `local`: no worker is asked. The last line: what taking guesses back costs at the real sizes, beside a copy
of the recurrent states there and back. Exit code 1 if any answer differs from its peer, or if the known text at
the longest RTT is less than 1.6 times as fast.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import trio

from benchmarks.real_sizes import with_real_states
from swarmnode.cli.bench_figures import Plan
from swarmnode.cli.bench_local import Bench, open_bench
from swarmnode.cli.bench_swarm import NETWORK, BenchSwarm, measured_rtt_ms, open_swarm
from swarmnode.cli.common import config_of, default_secret
from swarmnode.compute import ggml
from swarmnode.compute.devices import Device
from swarmnode.compute.tensors import WeightSet
from swarmnode.config import EngineConfig, Folders, Speculate
from swarmnode.models.graph_sources import GraphSources
from swarmnode.models.qwen35moe import Qwen35Moe
from swarmnode.models.replay import CoreReplay
from swarmnode.models.sampling import SamplingParams
from swarmnode.models.state import SlotStates
from swarmnode.net.delay_proxy import LOOPBACK
from swarmnode.node.backbone_parts import BackboneOptions, loaded
from swarmnode.node.common import open_compute
from swarmnode.services.account import Account
from swarmnode.services.engine import Engine, GenerateRequest, TokenEvent
from swarmnode.weights.catalog import resolve_model
from swarmnode.weights.index import ModelIndex

KNOWN = "On account of the bequest of the late Ezekiah Hopkins, of"
PARTLY = "My dear fellow, said Sherlock Holmes as we sat on either side of the fire in his lodgings at Baker Street,"
NEW = "We are ready to"
MIN_RATIO = 1.6
DEADLINE_MS = 30_000
COPIES = 8
MODES: tuple[Speculate, ...] = ("never", "always", "auto")


@dataclass(frozen=True)
class Run:
    """One answer."""

    tokens: tuple[int, ...]
    decode_s: float
    """From the first token to the last."""
    account: Account
    prefill: Account
    """The account when the first token came."""


@dataclass(frozen=True)
class Setting:
    """Under what an answer was given. `rtt_ms` None: no worker was asked."""

    rtt_ms: float | None
    text: str
    mode: Speculate


async def answer(engine: Engine, prompt: Sequence[int], n_tokens: int) -> Run:
    """The greedy answer, timed."""
    tokens: list[int] = []
    started_s = ended_s = 0.0
    prefill = account = Account()
    request = GenerateRequest(prompt, n_tokens, SamplingParams(temperature=0.0))
    async with aclosing(engine.generate(request)) as events:
        async for event in events:
            if not isinstance(event, TokenEvent):
                continue
            ended_s = time.perf_counter()
            tokens.append(event.token)
            account = event.account
            if len(tokens) == 1:
                started_s = ended_s
                prefill = Account(layers=account.layers, remote_layers=account.remote_layers)
    return Run(tuple(tokens), ended_s - started_s, account, prefill)


async def measure(options: argparse.Namespace) -> bool:
    """Load the model, start the workers, print everything; whether the bounds are kept."""
    with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as name:
        folder = Path(name)
        plan = plan_of(options, resolve_model(options.model, Folders.under(folder).models))
        folders = Folders.under(folder / "backbone")
        backbone_options = BackboneOptions(
            folders,
            NETWORK,
            secret=default_secret(folders),
            listen=(LOOPBACK, 0),
            config=plan.config,
            n_ctx=1024,
            n_slots=1,
        )
        with ModelIndex.open(plan.model) as index:
            async with (
                open_compute(backbone_options) as (gate, device),
                loaded(backbone_options, index, device, gate) as (model, bank),
                open_bench(index, model, bank, gate, plan) as bench,
                open_swarm(bench, backbone_options, device.info, folder) as swarm,
            ):
                await swarm.join(plan)
                is_good = await compare(bench, swarm, plan)
                print(await gate.run(partial(accept_costs, index, device)))
                return is_good


def plan_of(options: argparse.Namespace, model: Path) -> Plan:
    """As `swarmnode bench swarm` does it."""
    n_cores = os.cpu_count() or 1
    return Plan(
        sections=("swarm",),
        model=model,
        device=None,
        config=config_of(options.threads, DEADLINE_MS),
        rounds=options.rounds,
        prompt_tokens=1,
        decode_tokens=options.tokens,
        rtts_ms=tuple(float(rtt_ms) for rtt_ms in options.rtt.split(",")),
        sequences=(1,),
        n_workers=options.workers,
        worker_threads=max(1, n_cores // (options.workers + 1)),
        budget_bytes=None,
    )


async def compare(bench: Bench, swarm: BenchSwarm, plan: Plan) -> bool:
    """All settings in turns, printed."""
    engine = swarm.backbone.engine
    encode = engine.tokenizer.encode
    prompts = {"new": encode(NEW)}
    for name, text in (("known", KNOWN), ("partly", PARTLY)):
        tokens = encode(text)
        prompts[name] = [*tokens, *(await answer(bench.alone, tokens, plan.decode_tokens)).tokens, *tokens]
    settings = [
        Setting(rtt_ms, text, mode) for rtt_ms in (None, *plan.rtts_ms) for text in prompts for mode in MODES
    ]
    runs: dict[Setting, list[Run]] = {setting: [] for setting in settings}
    for number in range(plan.rounds + 1):  # the first round builds graphs
        for setting, taken in runs.items():
            swarm.link.set_rtt_ms(setting.rtt_ms or 0.0)
            asked = bench.alone if setting.rtt_ms is None else engine
            asked.batcher.speculate = setting.mode
            run = await answer(asked, prompts[setting.text], plan.decode_tokens)
            if number:
                taken.append(run)
    swarm.link.set_rtt_ms(0.0)
    measured = {rtt_ms: await measured_rtt_ms(rtt_ms) for rtt_ms in plan.rtts_ms}
    return report(runs, measured, plan, bench.model.n_layer)


def report(runs: dict[Setting, list[Run]], measured: dict[float, float], plan: Plan, n_layer: int) -> bool:
    """The table; whether the bounds are kept."""
    print(
        f"{plan.model.name}: {n_layer} layers, {plan.n_workers} workers; medians of {plan.rounds} rounds of "
        f"{plan.decode_tokens} tokens; load {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores"
    )
    print(
        "RTT ms  measured  text    guesses  ms/token  ratio  drafted  accepted  tokens/pass  layers remote"
        "  rounds/token  same"
    )
    is_good = True
    for setting, taken in runs.items():
        peers = runs[Setting(setting.rtt_ms, setting.text, "never")]
        ratio = median_s(peers) / median_s(taken)
        same = all(run.tokens == peers[0].tokens for run in taken)
        is_good &= same
        if (setting.rtt_ms, setting.text) == (max(plan.rtts_ms), "known") and setting.mode != "never":
            is_good &= ratio >= MIN_RATIO
        place = (
            "local           "
            if setting.rtt_ms is None
            else f"{setting.rtt_ms:6g}  {measured[setting.rtt_ms]:8.1f}"
        )
        print(
            f"{place}  {setting.text:6}  {setting.mode:7}  {figures(taken, n_layer, ratio)}  {'yes' if same else 'NO'}"
        )
    return is_good


def median_s(taken: Sequence[Run]) -> float:
    """Seconds of an answer."""
    return statistics.median(run.decode_s for run in taken)


def figures(taken: Sequence[Run], n_layer: int, ratio: float) -> str:
    """One line's numbers."""
    n_tokens = len(taken[0].tokens) - 1
    layers = statistics.fmean(run.account.layers - run.prefill.layers for run in taken)
    remote = statistics.fmean(run.account.remote_layers - run.prefill.remote_layers for run in taken)
    drafted = sum(run.account.drafted_tokens for run in taken)
    accepted = sum(run.account.accepted_tokens for run in taken)
    share = f"{accepted / drafted:8.0%}" if drafted else "       -"
    n_passes = layers / n_layer
    return (
        f"{1e3 * median_s(taken) / n_tokens:8.2f}  {ratio:5.2f}  {drafted / len(taken):7.1f}  {share}  "
        f"{n_tokens / n_passes:11.2f}  {f'{remote / n_passes:.3g}/{n_layer}':>13}  {remote / n_tokens:12.2f}"
    )


def accept_costs(index: ModelIndex, device: Device) -> str:
    """Milliseconds of `accept` with the recurrent layers of a 122B model, and of copies of their states."""
    architecture = Qwen35Moe()
    hparams = with_real_states(architecture.read_hparams(index))
    layers = [layer for layer, is_recurrent in enumerate(hparams.recurrent) if is_recurrent]
    states = SlotStates(device, architecture, hparams, n_slots=1, n_ctx=256, n_ubatch=1)
    weights = WeightSet(device)
    for layer in layers:
        weights.state(f"blk.{layer}.ssm_conv1d.weight", ggml.F32, (4, hparams.ssm_n_channels))
    replay = CoreReplay(GraphSources(device, architecture, hparams, weights, states))
    try:
        n_most = EngineConfig().draft_tokens + 1
        shapes = architecture.step_shapes(hparams, 0).into
        inputs = tuple(np.zeros((n_most, *reversed(ne)), np.float32) for ne in shapes)
        kept = dict.fromkeys(layers, inputs)
        times = {n: _median_ms(partial(replay.run, 0, kept, n)) for n in (1, n_most // 2, n_most)}
        n_bytes = sum(array.nbytes for array in inputs)
        copies_ms = _median_ms(lambda: states.write_recurrent(0, states.read_recurrent(0)))
        told = ", ".join(f"{n} tokens {ms:.0f} ms" for n, ms in times.items())
        return (
            f"at the real sizes ({len(layers)} recurrent layers): accepting {told}, of inputs of "
            f"{len(layers) * n_bytes / 1e6:.1f} MB for {n_most}; copying {states.recurrent_bytes / 1e6:.1f} MB of "
            f"states there and back {copies_ms:.0f} ms"
        )
    finally:
        replay.close()
        weights.close()
        states.close()


def _median_ms(function: Callable[[], None]) -> float:
    times_ms = []
    for _ in range(COPIES):
        started_s = time.perf_counter()
        function()
        times_ms.append(1e3 * (time.perf_counter() - started_s))
    return statistics.median(times_ms[1:])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model")
    parser.add_argument("--rtt", default="0,40", help="RTTs in ms")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=0)
    return 0 if trio.run(measure, parser.parse_args()) else 1


if __name__ == "__main__":
    sys.exit(main())
