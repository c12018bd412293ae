"""cases.md 12: a client of the API that ends its connection in any state of it, in any way, leaves the API up.

The states are h11's, which `PlainHttp` is. A situation says in which state the server's end is when the client goes;
all states that it can be in while it waits are reached by one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h11
import pytest
import trio
import trio.testing

from swarmnode.config import ApiConfig
from swarmnode.services.passes import Passes, Rows
from swarmnode.testing.memory_net import MemoryStream
from tests.swarm.site import CHAT, ENDINGS, LONGEST_S, Ending, Site, open_site, request, silent

STREAM = {**CHAT, "stream": True, "max_tokens": 60}
STREAMED, WHOLE = request(STREAM), request({**CHAT, "max_tokens": 60})
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
NOWHERE = b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
PASS_S = 0.1
STATES = {
    *(h11.IDLE, h11.SEND_RESPONSE, h11.SEND_BODY, h11.DONE, h11.MUST_CLOSE, h11.CLOSED, h11.ERROR),
    h11.SWITCHED_PROTOCOL,
}
NEVER_THEIRS = {
    h11.SEND_RESPONSE: "a client sends none",
    h11.CLOSED: "h11 is not told of the end of the stream (PlainHttp.receive_data)",
    h11.SWITCHED_PROTOCOL: "Upgrade is taken out, CONNECT refused",
}
NEVER_OURS = {
    h11.CLOSED: "h11 is not told of our end of it",
    h11.ERROR: "an application that breaks off sends no more, and the connection is closed within the same step",
    h11.SWITCHED_PROTOCOL: "Upgrade is taken out, CONNECT refused",
}


def sending(*data: bytes) -> Callable[[Site, MemoryStream], Awaitable[None]]:
    """Send these, each when the server has done all that it can about the one before."""

    async def do(site: Site, stream: MemoryStream) -> None:
        for piece in data:
            await stream.send_all(piece)
            await trio.testing.wait_all_tasks_blocked()

    return do


def reading(text: bytes, *data: bytes) -> Callable[[Site, MemoryStream], Awaitable[None]]:
    """Send these, then read until the answer so far ends with `text`, or has it where it ends with a newline."""

    async def do(site: Site, stream: MemoryStream) -> None:
        await sending(*data)(site, stream)
        got = b""
        while text not in got:
            piece = await stream.receive_some()
            assert piece, got
            got += piece
        await trio.testing.wait_all_tasks_blocked()

    return do


async def waiting_for_a_slot(site: Site, stream: MemoryStream) -> None:
    """Both are held by others, who read nothing and are given up at last."""
    for _ in range(2):
        other = await site.client()
        site.others.append(other)
        await other.send_all(STREAMED)
    await trio.sleep(PASS_S / 2)
    await stream.send_all(STREAMED)
    await trio.testing.wait_all_tasks_blocked()
    assert site.swarm.backbone.engine.n_waiting == 1


async def stalled(site: Site, stream: MemoryStream) -> None:
    """It has read nothing of a stream for a while: what was sent fills all there is for it."""
    await stream.send_all(STREAMED)
    await trio.sleep(4)
    await trio.testing.wait_all_tasks_blocked()


@dataclass(frozen=True)
class Situation:
    """What the client does, and the states of h11 in which the server then waits."""

    name: str
    do: Callable[[Site, MemoryStream], Awaitable[None]]
    theirs: Any
    ours: Any


IDLE, DONE = (h11.IDLE, h11.IDLE), (h11.DONE, h11.SEND_BODY)
BODY, ASKED = (h11.SEND_BODY, h11.SEND_RESPONSE), (h11.DONE, h11.SEND_RESPONSE)
HEAD_BYTES = STREAMED.index(b"\r\n\r\n") + 4
CLOSE = request(STREAM, "Connection: close")
OLD = request(STREAM, version="1.0")
CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
SITUATIONS = (
    Situation("nothing said", sending(), *IDLE),
    Situation("half a request line", sending(b"POST /v1/ch"), *IDLE),
    Situation("half the headers", sending(STREAMED[: HEAD_BYTES - 30]), *IDLE),
    Situation("all headers but a byte", sending(STREAMED[: HEAD_BYTES - 1]), *IDLE),
    Situation("the headers", sending(STREAMED[:HEAD_BYTES]), *BODY),
    Situation("half a body", sending(STREAMED[: HEAD_BYTES + 20]), *BODY),
    Situation("all of a body but a byte", sending(STREAMED[:-1]), *BODY),
    Situation("half a chunk", sending(CHUNKED, b"10\r\n{"), *BODY),
    Situation("chunks without an end", sending(CHUNKED, b"1\r\n{\r\n"), *BODY),
    Situation("waiting for a slot", waiting_for_a_slot, *ASKED),
    Situation("waiting for the first token", sending(STREAMED), *ASKED),
    Situation("waiting for a whole answer", sending(WHOLE), *ASKED),
    Situation("behind the headers of a stream", reading(b"\r\n\r\n", STREAMED), *DONE),
    Situation("in the middle of a stream", reading(b'"token"', STREAMED), *DONE),
    Situation("in a stream that it has stopped reading", stalled, *DONE),
    Situation("behind [DONE]", reading(b"[DONE]", request({**CHAT, "stream": True})), *IDLE),
    Situation("idle after an answer", reading(b"ok", HEALTH), *IDLE),
    Situation("the next request in a stream", reading(b'"token"', STREAMED, HEALTH), *DONE),
    Situation("half the next request in a stream", reading(b'"token"', STREAMED, HEALTH[:20]), *DONE),
    Situation("much behind a request", sending(STREAMED, bytes(2**16), bytes(2**16)), *ASKED),
    Situation("a stream that is the last", reading(b'"token"', CLOSE), h11.MUST_CLOSE, h11.SEND_BODY),
    Situation("a stream of HTTP/1.0", reading(b'"token"', OLD), h11.MUST_CLOSE, h11.SEND_BODY),
    Situation("after the last answer", reading(b"[DONE]", CLOSE), h11.MUST_CLOSE, h11.MUST_CLOSE),
    Situation("after what is no HTTP", reading(b"HTTP/1.1 400", b"\xff\r\n\r\n"), h11.ERROR, h11.MUST_CLOSE),
    Situation("refused before its body is there", reading(b"HTTP/1.1 404", NOWHERE), h11.SEND_BODY, h11.DONE),
)


@pytest.fixture(autouse=True)
def slow_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token takes a while in virtual time, so that there is a middle."""
    real = Passes.run

    async def slow(self: Passes, rows: Sequence[Rows]) -> Any:
        await trio.sleep(PASS_S)
        return await real(self, rows)

    monkeypatch.setattr(Passes, "run", slow)


