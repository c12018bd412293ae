"""Keeps contact with other nodes: dials whom services/dial_plan says, serves, dials again after a growing pause.

`add`, `remove` and `set_wanted` work at any time, before `run` and while it runs. A node has one connection at most,
whoever dialled (services/connections): no dial is begun once there is one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import trio

from swarmnode.config import ContactConfig
from swarmnode.errors import LocalError, RemoteError, WrongNodeError
from swarmnode.identity import NodeId
from swarmnode.net.address import PeerAddress
from swarmnode.net.links import Handlers, connect_first
from swarmnode.net.peer import OnPeer, Peer
from swarmnode.net.transport import Transport
from swarmnode.services.connections import Connections
from swarmnode.services.dial_plan import DialPlan, Source, Target
from swarmnode.services.reports import Connecting, Waiting
from swarmnode.wire.endpoint import Endpoint

OnMet = Callable[[PeerAddress, Peer], None]
"""Told of every node that was reached, and where."""


class Contacts:
    """Runs `on_peer` on a connection to each node it is to dial, for ever.

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
        *,
        connections: Connections | None = None,
        on_met: OnMet | None = None,
        waits_for_others: bool = False,
    ) -> None:
        """`connections`: the node's registry, shared with what serves inbound connections. `waits_for_others`: this
        node is there to be dialled, as a backbone is; whoever it remembers is dialled, but no news."""
        self._transport = transport
        self._endpoint = endpoint
        self._handlers = handlers
        self._on_peer = on_peer
        self._config = config
        self._report = report
        self._on_met = on_met
        self._waits_for_others = waits_for_others
        own = endpoint.credentials.node_id
        self._connections = (
            Connections(own, config, trio.current_time) if connections is None else connections
        )
        self._connections.subscribe(self._connection_changed)
        self._plan = DialPlan(own, config, rng)
        self._scopes: dict[Target, trio.CancelScope] = {}
        """Of dials that are under way."""
        self._changed = trio.Event()
        self._reported_s = float("-inf")

    @property
    def connections(self) -> Connections:
        """The registry of connected nodes."""
        return self._connections

    def add(self, addresses: Iterable[PeerAddress], source: Source = Source.LISTED) -> None:
        """Dial these nodes, too; several addresses of one node are tried in order. The own address is left out."""
        self._plan.add(addresses, source)
        self._changed.set()

    def set_wanted(self, addresses: Iterable[PeerAddress]) -> None:
        """Dial these whatever else is connected, in place of those wanted before (which stay connected if they are)."""
        self._plan.replace(addresses, Source.WANTED)
        self._give_up_removed()

    def remove(self, node_ids: Iterable[NodeId]) -> None:
        """Do not dial these any more. A connection that is open stays."""
        self._plan.remove(node_ids)
        self._give_up_removed()

    async def run(self, addresses: Iterable[PeerAddress] = ()) -> None:
        """Keep contact until cancelled, with these nodes and with those added."""
        self.add(addresses)
        async with trio.open_nursery() as nursery:
            while True:
                self._changed = trio.Event()
                now_s = trio.current_time()
                step = self._plan.step(now_s, self._connections.connected)
                for target in step.abandon:
                    self._give_up(target)
                for target in step.start:
                    self._scopes[target] = scope = trio.CancelScope()
                    nursery.start_soon(self._contact, target, scope)
                with trio.move_on_at(self._plan.wake_s(now_s)):
                    await self._changed.wait()

    def _connection_changed(self, peer: Peer, is_connected: bool) -> None:
        """A dial that loses against this connection (see Connections) is given up; one that wins goes on."""
        if is_connected and peer.node_id < self._endpoint.credentials.node_id:
            self._give_up(self._plan.get(peer.node_id))
        if not is_connected:
            self._note_goodbye(peer)
        self._changed.set()

    def _note_goodbye(self, peer: Peer) -> None:
        """Who said that it leaves is not asked at once whether it is back: it will dial a node that waits for it."""
        target = self._plan.get(peer.node_id)
        if target is None or not self._waits_for_others or target.source is not Source.REMEMBERED:
            return
        if peer.ended is not None and peer.ended.code == "leaving":
            self._plan.left(target, trio.current_time())

    def _give_up(self, target: Target | None) -> None:
        if target in self._scopes:
            self._scopes[target].cancel()

    def _give_up_removed(self) -> None:
        """Dials to nodes that are no longer on the plan."""
        for target in self._scopes:
            if self._plan.get(target.node_id) is not target:
                self._give_up(target)
        self._changed.set()

    async def _contact(self, target: Target, scope: trio.CancelScope) -> None:
        """One dial, and the connection that comes of it."""
        try:
            with scope:
                await self._dial(target, scope)
                return
        finally:
            self._not_dialling(target, scope)
            self._changed.set()
        self._plan.postpone(target, trio.current_time())

    def _not_dialling(self, target: Target, scope: trio.CancelScope) -> None:
        """This dial is over. A later one of the same node, begun while the connection of this one closed, is not."""
        if self._scopes.get(target) is scope:
            del self._scopes[target]

    async def _dial(self, target: Target, scope: trio.CancelScope) -> None:
        places = target.places
        name = _name(places[0])
        if self._is_of_interest(target) and len(self._plan) <= self._config.report_dials:
            self._report(Connecting(name))
        failures: dict[PeerAddress, RemoteError] = {}
        try:
            address, peer = await connect_first(
                self._transport,
                places,
                self._endpoint,
                handlers=self._handlers,
                stagger_s=self._config.attempt_delay_s,
                failures=failures,
            )
        except RemoteError as error:
            if target.node_id in self._connections.connected:
                self._plan.postpone(target, trio.current_time())
            else:
                self._ended(target, name, str(error), is_well=False, lasted_s=0.0)
            return
        finally:
            for place, failure in failures.items():
                if isinstance(failure, WrongNodeError):
                    self._plan.reached_another(target, place)
        self._plan.opened(target, address)
        self._not_dialling(target, scope)  # what is open is not given up
        await self._attend(target, address, peer)

    async def _attend(self, target: Target, address: PeerAddress, peer: Peer) -> None:
        """An open connection, until its end."""
        reasons: list[str] = []
        local: list[LocalError] = []
        was_kept = False

        async def guarded(peer: Peer) -> None:
            nonlocal was_kept
            was_kept = self._connections.enter(peer)
            if not was_kept:
                return
            if self._on_met is not None:
                self._on_met(address, peer)
            try:
                await self._on_peer(peer)
            except RemoteError as error:
                reasons.append(str(error))
            except LocalError as error:
                local.append(error)
            peer.close()

        started_s = trio.current_time()
        try:
            await peer.run(guarded)
        finally:
            self._connections.leave(peer)
        if local:
            raise local[0]
        if target in self._scopes:
            return  # it is being dialled again already: the next pause is that dial's
        ended = peer.ended
        if not was_kept or (ended is not None and ended.code == "replaced"):
            self._plan.postpone(target, trio.current_time())
            return
        closed = "the connection was closed" if ended is None else f"the connection was closed ({ended.code})"
        self._ended(
            target,
            _name(address),
            reasons[0] if reasons else closed,
            is_well=not reasons,
            lasted_s=trio.current_time() - started_s,
        )

    def _ended(self, target: Target, name: str, reason: str, *, is_well: bool, lasted_s: float) -> None:
        now_s = trio.current_time()
        pause_s = self._plan.ended(target, now_s, is_well=is_well, lasted_s=lasted_s)
        self._changed.set()
        text = reason if reason.startswith(name) else f"{name}: {reason}"
        n_targets = len(self._plan)
        if not self._is_of_interest(target):
            return
        if n_targets <= self._config.report_dials:
            self._report(Waiting(text, pause_s))
        elif not self._connections.connected and now_s - self._reported_s >= self._config.report_interval_s:
            self._reported_s = now_s
            self._report(Waiting(f"none of {n_targets} nodes answers yet; {text}", pause_s))

    def _is_of_interest(self, target: Target) -> bool:
        """Whether people are told of dials: to whom they named, and to everybody while a node that looks for others
        is connected with nobody. The others are many, and often gone."""
        if Source.LISTED in target.sources:
            return True
        return not self._waits_for_others and not self._connections.connected


def _name(address: PeerAddress) -> str:
    return f"{address.host} port {address.port}"
