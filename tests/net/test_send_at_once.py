"""What a peer says leaves before anybody else has a turn, as far as the kernel takes it; the rest follows in order."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from swarmnode.net import secure
from swarmnode.net.tcp import TcpStream, TcpTransport
from swarmnode.wire.messages import Experts, Rows
from tests.net.nodes import MODEL, SERVER, dial_from, endpoint, serve_on

N_ROWS, N_EMBD = 10, 2048
BODY = bytes(range(256)) * (N_ROWS * N_EMBD * 2 // 256)
"""40 KB: less than a receiver takes before it has read anything."""


class Writes:
    """Counts what `send_now` sends, of which it takes `most` bytes at a time."""

    def __init__(self, patch: pytest.MonkeyPatch, most: int = 1 << 30) -> None:
        self.sizes: list[int] = []
        send_now = TcpStream.send_now

        def counted(stream: TcpStream, data: bytes | bytearray | memoryview) -> int:
            self.sizes.append(send_now(stream, memoryview(data)[:most]))
            return self.sizes[-1]

        patch.setattr(TcpStream, "send_now", counted)


async def sizes_of_a_request(writes: Writes) -> list[int]:
    """Those of its writes before there was a checkpoint; its reply is looked at."""
    async with trio.open_nursery() as nursery:
        address = await serve_on(nursery, TcpTransport(), endpoint(SERVER), host="127.0.0.1", port=0)
        peer = await dial_from(nursery, TcpTransport(), address)
        await trio.testing.wait_all_tasks_blocked(0.01)
        writes.sizes.clear()
        message = Experts(MODEL, 1, "experts", "f16", N_ROWS, 1)
        asked = peer.begin(message, (BODY, bytes(6)))
        at_once = list(writes.sizes)
        assert asked is not None
        reply, body = await asked.reply()
        assert isinstance(reply, Rows)
        assert body == BODY
        nursery.cancel_scope.cancel()
    return at_once


async def test_several_writes_without_a_turn_between(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = await sizes_of_a_request(Writes(monkeypatch))
    assert len(sizes) > 1
    assert sum(sizes) > len(BODY)


async def test_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secure, "_WRITES_AT_ONCE", 1)
    sizes = await sizes_of_a_request(Writes(monkeypatch))
    assert len(sizes) == 1
    assert sum(sizes) < len(BODY)


@pytest.mark.parametrize("most", [0, 1, 1000, 16_000])
async def test_what_the_kernel_does_not_take_follows(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = await sizes_of_a_request(Writes(monkeypatch, most))
    assert sum(sizes) < len(BODY)
