"""Slices from whoever holds them: a backbone's model, a worker's store. What is not held is refused, never made up."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

from swarmnode.errors import RequestRefusedError
from swarmnode.net.links import dial
from swarmnode.net.peer import Peer
from swarmnode.services.fetch import SliceFetcher
from swarmnode.services.runners import Inline
from swarmnode.services.slice_server import BlockSource, SliceServer
from swarmnode.testing.memory_net import MemoryNetwork
from swarmnode.testing.tiny_gguf import TinyModel, write_tiny_gguf
from swarmnode.weights.hashing import build_manifest
from swarmnode.weights.index import ModelIndex
from swarmnode.weights.manifest import Manifest
from swarmnode.weights.slices import ExpertRange
from swarmnode.weights.store import SliceStore
from swarmnode.wire.messages import ManifestGet, ManifestReply, Slice, SliceGet
from tests.net.nodes import HANDLERS, endpoint, experts, serve_on
from tests.services.source import CONFIG, Source

HELD = ExpertRange(1, 2, 2)


@asynccontextmanager
async def asking(manifest: Manifest, source: BlockSource) -> AsyncIterator[Peer]:
    """A connection to a node that serves slices of `source`."""
    network = MemoryNetwork(latency_s=0.01)
    server = SliceServer(manifest, source, Inline())
    async with trio.open_nursery() as nursery:
        address = await serve_on(nursery, network.host("holder"), endpoint(1), server.handlers)
        start = partial(dial, network.host("asker"), address, endpoint(2), handlers={})
        yield await nursery.start(start)
        nursery.cancel_scope.cancel()


def filled(store: SliceStore, source: Source, item: ExpertRange = HELD) -> SliceStore:
    for expert in item.experts:
        for kind in source.manifest.layers[item.layer].layout.kinds:
            store.add_slab(item.layer, expert, kind, source.index.slab(item.layer, expert, kind))
    store.commit(item)
    return store


def get(manifest: Manifest, layer: int, expert: int, kind: str, offset: int, length: int) -> SliceGet:
    return SliceGet(manifest.model_id, layer, expert, kind, offset, length)


async def test_a_backbone_gives_any_block(source: Source) -> None:
    manifest = source.manifest
    slab = source.index.slab(0, 7, "ffn_down_exps")
    async with asking(manifest, source.index) as peer:
        for offset, length in ((0, 1), (0, len(slab)), (12345, 6789), (len(slab) - 1, 1)):
            reply, body = await peer.request(get(manifest, 0, 7, "ffn_down_exps", offset, length))
            assert reply == Slice(offset, length, len(slab))
            assert body == slab[offset : offset + length]


async def test_a_worker_gives_what_it_has_committed_and_nothing_else(source: Source, tmp_path: Path) -> None:
    manifest = source.manifest
    with filled(SliceStore(tmp_path, manifest), source) as store:
        store.add_slab(1, 4, "ffn_up_exps", source.index.slab(1, 4, "ffn_up_exps"))
        async with asking(manifest, store) as peer:
            _, body = await peer.request(get(manifest, 1, 3, "ffn_up_exps", 100, 1000))
            assert body == source.index.slab(1, 3, "ffn_up_exps")[100:1100]
            for layer, expert in ((1, 4), (0, 2), (1, 1)):
                with pytest.raises(RequestRefusedError, match=r"no_such_slice.*not held here"):
                    await peer.request(get(manifest, layer, expert, "ffn_up_exps", 0, 1))
            store.remove(HELD)
            with pytest.raises(RequestRefusedError, match="no_such_slice"):
                await peer.request(get(manifest, 1, 3, "ffn_up_exps", 100, 1000))


@pytest.mark.parametrize(
    ("layer", "expert", "kind", "offset", "length", "code"),
    [
        (2, 0, "ffn_up_exps", 0, 1, "no_such_slice"),
        (0, 8, "ffn_up_exps", 0, 1, "no_such_slice"),
        (0, 0, "ffn_gate_up_exps", 0, 1, "no_such_slice"),
        (0, 0, "ffn_up_exps", 69_632, 1, "bad_range"),
        (0, 0, "ffn_up_exps", 0, 69_633, "bad_range"),
        (0, 0, "ffn_up_exps", 1 << 30, 1 << 20, "bad_range"),
    ],
)
async def test_what_the_model_lacks_is_refused(
    layer: int, expert: int, kind: str, offset: int, length: int, code: str, source: Source
) -> None:
    async with asking(source.manifest, source.index) as peer:
        with pytest.raises(RequestRefusedError) as caught:
            await peer.request(get(source.manifest, layer, expert, kind, offset, length))
        assert caught.value.code == code


async def test_another_model_is_refused(source: Source) -> None:
    async with asking(source.manifest, source.index) as peer:
        for message in (ManifestGet(bytes(32)), SliceGet(bytes(32), 0, 0, "ffn_up_exps", 0, 1)):
            with pytest.raises(RequestRefusedError, match="wrong_model"):
                await peer.request(message)


async def test_any_holder_gives_the_manifest(source: Source, tmp_path: Path) -> None:
    with SliceStore(tmp_path, source.manifest) as store:
        async with asking(source.manifest, store) as peer:
            reply, body = await peer.request(ManifestGet(source.manifest.model_id))
    assert isinstance(reply, ManifestReply)
    assert Manifest.decode_untrusted(body, source.manifest.model_id) == source.manifest


async def test_slices_go_from_worker_to_worker(source: Source, tmp_path: Path) -> None:
    """No backbone is needed: what a worker fetched and checked, others fetch from it."""
    manifest = source.manifest
    with (
        filled(SliceStore(tmp_path / "one", manifest), source) as first,
        SliceStore(tmp_path / "two", manifest) as second,
    ):
        async with asking(manifest, first) as peer:
            fetch = SliceFetcher(lambda _: (peer,), manifest, second, Inline(), CONFIG.store, lambda _: None)
            await fetch.fetch(HELD)
        async with asking(manifest, second) as peer:
            _, body = await peer.request(get(manifest, 1, 2, "ffn_gate_exps", 0, 4096))
    assert body == source.index.slab(1, 2, "ffn_gate_exps")[:4096]


@pytest.mark.parametrize("end", ["vanishes", "stops reading"])
async def test_a_downloader_that_goes_delays_no_rows(end: str, source: Source) -> None:
    """cases.md 30: it has asked for hundreds of blocks; a row of another peer takes its round trip and nothing more."""
    network = MemoryNetwork(latency_s=0.01)
    server = SliceServer(source.manifest, source.index, Inline())
    message = get(source.manifest, 0, 0, "ffn_up_exps", 0, 60_000)
    async with trio.open_nursery() as nursery:
        handlers = {**server.handlers, **HANDLERS}
        address = await serve_on(nursery, network.host("holder"), endpoint(1), handlers)
        start = partial(dial, network.host("downloader"), address, endpoint(2), handlers={})
        downloader: Peer = await nursery.start(start)
        start = partial(dial, network.host("backbone"), address, endpoint(3), handlers={})
        backbone: Peer = await nursery.start(start)
        asked = [downloader.begin(message) for _ in range(200)]
        await trio.sleep(0.05)
        if end == "vanishes":
            network.break_all("downloader")
        else:
            network.partition({"downloader"}, {"holder"})
        for _ in range(20):
            started_s = trio.current_time()
            await backbone.request(*experts())
            assert trio.current_time() - started_s <= 0.02 + 1e-9
            await trio.sleep(0.05)
        assert all(request is not None for request in asked)
        nursery.cancel_scope.cancel()


async def test_slices_of_a_split_model_with_dense_layers_equal_those_of_the_whole(tmp_path: Path) -> None:
    """cases.md 1, 2, 3 and 29: four parts, an empty first one, leading layers without experts."""
    whole_model = TinyModel(n_layer=4, n_expert=4, dense_layers=(0, 1, 2), up_type="Q8_0")
    split_model = TinyModel(
        n_layer=4, n_expert=4, dense_layers=(0, 1, 2), up_type="Q8_0", n_parts=4, empty_first_part=True
    )
    whole_path = write_tiny_gguf(tmp_path / "whole.gguf", whole_model)
    split_path = write_tiny_gguf(tmp_path / "split.gguf", split_model)
    with ModelIndex.open(whole_path) as whole, ModelIndex.open(split_path) as split:
        manifest = build_manifest(split)
        assert manifest == build_manifest(whole)
        item = ExpertRange(3, 0, 4)
        with SliceStore(tmp_path / "cache", manifest) as store:
            async with asking(manifest, split) as peer:
                for layer in range(3):
                    with pytest.raises(RequestRefusedError, match="no_such_slice"):
                        await peer.request(get(manifest, layer, 0, "ffn_up_exps", 0, 1))
                fetch = SliceFetcher(
                    lambda _: (peer,), manifest, store, Inline(), CONFIG.store, lambda _: None
                )
                await fetch.fetch(item)
            for expert in item.experts:
                for kind in manifest.layers[3].layout.kinds:
                    assert store.read_slab(3, expert, kind) == whole.slab(3, expert, kind)
        with SliceStore(tmp_path / "cache", manifest) as store:
            assert store.held() == (item,), "its file reopens, whatever the model's was called"
