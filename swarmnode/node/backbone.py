"""A backbone: the model, its services, the API, under one nursery."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import trio
from starlette.applications import Starlette

from swarmnode.api import serve as api_serve
from swarmnode.api.access import Access
from swarmnode.api.app import Served, build_app
from swarmnode.api.metrics import Family
from swarmnode.api.node_routes import NodeApi
from swarmnode.compute.bank import ExpertBank
from swarmnode.compute.devices import Device, DeviceInfo
from swarmnode.config import Config, ModelsConfig
from swarmnode.errors import StoreError, UsageError
from swarmnode.gossip.records import ModelHoldings
from swarmnode.gossip.shape import MarketShape
from swarmnode.identity import NodeKey
from swarmnode.models.base import Model
from swarmnode.models.chat import template_of
from swarmnode.models.registry import open_model
from swarmnode.models.tokenizer import Tokenizer
from swarmnode.net.address import PeerAddress
from swarmnode.net.descriptors import raise_limit
from swarmnode.net.peer import Peer
from swarmnode.net.tcp import TcpTransport
from swarmnode.net.transport import Transport
from swarmnode.node.common import (
    LEAVE_GRACE_S,
    Goodbye,
    NodeOptions,
    endpoint_of,
    hold_key,
    listen_to_owner,
    open_compute,
    stop_on_signal,
)
from swarmnode.node.dashboard import prepare_dashboard
from swarmnode.node.gossiping import Gossiping, prepare_gossip
from swarmnode.node.listening import listen_for_nodes
from swarmnode.node.meeting import Meeting, prepare_meeting
from swarmnode.node.sending import prepare_policy, prepare_residents
from swarmnode.services.api_keys import KeyRing
from swarmnode.services.control import Control
from swarmnode.services.coverage_news import tell_coverage
from swarmnode.services.dashboard_view import DashboardView
from swarmnode.services.demand import DemandWatch
from swarmnode.services.engine import Engine
from swarmnode.services.gossip_state import GossipState
from swarmnode.services.lost_nodes import LostNodes
from swarmnode.services.market_watch import MarketWatch
from swarmnode.services.members import Members, Standing, Worker
from swarmnode.services.node_token import load_or_create_token
from swarmnode.services.prober import Prober
from swarmnode.services.reachability import Reachability
from swarmnode.services.remote_experts import RemoteExperts, WireForm
from swarmnode.services.reports import BackboneEvent, Hashing, Leaving, Ready, WorkerChanged
from swarmnode.services.resident_experts import ResidentExperts
from swarmnode.services.runners import ComputeGate, Inline, Runner, Threads
from swarmnode.services.seeder import Seeder
from swarmnode.services.swarm_state import SwarmState
from swarmnode.services.throughput import Throughput
from swarmnode.weights.catalog import resolve_model
from swarmnode.weights.expert_layers import tensor_name
from swarmnode.weights.hashing import load_or_build_manifest
from swarmnode.weights.index import ModelIndex
from swarmnode.weights.manifest import Manifest

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BackboneOptions(NodeOptions):
    """And a backbone."""

    model: str | None = None
    """A GGUF, a name the catalogue knows, or None for the bundled model."""
    api: tuple[str, int] = ("127.0.0.1", 8790)
    form: WireForm = field(default_factory=WireForm)
    n_ctx: int = 4096
    n_slots: int = 2


@dataclass(frozen=True)
class Backbone:
    """A backbone's services, wired to each other."""

    manifest: Manifest
    members: Members
    prober: Prober
    seeder: Seeder
    engine: Engine
    state: SwarmState
    demand: DemandWatch
    throughput: Throughput
    residents: ResidentExperts | None = None
    """None: nothing depends on what is in memory."""


