"""A process that fetches every slice of a model from one node into a store: `python -m tests.process.slice_worker`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import trio

from swarmnode.config import StoreConfig
from swarmnode.net.address import PeerAddress
from swarmnode.net.links import dial
from swarmnode.net.peer import Peer
from swarmnode.net.tcp import TcpTransport
from swarmnode.services.bulk_links import BulkLinks
from swarmnode.services.fetch import SliceFetcher
from swarmnode.services.manifest_fetch import about_bytes, fetch_manifest
from swarmnode.services.runners import Threads
from swarmnode.weights.slices import ExpertRange
from swarmnode.weights.store import SliceStore
from tests.net.nodes import CLIENT, endpoint

CONFIG = StoreConfig()


async def fetch_all(address: PeerAddress, model_id: bytes, folder: Path) -> None:
    """Fetch what is not held yet, eight experts at a time."""
    threads = Threads(CONFIG.threads)
    async with trio.open_nursery() as nursery:
        start = partial(dial, TcpTransport(), address, endpoint(CLIENT), handlers={})
        peer: Peer = await nursery.start(start)
        links = BulkLinks(TcpTransport(), endpoint(CLIENT), lambda _: address, CONFIG)
        await nursery.start(links.run)
        manifest = await fetch_manifest([links.source(peer)], model_id, about_bytes(64, 64), threads, CONFIG)
        with SliceStore(folder, manifest) as store:
            fetcher = SliceFetcher(
                lambda _: (links.source(peer),), manifest, store, threads, CONFIG, lambda _: None
            )
            for layer in manifest.layers:
                for item in ExpertRange(layer, 0, manifest.n_expert).pieces(CONFIG.commit_experts):
                    if item not in store.held():
                        await fetcher.fetch(item)
        nursery.cancel_scope.cancel()


def main() -> None:
    """Arguments: address, model id, folder."""
    address, model_id, folder = sys.argv[1:]
    trio.run(fetch_all, PeerAddress.parse(address), bytes.fromhex(model_id), Path(folder))


if __name__ == "__main__":
    main()
