"""Coverage is told when it has come to rest, once."""

from __future__ import annotations

import trio

from swarmnode.services.coverage_news import REST_S, tell_coverage
from swarmnode.services.reports import CoverageChanged


async def test_what_was_proven_is_told_once_it_rests() -> None:
    """The line of a worker that has just come says 8 of 64, and nothing ever said 64."""
    covered, told = 0, list[CoverageChanged]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tell_coverage, lambda: (covered, 64), told.append)
        await trio.sleep(10 * REST_S)
        assert told == []
        while covered < 64:
            covered += 8
            await trio.sleep(0.9 * REST_S)
        assert told == []
        await trio.sleep(10 * REST_S)
        assert told == [CoverageChanged(64, 64)]
        covered = 0
        await trio.sleep(10 * REST_S)
        assert told[1:] == [CoverageChanged(0, 64)]
        nursery.cancel_scope.cancel()
