"""Which parts of a pass run on the thread that asks: those of a lone pass that are known to be short."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import trio

from swarmnode.services.passes import Passes
from swarmnode.services.runners import Brief
from swarmnode.services.stage_times import StageTimes
from swarmnode.testing.swarm import Swarm, open_swarm
from tests.swarm.conftest import ALL_BYTES

T = TypeVar("T")
PROMPT = [5, 80, 33, 7]


class Kinds:
    """An inline runner that notes whether what it runs is brief, and how many passes were under way."""

    def __init__(self, passes: Passes) -> None:
        self._passes = passes
        self.seen: list[tuple[bool, int]] = []

    async def run(self, function: Callable[[], T]) -> T:
        self.seen.append((isinstance(function, Brief), self._passes._n_under_way))
        await trio.lowlevel.checkpoint()
        return function()


async def answers(swarm: Swarm, n: int) -> Kinds:
    """So many answers at once, with the runner that their passes had."""
    passes = swarm.backbone.engine.passes
    kinds = Kinds(passes)
    passes._compute = kinds
    async with trio.open_nursery() as nursery:
        for number in range(n):
            nursery.start_soon(swarm.generate, [*PROMPT, number], 6)
    return kinds


async def test_the_stages_of_a_lone_answer_are_brief_once_they_are_known(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with open_swarm(tiny_model, tmp_path) as swarm:
        await swarm.join(ALL_BYTES)
        kinds = await answers(swarm, 1)
        n_stages = 4 + 1  # layers, and the way to the first of them
        assert [is_brief for is_brief, _ in kinds.seen] == (
            2 * n_stages * [False] + (len(kinds.seen) - 2 * n_stages) * [True]
        ), "neither the prompt's nor the first token's"
        assert len(kinds.seen) == 6 * n_stages


async def test_while_several_passes_are_under_way_nothing_is_brief(tiny_model: Path, tmp_path: Path) -> None:
    """Answers of workers would come, and be noticed too late."""
    async with open_swarm(tiny_model, tmp_path, latency_s=0.05) as swarm:
        await swarm.join(ALL_BYTES)
        kinds = await answers(swarm, 2)
        kinds = await answers(swarm, 2)
        assert {n_passes for _, n_passes in kinds.seen} >= {1, 2}
        assert not any(is_brief for is_brief, n_passes in kinds.seen if n_passes > 1)


async def test_what_takes_long_is_not_brief(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StageTimes, "expected_s", lambda self, stage: 0.011)
    async with open_swarm(tiny_model, tmp_path) as swarm:
        await swarm.join(ALL_BYTES)
        kinds = await answers(swarm, 1)
        assert kinds.seen
        assert not any(is_brief for is_brief, _ in kinds.seen)
