"""The addresses of this machine, as others would dial it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

# Addresses of documentation (RFC 5737, RFC 3849): a socket "connected" to them tells which address of this machine
# would be used towards the internet. Nothing is sent.
_OUTSIDE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


def own_hosts() -> list[str]:
    """The addresses of this machine towards the internet, IPv4 first; empty without a network. Sends nothing."""
    hosts = []
    for family, outside in _OUTSIDE:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((outside, 9))
                host = str(probe.getsockname()[0])
        except OSError:
            continue
        if not ipaddress.ip_address(host.partition("%")[0]).is_link_local:
            hosts.append(host)
    return hosts


def answering(listened: str, hosts: Sequence[str]) -> list[str]:
    """Of this machine's addresses, those at which a node answers that listens on all of them, as 0.0.0.0 or ::.

    At 0.0.0.0, which is what people are told to give, nobody answers an IPv6 address.
    """
    return list(hosts) if listened == "::" else [host for host in hosts if ":" not in host] or list(hosts)
