"""Accepting when there is nothing left to accept with."""

from __future__ import annotations

import errno
from typing import Any

import pytest
import trio
import trio.testing

from swarmnode.net import descriptors as limits
from swarmnode.net.accepting import PAUSE_S, SILENT_S, accept_forever


class Listener:
    """Fails with an error for a while, then has one connection."""

    def __init__(self, number: int, until_s: float) -> None:
        self._number = number
        self._until_s = until_s
        self.ours, self._theirs = trio.testing.memory_stream_pair()

    async def accept(self) -> Any:
        await trio.lowlevel.checkpoint()
        if trio.current_time() < self._until_s:
            raise OSError(self._number, "no more")
        if self._theirs is None:
            await trio.sleep_forever()
        stream, self._theirs = self._theirs, None  # type: ignore[assignment]
        return stream


async def test_without_descriptors_it_waits_and_says_so_rarely(caplog: pytest.LogCaptureFixture) -> None:
    n_handled = 0

    async def handle(stream: Any) -> None:
        nonlocal n_handled
        n_handled += 1

    listener: Any = Listener(errno.EMFILE, trio.current_time() + 1.5 * SILENT_S)
    with trio.move_on_after(1.5 * SILENT_S + 2 * PAUSE_S):
        await accept_forever(listener, handle)
    assert n_handled == 1
    assert await listener.ours.receive_some() == b""  # closed after it was handled
    assert len(caplog.records) == 2
    assert all(record.exc_info is None for record in caplog.records)


async def test_a_broken_listener_is_an_error() -> None:
    listener: Any = Listener(errno.EBADF, float("inf"))
    with pytest.RaisesGroup(OSError):
        await accept_forever(listener, trio.sleep)  # type: ignore[arg-type]


def test_the_limit_is_raised_as_far_as_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    set_to: list[tuple[int, int]] = []
    now = (256, 1024)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: now)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, new: set_to.append(new))
    limits.raise_limit()
    assert set_to == [(1024, 1024)]
    assert limits.most_descriptors() == 256
    now = (10**6, resource.RLIM_INFINITY)
    limits.raise_limit()
    assert len(set_to) == 1
