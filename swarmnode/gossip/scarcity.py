"""What another replica of an expert is worth, and how many each should have: replicas against demand. Pure."""

from __future__ import annotations

import numpy as np

from swarmnode.config import MarketConfig
from swarmnode.gossip.shape import F32


def scarcity(replicas: F32, demand: F32, config: MarketConfig) -> F32:
    """How much another replica is worth, f32 of the same shape: demand over replicas, below two replicas in steps.

    w / (r + 1/2) + 16 max(0, 2 - r), w = demand within [min_weight, max_weight]. With w / (r + 1/2) <= 2 w <= 16 an
    expert nobody has comes before one that somebody fetches, that before one replica, and that before two; from two on
    demand decides, and the replicas of experts become proportional to it.
    """
    weight = np.clip(demand, config.min_weight, config.max_weight)
    value: F32 = (weight / (replicas + 0.5) + 16.0 * np.maximum(2.0 - replicas, 0.0)).astype(np.float32)
    return value


def target_replicas(demand: F32, mean: float, config: MarketConfig) -> F32:
    """f32: how many replicas each expert should have where the mean is `mean`: proportional to demand (within its
    bounds), but two of everything first, as far as that goes. The mean of the targets is `mean`.

    `demand`: f32 of the experts that exist.
    """
    weight = np.clip(demand, config.min_weight, config.max_weight)
    floor = min(2.0, mean)
    low, high = 0.0, mean / float(weight.min()) if mean > 0 else 0.0
    for _ in range(24):
        middle = (low + high) / 2
        if float(np.maximum(floor, middle * weight).mean()) > mean:
            high = middle
        else:
            low = middle
    target: F32 = np.maximum(np.float32(floor), np.float32(low) * weight).astype(np.float32)
    return target
