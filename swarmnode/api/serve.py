"""Runs the application on a listening socket."""

from __future__ import annotations

import logging
import socket
from functools import partial
from typing import Any, cast

import trio
from hypercorn.config import Config as HypercornConfig
from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from swarmnode.api.connection import Serving
from swarmnode.api.connections import Connections, most_connections
from swarmnode.config import ApiConfig

log = logging.getLogger(__name__)

HANG_UP = "swarmnode.hang_up"
"""An extension in a request's scope: an async function that ends its connection, also while `send` waits.

What Hypercorn calls when an application has ended, it does while ours has not: what waits to be sent is dropped.
"""

CAN_TIME_OUT = hasattr(socket, "TCP_USER_TIMEOUT")
"""Linux and Android. Elsewhere a client that stalls keeps its connection, and one piece of its answer, for ever."""


async def run(
    app: Starlette,
    listener: trio.SocketListener,
    *,
    config: ApiConfig = ApiConfig(),  # noqa: B008 - frozen
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve `app` on a listening socket until cancelled.

    The socket is bound by the caller: a port that is taken is then an error before anything is loaded, and port 0
    can be asked for. A client that takes nothing of its answer for `config.stalled_s` seconds is disconnected.
    """
    if CAN_TIME_OUT:  # HTTP/1.1 has no other way to notice it; accepted sockets inherit this
        listener.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(config.stalled_s * 1e3))
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        # Bounds what waits in the kernel behind what is on its way, not the latter: bulk stays as fast.
        listener.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, config.unsent_bytes)
    hypercorn = HypercornConfig()
    hypercorn.accesslog = None
    hypercorn.errorlog = log
    hypercorn.include_server_header = False
    serving = Serving(partial(_with_hang_up, app), hypercorn, config)
    connections = Connections(serving, most_connections(config.max_connections, config.descriptor_share))
    task_status.started()
    await connections.serve(listener)


async def _with_hang_up(app: Starlette, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        scope["extensions"][HANG_UP] = partial(send, cast(Any, None))
    await app(scope, receive, send)
