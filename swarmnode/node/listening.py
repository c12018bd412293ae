"""Accepting nodes; at the port of the last run, where the operator left the choice to us.

Others remember where they met this node, and invitations name it: both hold only as long as the port stays.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import trio

from swarmnode.errors import UsageError
from swarmnode.net.links import Handlers, serve
from swarmnode.net.peer import OnPeer
from swarmnode.net.transport import Transport
from swarmnode.node.common import NodeOptions
from swarmnode.state_file import read_small, replace_small
from swarmnode.wire.endpoint import Endpoint

log = logging.getLogger(__name__)

MIN_PORT, MAX_PORT = 1024, 65_535
"""A system that is asked for any port gives none below."""
MAX_PORT_FILE_BYTES = 16


async def listen_for_nodes(
    nursery: trio.Nursery,
    options: NodeOptions,
    transport: Transport,
    endpoint: Endpoint,
    handlers: Handlers,
    on_peer: OnPeer,
) -> list[tuple[str, int]]:
    """Accept nodes at `options.listen`, which must be set; returns the places. UsageError if that cannot be.

    Port 0 is the port of the last run, or any free one if there was none or somebody else has it now.
    """
    assert options.listen is not None
    host, port = options.listen
    listen = partial(serve, transport, endpoint, handlers=handlers, host=host, on_peer=on_peer)
    kept = options.folders.port_file
    try:
        if port == 0 and (last := _read(kept)):
            try:
                again: list[tuple[str, int]] = await nursery.start(partial(listen, port=last))
                return again
            except OSError as error:
                log.info(
                    "port %d, where others know this node, is taken (%s): another one", last, error.strerror
                )
        places: list[tuple[str, int]] = await nursery.start(partial(listen, port=port))
    except (OSError, UnicodeError) as error:  # UnicodeError: no host name, says the encoder of host names
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise UsageError(f"cannot listen on {host} port {port}: {reason}; give another --listen") from error
    if port == 0:
        _write(kept, places[0][1])
    return places


def _read(path: Path) -> int | None:
    """The port in the file, None if there is none: whatever is wrong with it, another port does as well."""
    try:
        text = read_small(path, MAX_PORT_FILE_BYTES).strip()
    except OSError:
        return None
    port = int(text) if text.isdigit() else 0
    return port if MIN_PORT <= port <= MAX_PORT else None


def _write(path: Path, port: int) -> None:
    try:
        replace_small(path, b"%d\n" % port)
    except OSError as error:
        log.warning("the next start will listen elsewhere: %s cannot be written: %s", path, error.strerror)
