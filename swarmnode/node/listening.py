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
from swarmnode.net.port_file import read_port, write_host, write_port
from swarmnode.net.transport import Transport
from swarmnode.node.common import NodeOptions
from swarmnode.wire.endpoint import Endpoint

log = logging.getLogger(__name__)


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
        if port == 0 and (last := read_port(kept)):
            try:
                again: list[tuple[str, int]] = await nursery.start(partial(listen, port=last))
                _keep(kept, host, last)
                return again
            except OSError as error:
                log.warning(
                    "port %d, where others know this node, cannot be had (%s): it listens at another one",
                    last,
                    error.strerror,
                )
        places: list[tuple[str, int]] = await nursery.start(partial(listen, port=port))
    except (OSError, UnicodeError) as error:  # UnicodeError: no host name, says the encoder of host names
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise UsageError(f"cannot listen on {host} port {port}: {reason}; give another --listen") from error
    _keep(kept, host, places[0][1])
    return places


def _keep(path: Path, host: str, port: int) -> None:
    try:
        write_port(path, port)
        write_host(path, host)
    except OSError as error:
        log.warning("the next start may listen elsewhere: %s cannot be written: %s", path, error.strerror)
