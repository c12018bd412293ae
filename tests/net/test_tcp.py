"""Real sockets on this machine: short messages are not held back, IPv6 works, dead addresses cost little."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import trio
import trio.testing

from swarmnode.errors import ConnectionLostError
from swarmnode.net.address import PeerAddress
from swarmnode.net.peer import Peer
from swarmnode.net.tcp import TcpStream, TcpTransport

from .nodes import SERVER, dial_from, endpoint, experts, serve_on

pytestmark = pytest.mark.real_time


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_6_kb_ping_pong_both_ways(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TCP_NODELAY on either side each round trip takes 40 ms or more; so both have it."""
    accepted: list[Peer] = []
    made: list[trio.socket.SocketType] = []
    make = TcpStream.__init__

    async def remember(peer: Peer) -> None:
        accepted.append(peer)

    def remembered(stream: TcpStream, own: trio.SocketStream) -> None:
        made.append(own.socket)
        make(stream, own)

    monkeypatch.setattr(TcpStream, "__init__", remembered)
    async with trio.open_nursery() as nursery:
        transport = TcpTransport()
        address = await serve_on(nursery, transport, endpoint(SERVER), on_peer=remember, host=host, port=0)
        peer = await dial_from(nursery, transport, address)
        for asker in (peer, accepted[0]):
            for _ in range(25):
                await asker.request(*experts(1, 3072))
        assert len(made) == 2
        assert all(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for own in made)
        nursery.cancel_scope.cancel()


