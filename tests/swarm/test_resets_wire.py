"""cases.md 12: a node that ends its connection in any state of the protocol, in any way, leaves the API up.

Each situation brings the backbone's end of a connection into one state of wire/connection.py, and asserts that; what
states there are is taken from there, so one that is added has to be reached here. Whoever dialled: the backbone, or
the node.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from swarmnode.identity import NodeKey
from swarmnode.net.address import PeerAddress
from swarmnode.net.peer import Body, Handler, Peer
from swarmnode.net.secure import SecureStream
from swarmnode.testing.memory_net import MemoryStream
from swarmnode.testing.swarm import MeddledHandlers
from swarmnode.wire.connection import Connection, State
from swarmnode.wire.constants import SLICE_KINDS, ConnectionClass, FrameType
from swarmnode.wire.endpoint import Endpoint
from swarmnode.wire.handshake import Credentials
from swarmnode.wire.messages import Experts, Message, SliceGet, encode_header
from swarmnode.wire.requests import RequestState
from tests.net.rude import Rude
from tests.swarm.conftest import ALL_BYTES
from tests.swarm.site import ENDINGS, LONGEST_S, Ending, Site, open_site, silent
from tests.wire.pairs import raw_frame, raw_request, raw_start

RUDE_KEY = NodeKey.from_seed(b"r" * 32)
RUDE = Endpoint.create(Credentials(RUDE_KEY), network="test", agent="rude", roles=("worker",))
RUDE_ADDRESS = PeerAddress(RUDE_KEY.node_id, "rude", 1)


@dataclass(frozen=True)
class End:
    """The backbone's end of a connection."""

    connection: Connection
    stream: MemoryStream


class Rudeness:
    """The rude node's end of one connection, with the backbone's."""

    def __init__(self, site: Site, stream: MemoryStream, connection: Connection, there: End) -> None:
        self.site = site
        self.stream = stream
        self.rude = Rude(stream, connection)
        self.backbones = there.connection
        self._there = there
        self._unsent = bytearray()
        self.request_id = 0x7001 if connection.is_dialer else 0x7000
        """Far from those that `connection` gives."""

    async def until(self, holds: Callable[[], bool]) -> None:
        """Behave, byte by byte, until something holds."""
        await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(LONGEST_S):
            while not holds():
                await self._step()
                await trio.testing.wait_all_tasks_blocked()

    async def _step(self) -> None:
        self._unsent += self.rude.connection.data_to_send(1 << 16)
        if self._unsent:
            await self.stream.send_all(self._unsent[:1])
            del self._unsent[:1]
        else:
            await self.rude.receive()

    async def behave(self) -> None:
        """Until it is open on both sides, and all is said that has to be."""
        ours = self.rude.connection
        await self.until(lambda: self.backbones.state is State.OPEN and ours.state is State.OPEN)
        await self.stream.send_all(self._unsent)
        self._unsent.clear()

    async def raw(self, plain: bytes, n_bytes: int | None = None) -> None:
        """Send (so many bytes of) a sealed record, and let the backbone do what it does about it."""
        writer = self.rude.connection._writer
        assert writer is not None
        await self.stream.send_all(writer.seal(plain)[:n_bytes])
        await trio.testing.wait_all_tasks_blocked()

    @property
    def is_over(self) -> bool:
        """Whether the backbone has closed it."""
        return self._there.stream._is_closed

    def states(self) -> set[RequestState]:
        """Of our requests at the backbone."""
        return {served.state for served in self.backbones._requests._served.values()}


Do = Callable[[Rudeness], Awaitable[None]]


@dataclass(frozen=True)
class Situation:
    """What the rude node does, and in which state the backbone's end must be then."""

    name: str
    do: Do
    state: State
    requests: frozenset[RequestState] = field(default_factory=frozenset)
    """States of the rude node's requests."""
    kind: ConnectionClass = ConnectionClass.LATENCY


def entering(state: State, n_more: int = 0) -> Do:
    """Behave until the backbone is in this state, then send so many bytes more of what comes next."""

    async def do(rude: Rudeness) -> None:
        await rude.until(lambda: rude.backbones.state is state)
        for _ in range(n_more):
            await rude._step()
            await trio.testing.wait_all_tasks_blocked()

    return do


