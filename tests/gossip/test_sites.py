"""Prefixes and sites: what addresses are counted by."""

from __future__ import annotations

import pytest

from swarmnode.gossip.sites import is_local_site, prefix_of, site_of
from tests.gossip.market import node_id


@pytest.mark.parametrize(
    ("addresses", "site"),
    [
        (("8.8.8.8:4000",), "8.8.8.0/24"),
        (("192.168.1.7:4000", "8.8.8.8:4000"), "8.8.8.0/24"),
        (("[2001:4860:4860::8888]:1",), "2001:4860:4860::/48"),
        (("[::ffff:8.8.8.8]:1",), "8.8.8.0/24"),
        (("Host.example:4000",), "name host.example"),
        (("192.168.1.7:4000",), "192.168.1.0/24"),
        (("127.0.0.1:4000",), "127.0.0.0/24"),
        ((), "nowhere"),
    ],
)
def test_sites(addresses: tuple[str, ...], site: str) -> None:
    assert site_of(addresses, ()) == site
    assert is_local_site(site) == (site.startswith(("192", "127", "nowhere")))


def test_a_relay_is_the_site_of_nodes_without_a_public_address() -> None:
    relay = node_id(5)
    assert site_of(("10.0.0.1:1",), (relay,)) == site_of((), (relay, node_id(6))) == f"relay {relay}"
    assert site_of(("8.8.8.8:1",), (relay,)) == "8.8.8.0/24"


@pytest.mark.parametrize(
    ("address", "prefix"),
    [
        ("203.0.113.9:7000", "203.0.113.0/24"),
        ("[2001:db8:1:2::9]:7000", "2001:db8:1::/48"),
        ("[::ffff:203.0.113.9]:7000", "203.0.113.0/24"),
        ("127.0.0.1:7000", ""),
        ("[::1]:7000", ""),
        ("node.example.org:7000", ""),
    ],
)
def test_prefixes(address: str, prefix: str) -> None:
    assert prefix_of(address) == prefix
