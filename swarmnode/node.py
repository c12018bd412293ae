"""The composition root: which services a backbone and a worker run, under one nursery each. No logic."""

from __future__ import annotations

import ipaddress
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import trio

from swarmnode import __version__
from swarmnode.api import serve as api_serve
from swarmnode.api.app import Served, build_app
from swarmnode.compute.bank import ExpertBank
from swarmnode.compute.devices import Device, open_device
from swarmnode.compute.thread import ComputeThread
from swarmnode.config import Config, Folders
from swarmnode.errors import UsageError
from swarmnode.identity import NodeKey
from swarmnode.models.base import Model
from swarmnode.models.chat import template_of
from swarmnode.models.registry import open_model
from swarmnode.models.tokenizer import Tokenizer
from swarmnode.net.address import PeerAddress
from swarmnode.net.links import Handlers, serve
from swarmnode.net.peer import OnPeer, Peer
from swarmnode.net.tcp import TcpTransport
from swarmnode.services.compute_gate import ComputeGate
from swarmnode.services.contact import Contacts
from swarmnode.services.engine import Engine
from swarmnode.services.members import Members
from swarmnode.services.prober import Prober
from swarmnode.services.remote_experts import RemoteExperts, WireForm
from swarmnode.services.reports import BackboneEvent, Hashing, JoinEvent, Listening, Ready
from swarmnode.services.residence import ResidenceBuilder
from swarmnode.services.seeder import Seeder
from swarmnode.services.swarm_state import SwarmState
from swarmnode.services.volunteer import VolunteerService
from swarmnode.weights.catalog import resolve_model
from swarmnode.weights.expert_layers import tensor_name
from swarmnode.weights.hashing import load_or_build_manifest
from swarmnode.weights.index import ModelIndex
from swarmnode.wire.endpoint import Endpoint
from swarmnode.wire.handshake import Credentials

LEAVE_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class NodeOptions:
    """What every node is told."""

    folders: Folders
    network: str
    bootstrap: tuple[PeerAddress, ...] = ()
    listen: tuple[str, int] | None = None
    """Host and port to accept nodes on; None: dial only."""
    device: str | None = None
    config: Config = field(default_factory=Config)


@dataclass(frozen=True)
class WorkerOptions(NodeOptions):
    """And a worker."""

    budget_bytes: int = 0


@dataclass(frozen=True)
class BackboneOptions(NodeOptions):
    """And a backbone."""

    model: str | None = None
    """A GGUF, a name the catalogue knows, or None for the bundled model."""
    api: tuple[str, int] = ("127.0.0.1", 8790)
    form: WireForm = field(default_factory=WireForm)
    n_ctx: int = 4096
    n_slots: int = 2


def endpoint_of(options: NodeOptions, key: NodeKey, role: str) -> Endpoint:
    """How the node presents itself on every connection."""
    return Endpoint.create(
        Credentials(key),
        network=options.network,
        agent=f"swarmnode/{__version__}",
        roles=(role,),
        config=options.config.wire,
    )


@asynccontextmanager
async def open_compute(options: NodeOptions) -> AsyncIterator[tuple[ComputeGate, Device]]:
    """The compute thread and the device that it owns."""
    thread = ComputeThread()
    gate = ComputeGate(thread)
    try:
        compute = options.config.compute
        device = await gate.run(partial(open_device, options.device, compute.n_threads, compute.poll))
        try:
            yield gate, device
        finally:
            await gate.run(device.close)
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(thread.close)


