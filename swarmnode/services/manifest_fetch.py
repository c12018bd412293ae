"""A model's manifest from whoever has it: its hash is the model id, so it does not matter who that is."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import trio

from swarmnode.config import StoreConfig
from swarmnode.errors import BadReplyError, ConnectionLostError, RemoteError
from swarmnode.services.fetch import Source
from swarmnode.services.nursery import open_flat_nursery
from swarmnode.services.runners import Runner
from swarmnode.weights.manifest import HASH_BYTES, MAX_MANIFEST_BYTES, Manifest
from swarmnode.wire.messages import ManifestGet, ManifestReply


def about_bytes(n_layer: int, n_expert: int) -> int:
    """Size of a manifest of that shape: three hashes an expert, at most MAX_MANIFEST_BYTES."""
    return min(3 * HASH_BYTES * n_layer * n_expert, MAX_MANIFEST_BYTES)


async def fetch_manifest(
    sources: Sequence[Source], model_id: bytes, n_bytes: int, threads: Runner, config: StoreConfig
) -> Manifest:
    """The first right one. The next source is asked when one has failed, or has not answered for `takeover_s` and what
    `n_bytes` may take; the first ones may still answer.

    Raises the last error when all have failed: ProtocolError (`bad_manifest`), BadReplyError, RequestRefusedError or
    ConnectionLostError (also when there is no source).
    """
    found: list[Manifest] = []
    errors: list[RemoteError] = [ConnectionLostError("no node to fetch a manifest from")]

    async def ask(source: Source, failed: trio.Event) -> None:
        try:
            found.append(await _ask(source, model_id, n_bytes, threads, config))
            nursery.cancel_scope.cancel()
        except RemoteError as error:
            errors.append(error)
            failed.set()

    async with open_flat_nursery() as nursery:
        for source in sources:
            failed = trio.Event()
            nursery.start_soon(ask, source, failed)
            with trio.move_on_after(config.takeover_s + n_bytes / config.patient_bytes_per_s):
                await failed.wait()
    if not found:
        raise errors[-1]
    return found[0]


async def _ask(
    source: Source, model_id: bytes, n_bytes: int, threads: Runner, config: StoreConfig
) -> Manifest:
    timeout_s = config.reply_timeout_s(n_bytes)
    try:
        with trio.fail_after(timeout_s):
            reply, body = await source.request(ManifestGet(model=model_id))
    except trio.TooSlowError:
        raise ConnectionLostError(
            f"{source.node_id.short} did not answer ManifestGet within {timeout_s:g} s"
        ) from None
    if not isinstance(reply, ManifestReply):
        raise BadReplyError(f"asked ManifestGet, got {type(reply).__name__}")
    return await threads.run(partial(Manifest.decode_untrusted, bytes(body), model_id))
