"""Runs a GossipCore: its requests go out over whatever connections there are, its handlers answer those of peers.

The core decides, here is only the way: one task a request, a deadline each, and a peer whose bytes cannot be right
loses its connection.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial

import trio

from swarmnode.config import GossipConfig
from swarmnode.errors import ProtocolError, RemoteError, RequestRefusedError, StoreError
from swarmnode.gossip.core import GossipCore, Outgoing
from swarmnode.gossip.records import ModelDemand, OwnState
from swarmnode.gossip.table import Change, RecordTable
from swarmnode.net.peer import Body, Handler, Peer
from swarmnode.services.connections import Connections
from swarmnode.wire.constants import TrafficClass
from swarmnode.wire.messages import GossipDigest, GossipHave, GossipLink, GossipWant, Message, Refused

log = logging.getLogger(__name__)

TICK_S = 0.25
MAX_NAP_S = 30.0
"""Sleep that is not made up for until there is more of it: an age travels in steps of 2.4 s, and GRACE_S is as long."""

OnChange = Callable[[Change], None]
"""Told of every record that came, changed or went. Must not raise."""


def asleep_s() -> float:
    """How long this machine has slept (suspended) since some moment, during which trio's clock stood still; 0 where
    the clocks do not tell (Windows: trio's goes on).
    """
    with_sleep = getattr(time, "CLOCK_BOOTTIME", None)
    without = getattr(time, "CLOCK_UPTIME_RAW", None)  # macOS, whose CLOCK_MONOTONIC goes on
    if with_sleep is not None:
        return time.clock_gettime(with_sleep) - time.clock_gettime(time.CLOCK_MONOTONIC)
    if without is not None:
        return time.clock_gettime(time.CLOCK_MONOTONIC) - time.clock_gettime(without)
    return 0.0


class GossipService:
    """The gossip of a node. `wall` is unix time in seconds; `keep_incarnation` stores one that grew by itself; `asleep`
    is how long the machine has slept, in seconds since whenever.
    """

    def __init__(
        self,
        core: GossipCore,
        connections: Connections,
        config: GossipConfig,
        wall: Callable[[], float],
        keep_incarnation: Callable[[int], None],
        asleep: Callable[[], float] = asleep_s,
    ) -> None:
        self._core = core
        self._connections = connections
        self._config = config
        self._wall = wall
        self._keep_incarnation = keep_incarnation
        self._asleep = asleep
        self._slept_s = asleep()
        """Made up for already."""
        self._kept = core.incarnation
        self._nursery: trio.Nursery | None = None
        self._listeners: list[OnChange] = []
        self._was_told_of_conflict = False
        connections.subscribe(self._connection_changed)

    @property
    def table(self) -> RecordTable:
        """What is known of others, and of ourselves."""
        return self._core.table

    @property
    def handlers(self) -> Mapping[type[Message], Handler]:
        """For the peer: the message types this service answers."""
        return dict.fromkeys((GossipHave, GossipWant, GossipDigest, GossipLink), self._answer)

    @property
    def incarnation(self) -> int:
        """Of our records now."""
        return self._core.incarnation

    @property
    def own_conflict(self) -> bool:
        """Another live node has our key."""
        return self._core.own_conflict

    @property
    def neighbours(self) -> int:
        """Peers that gossip goes to."""
        return len(self._core.neighbours)

    def subscribe(self, on_change: OnChange) -> Callable[[], None]:
        """Be told of every change from now on, and of every record that is here already. Call what is returned to
        hear no more.
        """
        self._listeners.append(on_change)
        for record in list(self.table.records()):
            on_change(Change(record.node_id, record.kind, None if record.leaving else record))
        return partial(self._listeners.remove, on_change)

    def publish(self, state: OwnState) -> None:
        """What our record says from now on. UsageError if no record can hold it."""
        self._core.publish(state, self._now(), self._wall())
        self._pump()

    def publish_demand(self, models: tuple[ModelDemand, ...]) -> None:
        """What our demand says from now on."""
        self._core.publish_demand(models, self._now(), self._wall())
        self._pump()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Gossip until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            try:
                while True:
                    self._core.tick(self._now(), self._wall())
                    self._pump()
                    await trio.sleep(TICK_S)
            finally:
                self._nursery = None

    def _now(self) -> float:
        """trio's time, after what the machine slept through is made up for: else the dead would be as young as they
        were, here and at everybody who is told.
        """
        slept_s = self._asleep()
        if slept_s - self._slept_s > MAX_NAP_S:
            log.info("slept for %d s", slept_s - self._slept_s)
            self._core.slept(slept_s - self._slept_s)
            self._slept_s = slept_s
        return trio.current_time()

    def _connection_changed(self, peer: Peer, is_connected: bool) -> None:
        if is_connected:
            self._core.connected(peer.node_id, self._now())
        else:
            self._core.disconnected(peer.node_id, self._now())

    def _pump(self) -> None:
        """Hand on what the core has for others, and for us."""
        for outgoing in self._core.take_output():
            peer = self._connections.connected.get(outgoing.peer)
            if peer is None or self._nursery is None:
                self._core.failed(outgoing, self._now())
            else:
                self._nursery.start_soon(self._send, peer, outgoing)
        for change in self._core.take_changes():
            for listener in tuple(self._listeners):
                listener(change)
        if self._core.incarnation != self._kept:
            self._kept = self._core.incarnation
            try:
                self._keep_incarnation(self._kept)
            except StoreError as error:  # the next start will have to jump again
                log.warning("%s", error)
        if self._core.own_conflict and not self._was_told_of_conflict:
            self._was_told_of_conflict = True
            log.error(
                "another node runs with this node's key; stop one of the two, or give it a --home of its own"
            )

    async def _send(self, peer: Peer, outgoing: Outgoing) -> None:
        reply: Message | None = None
        reply_body = memoryview(b"")
        try:
            with trio.fail_after(self._config.request_timeout_s):
                body: Body = (outgoing.body,) if outgoing.body else ()
                reply, reply_body = await peer.request(
                    outgoing.message, body, traffic_class=TrafficClass.PREFILL
                )
        except RequestRefusedError as error:  # an answer as well: it is not asked again at once
            reply = Refused(error.code, error.reason, error.retry_after_ms)
        except (RemoteError, trio.TooSlowError):
            pass  # reply stays None: `failed`
        if self._connections.connected.get(outgoing.peer) is not peer:
            return  # the core forgot it with the connection; what is asked on the next one is none of its business
        try:
            if reply is None:
                self._core.failed(outgoing, self._now())
            else:
                self._core.receive_untrusted(outgoing, reply, reply_body, self._now())
        except ProtocolError as error:
            self._core.failed(outgoing, self._now())
            peer.close(error.code, error.reason)
        self._pump()

    async def _answer(self, peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
        try:
            reply, reply_body = self._core.answer_untrusted(peer.node_id, message, body, self._now())
        except ProtocolError as error:
            peer.close(error.code, error.reason)
            raise RequestRefusedError(error.code, error.reason) from error
        self._pump()
        return reply, ((reply_body,) if reply_body else ())
