"""Decode over worker processes of this machine, behind a proxy that gives every connection an RTT."""

from __future__ import annotations

import statistics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import trio

from swarmnode.cli.bench_figures import Plan, Sample, TokenFigure, token_figure
from swarmnode.cli.bench_local import Bench
from swarmnode.cli.processes import NodeProcess, ProcessFailedError, start_node
from swarmnode.compute.devices import DeviceInfo
from swarmnode.identity import NodeKey
from swarmnode.net.address import PeerAddress
from swarmnode.net.delay_proxy import LOOPBACK, DelayedTransport, Link
from swarmnode.node.backbone import start_backbone
from swarmnode.node.backbone_parts import Backbone, BackboneOptions, assemble_backbone
from swarmnode.services.members import Standing
from swarmnode.services.runners import Threads
from swarmnode.weights.hashing import load_or_build_manifest
from swarmnode.weights.manifest import Manifest

JOIN_TIMEOUT_S = 900.0
"""A worker with half of a large model copies gigabytes."""
SPARE_EXPERTS = 8
"""More than its part that each worker has room for: they take runs of experts, and not always different ones."""
PINGS = 5
NETWORK = "bench"
"""Of its own: nobody who is in another network can be met."""


@dataclass
class BenchSwarm:
    """A started backbone behind the link, and its workers."""

    backbone: Backbone
    address: PeerAddress
    link: Link
    folder: Path
    nursery: trio.Nursery
    workers: list[NodeProcess] = field(default_factory=list)

    async def join(self, plan: Plan) -> None:
        """Start the workers, at no delay, and return once the backbone sends rows to all of them."""
        budget = plan.budget_bytes or part_of_experts_bytes(self.backbone.manifest, plan.n_workers)
        arguments = [
            *("join", "--budget", f"{budget}B", "--threads", str(plan.worker_threads)),
            *("--no-listen", "--network", NETWORK, "--bootstrap", str(self.address)),
        ]
        for number in range(1, plan.n_workers + 1):
            name = f"worker {number}"
            self.workers.append(
                await start_node(name, arguments, self.folder / f"worker{number}", self.nursery)
            )
        for worker in self.workers:
            await worker.wait_line("full: ", JOIN_TIMEOUT_S)
        with trio.move_on_after(JOIN_TIMEOUT_S) as waiting:
            while self._n_serving() < plan.n_workers:  # noqa: ASYNC110 - other processes cannot set an event
                await trio.sleep(0.05)
        if waiting.cancelled_caught:
            raise ProcessFailedError(f"not all {plan.n_workers} workers serve after {JOIN_TIMEOUT_S:.0f} s")

    def _n_serving(self) -> int:
        return sum(worker.standing is Standing.SERVING for worker in self.backbone.members.workers)


def part_of_experts_bytes(manifest: Manifest, n_workers: int) -> int:
    """A budget with which so many workers hold every expert between them."""
    layouts = [layer.layout for layer in manifest.layers.values()]
    total = sum(layout.n_expert * layout.expert_bytes for layout in layouts)
    return -(-total // n_workers) + SPARE_EXPERTS * max(layout.expert_bytes for layout in layouts)


@asynccontextmanager
async def open_swarm(
    bench: Bench, options: BackboneOptions, device: DeviceInfo, folder: Path
) -> AsyncIterator[BenchSwarm]:
    """Start the loaded model as a backbone; its processes have ended when this has, however it ends."""
    build = partial(load_or_build_manifest, bench.index, options.folders.cache, _unless_cancelled)
    manifest = await trio.to_thread.run_sync(build)
    link = Link()
    backbone = assemble_backbone(
        options, bench.index, manifest, bench.model, bench.bank, bench.gate, Threads()
    )
    key = NodeKey.load_or_create(options.folders.key_file)
    async with trio.open_nursery() as nursery:
        places = await start_backbone(
            backbone, options, key, DelayedTransport(link), lambda event: None, nursery, device
        )
        swarm = BenchSwarm(backbone, places[0], link, folder, nursery)
        try:
            yield swarm
        finally:
            link.set_rtt_ms(0)
            with trio.CancelScope(shield=True):
                async with trio.open_nursery() as stopping:
                    for worker in swarm.workers:
                        stopping.start_soon(worker.stop)
            nursery.cancel_scope.cancel()


def _unless_cancelled(done_bytes: int, total_bytes: int) -> None:
    """Hashing a large model takes minutes, and Ctrl-C should not."""
    trio.from_thread.check_cancelled()


async def measure_swarm(bench: Bench, swarm: BenchSwarm, plan: Plan) -> list[TokenFigure]:
    """Decode without workers and with them at each RTT, in turns; the runs without workers are the peer."""
    settings = [(rtt_ms, count) for rtt_ms in (None, *plan.rtts_ms) for count in plan.sequences]
    samples: dict[tuple[float | None, int], list[Sample]] = {setting: [] for setting in settings}
    for setting in settings:
        if setting[0] in (None, plan.rtts_ms[0]):
            await _sample(bench, swarm, *setting)  # builds graphs
    for _ in range(plan.rounds):
        for setting, taken in samples.items():
            taken.append(await _sample(bench, swarm, *setting))
    measured = {rtt_ms: await measured_rtt_ms(rtt_ms) for rtt_ms in plan.rtts_ms}
    figures: list[TokenFigure] = []
    for (rtt_ms, count), taken in samples.items():
        figures.append(
            token_figure(
                taken,
                bench.model.n_layer,
                workers=0 if rtt_ms is None else plan.n_workers,
                sequences=count,
                rtt_ms=rtt_ms,
                rtt_measured_ms=None if rtt_ms is None else measured[rtt_ms],
                local=samples[None, count][0].answers,
            )
        )
    return figures


async def _sample(bench: Bench, swarm: BenchSwarm, rtt_ms: float | None, sequences: int) -> Sample:
    if rtt_ms is None:
        return await bench.decode_sample(bench.alone, sequences)
    swarm.link.set_rtt_ms(rtt_ms)
    return await bench.decode_sample(swarm.backbone.engine, sequences)


async def measured_rtt_ms(rtt_ms: float) -> float:
    """The median of a few round trips of one byte through a proxy of the same delay, in this process."""
    link = Link()
    link.set_rtt_ms(rtt_ms)
    times_s: list[float] = []
    async with trio.open_nursery() as nursery:
        listen = partial(DelayedTransport(link).listen, _echo, LOOPBACK, 0)
        places: list[tuple[str, int]] = await nursery.start(listen)
        async with await trio.open_tcp_stream(*places[0]) as stream:
            for _ in range(PINGS + 1):
                started_s = trio.current_time()
                await stream.send_all(b"?")
                await stream.receive_some(1)
                times_s.append(trio.current_time() - started_s)
        nursery.cancel_scope.cancel()
    return 1e3 * statistics.median(times_s[1:])  # the first one waits for the proxy to connect, too


async def _echo(stream: trio.abc.Stream, source: str) -> None:
    async with stream:
        async for data in stream:
            await stream.send_all(data)
