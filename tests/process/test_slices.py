"""A process that downloads slices and is killed (-9) ten times ends with all of them; little is fetched twice."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio

from swarmnode.net.tcp import TcpTransport
from swarmnode.services.runners import Threads
from swarmnode.services.slice_server import SliceServer
from swarmnode.testing.tiny_gguf import TinyModel, write_tiny_gguf
from swarmnode.weights.hashing import build_manifest
from swarmnode.weights.index import ModelIndex
from swarmnode.weights.slices import ExpertRange
from swarmnode.weights.store import SliceStore
from tests.net.nodes import SERVER, endpoint, serve_on

pytestmark = pytest.mark.real_time

N_KILLS = 10
MODEL = TinyModel(n_layer=4, n_expert=32, n_expert_used=2)
"""100 MB of F32 experts; each slab is one block of 256 KiB."""


@dataclass
class Counted:
    """A model's blocks; counts those that were read to be sent, arrived or not."""

    index: ModelIndex
    sent_bytes: int = 0

    def read_block(self, layer: int, expert: int, kind: str, offset: int, length: int) -> bytes:
        self.sent_bytes += length
        return self.index.read_block(layer, expert, kind, offset, length)


async def test_killed_at_ten_random_moments(tmp_path: Path) -> None:
    rng = random.Random(30)
    with ModelIndex.open(write_tiny_gguf(tmp_path / "model.gguf", MODEL)) as index:
        manifest = build_manifest(index)
        total_bytes = sum(MODEL.n_expert * layer.layout.expert_bytes for layer in manifest.layers.values())
        kills = [0.95 * total_bytes * share for share in sorted(rng.random() for _ in range(N_KILLS))]
        source = Counted(index)
        server = SliceServer(manifest, source, Threads())
        async with trio.open_nursery() as nursery:
            address = await serve_on(
                nursery, TcpTransport(), endpoint(SERVER), server.handlers, port=0, host="127.0.0.1"
            )
            arguments = [str(address), manifest.model_id.hex(), str(tmp_path / "cache")]
            command = [sys.executable, "-m", "tests.process.slice_worker", *arguments]
            for kill in kills:
                process = await trio.lowlevel.open_process(command, stdin=subprocess.DEVNULL)
                while source.sent_bytes < kill and process.poll() is None:  # noqa: ASYNC110 - a thread counts
                    await trio.sleep(0.001)
                await trio.sleep(rng.uniform(0, 0.02))
                process.kill()
                assert await process.wait() == -9
            await trio.run_process(command)
            nursery.cancel_scope.cancel()
        assert total_bytes <= source.sent_bytes < 1.1 * total_bytes
        with SliceStore(tmp_path / "cache", manifest) as store:
            assert sum(item.count for item in store.held()) == 4 * MODEL.n_expert
            for item in store.held():
                check_slabs(store, index, item)


def check_slabs(store: SliceStore, index: ModelIndex, item: ExpertRange) -> None:
    """Every byte of a range is the model's."""
    for expert in item.experts:
        for kind in index.expert_layers[item.layer].kinds:
            slab = store.read_slab(item.layer, expert, kind)
            assert slab == index.slab(item.layer, expert, kind)
