"""What a part of a pass is expected to take."""

from __future__ import annotations

import math

import pytest

from swarmnode.services import stage_times
from swarmnode.services.stage_times import Stage, StageTimes


def test_the_longest_lately_counts() -> None:
    times, stage = StageTimes(), Stage(1, 3)
    assert times.expected_s(stage) == math.inf
    for seconds in (0.002, 0.2, 0.002):
        times.add(stage, seconds)
    assert times.expected_s(stage) == pytest.approx(0.18)
    for _ in range(60):
        times.add(stage, 0.002)
    assert times.expected_s(stage) == 0.002
    assert times.expected_s(Stage(2, 3)) == times.expected_s(Stage(1, -1)) == math.inf


def test_those_that_did_not_run_for_longest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_times, "_MOST_STAGES", 3)
    times = StageTimes()
    for layer in (0, 1, 2, 0, 3):
        times.add(Stage(1, layer), 0.001)
    assert [times.expected_s(Stage(1, layer)) < 1 for layer in range(4)] == [True, False, True, True]