def test_every_state_of_http_is_in_a_situation() -> None:
    """A state that h11 gets, or that `PlainHttp` no longer keeps away, has to be reached here."""
    assert set(_states_of_h11()) == STATES
    for states, never in (
        ({item.theirs for item in SITUATIONS}, NEVER_THEIRS),
        ({item.ours for item in SITUATIONS}, NEVER_OURS),
    ):
        assert not states & set(never)
        assert states | set(never) == STATES, STATES - states - set(never)


def _states_of_h11() -> Iterator[Any]:
    """What h11 exports that is written in capitals, but for the two roles and what `next_event` says beside events."""
    others = {h11.CLIENT, h11.SERVER, h11.NEED_DATA, h11.PAUSED}
    for name in h11.__all__:
        if name.isupper() and getattr(h11, name) not in others and isinstance(getattr(h11, name), type):
            yield getattr(h11, name)


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.name)
async def test_a_client_may_go_at_any_time(tiny_model: Path, tmp_path: Path, situation: Situation) -> None:
    """In every way, one after the other, at one backbone."""
    async with open_site(tiny_model, tmp_path) as site:
        await site.note()
        for ending in ENDINGS:
            await _go(site, situation, ending)
            await site.check(f"{situation.name}, {ending.__name__}")


async def _go(site: Site, situation: Situation, ending: Ending) -> None:
    stream = await site.client()
    await trio.testing.wait_all_tasks_blocked()
    (connection,) = site.connections._open
    await situation.do(site, stream)
    assert (connection._http.their_state, connection._http.our_state) == (situation.theirs, situation.ours)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ending, stream)
        assert await site.chat() == site.first_text, f"while it is going: {ending.__name__}"
        if ending is silent:
            with trio.fail_after(LONGEST_S - 50):
                while len(site.connections):  # noqa: ASYNC110 - deadlines end it
                    await trio.sleep(1)


@pytest.mark.parametrize("data", [CLOSE, OLD], ids=["Connection: close", "HTTP/1.0"])
async def test_the_last_answer_has_an_end(tiny_model: Path, tmp_path: Path, data: bytes) -> None:
    """For whoever speaks HTTP/1.0 there is no other: it would wait for ever."""
    async with open_site(tiny_model, tmp_path) as site:
        stream = await site.client()
        await stream.send_all(data)
        got = bytearray()
        with trio.fail_after(60):
            while piece := await stream.receive_some():
                got += piece
        assert b"[DONE]" in got
        await trio.sleep(ApiConfig.linger_s + 1)
        assert not len(site.connections)
