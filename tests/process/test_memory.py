"""`--budget` is a promise about real memory: peak of a worker process, as the kernel counted it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.machine import memory_of
from benchmarks.worker_memory import OVERHEAD_BYTES, measure, small_big_model
from tests.process.kit import open_real_swarm

pytestmark = pytest.mark.real_time

BUDGET_BYTES = 300_000_000


async def test_eight_megabytes_are_held(tmp_path: Path) -> None:
    async with open_real_swarm(tmp_path) as swarm:
        worker = await swarm.join("8MB")
        line = [line for line in worker.lines if line.startswith("full: ")][-1]
        peak_bytes = memory_of(worker.pid)["VmHWM"]
    held_mb = float(line.rpartition(", ")[2].removesuffix(" MB"))
    assert 7.0 < held_mb <= 8.0
    assert peak_bytes <= 8_000_000 + OVERHEAD_BYTES


@pytest.mark.slow
async def test_three_hundred_megabytes_of_the_real_sizes(tmp_path: Path) -> None:
    """While it downloads, computes a prompt of 591 rows and decodes, and once more with its slices on disk."""
    model = small_big_model(tmp_path)
    for life in await measure(model, tmp_path, "300MB"):
        assert life.pairs > 128, "rows of the whole prompt travelled"
        assert life.peak_bytes <= BUDGET_BYTES + OVERHEAD_BYTES, life


@pytest.mark.slow
async def test_the_address_space_stays_within_bounds(tmp_path: Path) -> None:
    """RLIMIT_AS of weights, the same slices mapped from disk, and 300 MB: reserved or not, no more is asked for."""
    model = small_big_model(tmp_path)
    lives = await measure(model, tmp_path, "300MB", address_space_bytes=2 * BUDGET_BYTES + 300_000_000)
    assert [life.name for life in lives] == ["downloaded", "restarted"]
