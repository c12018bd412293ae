"""The link on the page: what `swarmnode invite` prints, and never the network's secret."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from swarmnode.config import Folders
from swarmnode.identity import NodeKey
from swarmnode.net.address import PeerAddress
from swarmnode.net.invite import Invite
from swarmnode.node import dashboard
from swarmnode.node.common import NodeOptions
from swarmnode.node.dashboard import invitation_of
from swarmnode.wire.secret import NetworkSecret

NODE = NodeKey.from_seed(bytes(32)).node_id
OPTIONS = NodeOptions(Folders.under(Path("/nowhere")), "home")
BIG = 10**12


def at(*hosts: str) -> tuple[PeerAddress, ...]:
    return tuple(PeerAddress(NODE, host, 4790) for host in hosts)


def test_a_link_to_where_the_node_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "own_hosts", lambda: ["192.168.1.5", "2001:db8::5"])
    everywhere = invitation_of(OPTIONS, at("::"), BIG)
    assert everywhere is not None
    hosts = [address.host for address in Invite.parse(everywhere.link).addresses]
    assert hosts == ["192.168.1.5", "2001:db8::5"]
    found = invitation_of(OPTIONS, at("0.0.0.0"), BIG)
    assert found is not None
    invite = Invite.parse(found.link)
    assert [address.host for address in invite.addresses] == ["192.168.1.5"]
    assert invite.network == "home"
    assert found.command == f'swarmnode join --budget 300MB --bootstrap "{found.link}"'
    assert found.port == 4790


@pytest.mark.parametrize(
    ("hosts", "reach"),
    [
        (["127.0.0.1"], "machine"),
        (["localhost"], "machine"),
        (["127.0.0.1", "10.0.0.2"], "network"),
        (["nas.local"], "network"),
        (["10.0.0.2", "8.8.8.8"], "internet"),
        (["backbone.example.org"], "internet"),
    ],
)
def test_how_far_it_reaches(hosts: list[str], reach: str) -> None:
    found = invitation_of(OPTIONS, at(*hosts), BIG)
    assert found is not None
    assert found.reach == reach
    home = " --home ~/swarm-worker1" if reach == "machine" else ""
    assert found.command == f'swarmnode join --budget 300MB{home} --bootstrap "{found.link}"'


def test_what_the_operator_advertises_comes_first() -> None:
    options = replace(OPTIONS, advertise=(("backbone.example.org", 5000),))
    found = invitation_of(options, at("10.0.0.2"), BIG)
    assert found is not None
    assert [address.port for address in Invite.parse(found.link).addresses] == [5000, 4790]


def test_the_secret_is_never_in_it() -> None:
    secret = NetworkSecret(bytes(range(32)))
    found = invitation_of(
        replace(OPTIONS, secret=secret, allowed=frozenset({NODE})), at("10.0.0.2"), 30_000_000
    )
    assert found is not None
    assert secret.text not in found.link + found.command
    assert Invite.parse(found.link).secret is None
    assert found.needs_secret
    assert found.is_limited
    assert found.command.startswith("swarmnode join --budget 11MB --secret FILE --bootstrap")


def test_no_link_where_none_could_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert invitation_of(OPTIONS, (), BIG) is None
    monkeypatch.setattr(dashboard, "own_hosts", list)
    assert invitation_of(OPTIONS, at("0.0.0.0"), BIG) is None
    many = tuple((f"{'x' * 60}.{'y' * 60}.{'z' * 60}.{number}.example.org", 1) for number in range(30))
    assert invitation_of(replace(OPTIONS, advertise=many * 2), at("0.0.0.0"), BIG) is not None
