"""What a connection tells its owner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from swarmnode.errors import RemoteError
from swarmnode.identity import NodeId
from swarmnode.wire.constants import TrafficClass
from swarmnode.wire.messages import Message, Settings


@dataclass(frozen=True, slots=True)
class Opened:
    """Handshake and settings are through; requests may flow."""

    node_id: NodeId
    settings: Settings


@dataclass(frozen=True, slots=True)
class RequestReceived:
    """A whole request. It wants exactly one `Connection.send_reply`, even when it is cancelled meanwhile."""

    request_id: int
    message: Message
    body: memoryview
    traffic_class: TrafficClass


@dataclass(frozen=True, slots=True)
class ReplyReceived:
    """The whole reply to a request of ours."""

    request_id: int
    message: Message
    body: memoryview


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The asker no longer wants the reply to this request, which was received and is not answered yet."""

    request_id: int


@dataclass(frozen=True, slots=True)
class PongReceived:
    """The peer answered our ping."""

    nonce: int


@dataclass(frozen=True, slots=True)
class Ended:
    """Nothing more comes. `error` is None after a bye, whose words are in `code` and `reason`."""

    code: str
    reason: str
    error: RemoteError | None


Event: TypeAlias = Opened | RequestReceived | ReplyReceived | RequestCancelled | PongReceived | Ended