async def half_a_record(rude: Rudeness) -> None:
    await rude.behave()
    await rude.raw(raw_request(request_id=rude.request_id), 50)


async def half_a_length(rude: Rudeness) -> None:
    await rude.behave()
    await rude.raw(raw_request(request_id=rude.request_id), 1)


def body_of(n_bytes: int) -> Do:
    """A request of 20,006 bytes of which so many come."""

    async def do(rude: Rudeness) -> None:
        await rude.behave()
        header = encode_header(Experts(bytes(32), 1, "experts", "f16", 100, 1))
        start = raw_start(Experts.number, header, 20_006, bytes(n_bytes))
        await rude.raw(raw_frame(FrameType.REQUEST, start, request_id=rude.request_id))

    return do


async def slices_unread(rude: Rudeness, n: int = 1) -> None:
    """Asked for, and not read."""
    await rude.behave()
    model = rude.site.swarm.backbone.manifest.model_id
    ours = rude.rude.connection
    for _ in range(n):
        ours.send_request(SliceGet(model, 0, 0, SLICE_KINDS[1], 0, 256 * 1024))
    await rude.stream.send_all(ours.data_to_send(1 << 20))
    await trio.testing.wait_all_tasks_blocked()


async def a_bye_that_finds_no_room(rude: Rudeness) -> None:
    """The backbone has ended it, and waits for a moment for the rude node to take its last words."""
    await slices_unread(rude)
    await rude.raw(raw_frame(99, b"", request_id=0))


async def an_answer_is_awaited(rude: Rudeness) -> None:
    """The backbone asks every neighbour for its gossip."""
    await rude.behave()
    with trio.fail_after(LONGEST_S):
        while not any(item.outgoing.has_left for item in rude.backbones._requests._asked.values()):  # noqa: ASYNC110
            await trio.sleep(0.1)


async def an_answer_was_given_up(rude: Rudeness) -> None:
    """... and is still owed the reply to what it cancelled. We say that we live."""
    await rude.behave()
    with trio.fail_after(LONGEST_S):
        while not any(item.is_cancelled for item in rude.backbones._requests._asked.values()):
            rude.rude.connection.send_ping(1)
            await rude.rude.flush()
            await trio.sleep(1)


HANDSHAKE = (
    Situation("connected", entering(State.HELLO), State.HELLO),
    Situation("half a hello", entering(State.HELLO, 2), State.HELLO),
    Situation("a hello", entering(State.MESSAGE_1), State.MESSAGE_1),
    Situation("half of message 1", entering(State.MESSAGE_1, 16), State.MESSAGE_1),
    Situation("message 1", entering(State.MESSAGE_3), State.MESSAGE_3),
    Situation("half of message 3", entering(State.MESSAGE_3, 80), State.MESSAGE_3),
)
DIALLED_HANDSHAKE = (
    Situation("message 1 unanswered", entering(State.MESSAGE_2), State.MESSAGE_2),
    Situation("half of message 2", entering(State.MESSAGE_2, 100), State.MESSAGE_2),
)
FURTHER = (
    Situation("no settings yet", entering(State.SETTINGS), State.SETTINGS),
    Situation("half the settings", entering(State.SETTINGS, 40), State.SETTINGS),
    Situation("open", entering(State.OPEN), State.OPEN),
    Situation("half a record's length", half_a_length, State.OPEN),
    Situation("half a record", half_a_record, State.OPEN),
    Situation("a header without its body", body_of(0), State.OPEN, frozenset({RequestState.RECEIVING})),
    Situation("half a body", body_of(9000), State.OPEN, frozenset({RequestState.RECEIVING})),
    Situation("a reply half sent", slices_unread, State.OPEN, frozenset({RequestState.REPLYING})),
    Situation(
        "requests that wait behind it",
        partial(slices_unread, n=30),
        State.OPEN,
        frozenset({RequestState.REPLYING, RequestState.RUNNING}),
    ),
    Situation("an answer awaited", an_answer_is_awaited, State.OPEN),
    Situation("an answer given up", an_answer_was_given_up, State.OPEN),
    Situation("a last word that finds no room", a_bye_that_finds_no_room, State.CLOSED),
)
BULK = tuple(
    Situation(f"{name}, bulk", do, State.OPEN, requests, ConnectionClass.BULK)
    for name, do, requests in (
        ("open", entering(State.OPEN), frozenset[RequestState]()),
        ("a slice half sent", slices_unread, frozenset({RequestState.REPLYING})),
    )
)
IT_DIALLED = HANDSHAKE + FURTHER + BULK
IT_WAS_DIALLED = DIALLED_HANDSHAKE + FURTHER


