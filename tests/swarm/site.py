"""A backbone with its HTTP API on a memory network, for tests that do something to it and ask whether it is well."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import h11
import trio
from hypercorn.config import Config as HypercornConfig

from swarmnode.api.app import Served, build_app
from swarmnode.api.connection import Serving
from swarmnode.api.connections import Connections
from swarmnode.api.serve import _with_hang_up
from swarmnode.config import ApiConfig
from swarmnode.models.chat import ChatTemplate, template_of
from swarmnode.models.tokenizer import Tokenizer
from swarmnode.net.address import PeerAddress
from swarmnode.services.runners import Inline
from swarmnode.testing.memory_net import MemoryNetwork, MemoryStream
from swarmnode.testing.swarm import Swarm, open_swarm
from swarmnode.weights.index import ModelIndex

API_PORT = 80
API_WINDOW_BYTES = 2048
"""A client that does not read is noticed after a few events."""
LONGEST_S = 150.0
"""Everything that anybody left has been given up after so long: pings, deadlines, redials."""
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "who is it?"}],
    "max_tokens": 6,
    "temperature": 0,
}

Ending: TypeAlias = Callable[[MemoryStream], Any]


async def fin(stream: MemoryStream) -> None:
    """Close, as a process does that ends well."""
    await stream.aclose()


async def half_close(stream: MemoryStream) -> None:
    """Say that nothing more comes, and go on reading."""
    await stream.send_eof()
    try:
        while await stream.receive_some():
            pass
    except trio.BrokenResourceError:
        pass
    await stream.aclose()


async def reset(stream: MemoryStream) -> None:
    """Break it."""
    stream.reset()
    await trio.lowlevel.checkpoint()


async def silent(stream: MemoryStream) -> None:
    """Neither send nor read any more, for as long as anybody waits; then close, as whoever is given up must at last."""
    await trio.sleep(LONGEST_S)
    await stream.aclose()


ENDINGS: tuple[Ending, ...] = (fin, half_close, reset, silent)


@dataclass(frozen=True)
class _Counts:
    """What must be as before."""

    links: int
    tasks: int


@dataclass
class Site:
    """A running backbone with its API."""

    swarm: Swarm
    api: MemoryNetwork
    connections: Connections
    first_text: str = ""
    counts: _Counts = field(default_factory=lambda: _Counts(0, 0))
    others: list[MemoryStream] = field(default_factory=list)
    """Clients that `check` closes."""

    async def client(self) -> MemoryStream:
        """A connection to the API, of which nothing is sent yet."""
        return await self.api.host("client").connect("api", API_PORT)

    async def chat(self) -> str:
        """The text of a streamed answer, which must be whole."""
        stream = await self.client()
        await stream.send_all(request({**CHAT, "stream": True}))
        http = h11.Connection(h11.CLIENT)
        http.send(h11.Request(method="GET", target="/", headers=[("Host", "localhost")]))
        http.send(h11.EndOfMessage())
        body = bytearray()
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                http.receive_data(await stream.receive_some())
            elif isinstance(event, h11.Response):
                assert event.status_code == 200
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                break
        await stream.aclose()
        return text_of(body)

    async def note(self) -> None:
        """This is how it is when all is well."""
        self.first_text = await self.chat()
        assert self.first_text
        await trio.sleep(60)  # the connections over which workers fetched are closed by then
        self.counts = self._now()

    async def check(self, after: str) -> None:
        """It answers as before, and nothing is left of what was done to it."""
        assert await self.chat() == self.first_text, after
        while self.others:
            await self.others.pop().aclose()
        with trio.move_on_after(LONGEST_S):
            while not self._is_as_before():  # noqa: ASYNC110 - what it looks at cannot wake us
                await trio.sleep(0.5)
        assert self._is_as_before(), (after, self.counts, self._now(), len(self.connections))

    def _is_as_before(self) -> bool:
        now, engine = self._now(), self.swarm.backbone.engine
        return (
            now.links == self.counts.links
            and now.tasks <= self.counts.tasks
            and not len(self.connections)
            and (engine.n_free, engine.n_waiting) == (2, 0)
        )

    def _now(self) -> _Counts:
        tasks = trio.lowlevel.current_statistics().tasks_living
        return _Counts(len(self.swarm.network) + len(self.api), tasks)


def request(body: dict[str, Any], *headers: str, version: str = "1.1") -> bytes:
    """A POST to /v1/chat/completions."""
    data = json.dumps(body).encode()
    lines = (
        f"POST /v1/chat/completions HTTP/{version}",
        "Host: localhost",
        f"Content-Length: {len(data)}",
        *headers,
    )
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode() + data


def text_of(body: bytes | bytearray) -> str:
    """Of a stream of server-sent events that ends as it should, without an error in it."""
    lines = [line.removeprefix("data: ") for line in body.decode().splitlines() if line]
    assert lines[-1] == "[DONE]"
    pieces = [json.loads(line) for line in lines[:-1]]
    assert not any("error" in piece for piece in pieces), pieces
    return "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces)


@cache
def _template(model: Path) -> ChatTemplate | None:
    """Once for all tests: it runs in a process of its own, whose start takes long on a busy machine."""
    with ModelIndex.open(model) as index:
        return template_of(index.metadata, Tokenizer(index.metadata))


@asynccontextmanager
async def open_site(
    model: Path, folder: Path, *, bootstrap: tuple[PeerAddress, ...] = (), most: int = 99
) -> AsyncIterator[Site]:
    """A backbone with two slots. The API takes `most` connections."""
    async with open_swarm(model, folder, n_ctx=128, bootstrap=bootstrap) as swarm:
        engine, config = swarm.backbone.engine, ApiConfig()
        template = _template(model)
        app = build_app(Served(engine, "tiny", template, swarm.backbone.state.as_dict, 0, Inline(), config))
        hypercorn = HypercornConfig()
        hypercorn.include_server_header = False
        connections = Connections(Serving(partial(_with_hang_up, app), hypercorn, config), most)
        network = MemoryNetwork(window_bytes=API_WINDOW_BYTES)

        async def accepted(stream: trio.abc.Stream, source: str) -> None:
            assert isinstance(stream, MemoryStream)
            try:
                await connections.handle(stream, ("127.0.0.1", 1), ("127.0.0.1", API_PORT))
            finally:
                await trio.aclose_forcefully(stream)

        async with trio.open_nursery() as nursery:
            await nursery.start(network.host("api").listen, accepted, None, API_PORT)
            yield Site(swarm, network, connections)
            nursery.cancel_scope.cancel()
