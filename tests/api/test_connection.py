"""Connections of the HTTP API over streams in memory: whatever comes, others go on; who has gone is noticed at once."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

import pytest
import trio
import trio.testing
from hypercorn.config import Config as HypercornConfig
from hypercorn.events import Closed, RawData, Updated
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.worker_context import WorkerContext
from starlette.types import Receive, Scope, Send

from swarmnode.api.connection import Serving
from swarmnode.api.connections import Connections, most_connections
from swarmnode.config import ApiConfig

HERE = ("127.0.0.1", 1)
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
CONFIG = ApiConfig()


class App:
    """Answers at once, or (a path under /wait) when it is told to or the client has gone."""

    def __init__(self) -> None:
        self.n_gone = 0
        self.n_waiting = 0
        self.release = trio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        while (message := await receive())["type"] == "http.request" and message["more_body"]:
            pass
        if scope["path"] == "/wait":
            self.n_waiting += 1
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._hear, receive, nursery.cancel_scope)
                await self.release.wait()
                nursery.cancel_scope.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def _hear(self, receive: Receive, scope: trio.CancelScope) -> None:
        assert (await receive())["type"] == "http.disconnect"
        self.n_gone += 1
        scope.cancel()


class Kit:
    """A server of streams in memory."""

    def __init__(self, app: Any, nursery: trio.Nursery, most: int = 99) -> None:
        hypercorn = HypercornConfig()
        hypercorn.include_server_header = False
        self.connections = Connections(Serving(app, hypercorn, CONFIG), most)
        self._nursery = nursery

    def dial(
        self, pair: Callable[[], Any] = trio.testing.memory_stream_pair, host: str = HERE[0]
    ) -> trio.StapledStream[Any, Any]:
        ours, theirs = pair()
        self._nursery.start_soon(self.connections.handle, theirs, (host, 1), HERE)
        assert isinstance(ours, trio.StapledStream)
        return ours

    async def ask(self, data: bytes) -> bytes:
        """What comes back until the server ends the connection, or for a second."""
        stream = self.dial()
        await stream.send_all(data)
        answer = bytearray()
        with trio.move_on_after(1):
            async for piece in stream:
                answer += piece
        await stream.aclose()
        return bytes(answer)


@asynccontextmanager
async def serving(app: Any, most: int = 99) -> AsyncIterator[Kit]:
    async with trio.open_nursery() as nursery:
        yield Kit(app, nursery, most)
        nursery.cancel_scope.cancel()


def get(*headers: str, path: str = "/", method: str = "GET", body: bytes = b"") -> bytes:
    head = "".join(f"{line}\r\n" for line in (f"{method} {path} HTTP/1.1", "Host: localhost", *headers, ""))
    return head.encode("latin-1") + body


H2C = "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c"
WEBSOCKET = (
    "Connection: Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Key: x3JJHMbDL1EzLkh9GBhXDw==",
    "Sec-WebSocket-Version: 13",
)
CASES = {
    "h2c without settings": (get(*H2C), 200),
    "h2c, settings not base64": (get(*H2C, "HTTP2-Settings: AAA"), 200),
    "h2c, settings with a bad value": (get(*H2C, "HTTP2-Settings: AAT_____"), 200),
    "h2c, good": (get(*H2C, "HTTP2-Settings: AAMAAABkAAQAAP__"), 200),
    "HTTP/2": (PREFACE + bytes(9), 505),
    "HTTP/2, garbage": (PREFACE + b"\xff" * 100, 505),
    "HTTP/3": (b"GET / HTTP/3.0\r\nHost: localhost\r\n\r\n", 505),
    "WebSocket": (get(*WEBSOCKET), 200),
    "WebSocket and bytes": (get(*WEBSOCKET, body=b"\xff" * 200), 200),
    "WebSocket, bad subprotocol": (get(*WEBSOCKET, "Sec-WebSocket-Protocol: \xff"), 200),
    "WebSocket without a key": (get(*WEBSOCKET[:2]), 200),
    "CONNECT": (get(method="CONNECT", path="localhost:80"), 501),
    "garbage": (b"\x00\xff" * 500 + b"\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 500 + b"\r\n\r\n", 400),
    "large head": (get("X: " + "a" * 70_000), 431),
    "two lengths": (get("Transfer-Encoding: chunked", "Content-Length: 5", body=b"0\r\n\r\n"), 200),
    "unknown encoding": (get("Transfer-Encoding: gzip"), 501),
    "negative length": (get("Content-Length: -5"), 400),
    "bad chunk": (get("Transfer-Encoding: chunked", body=b"zz\r\n"), 400),
    "percent": (get(path="/%ff%fe%00/..%2f"), 200),
    "requests ahead": (GET * 300, 200),
    "garbage behind": (GET + b"\xff\xff\r\n\r\n" * 5, 200),
}


AHEAD = {GET * 300: 300, CASES["garbage behind"][0]: 2}
"""Answers, where there are several."""


@pytest.mark.parametrize(("data", "status"), CASES.values(), ids=CASES.keys())
async def test_whatever_comes_has_a_status_and_others_go_on(
    data: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    app = App()
    async with serving(app) as kit:
        other = kit.dial()
        answer = await kit.ask(data)
        assert answer.startswith(f"HTTP/1.1 {status} ".encode())
        assert answer.count(b"HTTP/1.1") == AHEAD.get(data, 1)
        assert b"101" not in answer
        await other.send_all(GET)
        assert (await other.receive_some()).startswith(b"HTTP/1.1 200")
        await trio.sleep(CONFIG.linger_s)
        assert len(kit.connections) == 1
    assert not caplog.records


async def test_whatever_the_protocol_raises_ends_one_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = H11Protocol.handle

    async def raises(self: Any, event: Any) -> None:
        if isinstance(event, RawData) and event.data == b"bad":
            raise KeyError("a stream")
        await real(self, event)

    monkeypatch.setattr(H11Protocol, "handle", raises)
    async with serving(App()) as kit:
        assert await kit.ask(b"bad") == b""
        assert (await kit.ask(GET)).startswith(b"HTTP/1.1 200")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "KeyError('a stream')" in record.getMessage()
    assert record.exc_info is None


async def test_an_application_that_fails_answers_500(caplog: pytest.LogCaptureFixture) -> None:
    async def app(*_: Any) -> None:
        raise ValueError

    async with serving(app) as kit:
        assert (await kit.ask(GET)).startswith(b"HTTP/1.1 500")
    assert "the application failed" in caplog.text


@pytest.mark.parametrize(
    "extra", [b"", b"\r\n", GET, b"x" * 10**6], ids=["nothing", "newline", "GET", "much"]
)
async def test_a_client_that_has_gone_is_noticed_at_once_whatever_it_sent(extra: bytes) -> None:
    app = App()
    async with serving(app) as kit:
        stream = kit.dial()
        await stream.send_all(get(path="/wait") + extra[:20])
        await trio.testing.wait_all_tasks_blocked()
        await stream.send_all(extra[20:] or b" ")
        await trio.testing.wait_all_tasks_blocked()
        assert (app.n_waiting, app.n_gone) == (1, 0)
        before_s = trio.current_time()
        await stream.aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert app.n_gone == 1
        assert len(kit.connections) == 0
        assert trio.current_time() == before_s


async def test_a_client_may_ask_again_as_soon_as_it_has_all_of_the_answer() -> None:
    """Before our side knows that the answer has ended: what it sends then is the next request, and not dropped."""

    async def lingers(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok", "more_body": True})
        await trio.sleep(1)
        await send({"type": "http.response.body", "body": b""})

    async with serving(lingers) as kit:
        stream = kit.dial()
        for _ in range(3):
            await stream.send_all(GET[:9])
            await trio.testing.wait_all_tasks_blocked()
            await stream.send_all(GET[9:])
            answer = b""
            while not answer.endswith(b"ok"):
                piece = await stream.receive_some()
                assert piece
                answer += piece
            assert answer.count(b"HTTP/1.1 200") == 1
        assert len(kit.connections) == 1


@pytest.mark.parametrize("n_bytes", [10, 2**16, 10**6])
async def test_the_next_request_may_be_long_and_come_in_many_pieces(n_bytes: int) -> None:
    """More than is held while the answer before is under way: reading pauses then, and nothing is lost."""
    lengths: list[int] = []

    async def counts(scope: Scope, receive: Receive, send: Send) -> None:
        n = 0
        while (message := await receive())["type"] == "http.request":
            n += len(message["body"])
            if not message["more_body"]:
                break
        lengths.append(n)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok", "more_body": True})
        await trio.sleep(1)
        await send({"type": "http.response.body", "body": b""})

    request = get(f"Content-Length: {n_bytes}", method="POST", body=bytes(n_bytes))
    async with serving(counts) as kit:
        stream = kit.dial()
        for _ in range(3):
            for start in range(0, len(request), 2**15):
                await stream.send_all(request[start : start + 2**15])
                await trio.testing.wait_all_tasks_blocked()
            answer = b""
            while not answer.endswith(b"ok"):
                piece = await stream.receive_some()
                assert piece
                answer += piece
        await trio.sleep(2)
        assert len(kit.connections) == 1
    assert lengths == [n_bytes] * 3


async def test_a_connection_that_is_ended_takes_no_request_that_came_just_then() -> None:
    app = App()
    async with serving(app, most=1) as kit:
        first = kit.dial()
        await first.send_all(GET)
        await first.receive_some()
        await trio.testing.wait_all_tasks_blocked()
        (connection,) = kit.connections._open
        connection._held += get(path="/wait")
        connection._wake()
        connection.end()
        await trio.testing.wait_all_tasks_blocked()
        assert (app.n_waiting, len(kit.connections)) == (0, 0)


async def test_a_connection_that_was_used_and_closed_is_gone_at_once() -> None:
    async with serving(App()) as kit:
        stream = kit.dial()
        for _ in range(2):  # one after the other, on one connection
            await stream.send_all(GET)
            await trio.testing.wait_all_tasks_blocked()
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")
        before_s = trio.current_time()
        await stream.aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert len(kit.connections) == 0
        assert trio.current_time() == before_s


@pytest.mark.parametrize("sent", [b"", GET, GET[:-5]], ids=["nothing", "a request", "half a head"])
async def test_idle_connections_are_closed(sent: bytes) -> None:
    async with serving(App()) as kit:
        stream = kit.dial()
        for byte in sent:
            await stream.send_all(bytes([byte]))
            await trio.sleep(CONFIG.idle_s / 100)
        began_s = trio.current_time()
        async for _ in stream:
            pass
        assert trio.current_time() - began_s <= CONFIG.idle_s
        await trio.testing.wait_all_tasks_blocked()
        assert len(kit.connections) == 0


async def test_an_answer_survives_what_the_client_still_sends() -> None:
    async def refuses(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async with serving(refuses) as kit:
        stream = kit.dial()
        await stream.send_all(get(f"Content-Length: {10**9}"))
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 413")
        began_s = trio.current_time()
        while len(kit.connections):  # it is read for a while, and never told to wait
            await stream.send_all(bytes(2**16))
            await trio.sleep(0.1)
        assert CONFIG.linger_s <= trio.current_time() - began_s <= CONFIG.linger_s + 0.2


async def test_for_a_new_one_the_longest_idle_goes_and_none_with_a_request() -> None:
    app = App()
    async with serving(app, most=3) as kit:
        busy, first, second = kit.dial(), kit.dial(), kit.dial()
        await busy.send_all(get(path="/wait"))
        await trio.sleep(1)
        await first.send_all(GET)
        await first.receive_some()
        third = kit.dial()
        with trio.fail_after(0.5):
            assert await second.receive_some() == b""
        for stream in (first, third):
            await stream.send_all(get(path="/wait"))
        await trio.testing.wait_all_tasks_blocked()
        assert (app.n_waiting, app.n_gone) == (3, 0)
        assert (await kit.ask(GET)).startswith(b"HTTP/1.1 503")
        app.release.set()
        assert (await busy.receive_some()).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("hosts", "most_of_it"),
    [
        (["192.0.2.1"], 3),
        (["192.0.2.1", "::ffff:192.0.2.1"], 3),
        (["2001:db8::1", "2001:db8::2"], 3),
        (["127.0.0.1", "::1"], 12),
    ],
    ids=lambda value: str(value),
)
async def test_one_address_does_not_take_all_connections(hosts: list[str], most_of_it: int) -> None:
    app = App()
    async with serving(app, most=12) as kit:
        streams = []
        for number in range(most_of_it):
            streams.append(kit.dial(host=hosts[number % len(hosts)]))
            await streams[-1].send_all(get(path="/wait"))
        await trio.testing.wait_all_tasks_blocked()
        assert app.n_waiting == most_of_it
        refused = kit.dial(host=hosts[-1])
        answer = bytes(await refused.receive_some())
        is_full = most_of_it == 12
        assert answer.startswith(b"HTTP/1.1 503 " if is_full else b"HTTP/1.1 429 ")
        head, _, body = answer.partition(b"\r\n\r\n")
        assert {b"Retry-After: 5", b"Connection: close", b"Content-Length: %d" % len(body)} <= set(
            head.split(b"\r\n")
        )
        assert json.loads(body)["error"]["code"] == ("overloaded" if is_full else "rate_limit_exceeded")
        if not is_full:
            other = kit.dial(host="198.51.100.7")
            await other.send_all(GET)
            assert (await other.receive_some()).startswith(b"HTTP/1.1 200")
        app.release.set()
        assert (await streams[0].receive_some()).startswith(b"HTTP/1.1 200"), "it was not disturbed"


async def test_of_one_address_an_idle_connection_makes_room_and_no_other() -> None:
    async with serving(App(), most=12) as kit:
        oldest = kit.dial(host="198.51.100.7")
        await trio.sleep(1)
        mine = []
        for _ in range(4):
            mine.append(kit.dial(host="192.0.2.1"))
            await trio.sleep(1)
        with trio.fail_after(0.5):
            assert await mine[0].receive_some() == b""
        for stream in (oldest, *mine[1:]):
            await stream.send_all(GET)
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")


def test_connections_leave_descriptors_to_the_swarm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmnode.api.connections.most_descriptors", lambda: 128)
    assert most_connections(256, 0.25) == 32
    assert most_connections(16, 0.25) == 16


@pytest.mark.parametrize("how", ["its sender gives up", "the server stops"])
async def test_what_nobody_takes_can_be_cancelled(how: str) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with trio.move_on_after(5 if how == "its sender gives up" else 1000) as given_up:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"a" * 10**6, "more_body": True})
        assert given_up.cancelled_caught

    async with serving(app) as kit:
        stream = kit.dial(trio.testing.lockstep_stream_pair)
        await stream.send_all(GET)
        await trio.sleep(10)
        assert len(kit.connections) == (1 if how == "the server stops" else 0)


def test_of_hypercorn_that_it_is_what_this_was_written_against() -> None:
    """When this fails, read what changed in hypercorn/protocol/h11.py before api/connection.py is adapted."""
    assert version("hypercorn").startswith("0.18.")
    assert list(inspect.signature(H11Protocol.__init__).parameters) == [
        *("self", "app", "config", "context", "task_group", "connection_state"),
        *("ssl", "client", "server", "send"),
    ]
    assert list(inspect.signature(H11Protocol.handle).parameters) == ["self", "event"]
    assert inspect.iscoroutinefunction(WorkerContext.event_class.set)
    unused: Any = None
    settings: tuple[Any, ...] = (unused, HypercornConfig(), WorkerContext(None), *[unused] * 6)
    protocol = H11Protocol(*settings)
    assert type(protocol.connection).__module__.startswith("h11")
    assert RawData(b"x").data == b"x"
    assert Updated(idle=True).idle
    assert Closed() == Closed()
