"""How a node let us down lately, how long it pauses for that, and when that is forgiven. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from swarmnode.config import DispatchConfig


@dataclass(eq=False)
class Past:
    """Of one node. Outlives connections for `DispatchConfig.quarantine_s`."""

    until_s: float = -math.inf
    """It gets no rows before this: it said so, or it is its pause."""
    in_vain: int = 0
    """Layers in a row of which it left something undone. Those that were under way when a pause began do not count."""
    strikes: int = 0
    """Pauses that are not forgiven: each is twice the one before."""
    good_s: float = 0.0
    """Seconds of work since the last strike or the last one that was forgiven."""
    seen_s: float = -math.inf
    """When it last worked or did not."""
    is_suspect: bool = False
    reason: str = ""
    ends_s: float = math.inf
    """When all that is forgotten."""

    def was_in_vain(self, now_s: float) -> bool:
        """A layer brought nothing. Whether that is news: not of work that was under way when a pause began."""
        if self.until_s > now_s:
            return False
        self.in_vain += 1
        self.seen_s = now_s
        return True

    def pause(self, now_s: float, config: DispatchConfig) -> None:
        """No rows for `probe_tick_s`, twice as long for each strike; what it worked since the last one is void."""
        pause_s = config.probe_tick_s * 2.0**self.strikes
        self.until_s = now_s + min(pause_s, config.suspect_max_s)
        if pause_s < config.suspect_max_s:
            self.strikes += 1
        self.good_s, self.seen_s = 0.0, now_s

    def worked(self, now_s: float, config: DispatchConfig) -> None:
        """It did all of a layer that it was asked for.

        The time since the layer before is what counts, if not too much of it: how many answers there were is up to the
        node, and how many layers to the model.
        """
        self.in_vain = 0
        if not self.strikes:
            return
        self.good_s += min(now_s - self.seen_s, config.work_gap_s)
        self.seen_s = now_s
        if self.good_s >= config.forgiven_after_s:
            self.strikes -= 1
            self.good_s = 0.0
