"""A Unix socket through which the owner of a running node talks to it: a JSON object in, a JSON object out.

The socket lies in the node's data folder, and only its owner may open it (mode 0600): there is nothing else to prove.
One request a connection. docs/decisions/0035-control-socket.md has the reasons.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import trio

from swarmnode.errors import ConnectionLostError, LocalError, UsageError

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 64 * 1024
ANSWER_TIMEOUT_S = 10.0
"""Longest time of a request on either side: nothing that is asked waits for others."""
MAX_PATH_BYTES = 103
"""Of a Unix socket's path, on every system that has them (Linux takes 107)."""
HAS_UNIX_SOCKETS = hasattr(socket, "AF_UNIX") and sys.platform != "win32"

Answer = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


async def serve_control(
    path: Path, answer: Answer, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Answer whoever may open the socket, until cancelled. `answer` may raise LocalError: its text is the answer.

    What an earlier run left at the path is replaced: the caller holds the folder's lock. UsageError if there can be no
    such socket, which says why.
    """
    if not HAS_UNIX_SOCKETS:
        raise UsageError("this system's Python has no Unix sockets")
    listening = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with short_name(path) as name:
            with suppress(FileNotFoundError):
                os.unlink(name)
            await listening.bind(name)
            os.chmod(name, 0o600)  # before `listen`: until then nobody can connect
        listening.listen(8)
    except OSError as error:
        listening.close()
        raise UsageError(f"{path}: {error.strerror or error}") from error
    task_status.started()
    try:
        await trio.serve_listeners(partial(_serve, answer), [trio.SocketListener(listening)])
    finally:
        with suppress(OSError):
            os.unlink(path)


async def _serve(answer: Answer, stream: trio.SocketStream) -> None:
    """One request. Whoever breaks off, or asks nonsense, ends this connection and nothing else."""
    async with stream:
        with trio.move_on_after(ANSWER_TIMEOUT_S), suppress(trio.BrokenResourceError):
            line = await _line(stream)
            try:
                request = json.loads(line)
                if not isinstance(request, dict):
                    raise ValueError("no object")
                reply = await answer(request)
            except (ValueError, RecursionError) as error:
                reply = {"error": f"a request is one JSON object in one line: {error}"}
            except LocalError as error:
                reply = {"error": str(error)}
            await stream.send_all(json.dumps(reply).encode() + b"\n")


async def _line(stream: trio.SocketStream) -> bytes:
    data = b""
    while not data.endswith(b"\n") and len(data) <= MAX_LINE_BYTES:
        piece = await stream.receive_some(4096)
        if not piece:
            break
        data += piece
    return data


def ask_control(path: Path, request: dict[str, Any], timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
    """The answer of the node that listens at this path. Blocks.

    ConnectionLostError if none runs, UsageError with what the node says against the request.
    """
    if not HAS_UNIX_SOCKETS:
        raise UsageError(
            "this needs Unix sockets, which Python on Windows lacks: stop a node with Ctrl-C, "
            "and start it again with other options"
        )
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream, short_name(path) as name:
            stream.settimeout(timeout_s)
            stream.connect(name)
            stream.sendall(json.dumps(request).encode() + b"\n")
            data = b""
            while piece := stream.recv(4096):
                data += piece
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise ConnectionLostError(
            f"no node runs in {path.parent}; a node with a --home DIR of its own is asked with the same --home DIR"
        ) from error
    except OSError as error:
        raise ConnectionLostError(f"{path}: {error.strerror or error}") from error
    return _checked(path, data)


def _checked(path: Path, data: bytes) -> dict[str, Any]:
    try:
        reply = json.loads(data)
    except ValueError:
        reply = None
    if not isinstance(reply, dict):
        raise ConnectionLostError(f"{path}: the node has ended, or is another program")
    if "error" in reply:
        raise UsageError(str(reply["error"]))
    return reply


@contextmanager
def short_name(path: Path) -> Iterator[str]:
    """The path as the system's socket calls take it: they know no long ones. OSError if there is no way."""
    if len(os.fsencode(path)) <= MAX_PATH_BYTES:
        yield str(path)
        return
    if not Path("/proc/self/fd").is_dir():
        raise OSError(0, f"the path is longer than {MAX_PATH_BYTES} bytes; choose a shorter --home DIR")
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
