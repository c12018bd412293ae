"""Tells how many experts workers answer for, once that has come to rest.

Each is proven by itself, long after the line that says that its worker has come.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from swarmnode.services.reports import CoverageChanged

REST_S = 5.0
"""Coverage that has been the same for so long is told: so a line comes every 10 s at most."""


async def tell_coverage(
    coverage: Callable[[], tuple[int, int]], report: Callable[[CoverageChanged], None]
) -> None:
    """Look every REST_S, for ever; `coverage` is how many experts are covered, and how many there are."""
    told = seen = (0, coverage()[1])
    while True:
        await trio.sleep(REST_S)
        before, seen = seen, coverage()
        if seen == before and seen != told:
            told = seen
            report(CoverageChanged(*seen))
