"""A worker: contacts with backbones, the experts it holds, nothing of any conversation.

Imports nothing of the extra `backbone`: a phone installs only what a worker needs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import trio

from swarmnode.identity import NodeKey
from swarmnode.net.address import PeerAddress
from swarmnode.net.tcp import TcpTransport
from swarmnode.net.transport import Transport
from swarmnode.node.common import (
    NodeOptions,
    endpoint_of,
    hold_key,
    listen_for_nodes,
    open_compute,
    stop_on_signal,
)
from swarmnode.node.meeting import prepare_meeting
from swarmnode.services.reports import JoinEvent, Listening, Started
from swarmnode.services.residence import ResidenceBuilder
from swarmnode.services.runners import Inline, Runner, Threads
from swarmnode.services.volunteer import VolunteerService


@dataclass(frozen=True)
class WorkerOptions(NodeOptions):
    """And a worker."""

    budget_bytes: int = 0


async def run_worker(options: WorkerOptions, report: Callable[[JoinEvent], None]) -> None:
    """Lend memory and compute until stopped. Raises LocalError when this machine cannot serve."""
    with hold_key(options.folders) as key:
        await _run_worker(options, key, report)


async def _run_worker(options: WorkerOptions, key: NodeKey, report: Callable[[JoinEvent], None]) -> None:
    async with open_compute(options) as (gate, device):
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
        service = VolunteerService(builder)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stop_on_signal, nursery.cancel_scope, service.leave)
                await start_worker(service, options, key, TcpTransport(), report, nursery, threads)
        finally:
            await service.aclose()


def may_meet_others(options: WorkerOptions, key: NodeKey) -> bool:
    """Whether there may be more than one backbone for this worker: several addresses, or any that dials it."""
    known = {address for address in options.bootstrap if address.node_id != key.node_id}
    return len(known) > 1 or options.listen is not None or options.lan


async def start_worker(
    service: VolunteerService,
    options: WorkerOptions,
    key: NodeKey,
    transport: Transport,
    report: Callable[[JoinEvent], None],
    nursery: trio.Nursery,
    threads: Runner | None = None,
) -> None:
    """Start the worker's services in `nursery`. `threads` write small files (None: right here)."""
    endpoint = endpoint_of(options, key, "worker")
    report(Started(key.node_id.short))
    rng = random.Random(key.node_id.raw)
    meeting = prepare_meeting(
        options, transport, endpoint, service.handlers, service.session, report, rng, threads
    )
    places: list[tuple[str, int]] = []
    if options.listen is not None:
        attend = meeting.connections.attended(service.accepted)
        places = await listen_for_nodes(nursery, options, transport, endpoint, service.handlers, attend)
        report(Listening(tuple(PeerAddress(key.node_id, host, port) for host, port in places)))
    nursery.start_soon(service.watch)
    meeting.start(nursery, options, endpoint, places, threads or Inline())
