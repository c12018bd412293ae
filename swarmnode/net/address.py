"""Where a node is and who it is: `swarm://NODEID@host:port`, IPv6 hosts in brackets; and what kind of host that is."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from swarmnode.errors import UsageError
from swarmnode.identity import NodeId

SCHEME = "swarm://"
MAX_ADDRESS_CHARS = 512
_DNS_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9_-]{1,63}(?<!-))*\.?")


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """A node and one place where it listens."""

    node_id: NodeId
    host: str
    """A DNS name or an IP address, without brackets."""
    port: int

    @classmethod
    def parse(cls, text: str) -> PeerAddress:
        """Read `swarm://NODEID@host:port`. Raises UsageError saying which part is wrong."""
        if len(text) > MAX_ADDRESS_CHARS:
            raise UsageError(f"an address of {len(text)} characters")
        if not text.startswith(SCHEME):
            raise UsageError(f"an address starts with {SCHEME}")
        node, at, place = text[len(SCHEME) :].partition("@")
        if not at:
            raise UsageError("an address is swarm://NODEID@host:port; the @ is missing")
        host, port = split_host_port(place)
        return cls(NodeId.parse(node), host, port)

    def __str__(self) -> str:
        return f"{SCHEME}{self.node_id}@{join_host_port(self.host, self.port)}"


def split_host_port(text: str) -> tuple[str, int]:
    """`host:port` or `[ipv6]:port`. Raises UsageError saying which part is wrong."""
    host, colon, port = text.rpartition(":")
    if not colon:
        raise UsageError(f"{text!r} has no port")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= 65_535):
        raise UsageError(f"{port!r} is not a port (1 to 65535)")
    return _checked_host(host), int(port)


def join_host_port(host: str, port: int) -> str:
    """`host:port`, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """True for localhost and loopback addresses; a name is not looked up."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_private(host: str) -> bool:
    """True for addresses of private networks, loopback among them, and names that mean something there only."""
    try:
        return ipaddress.ip_address(host).is_private
    except ValueError:
        return host == "localhost" or host.endswith(".local")


def _checked_host(host: str) -> str:
    if host.startswith("[") and host.endswith("]"):
        try:
            return str(ipaddress.IPv6Address(host[1:-1]))
        except ValueError:
            raise UsageError(f"{host!r} is not an IPv6 address") from None
    if ":" in host:
        raise UsageError(f"{host!r}: an IPv6 address stands in brackets")
    if not _DNS_NAME.fullmatch(host) or len(host) > 253:
        raise UsageError(f"{host!r} is neither a DNS name nor an IP address")
    if re.fullmatch(r"[0-9.]+", host):
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            raise UsageError(f"{host!r} is not an IPv4 address") from None
    return host
