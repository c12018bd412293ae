"""A whole swarm in one process: a backbone and workers on the memory network, computing inline.

async with open_swarm(model_path, folder) as swarm:
    worker = await swarm.join(budget_bytes=500_000)
    tokens = await swarm.generate([1, 2, 3], max_tokens=8)
    worker.kill()

Deterministic under a mock clock: compute takes no virtual time, the network takes what it is told to.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import trio

from swarmnode.compute.devices import Device, open_device
from swarmnode.config import Config, Folders
from swarmnode.identity import NodeKey
from swarmnode.models.sampling import SamplingParams
from swarmnode.net.address import PeerAddress
from swarmnode.net.peer import Handler, Peer
from swarmnode.node.backbone import start_backbone
from swarmnode.node.backbone_parts import Backbone, BackboneOptions, assemble_backbone, load_model
from swarmnode.node.worker import Worker, WorkerOptions, assemble_worker
from swarmnode.services.account import Account
from swarmnode.services.engine import DoneEvent, GenerateRequest, TokenEvent
from swarmnode.services.members import Standing
from swarmnode.services.remote_experts import EXACT, WireForm
from swarmnode.services.reports import Waiting
from swarmnode.services.residence import ResidenceBuilder
from swarmnode.services.runners import Inline
from swarmnode.services.volunteer import VolunteerService
from swarmnode.testing.memory_net import MemoryNetwork
from swarmnode.weights.hashing import build_manifest
from swarmnode.weights.index import ModelIndex
from swarmnode.wire.messages import Message

PORT = 1
GREEDY = SamplingParams(temperature=0.0)

Meddle = Callable[[Handler], Handler]
"""Wraps a worker's handler for `experts` requests, to make it late, silent or lying."""


class MeddledHandlers(MutableMapping[type[Message], Handler]):
    """A worker's handlers, as the service puts them there. That of one message is wrapped whenever it is looked up."""

    def __init__(self, message: type[Message], meddle: Meddle) -> None:
        self._handlers: dict[type[Message], Handler] = {}
        self._message = message
        self._meddle = meddle

    def __getitem__(self, key: type[Message]) -> Handler:
        handler = self._handlers[key]
        return self._meddle(handler) if key is self._message else handler

    def __setitem__(self, key: type[Message], handler: Handler) -> None:
        self._handlers[key] = handler

    def __delitem__(self, key: type[Message]) -> None:
        del self._handlers[key]

    def __iter__(self) -> Iterator[type[Message]]:
        return iter(self._handlers)

    def __len__(self) -> int:
        return len(self._handlers)


@dataclass
class SwarmWorker:
    """A worker of the kit."""

    name: str
    key: NodeKey
    parts: Worker
    network: MemoryNetwork
    waits: list[str] = field(default_factory=list)
    """Why its connections ended."""
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    @property
    def service(self) -> VolunteerService:
        """What it does as a volunteer."""
        return self.parts.service

    @property
    def is_settled(self) -> bool:
        """It holds all that fits, tested."""
        market = self.service.market
        return market is not None and market.is_settled

    def kill(self) -> None:
        """End it as `kill -9` would: its streams break, nothing is said."""
        self.network.break_all(self.name)
        self.scope.cancel()


