"""Bounds what the replies of one connection cost: bytes being computed for it or waiting to be sent.

A handler starts only when there is room for its reply, so a peer that asks and does not read makes us compute and keep
a few MiB, however much it asks. Each traffic class has room of its own: a decode never waits for slices to leave.
"""

from __future__ import annotations

import trio

from swarmnode.config import WireConfig
from swarmnode.net.secure import SecureStream
from swarmnode.wire.constants import TrafficClass
from swarmnode.wire.events import RequestReceived


class ReplyRoom:
    """The room of one connection. Per class, at most the class's budget and one reply more is held."""

    def __init__(self, stream: SecureStream, config: WireConfig) -> None:
        self._stream = stream
        self._connection = stream.connection
        self._reserved = [0 for _ in TrafficClass]
        """Bytes of replies that handlers may come up with, by class."""
        self._budgets = {
            TrafficClass.DECODE: config.decode_reply_bytes,
            TrafficClass.PREFILL: config.prefill_reply_bytes,
            TrafficClass.BULK: config.bulk_reply_bytes,
        }
        self._turns = [trio.Lock() for _ in TrafficClass]  # trio's lock is fair: first come, first served

    async def reserve(self, event: RequestReceived) -> tuple[TrafficClass, int]:
        """Wait until the answer to this request may be made; `release` takes what this returns.

        Not a checkpoint when there is room: that is on the way of every row.
        """
        n_bytes = event.message.reply_bytes(len(event.body))
        traffic_class = max(event.traffic_class, *(reply.traffic_class for reply in event.message.replies))
        if n_bytes:
            turn = self._turns[traffic_class]
            if turn.locked() or self._is_full(traffic_class):
                async with turn:
                    while self._is_full(traffic_class):
                        await self._stream.wait_change()
                    self._reserved[traffic_class] += n_bytes  # in our turn: the next one must see it
            else:
                self._reserved[traffic_class] += n_bytes
        return traffic_class, n_bytes

    def release(self, reserved: tuple[TrafficClass, int]) -> None:
        """The reply is queued (and counts there now), or there will be none."""
        traffic_class, n_bytes = reserved
        self._reserved[traffic_class] -= n_bytes
        self._stream.tell_change()

    def _is_full(self, traffic_class: TrafficClass) -> bool:
        held_bytes = self._reserved[traffic_class] + self._connection.reply_bytes(traffic_class)
        return held_bytes >= self._budgets.get(traffic_class, 1)