def test_every_state_of_a_connection_is_in_a_situation() -> None:
    """One that is added to wire/connection.py has to be reached here."""
    both = IT_DIALLED + IT_WAS_DIALLED
    assert {item.state for item in both} == set(State)
    assert set().union(*(item.requests for item in both)) == set(RequestState)
    assert {item.kind for item in both} == set(ConnectionClass)
    assert {item.state for item in IT_DIALLED} == set(State) - {State.MESSAGE_2}, "an acceptor's"
    assert {item.state for item in IT_WAS_DIALLED} == set(State) - {
        State.HELLO,
        State.MESSAGE_1,
        State.MESSAGE_3,
    }


@pytest.fixture
def backbones(monkeypatch: pytest.MonkeyPatch) -> list[End]:
    """The backbone's ends of connections with the rude node, in the order in which they began."""
    found: list[End] = []
    real = SecureStream.__init__

    def noting(self: SecureStream, stream: Any, connection: Connection, config: Any) -> None:
        real(self, stream, connection, config)
        if "rude" in stream._sending._ends:
            found.append(End(connection, stream))

    monkeypatch.setattr(SecureStream, "__init__", noting)
    return found


async def dialling(site: Site, situation: Situation, backbones: list[End]) -> Rudeness:
    """A connection that the rude node has dialled."""
    address = site.swarm.address
    stream = await site.swarm.network.host("rude").connect(address.host, address.port)
    await trio.testing.wait_all_tasks_blocked()
    return Rudeness(site, stream, Connection.dialer(RUDE, address.node_id, situation.kind), backbones[-1])


