"""For tests over real sockets."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import trio


async def until(condition: Callable[[], bool]) -> None:
    """Wait until it holds; TooSlowError after 20 s."""
    with trio.fail_after(20):
        while not condition():  # noqa: ASYNC110 - what happens in Hypercorn's tasks cannot wake us
            await trio.sleep(0.01)


def reset_when_closed(own: trio.socket.SocketType) -> None:
    """Let closing send a RST: what is under way is lost, and the other end hears of an error."""
    own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def n_descriptors() -> int:
    """That this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
