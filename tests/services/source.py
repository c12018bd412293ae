"""A backbone as far as a worker sees one, every answer of which a test may replace; and a worker that joins it."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import trio

from swarmnode.compute.devices import Device
from swarmnode.config import ComputeConfig, Config, Folders, StoreConfig
from swarmnode.errors import RequestRefusedError
from swarmnode.identity import NodeKey
from swarmnode.net.address import PeerAddress
from swarmnode.net.links import dial, serve
from swarmnode.net.peer import Body, Handler, Peer
from swarmnode.node.worker import Worker, WorkerOptions, assemble_worker
from swarmnode.services.market import Market
from swarmnode.services.reports import Fetched, Planned, Settled, Waiting
from swarmnode.services.residence import ResidenceBuilder
from swarmnode.services.runners import Inline
from swarmnode.testing.memory_net import MemoryNetwork
from swarmnode.weights.index import ModelIndex
from swarmnode.weights.manifest import Manifest
from swarmnode.wire import messages
from swarmnode.wire.endpoint import Endpoint
from swarmnode.wire.handshake import Credentials
from swarmnode.wire.messages import Message

CONFIG = replace(
    Config(),
    compute=replace(ComputeConfig(), n_threads=1, self_test_widths=(1, 16)),
    store=replace(StoreConfig(), block_bytes=16 * 1024, commit_experts=2),
)

KEY = NodeKey.from_seed(bytes([99]) * 32)
"""Of the worker."""


class Source:
    """Serves a model's manifest and slices. It does not gossip, but a backbone is asked for slices all the same.

    `silent`: the types of requests that it never answers. `refusing`: those that it refuses.
    """

    def __init__(self, index: ModelIndex, manifest: Manifest) -> None:
        self.index = index
        self.manifest = manifest
        self.silent: set[type[Message]] = set()
        self.refusing: set[type[Message]] = set()
        self.asked: Counter[type[Message]] = Counter()
        self.announced: list[messages.Announce] = []
        self.peers: list[Peer] = []
        """Who announced, each time."""

    @property
    def handlers(self) -> dict[type[Message], Handler]:
        kinds = (messages.ModelsGet, messages.ManifestGet, messages.SliceGet, messages.Announce)
        return dict.fromkeys(kinds, self._answer)

    @property
    def n_announced(self) -> int:
        """Experts of the last announcement."""
        return sum(count for _, _, count in self.announced[-1].holdings) if self.announced else 0

    async def _answer(self, peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
        self.asked[type(message)] += 1
        if type(message) in self.silent:
            await trio.sleep_forever()
        if type(message) in self.refusing:
            raise RequestRefusedError("no_such_slice", "not here")
        match message:
            case messages.ModelsGet():
                entry = messages.ModelEntry(self.manifest.model_id, "tiny", "qwen35moe", 2, 8, 1000)
                return messages.Models((entry,)), ()
            case messages.ManifestGet():
                return messages.ManifestReply(message.model), (self.manifest.encode(),)
            case messages.SliceGet():
                return self._slice(message)
            case messages.Announce():
                self.announced.append(message)
                self.peers.append(peer)
                return messages.Ok(), ()
        raise RequestRefusedError("unsupported", "")

    def _slice(self, message: messages.SliceGet) -> tuple[Message, Body]:
        slab = self.index.slab(message.layer, message.expert, message.kind)
        block = slab[message.offset : message.offset + message.length]
        return messages.Slice(message.offset, message.length, len(slab)), (block,)


def endpoint(seed: int, role: str) -> Endpoint:
    """A node whose id repeats from run to run."""
    credentials = Credentials(NodeKey.from_seed(bytes([seed]) * 32))
    return Endpoint.create(credentials, network="test", agent="test", roles=(role,), config=CONFIG.wire)


async def start_source(
    nursery: trio.Nursery, network: MemoryNetwork, source: Source, seed: int
) -> PeerAddress:
    """Let it listen; its address."""
    host = network.host(f"source{seed}")
    places = await nursery.start(
        partial(serve, host, endpoint(seed, "backbone"), handlers=source.handlers, host=None, port=1)
    )
    return PeerAddress(endpoint(seed, "backbone").credentials.node_id, *places[0])


@dataclass
class Joined:
    """A worker that was started, and what it told."""

    node: Worker | None = None
    waits: list[str] = field(default_factory=list)
    planned: list[Planned] = field(default_factory=list)
    fetched: list[Fetched] = field(default_factory=list)
    settled: list[Settled] = field(default_factory=list)

    @property
    def parts(self) -> Worker:
        assert self.node is not None
        return self.node

    @property
    def market(self) -> Market:
        """Once it has moved in."""
        found = self.parts.service.market
        assert found is not None
        return found

    @property
    def is_settled(self) -> bool:
        market = self.parts.service.market
        return market is not None and market.is_settled

    def report(self, event: object) -> None:
        match event:
            case Waiting():
                self.waits.append(event.reason)
            case Planned():
                self.planned.append(event)
            case Fetched():
                self.fetched.append(event)
            case Settled():
                self.settled.append(event)

    async def until(self, condition: Callable[[], bool], timeout_s: float = 300.0) -> None:
        """Until something holds; TooSlowError after so many seconds of virtual time."""
        with trio.fail_after(timeout_s):
            while not condition():  # noqa: ASYNC110 - nothing to wake us
                await trio.sleep(0.1)

    async def until_serving(self, source: Source, timeout_s: float = 300.0) -> None:
        """Until it has announced all that it takes to this source."""

        def is_announced() -> bool:
            return self.is_settled and source.n_announced == sum(item.count for item in self.market.serving)

        await self.until(is_announced, timeout_s)

    async def until_waiting(self, n_waits: int = 1) -> None:
        """Until its connections have ended so many times."""
        await self.until(lambda: len(self.waits) >= n_waits)


@asynccontextmanager
async def joined(
    network: MemoryNetwork,
    addresses: Iterable[PeerAddress],
    folder: Path,
    device: Device,
    budget_bytes: int,
    *,
    others: bool = False,
    listen: tuple[str, int] | None = None,
    config: Config = CONFIG,
    handlers: dict[type[Message], Handler] | None = None,
) -> AsyncIterator[Joined]:
    """A worker (KEY, at host "worker") that knows these backbones; it is stopped and closed at the end."""
    options = WorkerOptions(
        folders=Folders.under(folder),
        network="test",
        bootstrap=tuple(addresses),
        listen=listen,
        config=config,
        budget_bytes=budget_bytes,
    )
    heard: list[Joined] = []
    builder = ResidenceBuilder(
        budget_bytes,
        options.folders.cache,
        device,
        Inline(),
        Inline(),
        config,
        lambda event: heard[0].report(event),
        others,
    )
    worker = Joined()
    heard.append(worker)
    host = network.host("worker")
    worker.node = assemble_worker(options, KEY, builder, host, worker.report, Inline(), handlers)
    try:
        async with trio.open_nursery() as nursery:
            await worker.parts.start(nursery)
            yield worker
            nursery.cancel_scope.cancel()
    finally:
        await worker.parts.service.aclose()


async def dial_worker(
    nursery: trio.Nursery, network: MemoryNetwork, address: PeerAddress, source: Source
) -> Peer:
    """Connect to a worker that listens, as a backbone."""
    peer: Peer = await nursery.start(
        partial(dial, network.host("dialler"), address, endpoint(7, "backbone"), handlers=source.handlers)
    )
    return peer
