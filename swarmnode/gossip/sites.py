"""Where nodes are, as their records say: what they are counted by where many of one place could be one person. Pure.

A **prefix** is the /24 or /48 of one address: the table keeps only so many records of each. A **site** is what a node
fails together with, one for each node: coverage and votes count those of one site as little more than one.
"""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from typing import TypeAlias

from swarmnode.gossip.records import NodeRecord, Record
from swarmnode.identity import NodeId

IpAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


@lru_cache(maxsize=32_768)
def site_of(addresses: tuple[str, ...], relays: tuple[NodeId, ...]) -> str:
    """What a node fails together with: the /24 or /48 of its first public address, else its first relay, else the
    network of its first private address, else `nowhere`. A host's name is a site of its own.

    Remembered of as many nodes as a table holds records: 30 us, which a flood would cost again and again.
    """
    private = ""
    for address in addresses:
        host = _host_of(address)
        try:
            ip = _ip_of(host)
        except ValueError:
            return f"name {host.lower()}"
        site = _network_of(ip)
        if ip.is_global:
            return site
        private = private or site
    relay = next(iter(relays), None)
    if relay is not None:
        return f"relay {relay}"
    return private or "nowhere"


def is_local_site(site: str) -> bool:
    """Whether a site is a private network, this machine, or no address: a name that says nothing."""
    if site == "nowhere":
        return True
    try:
        return not ipaddress.ip_network(site).is_global
    except ValueError:
        return False


def prefixes_of(record: Record) -> tuple[str, ...]:
    """What the addresses of a record are counted by: IPv4 /24 and IPv6 /48, names and loopback not at all."""
    return _prefixes(record.state.addresses) if isinstance(record, NodeRecord) else ()


@lru_cache(maxsize=4096)
def _prefixes(addresses: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted({prefix for text in addresses if (prefix := prefix_of(text))}))


def prefix_of(address: str) -> str:
    """`203.0.113.9:7000` -> `203.0.113.0/24`, `[2001:db8::1]:7000` -> `2001:db8::/48`; "" for a name or loopback."""
    try:
        ip = _ip_of(_host_of(address).partition("%")[0])
    except ValueError:
        return ""
    return "" if ip.is_loopback else _network_of(ip)


def _host_of(address: str) -> str:
    """The host of `host:port`, without the brackets of IPv6."""
    return address.rpartition(":")[0].strip("[]")


def _ip_of(host: str) -> IpAddress:
    """An IPv4 address that is written as IPv6 is the IPv4 address. ValueError for a name."""
    ip = ipaddress.ip_address(host)
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return ip if mapped is None else mapped


def _network_of(ip: IpAddress) -> str:
    return str(ipaddress.ip_network((ip, 24 if ip.version == 4 else 48), strict=False))
