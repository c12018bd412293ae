"""Events over the application in memory: a snapshot, then changes; readers that are slow, stalled or many."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

import httpx
import pytest
import trio
from starlette.applications import Starlette
from starlette.routing import Route

from swarmnode.api import serve
from swarmnode.api.events_route import EventsRoute
from swarmnode.config import DashboardConfig
from swarmnode.services.runners import Inline
from swarmnode.testing.many_nodes import ManyNodes
from swarmnode.testing.page_server import page_app
from tests.api.kit import until

CONFIG = DashboardConfig()


@dataclass
class Reader:
    """One page. `takes`: what it does while an event is handed to it."""

    app: Starlette
    takes: Callable[[], Any] | None = None
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    text: str = ""
    n_hung_up: int = 0
    has_ended: bool = False
    gone: trio.Event = field(default_factory=trio.Event)

    async def run(self) -> None:
        async def hang_up() -> None:
            self.n_hung_up += 1

        scope = {
            "type": "http",
            "method": "GET",
            "path": "/api/events",
            "query_string": b"",
            "headers": [(b"host", b"localhost")],
            "client": ("127.0.0.1", 1),
            "extensions": {serve.HANG_UP: hang_up},
        }
        await self.app(scope, self._receive, self._send)
        self.has_ended = True

    async def _receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await trio.lowlevel.checkpoint()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            return
        if self.takes is not None and self.text:
            await self.takes()
        self.text += message.get("body", b"").decode()

    @property
    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """Names and values so far."""
        found = []
        for block in self.text.split("\n\n"):
            fields = dict(line.split(": ", 1) for line in block.splitlines())
            if "event" in fields:
                value = json.loads(fields["data"])
                assert fields["id"] == str(value["number"])
                found.append((fields["event"], value))
        return found

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.events]


@asynccontextmanager
async def reading(*readers: Reader) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        for reader in readers:
            nursery.start_soon(reader.run)
        yield
        nursery.cancel_scope.cancel()


def app_of(nodes: ManyNodes, config: DashboardConfig = CONFIG) -> Starlette:
    return page_app(nodes.view, config, threads=Inline())


def route_of(app: Starlette) -> EventsRoute:
    (found,) = [item for item in app.routes if isinstance(item, Route) and item.path == "/api/events"]
    route = cast(Any, found.endpoint).__self__
    assert isinstance(route, EventsRoute)
    return route


async def test_a_snapshot_then_what_changed() -> None:
    nodes = ManyNodes(2, 8, 3)
    nodes.step()
    reader = Reader(app_of(nodes))
    async with reading(reader):
        await trio.sleep(0.5)
        assert reader.status == 200
        assert reader.headers["content-type"].startswith("text/event-stream")
        assert reader.headers["cache-control"] == "no-store"
        assert "content-length" not in reader.headers
        assert reader.names == ["snapshot"]
        nodes.step()
        await trio.sleep(1)
    (_, first), (name, delta) = reader.events
    assert set(first) == {"number", "model", "node", "now", "layers", "nodes", "history"}
    assert len(first["nodes"]) == 3
    assert first["history"]["n"] == 1
    assert name == "delta"
    assert delta["now"]["n"] == 2
    assert "model" not in delta
    assert "node" not in delta


async def test_the_rate_is_bounded_and_the_work_is_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = ManyNodes(2, 8, 3)
    n_looks = 0
    look = nodes.view.look

    def counted() -> Any:
        nonlocal n_looks
        n_looks += 1
        nodes.step(0.01)
        return look()

    monkeypatch.setattr(nodes.view, "look", counted)
    readers = [Reader(app) for app in [app_of(nodes)] for _ in range(5)]
    async with reading(*readers):
        await trio.sleep(10.5)
    assert n_looks == 11
    for reader in readers:
        assert reader.names == ["snapshot"] + ["delta"] * 10
        assert reader.events[1:] == readers[0].events[1:]


async def test_nobody_reads_nobody_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = ManyNodes(2, 8, 3)
    app = app_of(nodes)
    first = Reader(app)
    async with reading(first):
        await trio.sleep(0.5)
        first.gone.set()
        await trio.sleep(0.1)
        assert first.has_ended
    monkeypatch.setattr(nodes.view, "look", lambda: pytest.fail("somebody looks"))
    await trio.sleep(100)


async def test_a_slow_reader_gets_a_snapshot_instead_of_what_it_missed() -> None:
    nodes = ManyNodes(2, 8, 3)
    app = app_of(nodes)
    n_taken = 0

    async def slowly() -> None:
        nonlocal n_taken
        n_taken += 1
        await trio.sleep(3.5 if n_taken == 2 else 0)

    slow, quick = Reader(app, slowly), Reader(app)
    async with reading(slow, quick):
        for _ in range(8):
            await trio.sleep(1)
            nodes.step()
    assert set(quick.names[1:]) == {"delta"}
    assert slow.names[:3] == ["snapshot", "delta", "snapshot"]
    numbers = [value["number"] for _, value in slow.events]
    assert numbers == sorted(set(numbers))


async def test_a_stalled_reader_is_dropped_and_costs_one_event() -> None:
    nodes = ManyNodes(2, 8, 3)
    app = app_of(nodes)
    stalled = Reader(app, trio.sleep_forever)
    async with reading(stalled):
        for _ in range(round(CONFIG.stalled_s) - 1):
            await trio.sleep(1)
            nodes.step()
        assert not stalled.has_ended
        assert stalled.names == []  # it holds one event, whatever happened meanwhile
        await trio.sleep(CONFIG.stalled_s / 2)
        assert stalled.has_ended
        assert stalled.n_hung_up == 1


async def test_readers_are_bounded_and_places_come_free() -> None:
    app = app_of(ManyNodes(2, 8, 3), replace(CONFIG, max_readers=2))
    first, second, third = Reader(app), Reader(app), Reader(app)
    async with reading(first, second):
        await trio.sleep(0.5)
        await third.run()
        assert third.status == 429
        assert third.headers["retry-after"] == "5"
        assert "2 pages" in third.text
        first.gone.set()
        await trio.sleep(0.1)
        fourth = Reader(app)
        async with reading(fourth):
            await trio.sleep(0.5)
            assert fourth.names[0] == "snapshot"


async def test_head_takes_no_place() -> None:
    transport = httpx.ASGITransport(app=app_of(ManyNodes(2, 8, 3)))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.head("/api/events")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")


@pytest.mark.real_time
async def test_over_a_socket_a_page_that_stops_reading_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = ManyNodes(2, 8, 3)
    config = replace(CONFIG, interval_s=0.01, stalled_s=0.5)
    look = nodes.view.look

    def all_new() -> Any:  # every change is a whole snapshot, so that the kernel's buffers fill up soon
        return {
            **look(),
            "now": {"n": trio.current_time(), "filler": "x" * 300_000 + str(trio.current_time())},
        }

    monkeypatch.setattr(nodes.view, "look", all_new)
    app = page_app(nodes.view, config, threads=Inline())
    route = route_of(app)
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener, trio.open_nursery() as nursery:
        await nursery.start(serve.run, app, listener)
        port = listener.socket.getsockname()[1]
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        async with stream:
            await stream.send_all(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")
            assert route.n_readers == 1
            await until(lambda: route.n_readers == 0)
            with (
                trio.fail_after(20),
                suppress(trio.BrokenResourceError),
            ):  # what the kernel kept, then its end
                while await stream.receive_some(2**20):
                    pass
        nursery.cancel_scope.cancel()
