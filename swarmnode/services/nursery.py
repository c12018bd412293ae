"""A nursery whose single failure comes out as itself: callers catch RemoteError, not a group that holds one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from swarmnode.errors import first_error


@asynccontextmanager
async def open_flat_nursery() -> AsyncIterator[trio.Nursery]:
    """Like `trio.open_nursery`; when tasks fail, the first real error is raised alone.

    The rest of the group stays reachable as its `__context__`. Cancellation passes through untouched.
    """
    try:
        async with trio.open_nursery() as nursery:
            yield nursery
    except BaseExceptionGroup as group:
        errors = group.split(trio.Cancelled)[1]
        if errors is None:
            raise
        raise first_error(errors) from group