@pytest.mark.parametrize("situation", IT_DIALLED, ids=lambda situation: situation.name)
async def test_a_node_that_dialled_may_go_at_any_time(
    tiny_model: Path, tmp_path: Path, situation: Situation, backbones: list[End]
) -> None:
    async with open_site(tiny_model, tmp_path) as site:
        await site.swarm.join(ALL_BYTES // 4)
        await site.note()
        for ending in ENDINGS:
            await go(await dialling(site, situation, backbones), situation, ending)
            await site.check(f"{situation.name}, {ending.__name__}")
        assert site.swarm.serving(), "others are not blamed"


@pytest.mark.parametrize("situation", IT_WAS_DIALLED, ids=lambda situation: situation.name)
async def test_a_node_that_was_dialled_may_go_at_any_time(
    tiny_model: Path, tmp_path: Path, situation: Situation, backbones: list[End]
) -> None:
    """The backbone dials it, and goes on doing so."""
    async with open_site(tiny_model, tmp_path, bootstrap=(RUDE_ADDRESS,)) as site:
        await site.swarm.join(ALL_BYTES // 4)
        await site.note()
        for ending in ENDINGS:
            async with trio.open_nursery() as nursery:
                rude = Rudeness(site, await dialled(site, nursery), Connection.acceptor(RUDE), backbones[-1])
                await go(rude, situation, ending)
                nursery.cancel_scope.cancel()
            await site.check(f"{situation.name}, {ending.__name__}")
        assert site.swarm.serving(), "others are not blamed"


async def dialled(site: Site, nursery: trio.Nursery) -> MemoryStream:
    """Listen as the rude node until the backbone has dialled it; later dials find nobody."""
    arrived, streams = trio.open_memory_channel[MemoryStream](1)

    async def accept(stream: trio.abc.Stream, source: str) -> None:
        assert isinstance(stream, MemoryStream)
        try:
            arrived.send_nowait(stream)
        except trio.WouldBlock:
            await stream.aclose()

    await nursery.start(site.swarm.network.host("rude").listen, accept, None, 1)
    stream = await streams.receive()
    arrived.send_nowait(stream)  # there is no more room
    await trio.testing.wait_all_tasks_blocked()
    return stream


async def go(rude: Rudeness, situation: Situation, ending: Ending) -> None:
    await situation.do(rude)
    assert rude.backbones.state is situation.state
    assert situation.requests <= rude.states()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ending, rude.stream)
        site = rude.site
        assert await site.chat() == site.first_text, f"while it is going: {ending.__name__}"
        if ending is silent:
            with trio.fail_after(LONGEST_S - 50):
                while not rude.is_over:  # noqa: ASYNC110 - deadlines end it
                    await trio.sleep(1)
    assert rude.is_over


# --- workers that have rows -------------------------------------------------------------------------------------------


class Cut:
    """A worker's stream that takes so many bytes more, and ends then."""

    def __init__(self, stream: MemoryStream, n_bytes: int, ending: str) -> None:
        self._stream = stream
        self._left_bytes = n_bytes
        self._ending = ending

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        taken = bytes(data[: self._left_bytes])
        self._left_bytes -= len(taken)
        await self._stream.send_all(taken)
        if len(taken) < len(data):
            await trio.testing.wait_all_tasks_blocked()
            match self._ending:
                case "fin":
                    await self._stream.aclose()
                case "half_close":
                    await self._stream.send_eof()
                case "reset":
                    self._stream.reset()
            await trio.sleep_forever()


ROWS_ENDINGS = ("fin", "half_close", "reset", "silent")
ROWS_BYTES = {"unanswered": 0, "a length": 1, "half a record": 5000, "half of the rows": 20_000}
"""Of the reply to the first request for rows of an answer."""


@pytest.mark.parametrize("n_bytes", ROWS_BYTES.values(), ids=ROWS_BYTES.keys())
@pytest.mark.parametrize("who_dialled", ["the worker", "the backbone"])
async def test_a_worker_may_go_while_its_rows_are_awaited(
    tiny_model: Path, tmp_path: Path, who_dialled: str, n_bytes: int
) -> None:
    """The answer goes on with the local copies, and the worker is used again when it has come back."""
    next_ending: str | None = None
    begun: list[bool] = []
    key = NodeKey.from_seed(b"w" * 32)

    def meddle(handler: Handler) -> Handler:
        async def cutting(peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
            nonlocal next_ending
            reply = await handler(peer, message, body)
            assert isinstance(message, Experts)
            if next_ending is not None and message.n_rows > 4:
                stream: Any = peer._stream
                stream._stream = Cut(stream._stream, n_bytes, next_ending)
                next_ending = None
                (worker,) = site.swarm.backbone.members.workers
                if not begun:  # later either may be sooner
                    assert worker.peer.is_dialer == backbone_dials
                begun.append(bool(worker.peer._connection._requests._asked))
            return reply

        return cutting

    backbone_dials = who_dialled == "the backbone"
    places = (PeerAddress(key.node_id, "worker", 1),) if backbone_dials else ()
    first = list(ROWS_BYTES.values()).index(n_bytes)  # each ending is the first in one of these tests
    async with open_site(tiny_model, tmp_path, bootstrap=places) as site:
        swarm = site.swarm
        handlers = MeddledHandlers(Experts, meddle)
        bootstrap = () if backbone_dials else None
        await swarm.join(ALL_BYTES, name="worker", key=key, handlers=handlers, bootstrap=bootstrap)
        await site.note()
        for ending in ROWS_ENDINGS[first:] + ROWS_ENDINGS[:first]:
            await forget(site)
            next_ending = ending
            assert await site.chat() == site.first_text
            assert next_ending is None, "it had been asked for rows"
            await swarm.until(lambda: bool(swarm.serving()), timeout_s=LONGEST_S)
            await site.check(f"{who_dialled} dialled, {ending}")
    assert begun == [True] * len(ROWS_ENDINGS)


async def forget(site: Site) -> None:
    """Fill both slots with something else, so that the next prompt is run again."""
    async with trio.open_nursery() as nursery:
        for token in (5, 6):
            nursery.start_soon(site.swarm.generate, [token, 80, 33], 2)
