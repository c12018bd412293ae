"""Keeps a connection to each node of a list: dials, serves, dials again after a growing, jittered pause."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import trio

from swarmnode.config import ContactConfig
from swarmnode.errors import LocalError, RemoteError, first_error
from swarmnode.net.address import PeerAddress
from swarmnode.net.links import Handlers, dial
from swarmnode.net.peer import OnPeer, Peer
from swarmnode.net.transport import Transport
from swarmnode.services.reports import Connecting, Waiting
from swarmnode.wire.endpoint import Endpoint
from swarmnode.wire.events import Ended


class Contacts:
    """Runs `on_peer` on a connection to each address, for ever.

    A RemoteError of `on_peer` ends that connection and is reported as the reason of the pause; a LocalError is this
    machine's and ends `run`. Pauses grow until a connection went well for longer than the last one: a node that answers
    the dial and then fails, or hangs up at once, is no reason to dial it every second.
    """

    def __init__(
        self,
        transport: Transport,
        endpoint: Endpoint,
        handlers: Handlers,
        on_peer: OnPeer,
        config: ContactConfig,
        report: Callable[[Connecting | Waiting], None],
        rng: random.Random,
    ) -> None:
        self._transport = transport
        self._endpoint = endpoint
        self._handlers = handlers
        self._on_peer = on_peer
        self._config = config
        self._report = report
        self._rng = rng
        self._dials = trio.CapacityLimiter(config.dials_at_once)

    async def run(self, addresses: Sequence[PeerAddress]) -> None:
        """Keep contact until cancelled. The own address, if listed, is left out."""
        own = self._endpoint.credentials.node_id
        async with trio.open_nursery() as nursery:
            for address in dict.fromkeys(addresses):
                if address.node_id != own:
                    nursery.start_soon(self._keep, address)

    async def _keep(self, address: PeerAddress) -> None:
        delay_s = self._config.redial_min_s
        while True:
            started_s = trio.current_time()
            is_well, reason = await self._session(address)
            if is_well and trio.current_time() - started_s >= delay_s:
                delay_s = self._config.redial_min_s
            pause_s = self._rng.uniform(0.5, 1.0) * delay_s
            place = f"{address.host} port {address.port}"
            self._report(Waiting(reason if reason.startswith(place) else f"{place}: {reason}", pause_s))
            await trio.sleep(pause_s)
            delay_s = min(2 * delay_s, self._config.redial_max_s)

    async def _session(self, address: PeerAddress) -> tuple[bool, str]:
        """One connection from dial to end: whether all went well until it ended, and why it ended."""
        reasons: list[str] = []
        local: list[LocalError] = []

        async def guarded(peer: Peer) -> None:
            try:
                await self._on_peer(peer)
            except RemoteError as error:
                reasons.append(str(error))
            except LocalError as error:
                local.append(error)
            peer.close()

        ended: Ended | None = None
        try:
            async with trio.open_nursery() as nursery:
                async with self._dials:
                    self._report(Connecting(f"{address.host} port {address.port}"))
                    peer: Peer = await nursery.start(self._dial, address, guarded)
                ended = await peer.wait_closed()
        except* RemoteError as group:
            reasons.append(str(first_error(group)))
        if local:
            raise local[0]
        if reasons:
            return False, reasons[0]
        closed = "the connection was closed"
        return True, closed if ended is None else f"{closed} ({ended.code})"

    async def _dial(
        self, address: PeerAddress, on_peer: OnPeer, *, task_status: trio.TaskStatus[Peer]
    ) -> None:
        await dial(
            self._transport,
            address,
            self._endpoint,
            handlers=self._handlers,
            on_peer=on_peer,
            task_status=task_status,
        )
