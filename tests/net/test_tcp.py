"""Real sockets on this machine: short messages are not held back, IPv6 works, dead addresses cost little."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import trio

from swarmnode.errors import ConnectionLostError
from swarmnode.net.address import PeerAddress
from swarmnode.net.peer import Peer
from swarmnode.net.tcp import TcpStream, TcpTransport

from .nodes import SERVER, dial_from, endpoint, experts, serve_on

pytestmark = pytest.mark.real_time


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_6_kb_ping_pong_both_ways(host: str) -> None:
    """Without TCP_NODELAY on either side each round trip takes 40 ms or more; with it, 0.3 ms."""
    accepted: list[Peer] = []

    async def remember(peer: Peer) -> None:
        accepted.append(peer)

    async with trio.open_nursery() as nursery:
        transport = TcpTransport()
        address = await serve_on(nursery, transport, endpoint(SERVER), on_peer=remember, host=host, port=0)
        peer = await dial_from(nursery, transport, address)
        for asker in (peer, accepted[0]):
            await asker.request(*experts(1, 3072))
            started_s = time.perf_counter()
            for _ in range(25):
                await asker.request(*experts(1, 3072))
            assert time.perf_counter() - started_s < 25 * 0.02
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
        with pytest.raises(ConnectionLostError, match=r"127\.0\.0\.1 port 1: "):
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
