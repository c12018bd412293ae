"""Is it ever worse to let the engine choose? All pairs here, all at workers, and `--send auto`, in six regimes.

    python -m benchmarks.regimes [MODEL.gguf] [--rtt 0.3 3 40] [--sequences 1 16] [--rounds 5] [--seconds 1]

Two worker processes of this machine hold all experts between them, behind a proxy that gives every connection an RTT.
The backbone's experts are in RAM, or behind an emulated disk of 2 GB/s with a cache for a quarter of them (least
recently used go first): a call sleeps for each expert that is not in the cache, as long as reading `--expert-mb` would
take. That is 6 MB by default, an expert of a 122B model, whatever the model at hand has: a small model's disk would be
no disk. Auto gets the cache's size as its `--local-budget`.

A sample decodes for so many seconds, after prompts that are not timed; medians of rounds in turns. For each regime the
policy begins with nothing learned, and has one sample to learn in; what prompts earn for exploring is spent in these
seconds, so short ones say little. `auto / better`: its speed over that of the better
of the other two. `again` is local once more: what differs from `local` is noise. Exit code 1 below 0.9 anywhere.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import trio

from swarmnode.cli.bench_figures import Plan
from swarmnode.cli.bench_swarm import BenchSwarm, measured_rtt_ms
from swarmnode.compute.bank import ExpertBank
from swarmnode.compute.devices import DeviceInfo
from swarmnode.config import Config, Folders
from swarmnode.identity import NodeKey
from swarmnode.models.base import Model
from swarmnode.net.delay_proxy import LOOPBACK, DelayedTransport, Link
from swarmnode.node.backbone import start_backbone
from swarmnode.node.backbone_parts import BackboneOptions, assemble_backbone, loaded
from swarmnode.node.common import open_compute
from swarmnode.node.sending import prepare_policy, prepare_residents
from swarmnode.services.account import Account
from swarmnode.services.engine import Engine
from swarmnode.services.members import Members
from swarmnode.services.remote_experts import RemoteExperts, WireForm
from swarmnode.services.runners import ComputeGate, Threads
from swarmnode.weights.catalog import bundled_model
from swarmnode.weights.hashing import load_or_build_manifest
from swarmnode.weights.index import ModelIndex
from swarmnode.weights.manifest import Manifest

DISK_BYTES_PER_S = 2e9
CACHE_SHARE = 4
"""The emulated cache holds one expert in so many."""
WORST = 0.9
PROMPT_TOKENS = 16
N_CTX = 2048
MODES = ("local", "remote", "auto", "again")
"""`again`: local once more. What it differs by is noise."""
NETWORK = "bench"


class EmulatedDisk:
    """A cache of experts, least recently used first; whoever wants another one sleeps. Any thread.

    What was brought in on purpose stays, and leaves less room for the rest.
    """

    def __init__(self, expert_bytes: int, capacity: int) -> None:
        self._read_s = expert_bytes / DISK_BYTES_PER_S
        self._capacity = capacity
        self._lock = threading.Lock()
        self._pinned: set[tuple[int, int]] = set()
        self._cached: OrderedDict[tuple[int, int], None] = OrderedDict()

    def read(self, experts: Sequence[tuple[int, int]]) -> None:
        """Have these in memory."""
        with self._lock:
            wanted = [expert for expert in experts if expert not in self._pinned]
            missing = sum(expert not in self._cached for expert in wanted)
            for expert in wanted:
                self._cached[expert] = None
                self._cached.move_to_end(expert)
            while len(self._cached) + len(self._pinned) > self._capacity and self._cached:
                self._cached.popitem(last=False)
        if missing:
            time.sleep(missing * self._read_s)

    def bring(self, experts: Sequence[tuple[int, int]]) -> None:
        """See Pages."""
        self.read(experts)
        with self._lock:
            self._pinned.update(experts)

    def drop(self, experts: Sequence[tuple[int, int]]) -> None:
        """See Pages."""
        with self._lock:
            self._pinned.difference_update(experts)


class DiskBank:
    """An ExpertBank whose experts may be behind a disk."""

    def __init__(self, bank: ExpertBank) -> None:
        self._bank = bank
        self.disk: EmulatedDisk | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bank, name)

    def _read(self, layer: int, experts: npt.NDArray[np.int32]) -> None:
        if self.disk is not None:
            self.disk.read([(layer, expert) for expert in sorted(set(experts.ravel().tolist()))])

    def stacked(self, layer: int, n_pairs: int) -> Any:
        """None behind a disk: which experts a graph of the whole layer reads is known too late for sleeping."""
        return None if self.disk is not None else self._bank.stacked(layer, n_pairs)

    def moe(self, layer: int, rows: Any, ids: Any, weights: Any) -> Any:
        """See ExpertBank."""
        self._read(layer, ids)
        return self._bank.moe(layer, rows, ids, weights)

    def experts(self, layer: int, rows: Any, pair_row: Any, pair_expert: Any) -> Any:
        """See ExpertBank."""
        self._read(layer, pair_expert)
        return self._bank.experts(layer, rows, pair_row, pair_expert)

    def partial(self, layer: int, rows: Any, pair_row: Any, pair_expert: Any, pair_weight: Any) -> Any:
        """See ExpertBank."""
        self._read(layer, pair_expert)
        return self._bank.partial(layer, rows, pair_row, pair_expert, pair_weight)


@dataclass(frozen=True)
class Sample:
    """What was decoded in one window."""

    tokens_per_s: float
    cpu_ms: float
    """Of this process, a token: neighbours on the machine change it less than they change the speed."""
    account: Account


@dataclass
class Stand:
    """A backbone with workers, and what is measured on it."""

    swarm: BenchSwarm
    index: ModelIndex
    manifest: Manifest
    model: Model
    bank: DiskBank
    gate: ComputeGate
    config: Config
    expert_bytes: int
    seconds: float
    remotes: dict[str, RemoteExperts] = field(default_factory=dict)
    disks: dict[str, EmulatedDisk | None] = field(default_factory=dict)
    """Each contestant has its own, and so its own cache."""

    @property
    def engine(self) -> Engine:
        """The one engine: its passes are given another sender for each mode."""
        return self.swarm.backbone.engine

    @asynccontextmanager
    async def regime(self, rtt_ms: float, has_disk: bool) -> AsyncIterator[None]:
        """Set up, with a policy that has learned nothing."""
        layers = self.index.expert_layers.values()
        n_cached = sum(layout.n_expert for layout in layers) // CACHE_SHARE
        budget = n_cached * max(layout.expert_bytes for layout in layers) if has_disk else None
        self.disks = {mode: EmulatedDisk(self.expert_bytes, n_cached) if has_disk else None for mode in MODES}
        self.swarm.link.set_rtt_ms(rtt_ms)
        dispatch = replace(self.config.dispatch, send="auto", local_budget_bytes=budget)
        residents = prepare_residents(
            dispatch, self.index, self.model, Threads(), self.disks["auto"] or EmulatedDisk(0, 0)
        )
        assert residents is not None
        max_steps = self.config.engine.max_steps
        backbone = self.swarm.backbone
        members, bank = backbone.members, cast(ExpertBank, self.bank)
        self.remotes = {
            name: RemoteExperts(
                self.manifest.model_id, bank, self.gate, members, dispatch, WireForm(), policy=policy
            )
            for name, policy in (
                ("remote", prepare_policy(replace(dispatch, send="always"), None, self.model, max_steps)),
                ("auto", prepare_policy(dispatch, residents, self.model, max_steps)),
            )
        }
        self.engine.passes._residents = residents
        async with trio.open_nursery() as nursery:
            nursery.start_soon(residents.run)
            yield
            nursery.cancel_scope.cancel()
        self.swarm.link.set_rtt_ms(0)

    async def sample(self, mode: str, sequences: int) -> Sample:
        """Decode so many sequences for a while."""
        passes = self.engine.passes
        members = passes._members
        try:
            self.bank.disk = self.disks[mode] if mode == "auto" else None
            self._set(mode if mode == "auto" else "local", members)
            firsts = await self._prompts(sequences)
            self.bank.disk = self.disks[mode]
            self._set(mode, members)
            return await self._decode(firsts)
        finally:
            passes._members = members

    def _set(self, mode: str, members: Members) -> None:
        passes = self.engine.passes
        passes.remote = self.remotes["auto" if mode == "auto" else "remote"]
        is_local = mode in ("local", "again")
        passes._members = _nobody(self.model.n_expert, self.config) if is_local else members

    async def _prompts(self, sequences: int) -> list[int]:
        """Run a prompt for each; the first token of each answer. Auto takes its own way, the others the shortest."""
        rng = np.random.default_rng(0)
        firsts: list[int] = []
        for slot in range(sequences):
            await self.gate.run(partial(self.model.reset, slot))
            prompt = rng.integers(self.model.n_vocab, size=PROMPT_TOKENS).tolist()
            firsts.append(int(np.argmax((await self.engine.step(slot, prompt, Account()))[-1])))
        return firsts

    async def _decode(self, firsts: list[int]) -> Sample:
        account = Account()
        counts = [0] * len(firsts)
        started_s, started_cpu_s = time.perf_counter(), time.process_time()

        async def run(slot: int, token: int) -> None:
            n_most = N_CTX - PROMPT_TOKENS - 1
            with self.engine.stepping(slot) as stepping:
                while time.perf_counter() - started_s < self.seconds and counts[slot] < n_most:
                    token = int(np.argmax((await stepping.run([token], account))[-1]))
                    counts[slot] += 1

        async with trio.open_nursery() as nursery:
            for slot, token in enumerate(firsts):
                nursery.start_soon(run, slot, token)
        n_tokens = sum(counts)
        cpu_ms = 1e3 * (time.process_time() - started_cpu_s) / n_tokens
        return Sample(n_tokens / (time.perf_counter() - started_s), cpu_ms, account)


def _nobody(n_expert: int, config: Config) -> Members:
    """Nobody has joined these."""
    return Members(n_expert, config.dispatch, trio.current_time)


@asynccontextmanager
async def open_stand(arguments: argparse.Namespace, model_path: Path, folder: Path) -> AsyncIterator[Stand]:
    """Load, start the workers, wait until they serve."""
    base = Config()
    config = replace(base, compute=replace(base.compute, n_threads=arguments.threads))
    options = BackboneOptions(
        folders=Folders.under(folder / "backbone"),
        network=NETWORK,
        listen=(LOOPBACK, 0),
        config=config,
        n_ctx=N_CTX,
        n_slots=max(arguments.sequences),
    )
    with ModelIndex.open(model_path) as index:
        manifest = load_or_build_manifest(index, options.folders.cache)
        async with (
            open_compute(options) as (gate, device),
            loaded(options, index, device, gate) as (model, bank),
        ):
            disk_bank = DiskBank(bank)
            async with _started(
                options, index, manifest, model, disk_bank, gate, device.info, folder
            ) as swarm:
                await swarm.join(_workers(arguments, config, model_path))
                bytes_ = round(arguments.expert_mb * 1e6)
                yield Stand(swarm, index, manifest, model, disk_bank, gate, config, bytes_, arguments.seconds)


@asynccontextmanager
async def _started(
    options: BackboneOptions,
    index: ModelIndex,
    manifest: Manifest,
    model: Model,
    bank: DiskBank,
    gate: ComputeGate,
    device: DeviceInfo,
    folder: Path,
) -> AsyncIterator[BenchSwarm]:
    link = Link()
    backbone = assemble_backbone(options, index, manifest, model, cast(ExpertBank, bank), gate, Threads())
    key = NodeKey.load_or_create(options.folders.key_file)
    async with trio.open_nursery() as nursery:
        transport = DelayedTransport(link)
        places = await start_backbone(backbone, options, key, transport, lambda event: None, nursery, device)
        swarm = BenchSwarm(backbone, places[0], link, folder, nursery)
        try:
            yield swarm
        finally:
            link.set_rtt_ms(0)
            with trio.CancelScope(shield=True):
                for worker in swarm.workers:
                    await worker.stop()
            nursery.cancel_scope.cancel()


def _workers(arguments: argparse.Namespace, config: Config, model: Path) -> Plan:
    return Plan(
        sections=("swarm",),
        model=model,
        device=None,
        config=config,
        rounds=arguments.rounds,
        prompt_tokens=PROMPT_TOKENS,
        decode_tokens=1,
        rtts_ms=tuple(arguments.rtt),
        sequences=tuple(arguments.sequences),
        n_workers=2,
        worker_threads=1,
        budget_bytes=None,
    )


async def measure(arguments: argparse.Namespace, model_path: Path) -> float:
    """Print a line for each regime; the worst `auto / better`."""
    worst = float("inf")
    with tempfile.TemporaryDirectory(prefix="swarmnode-regimes-") as folder:
        async with open_stand(arguments, model_path, Path(folder)) as stand:
            n_layer = stand.model.n_layer
            print(
                f"{stand.manifest.name}: {n_layer} layers; experts as of {arguments.expert_mb:g} MB; 2 workers"
            )
            print(
                "rtt ms (measured)  experts  sequences   local   again  remote    auto tok/s  auto/better"
                "  layers remote/total  rounds a token  pairs remote/hedged/fallback"
                "  cpu ms a token: local, auto"
            )
            for rtt_ms, has_disk in product(arguments.rtt, arguments.experts):
                measured_ms = await measured_rtt_ms(rtt_ms)
                async with stand.regime(rtt_ms, has_disk == "disk"):
                    for sequences in arguments.sequences:
                        ratio = await _case(stand, arguments.rounds, rtt_ms, measured_ms, has_disk, sequences)
                        worst = min(worst, ratio)
    return worst


async def _case(
    stand: Stand, rounds: int, rtt_ms: float, measured_ms: float, experts: str, sequences: int
) -> float:
    samples: dict[str, list[Sample]] = {mode: [] for mode in MODES}
    for mode in MODES:
        await stand.sample(mode, sequences)  # builds graphs, and learns
    for _ in range(rounds):
        for mode, taken in samples.items():
            taken.append(await stand.sample(mode, sequences))
    speeds = {
        mode: statistics.median(sample.tokens_per_s for sample in taken) for mode, taken in samples.items()
    }
    cpu_ms = [statistics.median(sample.cpu_ms for sample in samples[mode]) for mode in ("local", "auto")]
    ratio = speeds["auto"] / max((speeds["local"] + speeds["again"]) / 2, speeds["remote"])
    account = _sum([sample.account for sample in samples["auto"]])
    n_layer = stand.model.n_layer
    n_remote = n_layer * account.remote_layers / max(1, account.layers)
    pairs = [100 * n / max(1, account.pairs) for n in (account.remote, account.hedged, account.fallback)]
    speed = " ".join(f"{speeds[mode]:7.1f}" for mode in ("local", "again", "remote", "auto"))
    print(
        f"{rtt_ms:6.1f} ({measured_ms:5.2f})    {experts:>7s} {sequences:10d} {speed} {ratio:18.2f}"
        f"{n_remote:16.2f} / {n_layer} {n_remote:15.2f}  {pairs[0]:.1f} / {pairs[1]:.2f} / {pairs[2]:.2f} %"
        f"  {cpu_ms[0]:.2f} {cpu_ms[1]:.2f}",
        flush=True,
    )
    return ratio


def _sum(accounts: Sequence[Account]) -> Account:
    total = Account()
    for account in accounts:
        for name in ("pairs", "remote", "hedged", "fallback", "layers", "remote_layers"):
            setattr(total, name, getattr(total, name) + getattr(account, name))
    return total


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--rtt", type=float, nargs="+", default=[0.3, 3.0, 40.0], help="ms")
    parser.add_argument("--experts", choices=["ram", "disk"], nargs="+", default=["ram", "disk"])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--expert-mb", type=float, default=6.0)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    worst = trio.run(measure, arguments, arguments.model or bundled_model())
    print(f"the worst auto / better: {worst:.2f} (at least {WORST} wanted)")
    sys.exit(0 if worst >= WORST else 1)


if __name__ == "__main__":
    main()