def assemble_backbone(
    options: BackboneOptions,
    index: ModelIndex,
    manifest: Manifest,
    model: Model,
    bank: ExpertBank,
    compute: Runner,
    threads: Runner,
) -> Backbone:
    """Wire the services of a loaded model; nothing runs yet."""
    config = options.config
    members = Members(model.n_expert, config.dispatch, trio.current_time)
    prober = Prober(manifest.model_id, model.n_embd, bank, compute, members, config.dispatch)
    residents = prepare_residents(config.dispatch, index, model, threads)
    policy = prepare_policy(config.dispatch, residents, model, config.engine.max_steps)
    remote = RemoteExperts(
        manifest.model_id, bank, compute, members, config.dispatch, options.form, policy=policy
    )
    demand = DemandWatch(MarketShape.of(manifest), config.market, trio.current_time)
    engine = Engine(
        model,
        Tokenizer(index.metadata),
        bank,
        compute,
        members,
        remote,
        n_slots=options.n_slots,
        chunk_tokens=config.models.n_ubatch,
        config=config.engine,
        demand=demand,
        residents=residents,
        threads=threads,
    )
    seeder = Seeder(index, manifest, members, threads, prober.watch, config.dispatch, trio.current_time)
    state = SwarmState(manifest, members, options.form, config.dispatch)
    throughput = Throughput(members, lambda: engine.n_tokens, trio.current_time, config.dashboard)
    return Backbone(manifest, members, prober, seeder, engine, state, demand, throughput, residents)


