"""A request that is answered in time and by the right type of message, or fails: nobody waits for ever."""

from __future__ import annotations

from typing import TypeVar

import trio

from swarmnode.errors import BadReplyError, ConnectionLostError
from swarmnode.net.peer import Peer
from swarmnode.wire.messages import Message

M = TypeVar("M", bound=Message)


async def ask(peer: Peer, message: Message, reply_type: type[M], timeout_s: float) -> tuple[M, memoryview]:
    """The reply and its body.

    Raises ConnectionLostError when none has come after `timeout_s` (a peer that answers pings only is as good as
    gone), BadReplyError for another type of message, and what `Peer.request` raises.
    """
    try:
        with trio.fail_after(timeout_s):
            reply, body = await peer.request(message)
    except trio.TooSlowError:
        raise no_answer(peer, message, timeout_s) from None
    if not isinstance(reply, reply_type):
        raise BadReplyError(f"asked {type(message).__name__}, got {type(reply).__name__}")
    return reply, body


def no_answer(peer: Peer, message: Message, timeout_s: float) -> ConnectionLostError:
    """The error for a peer that let a deadline pass."""
    return ConnectionLostError(
        f"{peer.node_id.short} did not answer {type(message).__name__} within {timeout_s:g} s"
    )
