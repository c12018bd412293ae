"""Bodies in arrival: how many bytes, and for how long."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import trio
import trio.testing
from starlette.exceptions import HTTPException
from starlette.requests import Request

from swarmnode.api.body import Bodies
from swarmnode.config import ApiConfig
from swarmnode.errors import UsageError

CONFIG = ApiConfig(arriving_bytes=1000, short_body_bytes=100, body_wait_s=10, body_bytes_per_s=100)


class Client:
    """Sends a body in pieces."""

    def __init__(self) -> None:
        self.send, self._pieces = trio.open_memory_channel[bytes](100)

    def request(self) -> Request:
        return Request({"type": "http", "method": "POST", "headers": [], "path": "/"}, self._receive)

    async def _receive(self) -> Any:
        try:
            return {"type": "http.request", "body": await self._pieces.receive(), "more_body": True}
        except trio.EndOfChannel:
            return {"type": "http.request", "body": b"", "more_body": False}


class Reader:
    """Reads one, and works on it until told."""

    def __init__(self, bodies: Bodies, client: Client) -> None:
        self._bodies = bodies
        self._client = client
        self.body: bytes | None = None
        self.status = 0
        self.done = trio.Event()

    async def run(self) -> None:
        try:
            async with self._bodies.read(self._client.request(), 800) as self.body:
                await self.done.wait()
        except HTTPException as error:
            self.status = error.status_code
        except UsageError:
            self.status = 400


async def test_for_a_short_body_the_longest_in_arrival_goes() -> None:
    bodies = Bodies(CONFIG)
    clients = [Client() for _ in range(3)]
    readers = [Reader(bodies, client) for client in clients]
    async with trio.open_nursery() as nursery:
        for reader in readers:
            nursery.start_soon(reader.run)
        for client, n_bytes in zip(clients, (700, 200, 150), strict=True):
            await client.send.send(b"a" * n_bytes)
            await trio.testing.wait_all_tasks_blocked()
        assert [reader.status for reader in readers] == [503, 0, 0]
        assert bodies.n_bytes == 350
        for client in clients[1:]:
            client.send.close()
        await trio.testing.wait_all_tasks_blocked()
        assert [reader.body for reader in readers[1:]] == [b"a" * 200, b"a" * 150]
        assert bodies.n_bytes == 350  # until nobody works on them any more
        late = Client()
        await late.send.send(b"a" * 700)
        last = Reader(bodies, late)
        await last.run()
        assert last.status == 503  # those that have come may stay
        short = Client()
        await short.send.send(b"a" * 100)
        short.send.close()
        one_more = Reader(bodies, short)
        nursery.start_soon(one_more.run)
        await trio.testing.wait_all_tasks_blocked()
        assert one_more.body == b"a" * 100  # a short one always gets in
        one_more.done.set()
        for reader in readers:
            reader.done.set()
    assert bodies.n_bytes == 0


async def test_a_body_has_to_make_progress() -> None:
    bodies = Bodies(CONFIG)
    client = Client()
    reader = Reader(bodies, client)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader.run)
        for _ in range(
            4
        ):  # 50 bytes a second would do for ever at half the pace that is asked for, 10 s of grace
            await client.send.send(b"a" * 100)
            await trio.sleep(2)
        assert reader.status == 0
        began_s = trio.current_time()
        while not reader.status:
            await client.send.send(b"a")
            await trio.sleep(0.5)
        assert reader.status == 408
        assert trio.current_time() - began_s < CONFIG.body_wait_s
    assert bodies.n_bytes == 0


async def test_one_that_is_too_long_or_whose_client_has_gone_takes_no_room() -> None:
    bodies = Bodies(CONFIG)
    client = Client()
    reader = Reader(bodies, client)
    await client.send.send(b"a" * 801)
    await reader.run()
    assert reader.status == 400
    with suppress(trio.Cancelled), trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Reader(bodies, Client()).run)
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
    assert bodies.n_bytes == 0


@pytest.mark.parametrize(("n_bytes", "status"), [(800, 0), (0, 0)])
async def test_a_body_that_comes_in_time(n_bytes: int, status: int) -> None:
    client = Client()
    await client.send.send(b"a" * n_bytes)
    client.send.close()
    reader = Reader(Bodies(CONFIG), client)
    reader.done.set()
    await reader.run()
    assert (reader.status, reader.body) == (status, b"a" * n_bytes)
