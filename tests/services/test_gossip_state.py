"""The one word for what a node does, by its record."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from swarmnode.gossip.records import ModelHoldings
from swarmnode.services.gossip_state import GossipState
from swarmnode.weights.slices import ExpertRange

OURS, ANOTHER = bytes(32), bytes([1]) * 32
SOME = (ExpertRange(0, 0, 2),)


def holds(model: bytes, serving: tuple[ExpertRange, ...] = (), max_rows: int = 1) -> ModelHoldings:
    return ModelHoldings(model, 2, 4, serving, (), max_rows, seeds=False)


@pytest.mark.parametrize(
    ("models", "word"),
    [
        ((), "idle"),
        ((holds(OURS, SOME),), "serving"),
        ((holds(OURS),), "idle"),
        ((holds(OURS, max_rows=0),), "paused"),
        ((holds(OURS), holds(ANOTHER, SOME)), "idle"),
        ((holds(OURS, max_rows=0), holds(ANOTHER, SOME)), "paused"),
        ((holds(ANOTHER, SOME),), "other model"),
    ],
)
def test_a_worker_that_pauses_is_of_this_model(models: tuple[ModelHoldings, ...], word: str) -> None:
    """It says that it offers nothing of our model, and was once shown as one of another."""
    nothing: Any = None
    market: Any = SimpleNamespace(manifest=SimpleNamespace(model_id=OURS))
    state = GossipState(nothing, nothing, nothing, nothing, nothing, market, nothing, lambda: 0.0)
    record: Any = SimpleNamespace(leaving=False, state=SimpleNamespace(models=models))
    assert state.standing(record) == word
