"""Accepts connections as long as the process runs, also when it has no descriptor left for one."""

from __future__ import annotations

import errno
import logging
import math
from collections.abc import Awaitable, Callable

import trio

log = logging.getLogger(__name__)

PAUSE_S = 0.1
SILENT_S = 60.0
"""The log says so often at most that there are no descriptors."""
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


async def accept_forever(
    listener: trio.abc.Listener[trio.SocketStream], handle: Callable[[trio.SocketStream], Awaitable[None]]
) -> None:
    """Run `handle` for each connection, and close it afterwards, until cancelled.

    As `trio.serve_listeners`, but where that logs a traceback every 100 ms without descriptors, this logs one line a
    minute. Raises what `handle` raises, and OSError if the listener itself is broken.
    """
    said_s = -math.inf
    async with trio.open_nursery() as nursery:
        while True:
            try:
                stream = await listener.accept()
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                if trio.current_time() - said_s >= SILENT_S:
                    said_s = trio.current_time()
                    log.error("no connection can be accepted: %s (ulimit -n)", error.strerror)
                await trio.sleep(PAUSE_S)
            else:
                nursery.start_soon(_handle, handle, stream)


async def _handle(handle: Callable[[trio.SocketStream], Awaitable[None]], stream: trio.SocketStream) -> None:
    try:
        await handle(stream)
    finally:
        await trio.aclose_forcefully(stream)
