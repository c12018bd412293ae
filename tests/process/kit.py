"""A backbone in this process, on real sockets and its own compute thread, and real worker processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trio

from swarmnode.cli.processes import NodeProcess, start_node
from swarmnode.config import Config, Folders
from swarmnode.identity import NodeKey
from swarmnode.net.address import PeerAddress
from swarmnode.net.tcp import TcpTransport
from swarmnode.node.backbone import (
    Backbone,
    BackboneOptions,
    assemble_backbone,
    loaded,
    start_backbone,
)
from swarmnode.node.common import open_compute
from swarmnode.services.members import Standing
from swarmnode.services.remote_experts import EXACT, WireForm
from swarmnode.services.runners import Threads
from swarmnode.weights.catalog import bundled_model
from swarmnode.weights.hashing import load_or_build_manifest
from swarmnode.weights.index import ModelIndex

START_TIMEOUT_S = 60.0


@dataclass
class RealSwarm:
    """A running backbone and the worker processes that joined it."""

    backbone: Backbone
    address: PeerAddress
    folder: Path
    nursery: trio.Nursery
    workers: list[NodeProcess] = field(default_factory=list)
    start_timeout_s: float = START_TIMEOUT_S

    async def join(self, budget: str, name: str | None = None, *arguments: str) -> NodeProcess:
        """Start a worker process and return once the backbone sends it rows."""
        name = name or f"worker{len(self.workers) + 1}"
        before = self.n_serving
        join = ["join", "--budget", budget, "--listen", "127.0.0.1:0", "--bootstrap", str(self.address)]
        join += arguments
        worker = await start_node(name, join, self.folder / name, self.nursery)
        self.workers.append(worker)
        await worker.wait_line("full: ", self.start_timeout_s)
        await self.until_serving(before + 1)
        return worker

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
    config: Config | None = None,
    device_name: str | None = None,
) -> AsyncIterator[RealSwarm]:
    """A backbone of `model` (default: the bundled one), listening on loopback; ends every process it started."""
    options = BackboneOptions(
        folders=Folders.under(folder / "backbone"),
        network="public",
        listen=("127.0.0.1", 0),
        form=form,
        device=device_name,
        config=config or Config(),
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
                try:
                    yield swarm
                finally:
                    with trio.CancelScope(shield=True):
                        for worker in swarm.workers:
                            worker.kill()
                            await worker.process.wait()
                    nursery.cancel_scope.cancel()
