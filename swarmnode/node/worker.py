"""A worker: contacts with backbones, the experts it holds, nothing of any conversation.

Imports nothing of the extra `backbone`: a phone installs only what a worker needs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from functools import partial

import trio

from swarmnode.compute.devices import Device
from swarmnode.gossip.records import ModelHoldings
from swarmnode.identity import NodeKey
from swarmnode.net.address import PeerAddress
from swarmnode.net.descriptors import raise_limit
from swarmnode.net.peer import Handler, Peer
from swarmnode.net.tcp import TcpTransport
from swarmnode.net.transport import Transport
from swarmnode.node.common import (
    LEAVE_GRACE_S,
    LEAVE_TIMEOUT_S,
    NodeOptions,
    endpoint_of,
    hold_key,
    listen_to_owner,
    open_compute,
    stop_on_signal,
)
from swarmnode.node.gossiping import Gossiping, prepare_gossip
from swarmnode.node.listening import listen_for_nodes
from swarmnode.node.meeting import Meeting, prepare_meeting
from swarmnode.schedule.restraint import Hours, OnBattery, Wishes
from swarmnode.services.bulk_links import BulkLinks
from swarmnode.services.control import Control
from swarmnode.services.lost_nodes import LostNodes
from swarmnode.services.machine import read_machine
from swarmnode.services.market import Market
from swarmnode.services.memory_lease import lease_folder, memory_lease
from swarmnode.services.reports import JoinEvent, Leaving, Listening, Started
from swarmnode.services.residence import Residence, ResidenceBuilder
from swarmnode.services.runners import ComputeGate, Runner, Threads
from swarmnode.services.slice_holders import SliceHolders
from swarmnode.services.steward import Senses, Steward
from swarmnode.services.volunteer import VolunteerService
from swarmnode.wire.endpoint import Endpoint
from swarmnode.wire.messages import Message


@dataclass(frozen=True)
class WorkerOptions(NodeOptions):
    """And a worker."""

    budget_bytes: int = 0
    hours: tuple[Hours, ...] = ()
    """When it lends; empty: always."""
    on_battery: OnBattery = "pause"
    keep_free_bytes: int | None = None
    """Memory that is to stay available; None: RestraintConfig says how much."""


async def run_worker(options: WorkerOptions, report: Callable[[JoinEvent], None]) -> None:
    """Lend memory and compute until stopped. Raises LocalError when this machine cannot serve."""
    raise_limit()
    with hold_key(options.folders) as key:
        await _run_worker(options, key, report)


async def _run_worker(options: WorkerOptions, key: NodeKey, report: Callable[[JoinEvent], None]) -> None:
    async with open_compute(options) as (gate, device):
        info = device.info
        with memory_lease(lease_folder(), info.name, options.budget_bytes, info.memory_total_bytes):
            await _lend(options, key, gate, device, report)


async def _lend(
    options: WorkerOptions,
    key: NodeKey,
    gate: ComputeGate,
    device: Device,
    report: Callable[[JoinEvent], None],
) -> None:
    threads = Threads(options.config.store.threads)
    builder = ResidenceBuilder(
        options.budget_bytes,
        options.folders.cache,
        device,
        gate,
        threads,
        options.config,
        report,
        others=may_meet_others(options, key),
    )
    worker = assemble_worker(options, key, builder, TcpTransport(), report, threads)
    asked = trio.Event()
    senses = Senses(read_machine, _minute_of_day, threads)
    steward = steward_of(worker, senses)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                partial(stop_on_signal, asked=asked, on_leave=partial(report, Leaving())),
                nursery.cancel_scope,
                worker.leave,
            )
            await listen_to_owner(
                nursery, options.folders, Control(key.node_id, "worker", asked.set, steward)
            )
            nursery.start_soon(steward.run)
            await worker.start(nursery)
    finally:
        await worker.service.aclose()


def steward_of(worker: Worker, senses: Senses) -> Steward:
    """Who keeps this worker within what its machine and its owner allow; to be run beside it."""
    options = worker.options
    wishes = Wishes(options.budget_bytes, options.hours, options.on_battery, options.keep_free_bytes)
    connected = worker.meeting.connections.connected
    return Steward(
        worker.service, wishes, senses, options.config.restraint, worker.report, lambda: len(connected)
    )


def _minute_of_day() -> int:
    now = time.localtime()
    return 60 * now.tm_hour + now.tm_min


def may_meet_others(options: WorkerOptions, key: NodeKey) -> bool:
    """Whether this worker was told of more than one node, so that another's model may fit if the first one's does not.

    Others may come with gossip, but somebody who knows one backbone wants to hear that the budget is too small for it.
    """
    known = {address for address in options.bootstrap if address.node_id != key.node_id}
    return len(known) > 1 or options.lan


@dataclass(frozen=True)
class Worker:
    """A worker's services, wired to each other."""

    options: WorkerOptions
    key: NodeKey
    endpoint: Endpoint
    transport: Transport
    service: VolunteerService
    meeting: Meeting
    gossiping: Gossiping
    bulk: BulkLinks
    threads: Runner
    report: Callable[[JoinEvent], None]

    async def start(self, nursery: trio.Nursery) -> None:
        """Start everything in `nursery`."""
        options = self.options
        self.report(Started(self.key.node_id.short))
        places: list[tuple[str, int]] = []
        if options.listen is not None:
            attend = self.meeting.connections.attended(self.service.accepted)
            places = await listen_for_nodes(
                nursery, options, self.transport, self.endpoint, self.service.handlers, attend
            )
            self.report(Listening(tuple(PeerAddress(self.key.node_id, host, port) for host, port in places)))
        await nursery.start(self.bulk.run)
        await self.gossiping.start(nursery, places)
        nursery.start_soon(self._serve)
        self.meeting.start(nursery, options, self.endpoint, places, self.threads)

    async def _serve(self) -> None:
        """Until this machine cannot: then the others hear of it before the error ends the node."""
        try:
            await self.service.run()
        except Exception:
            with trio.move_on_after(LEAVE_TIMEOUT_S):
                await self.leave()
            raise

    async def leave(self) -> None:
        """Say goodbye to everybody, before a clean stop."""
        self.gossiping.record.leave()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.service.leave)
            nursery.start_soon(trio.sleep, LEAVE_GRACE_S)
        await self.meeting.close("leaving")


