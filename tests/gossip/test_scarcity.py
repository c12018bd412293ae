"""What another replica is worth, and how many each expert should have."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.gossip.scarcity import scarcity, target_replicas
from tests.gossip.market import CONFIG


def test_scarcity_goes_by_replicas_below_two_and_by_demand_above() -> None:
    replicas = np.array([0, 0.5, 1, 1.5, 2, 2, 3], np.float32)
    hot = np.array([0, 0, 0, 0, 100, 1, 100], np.float32)
    values = scarcity(replicas, hot, CONFIG)
    assert list(np.argsort(-values)[:4]) == [0, 1, 2, 3]
    assert values[4] > values[6] > values[5]


@given(st.lists(st.floats(0, 100, width=32), min_size=1, max_size=50), st.floats(0, 50, allow_nan=False))
def test_targets_have_the_mean_that_is_there(demand: list[float], mean: float) -> None:
    target = target_replicas(np.array(demand, np.float32), mean, CONFIG)
    assert float(target.mean()) == pytest.approx(mean, rel=1e-3, abs=1e-3)
    assert float(target.min()) >= min(2.0, mean) * 0.999 - 1e-6
