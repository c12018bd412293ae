"""The owner's socket: who may open it, what it takes, and what happens when nobody is there."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from swarmnode.errors import ConnectionLostError, UsageError
from swarmnode.net import control_socket
from swarmnode.net.control_socket import MAX_LINE_BYTES, ask_control, serve_control, short_name

pytestmark = pytest.mark.real_time


async def echo(request: dict[str, Any]) -> dict[str, Any]:
    if "refuse" in request:
        raise UsageError("not that")
    return {"asked": request}


@asynccontextmanager
async def served(path: Path) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_control, path, echo)
        yield
        nursery.cancel_scope.cancel()


async def asked(path: Path, request: dict[str, Any]) -> dict[str, Any]:
    return await trio.to_thread.run_sync(ask_control, path, request)


async def raw(path: Path, data: bytes) -> bytes:
    """What comes back for bytes that are not those of `ask_control`."""

    def talk() -> bytes:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream, short_name(path) as name:
            stream.connect(name)
            stream.sendall(data)
            stream.shutdown(socket.SHUT_WR)
            return b"".join(iter(partial(stream.recv, 4096), b""))

    return await trio.to_thread.run_sync(talk)


async def test_only_the_owner_may_open_it_and_it_goes_with_the_node(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    async with served(path):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert await asked(path, {"do": "x", "n": [1]}) == {"asked": {"do": "x", "n": [1]}}
        with pytest.raises(UsageError, match="not that"):
            await asked(path, {"refuse": 1})
    assert os.listdir(tmp_path) == []


async def test_what_a_crash_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
        left.bind(str(path))
    with pytest.raises(ConnectionLostError, match=r"no node runs in .*same --home DIR"):
        await asked(path, {})
    async with served(path):
        assert await asked(path, {}) == {"asked": {}}


@pytest.mark.parametrize("data", [b"", b"\n", b"nonsense\n", b"[1]\n", b"\xff\n", b"[" * 5000 + b"\n"])
async def test_nonsense_is_told_and_others_go_on(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    async with served(path):
        assert b"one JSON object in one line" in await raw(path, data)
        assert await asked(path, {}) == {"asked": {}}


async def test_a_line_without_end_is_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    async with served(path):
        with suppress(OSError):  # it hangs up on whoever goes on sending
            await raw(path, b"x" * (64 * MAX_LINE_BYTES))
        assert await asked(path, {}) == {"asked": {}}


async def test_folders_with_long_names(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    async with served(folder / "control.sock"):
        assert await asked(folder / "control.sock", {}) == {"asked": {}}


async def test_a_system_without_unix_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_socket, "HAS_UNIX_SOCKETS", False)
    with pytest.raises(UsageError, match="Unix sockets"):
        await serve_control(tmp_path / "s", echo)
    with pytest.raises(UsageError, match="Python on Windows lacks"):
        ask_control(tmp_path / "s", {})


async def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"control\.sock: No such file"):
        await serve_control(tmp_path / "no" / "control.sock", echo)
    with pytest.raises(ConnectionLostError, match="no node runs"):
        await asked(tmp_path / "no" / "control.sock", {})