def assemble_worker(
    options: WorkerOptions,
    key: NodeKey,
    builder: ResidenceBuilder,
    transport: Transport,
    report: Callable[[JoinEvent], None],
    threads: Runner,
    handlers: MutableMapping[type[Message], Handler] | None = None,
) -> Worker:
    """Wire the services; nothing runs yet. `handlers`: where they are put (a test's may wrap them). StoreError."""
    endpoint = endpoint_of(options, key, "worker")
    config = options.config
    handlers = {} if handlers is None else handlers
    rng = random.Random(key.node_id.raw)

    async def attend(peer: Peer) -> None:
        await service.session(peer)

    meeting = prepare_meeting(options, transport, endpoint, handlers, attend, report, rng, threads)
    gossiping = prepare_gossip(
        options, key, "worker", meeting, builder.device.info, options.budget_bytes, rng
    )
    gossip = gossiping.service
    lost_after_s = config.market.lost_after_s
    lost = LostNodes(meeting.connections, gossip.table, lost_after_s, trio.current_time)
    holders = SliceHolders(gossip, meeting.connections)
    bulk = BulkLinks(transport, endpoint, holders.address_of, config.store)

    def open_market(residence: Residence) -> Market:
        sources = partial(holders.sources, residence.manifest.model_id, bulk.source)
        return Market(
            key.node_id,
            residence,
            gossip,
            lost.nodes,
            sources,
            config,
            gossip.incarnation,
            report,
        )

    def publish(models: tuple[ModelHoldings, ...]) -> None:
        gossiping.neighbours.hold([item.model for item in models])
        gossiping.record.holding(models)

    service = VolunteerService(builder, open_market, publish, handlers)
    handlers.update(gossip.handlers)
    return Worker(options, key, endpoint, transport, service, meeting, gossiping, bulk, threads, report)
