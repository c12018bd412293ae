"""A backbone in the benchmark's process, so that a stopwatch reaches it, and real worker processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import trio

from benchmarks.stopwatch import Stopwatch
from swarmnode.cli.processes import NodeProcess, start_node
from swarmnode.config import Config, Folders, Repack
from swarmnode.identity import NodeKey
from swarmnode.net.address import PeerAddress
from swarmnode.net.tcp import TcpTransport
from swarmnode.node.backbone import start_backbone
from swarmnode.node.backbone_parts import Backbone, BackboneOptions, assemble_backbone, loaded
from swarmnode.node.common import open_compute
from swarmnode.schedule.dispatch import LOCAL
from swarmnode.services.engine import Engine
from swarmnode.services.members import Members, Standing
from swarmnode.services.remote_experts import RemoteExperts, WireForm
from swarmnode.services.runners import Threads
from swarmnode.weights.hashing import load_or_build_manifest
from swarmnode.weights.index import ModelIndex

JOIN_TIMEOUT_S = 900.0
SETTLED_S = 10.0
"""Without a change: longer than a market takes from one look to the next."""
DEADLINE_S = 30.0
"""A busy machine must not turn remote rows into local ones here."""


@dataclass
class BenchSwarm:
    """One loaded model behind two engines: `alone` sends nothing out, `backbone.engine` whatever a worker holds."""

    backbone: Backbone
    alone: Engine
    remotes: dict[WireForm, RemoteExperts]
    address: PeerAddress
    folder: Path
    nursery: trio.Nursery
    workers: list[NodeProcess] = field(default_factory=list)

    def engine(self, form: WireForm | None) -> Engine:
        """The engine that uses the workers in this form; None: without workers."""
        if form is None:
            return self.alone
        self.backbone.engine.passes.remote = self.remotes[form]
        return self.backbone.engine

    async def join(self, budget_bytes: int, n_threads: int) -> None:
        """Start one more worker and wait until it gets rows. Its slices stay in the folder for the next run."""
        name = f"worker{len(self.workers) + 1}"
        arguments = [
            *("join", "--budget", f"{budget_bytes}B", "--threads", str(n_threads)),
            *("--listen", "127.0.0.1:0"),
            *("--bootstrap", str(self.address)),
        ]
        worker = await start_node(name, arguments, self.folder / name, self.nursery)
        self.workers.append(worker)
        await worker.wait_line("full: ", JOIN_TIMEOUT_S)
        with trio.fail_after(JOIN_TIMEOUT_S):
            while self._n_serving() < len(self.workers):  # noqa: ASYNC110 - other processes cannot set an event
                await trio.sleep(0.05)

    async def settle(self) -> None:
        """Wait until workers hold every expert, and no more of them for a while: nothing is on its way."""
        n_experts = sum(layer.layout.n_expert for layer in self.backbone.manifest.layers.values())
        with trio.fail_after(JOIN_TIMEOUT_S):
            known, since_s = (0, 0), trio.current_time()
            while known[0] < n_experts or trio.current_time() - since_s < SETTLED_S:
                routing, _ = self.backbone.members.routing()
                held = _n_held(routing.owners), _n_held(routing.seconds)
                if held != known:
                    known, since_s = held, trio.current_time()
                await trio.sleep(0.5)

    def _n_serving(self) -> int:
        return sum(worker.standing is Standing.SERVING for worker in self.backbone.members.workers)


def _n_held(table: Mapping[int, npt.NDArray[np.int32]]) -> int:
    """Experts for which a routing's owners, or seconds, name somebody."""
    return sum(int((layer != LOCAL).sum()) for layer in table.values())


@asynccontextmanager
async def open_bench_swarm(
    model: Path,
    folder: Path,
    n_threads: int,
    forms: tuple[WireForm, ...],
    watch: Stopwatch,
    n_slots: int = 1,
    repack: Repack = "auto",
) -> AsyncIterator[BenchSwarm]:
    """Load the model and listen on loopback; every process is ended on leaving."""
    base = Config()
    config = replace(
        base,
        compute=replace(base.compute, n_threads=n_threads),
        dispatch=replace(base.dispatch, deadline_s=DEADLINE_S),
        models=replace(base.models, repack=repack),
    )
    options = BackboneOptions(
        folders=Folders.under(folder / "backbone"),
        network="public",
        listen=("127.0.0.1", 0),
        config=config,
        n_ctx=1024,
        n_slots=n_slots,
    )
    key = NodeKey.load_or_create(options.folders.key_file)
    with ModelIndex.open(model) as index:
        manifest = load_or_build_manifest(index, options.folders.cache)
        async with (
            open_compute(options) as (gate, device),
            loaded(options, index, device, gate) as (loaded_model, bank),
            trio.open_nursery() as nursery,
        ):
            compute = watch.watch(gate)
            backbone = assemble_backbone(options, index, manifest, loaded_model, bank, compute, Threads())
            dispatch = config.dispatch
            remotes = {
                form: RemoteExperts(manifest.model_id, bank, compute, backbone.members, dispatch, form)
                for form in forms
            }
            alone = Engine(
                loaded_model,
                backbone.engine.tokenizer,
                bank,
                compute,
                Members(loaded_model.n_expert, dispatch, trio.current_time),
                backbone.engine.passes.remote,
                n_slots=n_slots,
                chunk_tokens=config.models.n_ubatch,
            )
            await nursery.start(alone.run)
            places = await start_backbone(
                backbone, options, key, TcpTransport(), lambda event: None, nursery, device.info
            )
            swarm = BenchSwarm(backbone, alone, remotes, places[0], folder, nursery)
            try:
                yield swarm
            finally:
                with trio.CancelScope(shield=True):
                    for worker in swarm.workers:
                        await worker.stop()
                nursery.cancel_scope.cancel()