@dataclass
class Swarm:
    """A running backbone and whoever joined."""

    network: MemoryNetwork
    backbone: Backbone
    address: PeerAddress
    folder: Path
    device: Device
    config: Config
    nursery: trio.Nursery
    _count: int = 0

    async def join(
        self,
        budget_bytes: int,
        *,
        name: str | None = None,
        key: NodeKey | None = None,
        handlers: MutableMapping[type[Message], Handler] | None = None,
        bootstrap: tuple[PeerAddress, ...] | None = None,
        wait: bool = True,
    ) -> SwarmWorker:
        """Start a worker and (unless `wait` is false) return once the backbone sends it rows.

        A worker with the `name` of an earlier one finds that one's slices on its disk.
        """
        self._count += 1
        name = name or f"worker{self._count}"
        key = key or NodeKey.from_seed(bytes([self._count] * 32))
        options = WorkerOptions(
            folders=Folders.under(self.folder / name),
            network="test",
            bootstrap=(self.address,) if bootstrap is None else bootstrap,
            listen=(name, PORT),
            config=self.config,
            budget_bytes=budget_bytes,
        )
        waits: list[str] = []

        def report(event: object) -> None:
            if isinstance(event, Waiting):
                waits.append(event.reason)

        builder = ResidenceBuilder(
            budget_bytes, options.folders.cache, self.device, Inline(), Inline(), self.config, report
        )
        transport = self.network.host(name)
        parts = assemble_worker(options, key, builder, transport, report, Inline(), handlers)
        worker = SwarmWorker(name, key, parts, self.network, waits)
        self.nursery.start_soon(self._run, worker)
        if wait:
            await self.until(lambda: worker.is_settled and self._is_known(worker))
        return worker

    def _is_known(self, worker: SwarmWorker) -> bool:
        """Whether the backbone sends it rows for all that it serves."""
        market = worker.service.market
        known = self.serving().get(worker.key.node_id)
        if market is None or known is None:
            return False
        return known == {(item.layer, expert) for item in market.serving for expert in item.experts}

    async def _run(self, worker: SwarmWorker) -> None:
        try:
            with worker.scope:
                async with trio.open_nursery() as nursery:
                    await worker.parts.start(nursery)
        finally:
            await worker.service.aclose()

    def serving(self) -> Mapping[object, frozenset[tuple[int, int]]]:
        """Node ids that get rows now, with the (layer, expert) pairs they get them for."""
        return {
            worker.node_id: frozenset(
                (layer, expert) for layer, experts in worker.proven.items() for expert in experts
            )
            for worker in self.backbone.members.workers
            if worker.standing is Standing.SERVING
        }

    async def until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Wait (in virtual time) until something holds; trio.TooSlowError after `timeout_s`."""
        with trio.fail_after(timeout_s):
            while not condition():  # noqa: ASYNC110 - whatever the condition looks at cannot wake us
                await trio.sleep(0.01)

    async def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        on_token: Callable[[int], None] | None = None,
    ) -> tuple[list[int], Account]:
        """Greedy tokens and the account. `on_token` is called with the number of tokens so far."""
        job = GenerateRequest(prompt, max_tokens, GREEDY)
        tokens: list[int] = []
        account = Account()
        async with aclosing(self.backbone.engine.generate(job)) as events:
            async for event in events:
                if isinstance(event, TokenEvent):
                    tokens.append(event.token)
                    if on_token is not None:
                        on_token(len(tokens))
                elif isinstance(event, DoneEvent):
                    account = event.account
        return tokens, account

    async def logits(self, tokens: Sequence[int]) -> tuple[npt.NDArray[np.float32], Account]:
        """Logits f32 [T, n_vocab] of a fresh sequence, and the account."""
        account = Account()
        self.backbone.engine.model.reset(0)
        return await self.backbone.engine.step(0, tokens, account, all_logits=True), account


@asynccontextmanager
async def open_swarm(
    model_path: Path,
    folder: Path,
    *,
    form: WireForm = EXACT,
    config: Config | None = None,
    latency_s: float = 0.0,
    n_ctx: int = 512,
    n_slots: int = 2,
    bootstrap: tuple[PeerAddress, ...] = (),
) -> AsyncIterator[Swarm]:
    """A backbone of `model_path`, with room for `n_slots` sequences of `n_ctx` tokens; no workers yet.

    It dials `bootstrap`, and goes on doing so; without, it only waits to be dialled.
    """
    config = config or Config()
    config = replace(config, compute=replace(config.compute, n_threads=1, self_test_widths=(1, 64)))
    network = MemoryNetwork(latency_s=latency_s)
    key = NodeKey.from_seed(bytes(32))
    options = BackboneOptions(
        folders=Folders.under(folder / "backbone"),
        network="test",
        bootstrap=bootstrap,
        listen=("backbone", PORT),
        config=config,
        form=form,
        n_ctx=n_ctx,
        n_slots=n_slots,
    )
    device = open_device("CPU", 1)
    with ModelIndex.open(model_path) as index:
        model, bank = load_model(options, index, device)
        backbone = assemble_backbone(options, index, build_manifest(index), model, bank, Inline(), Inline())
        try:
            async with trio.open_nursery() as nursery:
                host = network.host("backbone")
                await start_backbone(backbone, options, key, host, lambda event: None, nursery, device.info)
                address = PeerAddress(key.node_id, "backbone", PORT)
                yield Swarm(network, backbone, address, folder, device, config, nursery)
                nursery.cancel_scope.cancel()
        finally:
            bank.close()
            model.close()
            device.close()


async def silent(peer: Peer, message: Message, body: memoryview) -> tuple[Message, Sequence[bytes]]:
    """A handler that never answers."""
    await trio.sleep_forever()
    raise AssertionError("unreachable")
