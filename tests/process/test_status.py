"""A real backbone and a worker, seen by `swarmnode status` and through the routes that ask for the node's token."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from swarmnode.weights.catalog import bundled_model
from tests.process.test_commands import TIMEOUT_S, open_processes, start_backbone

pytestmark = pytest.mark.real_time


async def command(*arguments: str) -> str:
    """What a command that must succeed prints."""
    run = partial(
        subprocess.run,
        [sys.executable, "-m", "swarmnode.cli", *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    finished: subprocess.CompletedProcess[str] = await trio.to_thread.run_sync(run)
    return finished.stdout


async def status_when(api: str, is_so: Any) -> dict[str, Any]:
    """`status --json` once it says what is waited for."""
    with trio.fail_after(TIMEOUT_S):
        while True:
            state: dict[str, Any] = json.loads(await command("status", "--api", api, "--json"))
            if is_so(state):
                return state
            await trio.sleep(0.1)


async def test_a_swarm_from_its_start_to_the_leave_of_its_worker(tmp_path: Path) -> None:
    async with open_processes() as processes:
        _, address, api = await start_backbone(tmp_path, processes)
        alone = await command("status", "--api", api)
        assert "nobody has dialled this node yet" in alone
        assert "0 others known" in alone

        join = ["join", "--budget", "600kB", "--bootstrap", address, "--listen", "127.0.0.1:0"]
        worker = await processes.start("worker", join, tmp_path / "worker")
        state = await status_when(api, lambda state: any(node["serving"] for node in state["nodes"]))
        (node,) = state["nodes"]
        assert (node["roles"], node["state"], node["connected"]) == (["worker"], "serving", True)
        assert state["own"]["dialled_by_others"] == 1
        text = await command("status", "--api", api)
        assert f"* {node['name']} worker" in text
        assert max(map(len, text.splitlines())) <= 80

        await routes_with_the_token(api, tmp_path)

        worker.process.terminate()
        state = await status_when(api, lambda state: all(node["state"] == "lost" for node in state["nodes"]))
        assert sum(layer["covered"] for layer in state["coverage"]) == 0


async def routes_with_the_token(api: str, folder: Path) -> None:
    token = (await command("identity", "--token", "--home", str(folder / "backbone"))).strip()
    path = folder / "written.gguf"
    await command("shard", str(bundled_model()), "--layers", "0:2", "--experts", "0:4", "-o", str(path))
    async with httpx.AsyncClient(trust_env=False, base_url=api) as client:
        assert (await client.get("/api/expert-coverage")).status_code == 401
        client.headers["Authorization"] = f"Bearer {token}"
        coverage = (await client.get("/api/expert-coverage")).json()
        assert sum(sum(layer["serving"]) for layer in coverage["layers"]) > 0
        model = coverage["model_id"]
        query = {"layers": "0:2", "experts": "0:4"}
        shard = await client.get(f"/api/models/{model}/expert-shard", params=query)
        assert shard.content == path.read_bytes()
