"""A link that brings a node into a network: `swarm://NODEID@host:port?at=host:port&network=NAME&secret=SECRET`.

Everything behind `?` is optional: further places of the same node, the network's name, and, if whoever made the link
wanted that, the network's secret. A link without all that is a plain address.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl, quote

from swarmnode.errors import UsageError
from swarmnode.net.address import PeerAddress, split_host_port
from swarmnode.wire.constants import MAX_NETWORK_NAME_BYTES
from swarmnode.wire.secret import NetworkSecret

MAX_LINK_CHARS = 2048
MAX_PLACES = 8


_LARGE_BYTES = 900_000_000
_HOME_BESIDE = "~/swarm-worker1"  # README's


def suggested_budget(routed_bytes: int) -> str:
    """The budget that an invitation names for a worker of a model with so many bytes of routed experts: 300MB, or a
    third of a small model."""
    return "300MB" if routed_bytes > _LARGE_BYTES else f"{1 + routed_bytes // 3_000_000}MB"


def join_command(budget: str, source: str, options: str = "", *, beside: bool = False) -> str:
    """The line that starts a worker. `source`: what --bootstrap takes, quoted if the shell needs that; `options`: more
    of them, with a space in front. `beside`: on the machine of the node that says it, where the default folders are
    taken: a line that is pasted as it is must not end with an error about the key."""
    home = f" --home {_HOME_BESIDE}" if beside else ""
    return f"swarmnode join --budget {budget}{home}{options} --bootstrap {source}"


@dataclass(frozen=True, slots=True)
class Invite:
    """What a link says."""

    addresses: tuple[PeerAddress, ...]
    """Of a link: at least one, all of the same node."""
    network: str | None = None
    """None: not said."""
    secret: NetworkSecret | None = None

    @classmethod
    def parse(cls, text: str) -> Invite:
        """Read a link; white space (a pasted line that was broken) is left out. Raises UsageError, which never repeats
        a secret.
        """
        text = "".join(text.split())
        if len(text) > MAX_LINK_CHARS:
            raise UsageError(f"a link of {len(text)} characters")
        first, _, query = text.partition("?")
        address = PeerAddress.parse(first)
        addresses = [address]
        network: str | None = None
        secret: NetworkSecret | None = None
        for name, value in _fields(query):
            if name == "at":
                addresses.append(PeerAddress(address.node_id, *split_host_port(value)))
            elif name == "network" and network is None:
                network = checked_network(value)
            elif name == "secret" and secret is None:
                secret = NetworkSecret.parse(value)
            else:
                raise UsageError(f"{name!r} in a link is unknown, or there twice")
        if len(addresses) > MAX_PLACES:
            raise UsageError(f"a link with {len(addresses)} places; at most {MAX_PLACES}")
        return cls(tuple(dict.fromkeys(addresses)), network, secret)

    def __str__(self) -> str:
        """The link, with the secret in it if there is one."""
        places = [str(address).partition("@")[2] for address in self.addresses[1:]]
        fields = [("at", place) for place in places]
        if self.network is not None:
            fields.append(("network", self.network))
        if self.secret is not None:
            fields.append(("secret", self.secret.text))
        query = "&".join(f"{name}={quote(value, safe='[]:')}" for name, value in fields)
        return str(self.addresses[0]) + (f"?{query}" if query else "")


def _fields(query: str) -> list[tuple[str, str]]:
    if not query:
        return []
    try:
        return parse_qsl(
            query, keep_blank_values=True, strict_parsing=True, errors="strict", max_num_fields=2 * MAX_PLACES
        )
    except ValueError:  # also UnicodeDecodeError
        raise UsageError("a link whose part behind the ? is not name=value&name=value") from None


def checked_network(name: str) -> str:
    """The name of a network, as links and handshakes take it. UsageError."""
    try:
        n_bytes = len(name.encode("utf-8"))
    except UnicodeEncodeError:  # half of a surrogate pair: what the terminal sent was no UTF-8
        raise UsageError("a network name that is not UTF-8 text") from None
    if not 1 <= n_bytes <= MAX_NETWORK_NAME_BYTES:
        raise UsageError(f"a network name has 1 to {MAX_NETWORK_NAME_BYTES} bytes")
    return name
