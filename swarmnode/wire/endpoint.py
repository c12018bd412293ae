"""What a node is on every one of its connections: its key, its network, what it tells in settings, whom it lets in."""

from __future__ import annotations

from dataclasses import dataclass

from swarmnode.config import WireConfig
from swarmnode.identity import NodeId
from swarmnode.wire.constants import ENCODINGS, PROTOCOL_VERSION
from swarmnode.wire.handshake import Credentials
from swarmnode.wire.messages import Settings
from swarmnode.wire.secret import NetworkSecret


@dataclass(frozen=True)
class Endpoint:
    """What a node is on every connection of its own."""

    credentials: Credentials
    network: str
    """Nodes of another network cannot talk to us."""
    settings: Settings
    config: WireConfig
    allowed: frozenset[NodeId] | None = None
    """Who may dial us; None: everybody with a key."""
    secret: NetworkSecret | None = None
    """The private network's secret, mixed into every handshake; None: a network that anybody may dial."""

    @classmethod
    def create(
        cls,
        credentials: Credentials,
        *,
        network: str,
        agent: str,
        roles: tuple[str, ...],
        config: WireConfig | None = None,
        allowed: frozenset[NodeId] | None = None,
        secret: NetworkSecret | None = None,
    ) -> Endpoint:
        """An endpoint that speaks every row encoding and tells the caps of `config`."""
        config = WireConfig() if config is None else config
        settings = Settings(
            versions=(PROTOCOL_VERSION,),
            agent=agent,
            roles=roles,
            encodings=ENCODINGS,
            max_body_bytes=config.max_body_bytes,
            max_requests=config.max_requests_in_flight,
        )
        return cls(credentials, network, settings, config, allowed, secret)
