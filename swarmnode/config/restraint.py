"""When a worker steps back, so that its machine stays its owner's."""

from __future__ import annotations

from dataclasses import dataclass

from swarmnode.config.units import MIB


@dataclass(frozen=True)
class RestraintConfig:
    """What a worker leaves to its machine (schedule/restraint, services/steward)."""

    look_s: float = 5.0
    """How often the machine is looked at: a few small files, well under a millisecond."""
    tell_s: float = 1.0
    """How often the person is told how it goes."""
    reserve_share: float = 0.05
    """Memory that stays available: this share of all there is, ..."""
    min_reserve_bytes: int = 256 * MIB
    """... and at least so much, ..."""
    max_reserve_share: float = 0.25
    """... but no more than this share: a phone of 1 GB must be able to lend some."""
    stalled_percent: float = 10.0
    """Share of the last ten seconds in which some process waited for memory (Linux: /proc/pressure/memory, `some
    avg10`): below 1 on a machine that has enough, 10 means that people notice."""
    helpful_share: float = 0.02
    """Of the memory that is available, what a worker must hold for such waits to be its business. Programs also wait
    at limits of their own, or for files, where plenty is free: nobody would be helped by a few experts less."""
    step_share: float = 0.25
    """Of what is held, so much at least is given up at a time."""
    settle_s: float = 20.0
    """Between two steps down: MarketConfig.withdraw_s, freeing, and two averages of ten seconds."""
    calm_s: float = 300.0
    """Without pressure for so long, a step up is tried; the next one as long after it. What was given up has to be
    downloaded again, so this is slow."""