async def run_backbone(
    options: BackboneOptions,
    report: Callable[[BackboneEvent], None],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve a model until stopped. Raises LocalError when this machine or the model's files cannot."""
    raise_limit()
    with hold_key(options.folders) as key:
        keys = KeyRing(options.folders.api_keys_file, _log_bad_keys)
        async with trio.open_nursery() as nursery, await _api_listener(options.api, keys) as api_listener:
            goodbye, asked = Goodbye(), trio.Event()
            nursery.start_soon(
                partial(stop_on_signal, asked=asked, on_leave=partial(report, Leaving())),
                nursery.cancel_scope,
                goodbye,
            )
            await listen_to_owner(nursery, options.folders, Control(key.node_id, "backbone", asked.set))
            path = resolve_model(options.model, options.folders.models)
            with ModelIndex.open(path) as index:
                options.form.check_width(index.n_embd)
                await _serve_model(options, key, index, api_listener, keys, goodbye, report, task_status)


async def _serve_model(
    options: BackboneOptions,
    key: NodeKey,
    index: ModelIndex,
    api_listener: trio.SocketListener,
    keys: KeyRing,
    goodbye: Goodbye,
    report: Callable[[BackboneEvent], None],
    task_status: trio.TaskStatus[None],
) -> None:
    def progress(done_bytes: int, total_bytes: int) -> None:
        trio.from_thread.check_cancelled()
        report(Hashing(done_bytes, total_bytes))

    token = load_or_create_token(options.folders.token_file)
    manifest = await trio.to_thread.run_sync(load_or_build_manifest, index, options.folders.cache, progress)
    async with open_compute(options) as (gate, device), loaded(options, index, device, gate) as (model, bank):
        backbone = assemble_backbone(options, index, manifest, model, bank, gate, Threads())
        async with trio.open_nursery() as nursery:
            places = await start_backbone(
                backbone, options, key, TcpTransport(), report, nursery, device.info, Threads(), goodbye
            )
            node = node_api_of(backbone, index, options, key, token)
            app = app_of(backbone, index, options, node, places, _access(options, keys, token))
            await nursery.start(partial(api_serve.run, config=options.config.api), app, api_listener)
            report(_ready(options, manifest, model, device.info, places, _url(api_listener)))
            nursery.start_soon(tell_coverage, backbone.state.coverage, report)
            task_status.started()


def _ready(
    options: BackboneOptions,
    manifest: Manifest,
    model: Model,
    device: DeviceInfo,
    places: tuple[PeerAddress, ...],
    api_url: str,
) -> Ready:
    kept_bytes = options.config.engine.checkpoint_bytes
    return Ready(
        manifest, model.state_bytes, options.n_slots, options.n_ctx, kept_bytes, device, places, api_url
    )


async def start_backbone(
    backbone: Backbone,
    options: BackboneOptions,
    key: NodeKey,
    transport: Transport,
    report: Callable[[BackboneEvent], None],
    nursery: trio.Nursery,
    device: DeviceInfo,
    threads: Runner | None = None,
    goodbye: Goodbye | None = None,
) -> tuple[PeerAddress, ...]:
    """Start the services in `nursery`; returns the addresses listened on. `threads` write small files (None: here)."""
    backbone.members.on_change = partial(_tell, backbone.state, report)
    endpoint = endpoint_of(options, key, "backbone")
    handlers = dict(backbone.seeder.handlers)
    attend = partial(_attend, backbone)
    rng = random.Random()
    meeting = prepare_meeting(options, transport, endpoint, handlers, attend, report, rng, threads)
    gossiping = prepare_gossip(options, key, "backbone", meeting, device, 0, rng)
    handlers.update(gossiping.service.handlers)
    model = backbone.manifest.model_id
    gossiping.neighbours.hold([model])
    gossiping.record.holding((_seeds(backbone.manifest),))
    await nursery.start(backbone.engine.run)
    await nursery.start(backbone.prober.run)
    if backbone.residents is not None:
        await nursery.start(backbone.residents.run)
    attended = meeting.connections.attended(attend)
    places = await listen_for_nodes(nursery, options, transport, endpoint, handlers, attended)
    gossip, now = gossiping.service, trio.current_time
    reachability = Reachability(meeting.connections, now)
    lost = LostNodes(meeting.connections, gossip.table, options.config.market.lost_after_s, now)
    await gossiping.start(nursery, places)
    market = MarketWatch(backbone.manifest, key.node_id, gossip, options.config, now, lost.nodes)
    backbone.state.gossip = GossipState(
        key.node_id,
        gossip,
        meeting.connections,
        gossiping.record,
        reachability,
        market,
        options.config,
        now,
    )
    nursery.start_soon(backbone.demand.run, model, gossiping.service.publish_demand)
    nursery.start_soon(backbone.throughput.run)
    meeting.start(nursery, options, endpoint, places, threads or Inline())
    if goodbye is not None:
        goodbye.say = partial(_leave, gossiping, meeting)
    return tuple(PeerAddress(key.node_id, host, port) for host, port in places)


async def _leave(gossiping: Gossiping, meeting: Meeting) -> None:
    """Others forget this node at once; the next start has a higher number."""
    gossiping.record.leave()
    await trio.sleep(LEAVE_GRACE_S)
    await meeting.close("leaving")


def _seeds(manifest: Manifest) -> ModelHoldings:
    """What a backbone's record says: all of the model may be fetched here, and no rows be asked for."""
    shape = MarketShape.of(manifest)
    return ModelHoldings(manifest.model_id, shape.n_layer, shape.n_expert, (), (), 1, seeds=True)


def node_api_of(
    backbone: Backbone, index: ModelIndex, options: BackboneOptions, key: NodeKey, token: str
) -> NodeApi:
    """What the node-local routes of a started backbone work with."""
    known = backbone.state.gossip
    assert known is not None
    return NodeApi(
        own=key.node_id,
        token=token,
        market=known.market,
        demand=backbone.demand,
        source=index,
        names=(backbone.manifest.name,),
        threads=Threads(options.config.node_api.threads),
        config=options.config,
        rows_at_s=known.connections.rows_at_s,
    )


def _access(options: BackboneOptions, keys: KeyRing, token: str) -> Access:
    """Besides keys the node's token lets in: whoever has that owns the node."""

    def admits(key: str) -> bool:
        return hmac.compare_digest(key.encode("utf-8", "replace"), token.encode()) or keys.admits(key)

    return Access(admits, options.config.api.cors, is_public=not is_loopback(options.api[0]))


def _log_bad_keys(error: StoreError) -> None:
    log.error("no API key is good any more: %s", error)


def app_of(
    backbone: Backbone,
    index: ModelIndex,
    options: BackboneOptions,
    node: NodeApi,
    places: tuple[PeerAddress, ...],
    access: Access,
) -> Starlette:
    """The HTTP face of a started backbone. `places`: where it accepts nodes; `access`: who may use it."""
    engine, config = backbone.engine, options.config
    template = template_of(index.metadata, engine.tokenizer)
    known = backbone.state.gossip
    assert known is not None
    view = DashboardView(
        known,
        backbone.members,
        backbone.throughput,
        lambda: engine.n_waiting,
        config.dashboard,
        has_chat=template is not None,
    )
    routed_bytes = sum(layer.layout.expert_bytes for layer in backbone.manifest.layers.values())
    routed_bytes *= backbone.manifest.n_expert
    served = Served(
        engine,
        backbone.manifest.name,
        template,
        backbone.state.as_dict,
        int(time.time()),
        Threads(config.api.prompt_threads),
        config.api,
        node,
        access,
        gauges=partial(_gauges, backbone),
        dashboard=prepare_dashboard(view, options, places, routed_bytes, node.token, node.threads),
    )
    return build_app(served)


def _gauges(backbone: Backbone) -> list[Family]:
    standings = Counter(worker.standing.value for worker in backbone.members.workers)
    covered, total = backbone.state.coverage()
    workers = [({"standing": standing.value}, float(standings[standing.value])) for standing in Standing]
    experts = [({"state": "covered"}, float(covered)), ({"state": "all"}, float(total))]
    return [
        Family("swarmnode_workers", "gauge", "Connected workers by standing.", workers),
        Family("swarmnode_experts", "gauge", "Routed experts, and those that workers answer for.", experts),
    ]


def load_model(options: BackboneOptions, index: ModelIndex, device: Device) -> tuple[Model, ExpertBank]:
    """The dense path and a bank of every routed expert, bound from the mapped file. Blocks; on the compute thread."""
    config = options.config
    model = open_model(index, device, options.n_ctx, options.n_slots, _with_mtp(config, index))
    bank = ExpertBank(device, max_rows=config.compute.backbone_max_rows, config=config.compute)
    for number, layout in index.expert_layers.items():
        stacked = {kind: index.data(tensor_name(number, kind)) for kind in layout.kinds}
        bank.bind(layout, range(layout.n_expert), stacked)
    return model, bank


def _with_mtp(config: Config, index: ModelIndex) -> ModelsConfig:
    """An MTP block is loaded if anybody may ask it. UsageError if one is asked for that is not there."""
    if config.engine.drafts == "mtp" and not index.n_mtp:
        raise UsageError(
            f"{index.paths[0]} has no MTP block to guess with: leave --speculate mtp out, or take a file that has one"
        )
    is_wanted = config.engine.speculate != "never" and config.engine.drafts != "ngram"
    return replace(config.models, mtp=config.models.mtp and is_wanted)


@asynccontextmanager
async def loaded(
    options: BackboneOptions, index: ModelIndex, device: Device, gate: ComputeGate
) -> AsyncIterator[tuple[Model, ExpertBank]]:
    """`load_model` on the compute thread, and everything freed at the end."""
    model, bank = await gate.run(partial(load_model, options, index, device))
    try:
        yield model, bank
    finally:
        with trio.CancelScope(shield=True):
            await gate.run(bank.close)
            await gate.run(model.close)


def _tell(state: SwarmState, report: Callable[[BackboneEvent], None], worker: Worker, left: bool) -> None:
    covered, total = state.coverage()
    standing = "left" if left else worker.standing.value
    count = sum(item.count for item in worker.ranges)
    report(WorkerChanged(worker.node_id.short, standing, worker.reason, count, covered, total))


async def _attend(backbone: Backbone, peer: Peer) -> None:
    """Beside every connection of a backbone: whoever goes is out of routing at once."""
    try:
        await peer.wait_closed()
    finally:
        backbone.members.disconnected(peer)


async def _api_listener(place: tuple[str, int], keys: KeyRing) -> trio.SocketListener:
    host, port = place
    if not is_loopback(host) and not len(keys):
        raise UsageError(
            f"the API would listen on {host} for everybody who reaches this machine, and there is no key that lets "
            "anybody in: make one with `swarmnode key new` (same --home), or keep to this machine with "
            f"--api 127.0.0.1:{port}"
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


def _url(listener: trio.SocketListener) -> str:
    host, port = listener.socket.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
