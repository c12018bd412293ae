"""The LAN: what is announced, whom to believe, and that nothing there ends the node. No packet is sent here."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.config import LanConfig
from swarmnode.errors import ProtocolError, UsageError
from swarmnode.identity import NodeKey
from swarmnode.net.address import PeerAddress
from swarmnode.services.lan import LanDiscovery, LanService, addresses_untrusted, announcement
from swarmnode.services.runners import Inline
from swarmnode.wire.secret import NetworkSecret, network_tag

OWN, OTHER = (NodeKey.from_seed(bytes([number]) * 32).node_id for number in (1, 2))
SECRET = NetworkSecret(bytes(32))
TAG = network_tag("test", SECRET)
CONFIG = LanConfig(max_nodes=3)
HOSTS = ("192.0.2.1", "2001:db8::1")


class FakeLan:
    """Multicast among the backends made by it, at once."""

    def __init__(self) -> None:
        self.members: list[FakeBackend] = []

    def backend(self) -> FakeBackend:
        return FakeBackend(self)


class FakeBackend:
    def __init__(self, lan: FakeLan) -> None:
        self._lan = lan
        self.own: LanService | None = None
        self.on_seen: Callable[[LanService], None] | None = None

    def start(self, own: LanService | None, on_seen: Callable[[LanService], None]) -> None:
        self.own, self.on_seen = own, on_seen
        self._lan.members.append(self)
        for member in self._lan.members:
            if member.own is not None:
                on_seen(member.own)
            if own is not None and member is not self and member.on_seen is not None:
                member.on_seen(own)

    def close(self) -> None:
        self._lan.members.remove(self)


class NoLan(FakeBackend):
    def start(self, own: LanService | None, on_seen: Callable[[LanService], None]) -> None:
        raise UsageError("no multicast")


async def test_two_nodes_find_each_other_whoever_comes_first() -> None:
    lan = FakeLan()
    found: dict[str, list[PeerAddress]] = {"own": [], "other": []}
    async with trio.open_nursery() as nursery:
        for name, node in (("own", OWN), ("other", OTHER)):
            listening = (HOSTS, 4790)
            discovery = LanDiscovery(
                lan.backend(), node, TAG, listening, found[name].extend, Inline(), CONFIG
            )
            nursery.start_soon(discovery.run)
            await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert set(found["own"]) == {PeerAddress(OTHER, host, 4790) for host in HOSTS}
    assert set(found["other"]) == {PeerAddress(OWN, host, 4790) for host in HOSTS}
    assert lan.members == [], "the announcement is withdrawn"


async def test_a_node_that_does_not_listen_announces_nothing() -> None:
    lan = FakeLan()
    backend = lan.backend()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(LanDiscovery(backend, OWN, TAG, None, lambda _: None, Inline(), CONFIG).run)
        await trio.sleep(1)
        assert lan.members == [backend]
        assert backend.own is None
        nursery.cancel_scope.cancel()


async def test_a_machine_without_multicast_goes_on_without(caplog: pytest.LogCaptureFixture) -> None:
    await LanDiscovery(NoLan(FakeLan()), OWN, TAG, None, lambda _: None, Inline(), CONFIG).run()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


async def test_a_flood_of_announcements_is_bounded_and_a_known_node_may_move() -> None:
    lan, found = FakeLan(), list[PeerAddress]()
    backend = lan.backend()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(LanDiscovery(backend, OWN, TAG, None, found.extend, Inline(), CONFIG).run)
        await trio.sleep(1)
        assert backend.on_seen is not None
        nodes = [NodeKey.from_seed(bytes([number]) * 32).node_id for number in range(10, 30)]
        for node in nodes:
            backend.on_seen(announcement(node, TAG, HOSTS[:1], 1))
        backend.on_seen(announcement(nodes[0], TAG, HOSTS[:1], 2))
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert found == [PeerAddress(node, HOSTS[0], 1) for node in nodes[:3]] + [
        PeerAddress(nodes[0], HOSTS[0], 2)
    ]


def believed(service: LanService) -> tuple[PeerAddress, ...]:
    return addresses_untrusted(service, OWN, TAG, CONFIG)


def test_what_is_announced_gives_no_secret_away() -> None:
    service = announcement(OTHER, TAG, HOSTS, 4790)
    assert set(service.fields) == {"id", "net"}
    said = " ".join(service.fields.values())
    assert SECRET.text not in said
    assert SECRET.raw.hex() not in said
    assert "test" not in said


def test_other_networks_and_ourselves_are_left_out() -> None:
    for network, secret in (("test", None), ("other", SECRET), ("test", NetworkSecret(bytes([1]) * 32))):
        assert believed(announcement(OTHER, network_tag(network, secret), HOSTS, 1)) == ()
    assert believed(announcement(OWN, TAG, HOSTS, 1)) == ()
    assert believed(LanService(HOSTS, 1, {})) == ()


def test_only_addresses_that_can_be_dialled_are_taken() -> None:
    hosts = ("fe80::1", "fe80::1%eth0", "name.local", "224.0.0.251", "0.0.0.0", "::", "192.0.2.1", "")
    assert believed(announcement(OTHER, TAG, hosts, 1)) == (PeerAddress(OTHER, "192.0.2.1", 1),)
    many = tuple(f"192.0.2.{number}" for number in range(200))
    assert len(believed(announcement(OTHER, TAG, many, 1))) == CONFIG.max_hosts


@given(
    st.lists(st.text(max_size=20), max_size=5),
    st.integers(-1, 70_000),
    st.text(max_size=60) | st.just(str(OTHER)),
)
def test_an_announcement_may_hold_anything(hosts: list[str], port: int, node: str) -> None:
    with contextlib.suppress(ProtocolError):
        found = believed(LanService(tuple(hosts), port, {"net": TAG.hex(), "id": node}))
        assert all(PeerAddress.parse(str(address)) == address for address in found)
