"""A backbone in this process, on real sockets and its own compute thread, and real worker processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trio

from swarmnode.cli.processes import NodeProcess, start_node
from swarmnode.config import Config, DispatchConfig, Folders
from swarmnode.identity import NodeKey
from swarmnode.net.address import PeerAddress
from swarmnode.net.tcp import TcpTransport
from swarmnode.node.backbone import start_backbone
from swarmnode.node.backbone_parts import Backbone, BackboneOptions, assemble_backbone, loaded
from swarmnode.node.common import open_compute
from swarmnode.services.members import Standing
from swarmnode.services.remote_experts import EXACT, RemoteExperts, WireForm
from swarmnode.services.runners import Threads
from swarmnode.weights.catalog import bundled_model
from swarmnode.weights.hashing import load_or_build_manifest
from swarmnode.weights.index import ModelIndex
from swarmnode.wire.constants import ENCODINGS

START_TIMEOUT_S = 60.0
PATIENT = Config(dispatch=DispatchConfig(deadline_s=10.0, probe_timeout_s=10.0))
"""For tests of anything but deadlines: other tests keep the machine busy."""
FORMS = (EXACT, WireForm("experts", "f16"), *(WireForm("partial", encoding) for encoding in ENCODINGS))


@dataclass
class RealSwarm:
    """A running backbone and the worker processes that joined it."""

    backbone: Backbone
    address: PeerAddress
    folder: Path
    nursery: trio.Nursery
    workers: list[NodeProcess] = field(default_factory=list)
    start_timeout_s: float = START_TIMEOUT_S
    remotes: dict[WireForm, RemoteExperts] = field(default_factory=dict)

    def use(self, form: WireForm) -> None:
        """Rows travel in this form from now on."""
        self.backbone.engine.passes.remote = self.remotes[form]

    async def join(self, budget: str, name: str | None = None, *arguments: str) -> NodeProcess:
        """Start a worker process and return once it is full and the backbone sends it rows."""
        worker = await self._start(budget, name or f"worker{len(self.workers) + 1}", *arguments)
        await self._until_full(worker)
        return worker

    async def join_all(self, budget: str, n_workers: int) -> None:
        """Start so many at once, and return when `join` would for each."""
        for _ in range(n_workers):
            await self._start(budget, f"worker{len(self.workers) + 1}")
        for worker in self.workers[-n_workers:]:
            await self._until_full(worker)

    async def _start(self, budget: str, name: str, *arguments: str) -> NodeProcess:
        join = ["join", "--budget", budget, "--listen", "127.0.0.1:0", "--bootstrap", str(self.address)]
        join += arguments
        worker = await start_node(name, join, self.folder / name, self.nursery)
        self.workers.append(worker)
        return worker

    async def _until_full(self, worker: NodeProcess) -> None:
        short = await worker.wait_line("this node is ", self.start_timeout_s)
        n_experts = int((await worker.wait_line("full: ", self.start_timeout_s)).split()[0])
        with trio.fail_after(START_TIMEOUT_S):
            while self._experts_of(short) != n_experts:  # noqa: ASYNC110 - another process cannot set an event
                await trio.sleep(0.02)

    def _experts_of(self, short: str) -> int:
        """Experts for which a worker gets rows now."""
        return sum(
            len(experts)
            for worker in self.backbone.members.workers
            if worker.node_id.short == short and worker.standing is Standing.SERVING
            for experts in worker.proven.values()
        )

    @property
    def n_serving(self) -> int:
        """Workers that get rows now."""
        return sum(worker.standing is Standing.SERVING for worker in self.backbone.members.workers)

    async def until_serving(self, n_workers: int) -> None:
        """Wait until so many workers get rows."""
        with trio.fail_after(START_TIMEOUT_S):
            while self.n_serving != n_workers:  # noqa: ASYNC110 - other processes cannot set an event
                await trio.sleep(0.02)


@asynccontextmanager
async def open_real_swarm(
    folder: Path,
    *,
    model: Path | None = None,
    form: WireForm = EXACT,
    config: Config = PATIENT,
    device_name: str | None = None,
) -> AsyncIterator[RealSwarm]:
    """A backbone of `model` (default: the bundled one), listening on loopback; ends every process it started."""
    options = BackboneOptions(
        folders=Folders.under(folder / "backbone"),
        network="public",
        listen=("127.0.0.1", 0),
        form=form,
        device=device_name,
        config=config,
        n_ctx=1024,
    )
    key = NodeKey.load_or_create(options.folders.key_file)
    with ModelIndex.open(model or bundled_model()) as index:
        manifest = load_or_build_manifest(index, options.folders.cache)
        async with (
            open_compute(options) as (gate, device),
            loaded(options, index, device, gate) as (loaded_model, bank),
        ):
            backbone = assemble_backbone(options, index, manifest, loaded_model, bank, gate, Threads())
            async with trio.open_nursery() as nursery:
                places = await start_backbone(
                    backbone, options, key, TcpTransport(), lambda event: None, nursery, device.info
                )
                swarm = RealSwarm(backbone, places[0], folder, nursery)
                dispatch, members = options.config.dispatch, backbone.members
                for other in FORMS:
                    swarm.remotes[other] = RemoteExperts(
                        manifest.model_id, bank, gate, members, dispatch, other
                    )
                try:
                    yield swarm
                finally:
                    with trio.CancelScope(shield=True):
                        for worker in swarm.workers:
                            worker.kill()
                            await worker.process.wait()
                    nursery.cancel_scope.cancel()
