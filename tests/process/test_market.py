"""A market of real processes: nine nodes that know one address, three killed at once, the bootstrap node killed."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from swarmnode.cli.processes import NodeProcess, start_node
from swarmnode.services.members import Standing
from tests.process.kit import RealSwarm, open_real_swarm
from tests.process.test_workers import greedy

pytestmark = pytest.mark.real_time

PATIENCE_S = 150.0
N_WORKERS = 8


async def start_worker(swarm: RealSwarm, name: str, budget_bytes: int, bootstrap: str | None) -> NodeProcess:
    """A worker process that knows at most one address; returns at once."""
    arguments = ["join", "--budget", f"{budget_bytes}B", "--threads", "1", "--listen", "127.0.0.1:0"]
    if bootstrap is not None:
        arguments += ["--bootstrap", bootstrap]
    worker = await start_node(name, arguments, swarm.folder / name, swarm.nursery)
    swarm.workers.append(worker)
    return worker


def replicas(swarm: RealSwarm) -> list[int]:
    """How many workers get rows for each expert of the model."""
    manifest = swarm.backbone.manifest
    held = [worker.proven for worker in swarm.backbone.members.workers if worker.standing is Standing.SERVING]
    return [
        sum(expert in holdings.get(layer, frozenset()) for holdings in held)
        for layer in manifest.layers
        for expert in range(manifest.n_expert)
    ]


async def until_replicas(swarm: RealSwarm, least: int, timeout_s: float = PATIENCE_S) -> None:
    """Wait until every expert has so many."""
    with trio.move_on_after(timeout_s):
        while min(replicas(swarm)) < least:  # noqa: ASYNC110 - other processes cannot set an event
            await trio.sleep(0.2)
        return
    lines = "\n".join(f"{worker.name}: {worker.lines[-3:]}" for worker in swarm.workers)
    raise AssertionError(f"replicas {replicas(swarm)} after {timeout_s:.0f} s\n{lines}")


def model_bytes(swarm: RealSwarm) -> int:
    layers = swarm.backbone.manifest.layers.values()
    return sum(layer.layout.n_expert * layer.layout.expert_bytes for layer in layers)


async def until_remote(swarm: RealSwarm, alone: list[int]) -> None:
    """Answer until workers compute nearly all: what is on the move between workers is computed here meanwhile."""
    with trio.fail_after(PATIENCE_S):
        while True:
            helped, account = await greedy(swarm, len(alone))
            assert helped == alone
            if account.remote > 0.9 * account.pairs:
                return


async def test_nine_nodes_cover_the_model_twice_and_heal_when_three_are_killed(tmp_path: Path) -> None:
    async with open_real_swarm(tmp_path) as swarm:
        alone, _ = await greedy(swarm, 24)
        budget_bytes = 3 * model_bytes(swarm) // N_WORKERS
        first = await start_worker(swarm, "worker1", budget_bytes, str(swarm.address))
        entry = await first.wait_line("listening ", PATIENCE_S)
        for number in range(2, N_WORKERS + 1):  # they know a worker; of the backbone they hear from it
            await start_worker(swarm, f"worker{number}", budget_bytes, entry)
        await until_replicas(swarm, 2)
        await until_remote(swarm, alone)

        for worker in swarm.workers[3:6]:
            worker.kill()
        helped, _ = await greedy(swarm, 24)
        assert helped == alone
        await until_replicas(swarm, 1)
        await until_remote(swarm, alone)

        # The node that everybody joined through goes; one comes back that knows nobody but those on its disk.
        first.kill()
        survivor = swarm.workers[1]
        await survivor.stop()
        again = await start_worker(swarm, survivor.name, budget_bytes, None)
        await again.wait_line("serving ", PATIENCE_S)
        await until_replicas(swarm, 1)
        await until_remote(swarm, alone)