async def stop_on_signal(scope: trio.CancelScope, leave: Callable[[], Awaitable[None]] | None = None) -> None:
    """On Ctrl-C or SIGTERM take leave (for a second at most), then cancel `scope`, so that all closes in order."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            break
    if leave is not None:
        with trio.move_on_after(LEAVE_TIMEOUT_S):
            await leave()
    scope.cancel()


async def run_worker(options: WorkerOptions, report: Callable[[JoinEvent], None]) -> None:
    """Lend memory and compute until stopped. Raises LocalError when this machine cannot serve."""
    key = NodeKey.load_or_create(options.folders.key_file)
    endpoint = endpoint_of(options, key, "worker")
    transport = TcpTransport()
    async with open_compute(options) as (gate, device):
        builder = ResidenceBuilder(
            options.budget_bytes, options.folders.cache, device, gate, options.config, report
        )
        service = VolunteerService(builder)
        contacts = Contacts(
            transport,
            endpoint,
            service.handlers,
            service.session,
            options.config.contact,
            report,
            random.Random(key.node_id.raw),
        )
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stop_on_signal, nursery.cancel_scope, service.leave)
                if options.listen is not None:
                    places = await _listen(nursery, options, endpoint, service.handlers, service.accepted)
                    report(Listening(_addresses(key, places)))
                nursery.start_soon(contacts.run, options.bootstrap)
        finally:
            service.close()


async def run_backbone(
    options: BackboneOptions,
    report: Callable[[BackboneEvent], None],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve a model until stopped. Raises LocalError when this machine or the model's files cannot."""
    key = NodeKey.load_or_create(options.folders.key_file)
    api_listener = await _api_listener(options.api)
    path = resolve_model(options.model, [Path.cwd(), options.folders.cache / "models"])
    config = options.config
    with ModelIndex.open(path) as index:
        manifest = await trio.to_thread.run_sync(
            load_or_build_manifest,
            index,
            options.folders.cache,
            lambda done, total: report(Hashing(done, total)),
        )
        async with (
            open_compute(options) as (gate, device),
            loaded(options, index, device, gate) as (model, bank),
        ):
            tokenizer = Tokenizer(index.metadata)
            members = Members(model.n_expert, config.dispatch.fresh_s, trio.current_time)
            prober = Prober(manifest.model_id, model.n_embd, bank, gate, members, config.dispatch)
            seeder = Seeder(index, manifest, members, config.serve, prober.watch)
            remote = RemoteExperts(manifest.model_id, bank, gate, members, config.dispatch, options.form)
            engine = Engine(
                model,
                tokenizer,
                bank,
                gate,
                members,
                remote,
                n_slots=options.n_slots,
                chunk_tokens=config.models.n_ubatch,
            )
            endpoint = endpoint_of(options, key, "backbone")
            attend = partial(_attend, members)
            contacts = Contacts(
                TcpTransport(), endpoint, seeder.handlers, attend, config.contact, report, random.Random()
            )
            state = SwarmState(manifest, members, options.form, config.dispatch)
            app = build_app(
                Served(engine, manifest.name, template_of(index.metadata, tokenizer), state.as_dict, int(time.time()))
            )
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stop_on_signal, nursery.cancel_scope)
                await nursery.start(prober.run)
                places = await _listen(nursery, options, endpoint, seeder.handlers, attend)
                await nursery.start(api_serve.run, app, api_listener)
                nursery.start_soon(contacts.run, options.bootstrap)
                report(
                    Ready(
                        manifest, model.state_bytes, device.info, _addresses(key, places), _url(api_listener)
                    )
                )
                task_status.started()


@asynccontextmanager
async def loaded(
    options: BackboneOptions, index: ModelIndex, device: Device, gate: ComputeGate
) -> AsyncIterator[tuple[Model, ExpertBank]]:
    """The dense path and a bank of every routed expert, bound from the mapped file."""
    config = options.config

    def load() -> tuple[Model, ExpertBank]:
        model = open_model(index, device, options.n_ctx, options.n_slots, config.models)
        bank = ExpertBank(device, max_rows=config.compute.backbone_max_rows, config=config.compute)
        for number, layout in index.expert_layers.items():
            stacked = {kind: index.data(tensor_name(number, kind)) for kind in layout.kinds}
            bank.bind(layout, range(layout.n_expert), stacked)
        return model, bank

    model, bank = await gate.run(load)
    try:
        yield model, bank
    finally:
        with trio.CancelScope(shield=True):
            await gate.run(bank.close)
            await gate.run(model.close)


async def _attend(members: Members, peer: Peer) -> None:
    """Beside every connection of a backbone: whoever goes is out of routing at once."""
    try:
        await peer.wait_closed()
    finally:
        members.disconnected(peer)


async def _listen(
    nursery: trio.Nursery, options: NodeOptions, endpoint: Endpoint, handlers: Handlers, on_peer: OnPeer
) -> list[tuple[str, int]]:
    assert options.listen is not None
    host, port = options.listen
    try:
        places: list[tuple[str, int]] = await nursery.start(
            partial(serve, TcpTransport(), endpoint, handlers=handlers, host=host, port=port, on_peer=on_peer)
        )
    except OSError as error:
        raise UsageError(
            f"cannot listen on {host} port {port}: {error.strerror}; give another --listen"
        ) from error
    return places


async def _api_listener(place: tuple[str, int]) -> trio.SocketListener:
    host, port = place
    if not is_loopback(host):
        raise UsageError(
            f"the API has no keys yet, so it listens on loopback only, not on {host}; use --api 127.0.0.1:{port}"
        )
    try:
        return (await trio.open_tcp_listeners(port, host=host))[0]
    except OSError as error:
        raise UsageError(
            f"cannot listen on {host} port {port}: {error.strerror}; give another --api"
        ) from error


def is_loopback(host: str) -> bool:
    """True for localhost and loopback addresses; a name is not looked up."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _addresses(key: NodeKey, places: Sequence[tuple[str, int]]) -> tuple[PeerAddress, ...]:
    return tuple(PeerAddress(key.node_id, host, port) for host, port in places)


def _url(listener: trio.SocketListener) -> str:
    host, port = listener.socket.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