async def test_large_bodies_arrive_whole() -> None:
    async with trio.open_nursery() as nursery:
        transport = TcpTransport()
        address = await serve_on(nursery, transport, endpoint(SERVER), host="127.0.0.1", port=0)
        peer = await dial_from(nursery, transport, address)
        message, body = experts(2000, 3072)
        rows = memoryview(bytes(range(256)) * (2000 * 6144 // 256))
        _, reply = await peer.request(message, (rows, body[1]))
        assert reply == rows
        nursery.cancel_scope.cancel()


@contextmanager
def black_hole() -> Iterator[int]:
    """A port of loopback that never answers: a listener that accepts nobody, with its queue full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port: int = listener.getsockname()[1]
        for _ in range(8):  # more than any system queues for a backlog of 0
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        yield port


async def test_a_black_holed_address_does_not_hold_up_the_others() -> None:
    """A name with one address that never answers before the right one; both on loopback."""

    class Resolver(trio.abc.HostnameResolver):
        async def getaddrinfo(self, host: Any, port: Any, *_: Any, **__: Any) -> Any:
            kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
            return [(*kind, ("127.0.0.1", dead_port)), (*kind, ("127.0.0.1", port))]

        async def getnameinfo(self, sockaddr: Any, flags: int) -> Any:
            raise AssertionError("nobody asks for names")

    with black_hole() as dead_port:
        with trio.move_on_after(0.3) as never:
            await trio.open_tcp_stream("127.0.0.1", dead_port)
        assert never.cancelled_caught, "the black hole answered: this test would show nothing"
        async with trio.open_nursery() as nursery:
            transport = TcpTransport()
            address = await serve_on(nursery, transport, endpoint(SERVER), host="127.0.0.1", port=0)
            trio.socket.set_custom_hostname_resolver(Resolver())
            with trio.fail_after(5):
                peer = await dial_from(nursery, transport, PeerAddress(address.node_id, "name", address.port))
            await peer.request(*experts())
            nursery.cancel_scope.cancel()


async def test_a_closed_port_is_told_at_once() -> None:
    async with trio.open_nursery() as nursery:
        nobody = PeerAddress(endpoint(SERVER).credentials.node_id, "127.0.0.1", 1)
        with pytest.raises(ConnectionLostError, match=r"127\.0\.0\.1 port 1: refused: nothing listens"):
            await dial_from(nursery, TcpTransport(), nobody)


async def test_a_taken_port_is_an_error_of_the_system() -> None:
    async with trio.open_nursery() as nursery:
        address = await serve_on(nursery, TcpTransport(), endpoint(SERVER), host="127.0.0.1", port=0)
        with pytest.raises(OSError, match=r"[Aa]ddress already in use|errno 98"):
            await serve_on(nursery, TcpTransport(), endpoint(SERVER), host="127.0.0.1", port=address.port)
        nursery.cancel_scope.cancel()


async def test_sending_now_takes_what_fits_and_never_raises() -> None:
    one, other = socket.socketpair()
    stream = TcpStream(trio.SocketStream(trio.socket.from_stdlib_socket(one)))
    assert stream.send_now(b"abc") == 3
    sent = 3
    while n_bytes := stream.send_now(bytes(100_000)):
        sent += n_bytes
    other.close()
    assert stream.send_now(b"broken") == 0
    with pytest.raises(trio.BrokenResourceError):
        await stream.send_all(b"broken")
    await stream.aclose()
    assert stream.send_now(b"closed") == 0


def connected() -> tuple[TcpStream, socket.socket]:
    """A stream and the other end of its connection."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        other = socket.create_connection(listener.getsockname())
        own = listener.accept()[0]
    return TcpStream(trio.SocketStream(trio.socket.from_stdlib_socket(own))), other


async def receive_all(stream: TcpStream, max_bytes: int) -> bytes:
    received = bytearray()
    while data := await stream.receive_some(max_bytes):
        received += data
    return bytes(received)


async def drained() -> tuple[TcpStream, socket.socket]:
    """As `connected`, where the next read waits before it reads."""
    stream, other = connected()
    other.send(b"first")
    assert await stream.receive_some(100) == b"first"
    return stream, other


@pytest.mark.parametrize("n_bytes", [1, 99, 100, 101, 200])
@pytest.mark.parametrize("piece_bytes", [1, 1000])
async def test_all_lengths_of_reads_arrive_whole_with_their_end(n_bytes: int, piece_bytes: int) -> None:
    stream, other = connected()
    sent = bytes(range(n_bytes))
    with other:
        for start in range(0, n_bytes, piece_bytes):
            other.send(sent[start : start + piece_bytes])
        other.shutdown(socket.SHUT_WR)
        assert await receive_all(stream, 100) == sent
        assert await stream.receive_some(100) == b"", "the end stays the end"
    await stream.aclose()


async def test_a_read_that_is_cancelled_loses_nothing() -> None:
    stream, other = await drained()
    with other:
        with trio.move_on_after(0.001) as waiting:
            await stream.receive_some(100)
        assert waiting.cancelled_caught
        other.send(b"second")
        with trio.CancelScope() as cancelled:
            cancelled.cancel()
            await stream.receive_some(100)
        assert cancelled.cancelled_caught
        assert await stream.receive_some(100) == b"second"
    await stream.aclose()


async def test_a_reset_and_a_close_end_a_read_that_waits() -> None:
    for is_reset in (True, False):
        stream, other = await drained()
        expected = trio.BrokenResourceError if is_reset else trio.ClosedResourceError
        with trio.fail_after(5), pytest.RaisesGroup(expected):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stream.receive_some, 100)
                await trio.testing.wait_all_tasks_blocked()
                if is_reset:
                    other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    other.close()
                else:
                    await stream.aclose()
        other.close()
        await stream.aclose()
        with pytest.raises(trio.ClosedResourceError):
            await stream.receive_some(100)


async def test_a_descriptor_that_went_to_another_connection_is_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A task may close the stream when its reader has been woken and has not run yet."""
    stream, other = await drained()
    wait_readable = trio.lowlevel.wait_readable
    opened: list[socket.socket] = []

    async def closed_behind(descriptor: int) -> None:
        await wait_readable(descriptor)
        with trio.CancelScope() as at_once:
            at_once.cancel()
            await stream.aclose()
        opened.extend(socket.socketpair())
        numbers = [end.fileno() for end in opened]
        opened[1 - numbers.index(descriptor)].send(b"not for this stream")

    monkeypatch.setattr(trio.lowlevel, "wait_readable", closed_behind)
    with other:
        other.send(b"second")
        with pytest.raises(trio.ClosedResourceError):
            await stream.receive_some(100)
    for end in opened:
        end.close()


async def test_sizes_that_are_none_are_refused() -> None:
    stream, other = await drained()
    with other, pytest.raises(ValueError, match="max_bytes"):
        await stream.receive_some(0)
    await stream.aclose()
