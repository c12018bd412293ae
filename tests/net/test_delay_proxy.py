"""The delaying proxy: exact times on the mock clock, order, the ends, a bound on what is under way; real sockets."""

from __future__ import annotations

from functools import partial

import pytest
import trio
import trio.testing

from swarmnode.net.delay_proxy import DelayedTransport, Link, join
from swarmnode.net.tcp import TcpTransport

from .nodes import SERVER, dial_from, endpoint, experts, serve_on

Ends = tuple[trio.abc.HalfCloseableStream, trio.abc.HalfCloseableStream]


def joined(nursery: trio.Nursery, link: Link, window_bytes: int = 1000) -> Ends:
    """The two ends that a link ties together."""
    near, one = trio.testing.memory_stream_pair()
    far, other = trio.testing.memory_stream_pair()
    nursery.start_soon(join, one, other, link, window_bytes)
    return near, far


async def read_all(stream: trio.abc.ReceiveStream) -> bytes:
    return b"".join([bytes(data) async for data in stream])


async def test_bytes_come_after_half_of_the_rtt_each_way() -> None:
    link = Link()
    link.set_rtt_ms(40)
    async with trio.open_nursery() as nursery:
        near, far = joined(nursery, link)
        started_s = trio.current_time()
        await near.send_all(b"there")
        assert await far.receive_some() == b"there"
        assert trio.current_time() - started_s == pytest.approx(0.02)
        await far.send_all(b"back")
        assert await near.receive_some() == b"back"
        assert trio.current_time() - started_s == pytest.approx(0.04)
        nursery.cancel_scope.cancel()


async def test_chunks_travel_side_by_side() -> None:
    """A delay is no turn-taking: ten chunks sent 1 ms apart come 1 ms apart."""
    async with trio.open_nursery() as nursery:
        near, far = joined(nursery, Link(delay_s=0.5))

        async def send() -> None:
            for number in range(10):
                await near.send_all(bytes([number]))
                await trio.sleep(0.001)

        started_s = trio.current_time()
        nursery.start_soon(send)
        for number in range(10):
            assert await far.receive_some(1) == bytes([number])
            assert trio.current_time() - started_s == pytest.approx(0.5 + 0.001 * number)
        nursery.cancel_scope.cancel()


async def test_a_shorter_delay_overtakes_nothing() -> None:
    link = Link(delay_s=1.0)
    async with trio.open_nursery() as nursery:
        near, far = joined(nursery, link)
        started_s = trio.current_time()
        await near.send_all(b"slow")
        await trio.sleep(0.1)
        link.delay_s = 0.0
        await near.send_all(b"fast")
        await near.send_eof()
        assert await read_all(far) == b"slowfast"
        assert trio.current_time() - started_s == pytest.approx(1.0)
        nursery.cancel_scope.cancel()


async def test_a_rate_adds_to_the_delay() -> None:
    async with trio.open_nursery() as nursery:
        near, far = joined(nursery, Link(delay_s=1.0, bytes_per_s=100.0))
        started_s = trio.current_time()
        for _ in range(3):
            await near.send_all(bytes(50))
            await trio.testing.wait_all_tasks_blocked()
        for number in range(1, 4):
            assert len(await far.receive_some(50)) == 50
            assert trio.current_time() - started_s == pytest.approx(1.0 + 0.5 * number)
        nursery.cancel_scope.cancel()


async def test_an_end_arrives_late_too_and_leaves_the_other_direction_open() -> None:
    async with trio.open_nursery() as nursery:
        near, far = joined(nursery, Link(delay_s=0.5))
        started_s = trio.current_time()
        await near.send_all(b"question")
        await near.send_eof()
        assert await read_all(far) == b"question"
        assert trio.current_time() - started_s == pytest.approx(0.5)
        await trio.sleep(10)
        await far.send_all(b"answer")
        await far.send_eof()
        assert await read_all(near) == b"answer"
    # The nursery ended by itself: so did `join`.


class Clogged(trio.abc.HalfCloseableStream):
    """Takes one piece each time it is told to; says something whenever it is asked, if it `talks`, and counts it."""

    def __init__(self, talks: bool) -> None:
        self._talks = talks
        self.turns = trio.Semaphore(0)
        self.n_taken = 0
        self.n_said = 0

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self.turns.acquire()
        self.n_taken += len(data)

    async def wait_send_all_might_not_block(self) -> None:
        raise NotImplementedError

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        if not self._talks:
            await trio.sleep_forever()
        assert max_bytes is not None
        n_bytes = min(max_bytes, 300)
        self.n_said += n_bytes
        return bytes(n_bytes)

    async def send_eof(self) -> None:
        raise NotImplementedError

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("delay_s", [0.0, 5.0])
async def test_what_is_under_way_is_bounded(delay_s: float) -> None:
    source, sink = Clogged(talks=True), Clogged(talks=False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(join, source, sink, Link(delay_s), 1000)
        await trio.sleep(100)
        assert source.n_said == 1000
        for _ in range(50):
            sink.turns.release()
            await trio.sleep(10)
            assert source.n_said == sink.n_taken + 1000
        assert sink.n_taken > 1000
        nursery.cancel_scope.cancel()


async def test_a_break_closes_both() -> None:
    async with trio.open_nursery() as nursery:
        near, one = trio.testing.memory_stream_pair()
        far, other = trio.testing.memory_stream_pair()
        nursery.start_soon(join, one, other, Link(delay_s=0.5))
        await far.aclose()
        await near.send_all(b"for nobody")
        await trio.sleep(1)
        assert await near.receive_some() == b""
        with pytest.raises(trio.BrokenResourceError):
            await near.send_all(b"more")


@pytest.mark.real_time
async def test_a_node_behind_it_is_dialled_and_answers() -> None:
    """On real sockets; that the delay is there is shown by the clock, that it is not too long by none."""
    link = Link()
    async with trio.open_nursery() as nursery:
        address = await serve_on(nursery, DelayedTransport(link), endpoint(SERVER), host="127.0.0.1", port=0)
        peer = await dial_from(nursery, TcpTransport(), address)
        link.set_rtt_ms(60)
        started_s = trio.current_time()
        message, body = experts(2000, 3072)
        rows = memoryview(bytes(range(256)) * (2000 * 6144 // 256))
        _, reply = await peer.request(message, (rows, body[1]))
        assert reply == rows
        assert trio.current_time() - started_s >= 0.06
        nursery.cancel_scope.cancel()


@pytest.mark.real_time
async def test_nobody_behind_it() -> None:
    """A handler that hangs up at once ends the connection in front, too."""

    async def hang_up(stream: trio.abc.Stream, source: str) -> None:
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        listen = partial(DelayedTransport(Link()).listen, hang_up, "127.0.0.1", 0)
        places: list[tuple[str, int]] = await nursery.start(listen)
        stream = await trio.open_tcp_stream(*places[0])
        assert await stream.receive_some() == b""
        await stream.aclose()
        nursery.cancel_scope.cancel()
