"""The memory network behaves as a stream must, and as badly as it is told to."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from swarmnode.testing.memory_net import MemoryNetwork, MemoryStream


async def stream_pair(network: MemoryNetwork | None = None) -> tuple[MemoryStream, MemoryStream]:
    """(dialled at host a, accepted at host b)."""
    network = MemoryNetwork() if network is None else network
    accepted: list[MemoryStream] = []
    network._listeners[("b", 1)] = lambda stream, source: accepted.append(stream)
    try:
        return await network.host("a").connect("b", 1), accepted[0]
    finally:
        del network._listeners[("b", 1)]


async def test_it_is_a_stream_by_trios_own_checks() -> None:
    async def clogged() -> tuple[MemoryStream, MemoryStream]:
        one, other = await stream_pair()
        for stream in (one, other):
            with trio.move_on_after(0.01):
                await stream.send_all(bytes(100_000))
        return one, other

    await trio.testing.check_half_closeable_stream(stream_pair, clogged)


async def test_latency_is_exact() -> None:
    network = MemoryNetwork(latency_s=0.04)
    started_s = trio.current_time()
    one, other = await stream_pair(network)
    assert trio.current_time() - started_s == pytest.approx(0.08)
    await one.send_all(b"there")
    assert await other.receive_some() == b"there"
    assert trio.current_time() - started_s == pytest.approx(0.12)


async def test_a_partition_holds_bytes_back_and_healing_lets_them_go() -> None:
    network = MemoryNetwork()
    one, other = await stream_pair(network)
    network.partition(["a", "x"], ["b"])
    await one.send_all(b"held")
    with trio.move_on_after(5) as waited:
        await other.receive_some()
    assert waited.cancelled_caught
    network.heal()
    assert await other.receive_some() == b"held"


async def test_breaking_a_host_breaks_both_ends_of_its_streams_only() -> None:
    network = MemoryNetwork()
    one, other = await stream_pair(network)
    network.break_all("c")
    await one.send_all(b"x")
    assert await other.receive_some() == b"x"
    network.break_all("b")
    for stream in (one, other):
        with pytest.raises(trio.BrokenResourceError):
            await stream.receive_some()
        with pytest.raises(trio.BrokenResourceError):
            await stream.send_all(b"x")
        await stream.aclose()
    assert network._links == {}


async def test_a_reset_breaks_one_stream_and_loses_what_is_under_way() -> None:
    network = MemoryNetwork()
    one, other = await stream_pair(network)
    third, fourth = await stream_pair(network)
    await one.send_all(b"lost")
    one.reset()
    with pytest.raises(trio.BrokenResourceError):
        await other.receive_some()
    with pytest.raises(trio.BrokenResourceError):
        await other.send_all(b"x")
    with pytest.raises(trio.ClosedResourceError):
        await one.receive_some()
    await other.aclose()
    await third.send_all(b"x")
    assert await fourth.receive_some() == b"x"
    assert len(network) == 1


async def test_a_network_may_have_a_smaller_window() -> None:
    one, other = await stream_pair(MemoryNetwork(window_bytes=3))
    with trio.move_on_after(1) as waited:
        await one.send_all(b"four")
    assert waited.cancelled_caught
    assert await other.receive_some() == b"fou"


async def test_lost_connections_repeat_with_the_seed() -> None:
    async def attempts(seed: int) -> list[bool]:
        network = MemoryNetwork(connect_loss=0.5, seed=seed)
        found = []
        for _ in range(20):
            try:
                await stream_pair(network)
            except ConnectionRefusedError:
                found.append(False)
            else:
                found.append(True)
        return found

    first = await attempts(1)
    assert first == await attempts(1)
    assert first != await attempts(2)
    assert {True, False} == set(first)


async def test_ports_are_given_out_and_taken_once() -> None:
    network = MemoryNetwork()

    async def ignore(stream: trio.abc.Stream, source: str) -> None:
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        listen = network.host("a").listen
        first = await nursery.start(listen, ignore, None, 0)
        second = await nursery.start(listen, ignore, None, 0)
        assert first != second
        with pytest.raises(OSError, match="listens on port"):
            await nursery.start(listen, ignore, None, first[0][1])
        nursery.cancel_scope.cancel()
    with pytest.raises(ConnectionRefusedError):
        await network.host("b").connect(*first[0])
