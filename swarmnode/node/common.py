"""What backbones and workers have in common: options, the key, the compute thread, stopping on a signal."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial

import trio

from swarmnode import __version__
from swarmnode.compute.devices import Device, build_report, open_device
from swarmnode.compute.thread import ComputeThread
from swarmnode.compute.tuning import tune_threads
from swarmnode.config import Config, Folders
from swarmnode.errors import StoreError, UsageError
from swarmnode.identity import NodeId, NodeKey
from swarmnode.net.address import PeerAddress
from swarmnode.net.control_socket import serve_control
from swarmnode.services.control import Control
from swarmnode.services.runners import ComputeGate
from swarmnode.weights.file_lock import try_lock
from swarmnode.wire.endpoint import Endpoint
from swarmnode.wire.handshake import Credentials
from swarmnode.wire.secret import NetworkSecret

log = logging.getLogger(__name__)

LEAVE_TIMEOUT_S = 2.0
LEAVE_GRACE_S = 0.7
"""Between our last record and the end of the connections: neighbours ask for it in that time."""


@dataclass(frozen=True)
class NodeOptions:
    """What every node is told."""

    folders: Folders
    network: str
    bootstrap: tuple[PeerAddress, ...] = ()
    listen: tuple[str, int] | None = None
    """Host and port to accept nodes on; None: dial only."""
    advertise: tuple[tuple[str, int], ...] = ()
    """Hosts and ports at which others reach this node, beside those that it finds out itself."""
    allowed: frozenset[NodeId] | None = None
    """Who may dial this node; None: everybody with a key."""
    secret: NetworkSecret | None = None
    """Of a private network; None: a network that anybody may join."""
    lan: bool = False
    """Look for nodes on the LAN, and be found there."""
    device: str | None = None
    config: Config = field(default_factory=Config)


def endpoint_of(options: NodeOptions, key: NodeKey, role: str) -> Endpoint:
    """How the node presents itself on every connection."""
    return Endpoint.create(
        Credentials(key),
        network=options.network,
        agent=f"swarmnode/{__version__}",
        roles=(role,),
        config=options.config.wire,
        allowed=options.allowed,
        secret=options.secret,
    )


@contextmanager
def hold_key(folders: Folders) -> Iterator[NodeKey]:
    """The node's key, made at the first start, and locked as long as the node runs.

    Two nodes with one key would push each other out of every table. UsageError if another process has it, StoreError
    if the folder cannot be used.
    """
    key = NodeKey.load_or_create(folders.key_file)
    try:
        descriptor = os.open(folders.data / "node.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StoreError(
            f"{folders.data} cannot be used: {error.strerror}; choose another: --home DIR"
        ) from error
    try:
        if not try_lock(descriptor):
            raise UsageError(
                f"another node runs with the key in {folders.data}; "
                "give each node on this machine a --home DIR of its own"
            )
        yield key
    finally:
        os.close(descriptor)


@asynccontextmanager
async def open_compute(options: NodeOptions) -> AsyncIterator[tuple[ComputeGate, Device]]:
    """The compute thread and the device that it owns."""
    thread = ComputeThread()
    gate = ComputeGate(thread)
    try:
        compute = options.config.compute
        device = await gate.run(partial(open_device, options.device, compute.n_threads, compute.poll))
        try:
            if not compute.n_threads:
                await gate.run(partial(tune_threads, device, options.folders.cache / "tuning"))
            gate.may_stand_in = device.is_host and not build_report().openmp
            yield gate, device
        finally:
            with trio.CancelScope(shield=True):
                await gate.run(device.close)
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(thread.close)


class Goodbye:
    """What to do before a clean stop, once there is somebody to say it to."""

    def __init__(self) -> None:
        self.say: Callable[[], Awaitable[None]] | None = None

    async def __call__(self) -> None:
        if self.say is not None:
            await self.say()


async def stop_on_signal(
    scope: trio.CancelScope,
    leave: Callable[[], Awaitable[None]] | None = None,
    *,
    asked: trio.Event | None = None,
    on_leave: Callable[[], None] = lambda: None,
) -> None:
    """On Ctrl-C, SIGTERM, the end of the terminal or once `asked` is set: `on_leave`, take leave (for at most
    LEAVE_TIMEOUT_S), then cancel `scope`, so that all closes in order. Another Ctrl-C meanwhile ends
    the process at once.
    """
    async with trio.open_nursery() as nursery:
        if asked is not None:
            nursery.start_soon(_cancel_when, asked, nursery.cancel_scope)
        with trio.open_signal_receiver(*_stop_signals()) as signals:
            async for _ in signals:
                break
        nursery.cancel_scope.cancel()
    on_leave()
    if leave is not None:
        with trio.move_on_after(LEAVE_TIMEOUT_S):
            await leave()
    scope.cancel()


async def _cancel_when(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


async def listen_to_owner(nursery: trio.Nursery, folders: Folders, control: Control) -> None:
    """Answer `swarmnode pause`, `leave` and so on from now on; where that cannot be, the node runs without."""
    try:
        await nursery.start(serve_control, folders.control_socket, control.answer)
    except UsageError as error:
        log.warning("`swarmnode pause`, `leave` and `limits` cannot reach this node: %s", error)


def _stop_signals() -> list[signal.Signals]:
    found = [signal.SIGINT, signal.SIGTERM]
    if (
        sys.platform != "win32" and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
    ):  # which is nohup's doing
        found.append(signal.SIGHUP)
    return found
