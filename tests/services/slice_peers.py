"""Sources of slices of which a test says what they answer, and what was asked of them."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence

import trio

from swarmnode.config import StoreConfig
from swarmnode.identity import NodeKey
from swarmnode.services.fetch import SliceFetcher, Source
from swarmnode.services.runners import Inline
from swarmnode.weights.manifest import Manifest
from swarmnode.weights.store import SliceStore
from swarmnode.wire.messages import Message, Slice, SliceGet
from tests.services.source import CONFIG
from tests.services.source import Source as Backbone

Reply = tuple[Message, memoryview]
Answer = Callable[[int, SliceGet], Awaitable[Reply]]


class FakePeer:
    """A peer of which `answer` says what it replies to the n-th request; `seed` gives its id."""

    def __init__(self, source: Backbone, seed: int = 0) -> None:
        self.node_id = NodeKey.from_seed(bytes([seed] * 32)).node_id
        self.source = source
        self.rows_at_s = -math.inf
        self.n_asked = 0
        self.sent_bytes = 0
        self.at_once = self.most_at_once = 0
        self.experts: list[int] = []
        """Of every request."""
        self.answer: Answer = self.honest

    async def honest(self, number: int, message: SliceGet) -> Reply:
        reply, parts = self.source._slice(message)
        return reply, memoryview(bytes(parts[0]))

    def after(self, pause_s: float) -> Answer:
        """Honest, at a distance."""

        async def answer(number: int, message: SliceGet) -> Reply:
            await trio.sleep(pause_s)
            return await self.honest(number, message)

        return answer

    def flipping(self, every: int, answer: Answer | None = None) -> Answer:
        """One bit of every n-th block is another."""

        async def flip(number: int, message: SliceGet) -> Reply:
            reply, body = await (answer or self.honest)(number, message)
            if number % every or not isinstance(reply, Slice):
                return reply, body
            return reply, memoryview(bytes([body[0] ^ 1]) + bytes(body[1:]))

        return flip

    async def silent(self, number: int, message: SliceGet) -> Reply:
        """Never."""
        await trio.sleep_forever()
        raise AssertionError("unreachable")

    async def request(self, message: Message) -> Reply:
        assert isinstance(message, SliceGet)
        self.n_asked += 1
        number = self.n_asked
        self.experts.append(message.expert)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await trio.lowlevel.checkpoint()
            reply = await self.answer(number, message)
            self.sent_bytes += len(reply[1])
            return reply
        finally:
            self.at_once -= 1


def fetcher(
    peers: Sequence[Source],
    manifest: Manifest,
    store: SliceStore,
    on_bytes: list[int] | None = None,
    config: StoreConfig = CONFIG.store,
) -> SliceFetcher:
    """Of whoever is in `peers` at the time."""
    arrived = [] if on_bytes is None else on_bytes
    return SliceFetcher(lambda item: tuple(peers), manifest, store, Inline(), config, arrived.append)
