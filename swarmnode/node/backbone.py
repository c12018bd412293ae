"""A backbone's life: the model, its services, the API, under one nursery."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from functools import partial

import trio

from swarmnode.api import serve as api_serve
from swarmnode.compute.devices import DeviceInfo
from swarmnode.errors import StoreError
from swarmnode.gossip.records import ModelHoldings
from swarmnode.gossip.shape import MarketShape
from swarmnode.identity import NodeKey
from swarmnode.models.base import Model
from swarmnode.net.address import PeerAddress
from swarmnode.net.descriptors import raise_limit
from swarmnode.net.invite import suggested_budget
from swarmnode.net.peer import Peer
from swarmnode.net.port_file import write_budget
from swarmnode.net.tcp import TcpTransport
from swarmnode.net.transport import Transport
from swarmnode.node.backbone_http import access_of, api_listener, app_of, node_api_of, url_of
from swarmnode.node.backbone_parts import Backbone, BackboneOptions, assemble_backbone, loaded, routed_bytes
from swarmnode.node.common import (
    LEAVE_GRACE_S,
    Goodbye,
    endpoint_of,
    hold_key,
    listen_to_owner,
    open_compute,
    stop_on_signal,
)
from swarmnode.node.gossiping import Gossiping, prepare_gossip
from swarmnode.node.listening import listen_for_nodes
from swarmnode.node.meeting import Meeting, prepare_meeting
from swarmnode.services.api_keys import KeyRing
from swarmnode.services.control import Control
from swarmnode.services.coverage_news import tell_coverage
from swarmnode.services.gossip_state import GossipState
from swarmnode.services.lost_nodes import LostNodes
from swarmnode.services.market_watch import MarketWatch
from swarmnode.services.members import Worker
from swarmnode.services.node_token import load_or_create_token
from swarmnode.services.reachability import Reachability
from swarmnode.services.reports import BackboneEvent, Hashing, Leaving, Ready, WorkerChanged
from swarmnode.services.runners import Inline, Runner, Threads
from swarmnode.services.swarm_state import SwarmState
from swarmnode.weights.catalog import resolve_model
from swarmnode.weights.hashing import load_or_build_manifest
from swarmnode.weights.index import ModelIndex
from swarmnode.weights.manifest import Manifest

log = logging.getLogger(__name__)


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
        async with trio.open_nursery() as nursery, await api_listener(options.api, keys) as listener:
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
                await _serve_model(options, key, index, listener, keys, goodbye, report, task_status)


def _log_bad_keys(error: StoreError) -> None:
    log.error("no API key is good any more: %s", error)


async def _serve_model(
    options: BackboneOptions,
    key: NodeKey,
    index: ModelIndex,
    listener: trio.SocketListener,
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
            app = app_of(backbone, index, options, node, places, access_of(options, keys, token))
            await nursery.start(partial(api_serve.run, config=options.config.api), app, listener)
            _keep_budget(options, routed_bytes(manifest))
            report(_ready(options, manifest, model, device.info, places, url_of(listener)))
            nursery.start_soon(tell_coverage, backbone.state.coverage, report)
            task_status.started()


def _keep_budget(options: BackboneOptions, n_bytes: int) -> None:
    """For `swarmnode invite`, which names the same as the dashboard."""
    try:
        write_budget(options.folders.port_file, suggested_budget(n_bytes))
    except OSError as error:
        log.warning("`swarmnode invite` will not know this model's budget: %s", error.strerror)


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


def _tell(state: SwarmState, report: Callable[[BackboneEvent], None], worker: Worker, left: bool) -> None:
    covered, total = state.coverage()
    if left and worker.pauses and worker.lacks:
        report(WorkerChanged(worker.node_id.short, "empty", worker.lacks, 0, covered, total))
        return
    gone = "paused" if worker.pauses else "left"
    standing = gone if left else worker.standing.value
    count = sum(item.count for item in worker.ranges)
    report(WorkerChanged(worker.node_id.short, standing, worker.reason, count, covered, total))


async def _attend(backbone: Backbone, peer: Peer) -> None:
    """Beside every connection of a backbone: whoever goes is out of routing at once."""
    try:
        await peer.wait_closed()
    finally:
        backbone.members.disconnected(peer)
