"""Answers requests for a manifest and for slices, out of whatever a node has: a model's files, or a worker's store."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Protocol

from swarmnode.errors import ModelFileError, RequestRefusedError
from swarmnode.net.peer import Body, Handler, Peer
from swarmnode.services.runners import Runner
from swarmnode.weights.manifest import Manifest
from swarmnode.wire import messages
from swarmnode.wire.messages import Message


class BlockSource(Protocol):
    """Where blocks come from: a ModelIndex (all experts), a SliceStore (what is committed there)."""

    def read_block(self, layer: int, expert: int, kind: str, offset: int, length: int) -> bytes:
        """A copy of some bytes of one slab; blocks. KeyError if it is not held."""
        ...


class SliceServer:
    """Handlers for `ManifestGet` and `SliceGet` of one model."""

    def __init__(self, manifest: Manifest, source: BlockSource, threads: Runner) -> None:
        self._manifest = manifest
        self._encoded = manifest.encode()
        self._source = source
        self._threads = threads

    @property
    def handlers(self) -> Mapping[type[Message], Handler]:
        """For the peer: the message types this service answers."""
        return {messages.ManifestGet: self._manifest_get, messages.SliceGet: self._slice}

    def check_model(self, model: bytes) -> None:
        """Raises RequestRefusedError `wrong_model` unless it is the one served here."""
        model_id = self._manifest.model_id
        if model != model_id:
            raise RequestRefusedError("wrong_model", f"this node serves {model_id.hex()[:16]} only")

    async def _manifest_get(self, peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
        assert isinstance(message, messages.ManifestGet)
        self.check_model(message.model)
        return messages.ManifestReply(model=message.model), (self._encoded,)

    async def _slice(self, peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
        assert isinstance(message, messages.SliceGet)
        self.check_model(message.model)
        total_bytes = self._slab_bytes(message)
        end = message.offset + message.length
        if end > total_bytes:
            raise RequestRefusedError(
                "bad_range", f"bytes {message.offset} to {end} of a slab of {total_bytes} bytes"
            )
        read = partial(
            self._source.read_block,
            message.layer,
            message.expert,
            message.kind,
            message.offset,
            message.length,
        )
        try:
            block = await self._threads.run(
                read
            )  # from disk, perhaps: not on the thread that serves everybody
        except (KeyError, ModelFileError):  # given up, just now or before
            raise _no_such_slice(message, "is not held here") from None
        return messages.Slice(offset=message.offset, length=message.length, total=total_bytes), (block,)

    def _slab_bytes(self, message: messages.SliceGet) -> int:
        layer = self._manifest.layers.get(message.layer)
        if layer is None or message.expert >= self._manifest.n_expert:
            raise _no_such_slice(message, "is not in this model")
        if message.kind not in layer.layout.kinds:
            raise RequestRefusedError("no_such_slice", f"layer {message.layer} has no {message.kind}")
        return layer.layout.tensor(message.kind).n_bytes


def _no_such_slice(message: messages.SliceGet, reason: str) -> RequestRefusedError:
    return RequestRefusedError("no_such_slice", f"layer {message.layer}, expert {message.expert} {reason}")
