"""A manifest comes from whoever has it, and is checked against the model id."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio

from swarmnode.errors import ConnectionLostError, ProtocolError, RequestRefusedError
from swarmnode.identity import NodeKey
from swarmnode.services.manifest_fetch import about_bytes, fetch_manifest
from swarmnode.services.runners import Inline
from swarmnode.weights.manifest import Manifest
from swarmnode.wire.messages import ManifestGet, ManifestReply, Message
from tests.services.source import CONFIG, Source


class Holder:
    """A source of which `answer` gives the bytes."""

    def __init__(self, seed: int, answer: Callable[[], Awaitable[bytes]]) -> None:
        self.node_id = NodeKey.from_seed(bytes([seed] * 32)).node_id
        self.answer = answer
        self.n_asked = 0
        self.rows_at_s = 0.0

    async def request(self, message: Message) -> tuple[Message, memoryview]:
        assert isinstance(message, ManifestGet)
        self.n_asked += 1
        return ManifestReply(message.model), memoryview(await self.answer())


async def silent() -> bytes:
    await trio.sleep_forever()
    raise AssertionError("unreachable")


async def refusing() -> bytes:
    raise RequestRefusedError("wrong_model", "")


async def fetched(source: Source, *holders: Holder) -> Manifest:
    return await fetch_manifest(holders, source.manifest.model_id, about_bytes(2, 8), Inline(), CONFIG.store)


async def test_the_first_right_one_counts(source: Source) -> None:
    encoded = source.manifest.encode()

    async def right() -> bytes:
        return encoded

    async def flipped() -> bytes:
        return encoded[:-1] + bytes([encoded[-1] ^ 1])

    holders = [Holder(1, refusing), Holder(2, flipped), Holder(3, silent), Holder(4, right), Holder(5, right)]
    assert await fetched(source, *holders) == source.manifest
    assert trio.current_time() < 2 * CONFIG.store.takeover_s
    assert holders[4].n_asked == 0


async def test_a_late_answer_counts_too(source: Source) -> None:
    async def late() -> bytes:
        await trio.sleep(10)
        return source.manifest.encode()

    assert await fetched(source, Holder(1, late), Holder(2, silent)) == source.manifest
    assert trio.current_time() < 11


async def test_none_is_an_error(source: Source) -> None:
    async def wrong() -> bytes:
        return b"wrong"

    with pytest.raises(ProtocolError, match="bad_manifest"):
        await fetched(source, Holder(1, refusing), Holder(2, wrong))
    with pytest.raises(ConnectionLostError, match="did not answer ManifestGet"):
        await fetched(source, Holder(1, silent))
    with pytest.raises(ConnectionLostError, match="no node"):
        await fetched(source)
