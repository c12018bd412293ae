"""The page at `/` of a node's HTTP API, and the events that keep it up to date."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DashboardConfig:
    """What services/dashboard_view and services/throughput look at, and how api/events_route tells it."""

    interval_s: float = 1.0
    """Between two looks at the swarm, however many pages are open: a look at 512 nodes takes milliseconds on trio's
    thread, for which rows wait."""
    max_nodes: int = 512
    """Nodes that a page is told of, connected ones first: 200 KB of JSON with what each holds."""
    relist_s: float = 5.0
    """How long a choice of them stands where more are known: to put 10,000 in order takes 20 ms."""
    max_readers: int = 16
    """Pages that are kept up to date at a time; more are refused with status 429."""
    stalled_s: float = 20.0
    """A page that takes nothing of what is sent to it for so long is disconnected; so long, one event waits for it."""
    sample_s: float = 1.0
    """Between two points of the curves over time."""
    n_samples: int = 600
    """Points that are kept: ten minutes, 6 KB of JSON."""
    rate_samples: int = 5
    """A worker's rows/s are the mean of so many samples: a single one jumps between nothing and a prompt."""
