"""What a connection tells its owner."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from swarmnode.errors import RemoteError
from swarmnode.identity import NodeId
from swarmnode.wire.constants import TrafficClass
from swarmnode.wire.messages import Message, Settings


class Opened(NamedTuple):
    """Handshake and settings are through; requests may flow."""

    node_id: NodeId
    settings: Settings


class RequestReceived(NamedTuple):
    """A whole request. It wants exactly one `Connection.send_reply`, even when it is cancelled meanwhile."""

    request_id: int
    message: Message
    body: memoryview
    traffic_class: TrafficClass


class ReplyReceived(NamedTuple):
    """The whole reply to a request of ours."""

    request_id: int
    message: Message
    body: memoryview


class RequestCancelled(NamedTuple):
    """The asker no longer wants the reply to this request, which was received and is not answered yet."""

    request_id: int


class PongReceived(NamedTuple):
    """The peer answered our ping."""

    nonce: int


class Ended(NamedTuple):
    """Nothing more comes. `error` is None after a bye, whose words are in `code` and `reason`."""

    code: str
    reason: str
    error: RemoteError | None


Event: TypeAlias = Opened | RequestReceived | ReplyReceived | RequestCancelled | PongReceived | Ended
