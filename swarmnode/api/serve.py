"""Runs the application on Hypercorn's trio worker."""

from __future__ import annotations

import logging
import socket
from functools import partial
from typing import Any, cast

import trio
from hypercorn.config import Config as HypercornConfig
from hypercorn.config import Sockets
from hypercorn.trio import serve as hypercorn_serve
from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from swarmnode.config import ApiConfig

log = logging.getLogger(__name__)

HANG_UP = "swarmnode.hang_up"
"""An extension in a request's scope: an async function that ends its connection, also while `send` waits in a shield.

What Hypercorn calls when an application has ended, it does while ours has not: what waits to be sent is dropped.
"""

CAN_TIME_OUT = hasattr(socket, "TCP_USER_TIMEOUT")
"""Linux and Android. Elsewhere a client that stalls keeps its connection, and one piece of its answer, for ever."""


async def run(
    app: Starlette,
    listener: trio.SocketListener,
    *,
    stalled_s: float = ApiConfig.stalled_s,
    unsent_bytes: int = ApiConfig.unsent_bytes,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve `app` on a listening socket until cancelled.

    The socket is bound by the caller: a port that is taken is then an error before anything is loaded, and port 0
    can be asked for. A client that takes nothing of its answer for `stalled_s` seconds is disconnected.
    """
    config = _OneSocket(listener.socket)
    if CAN_TIME_OUT:  # Hypercorn shields what it sends from every deadline; accepted sockets inherit this
        listener.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(stalled_s * 1e3))
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        # Bounds what waits in the kernel behind what is on its way, not the latter: bulk stays as fast.
        listener.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, unsent_bytes)
    config.accesslog = None
    config.errorlog = log
    config.graceful_timeout = 1.0
    # Hypercorn keeps a connection that its client has closed just as long, if it was closed while the answer ended.
    config.keep_alive_timeout = 5.0
    config.include_server_header = False
    # Starlette's and Hypercorn's types of the same ASGI callable differ.
    await hypercorn_serve(
        cast(Any, partial(_with_hang_up, app)),
        config,
        shutdown_trigger=trio.sleep_forever,
        task_status=_Started(task_status),
    )


async def _with_hang_up(app: Starlette, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        scope["extensions"][HANG_UP] = partial(send, cast(Any, None))
    await app(scope, receive, send)


class _OneSocket(HypercornConfig):
    """Hypercorn's configuration with a socket that is bound already. (`fd://N` is for POSIX only.)"""

    def __init__(self, bound: trio.socket.SocketType) -> None:
        super().__init__()
        self._bound = bound

    def create_sockets(self) -> Sockets:
        """A duplicate: Hypercorn closes it, the caller its own. `socket.fromfd` duplicates on Windows too."""
        bound = self._bound
        return Sockets([], [socket.fromfd(bound.fileno(), bound.family, bound.type)], [])


class _Started:
    """Hypercorn reports its binds; our callers only wait for the start."""

    def __init__(self, inner: trio.TaskStatus[None]) -> None:
        self._inner = inner

    def started(self, binds: list[str] | None = None) -> None:
        self._inner.started()
