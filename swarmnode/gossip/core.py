"""The gossip of one node as a state machine: messages and times in, messages and changes out. Pure.

The caller (services/gossip, or the simulator) says which peers are connected, sends what `take_output` gives as
requests, and hands every reply to `receive_untrusted` or says `failed`; a peer's requests are answered by
`answer_untrusted`. `tick` several times a second. docs/gossip.md has the rules.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from swarmnode.config import GossipConfig
from swarmnode.errors import ProtocolError
from swarmnode.gossip import bodies
from swarmnode.gossip.asking import Asking
from swarmnode.gossip.comparing import Comparing
from swarmnode.gossip.overlay import Overlay, Peer
from swarmnode.gossip.own import OwnRecords
from swarmnode.gossip.rates import Dice
from swarmnode.gossip.reading import PlainReader, RecordReader
from swarmnode.gossip.records import Envelope, ModelDemand, OwnState, network_id
from swarmnode.gossip.table import AGE_UNIT, Change, Heard, Outcome, RecordTable
from swarmnode.gossip.telling import Telling
from swarmnode.gossip.view import ALL, View
from swarmnode.gossip.work import Work, work_of
from swarmnode.identity import NodeId, NodeKey
from swarmnode.wire.messages import (
    GossipDifferences,
    GossipDigest,
    GossipHave,
    GossipLink,
    GossipRecords,
    GossipWant,
    Message,
    Ok,
    Refused,
)

UPKEEP_S = 1.0
"""How often links and comparisons are looked at."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A request to send."""

    peer: NodeId
    message: Message
    body: bytes = b""


class GossipCore:
    """Everything a node does about records. `network` is the network's name; `view` what it wants to hear of.

    `now_s` is monotonic, in seconds; `wall_s` unix time, which is only written into our records.
    """

    def __init__(
        self,
        key: NodeKey,
        network: str,
        config: GossipConfig,
        rng: Dice,
        incarnation: int,
        *,
        view: View = ALL,
        reader: RecordReader | None = None,
    ) -> None:
        self._config = config
        self._view = view
        self._reader = reader or PlainReader()
        network_bytes = network_id(network)
        self.node_id = key.node_id
        self.table = RecordTable(config, network_bytes, key.node_id, rng)
        self._own = OwnRecords(key, network_bytes, config, incarnation, rng)
        self._overlay = Overlay(config, rng)
        self._output: list[Outgoing] = []
        self._asking = Asking(config, self._overlay, self._hear, self._want)
        self._telling = Telling(config, self._overlay, self.table, self._have)
        self._comparing = Comparing(
            config,
            self._overlay,
            self.table,
            self._telling,
            self.node_id,
            view,
            rng,
            self._send,
            self._hear_offers,
        )
        self._work = Work(config, self._overlay)
        self._upkeep_s = -math.inf

    # -- what the node does

    def publish(self, state: OwnState, now_s: float, wall_s: float) -> None:
        """Our state from now on; told at once, or as soon as their pace allows (a record in `issue_interval_s` on
        average, `issue_burst` of them `have_interval_s` after each other). UsageError if no record can hold it. A
        state that is `leaving` is the last one: give it a second or two before closing connections.
        """
        self._own.set(state, now_s)
        self._issue(now_s, wall_s)

    def publish_demand(self, models: tuple[ModelDemand, ...], now_s: float, wall_s: float) -> None:
        """Our demand from now on, likewise."""
        self._own.set(models, now_s)
        self._issue(now_s, wall_s)

    @property
    def incarnation(self) -> int:
        """Of our records; it may have jumped. Stored by the caller, so that the next start begins above it."""
        return self._own.version[0]

    @property
    def own_conflict(self) -> bool:
        """Another live node has our key: people must be told, and one of the two must stop."""
        return self._own.conflict

    @property
    def neighbours(self) -> tuple[NodeId, ...]:
        """Peers with a link."""
        return tuple(peer.node_id for peer in self._overlay.neighbours())

    def take_changes(self) -> list[Change]:
        """What is new in the table since the last call."""
        return self.table.take_changes()

    def take_output(self) -> list[Outgoing]:
        """Requests to send now."""
        output, self._output = self._output, []
        return output

    # -- what happens to it

    def connected(self, peer: NodeId, now_s: float) -> None:
        """The first connection to a peer opened."""
        if peer == self.node_id or self._overlay.get(peer) is not None:
            return
        known = self._overlay.add(peer, now_s)
        self._comparing.joined(known, now_s)
        self._asking.joined()
        self.table.pin(peer, True)
        self._upkeep_s = -math.inf

    def disconnected(self, peer: NodeId, now_s: float) -> None:
        """The last connection to a peer closed."""
        gone = self._overlay.remove(peer)
        if gone is None:
            return
        self._asking.left(gone)
        self._telling.left(gone)
        self.table.pin(peer, False)

    def slept(self, asleep_s: float) -> None:
        """The machine slept, and `now_s` stood still for so long: all records are older by it, those of the dead among
        them. To be said before anything else is done after it.
        """
        self.table.slept(asleep_s)
        self._own.slept(asleep_s)

    def tick(self, now_s: float, wall_s: float) -> None:
        """What is due. Cheap when nothing is; four times a second is often enough."""
        self.table.expire(now_s)
        self._issue(now_s, wall_s)
        self._telling.tell_due(now_s)
        if now_s < self._upkeep_s:
            return
        self._upkeep_s = now_s + UPKEEP_S
        self._asking.ask_all(now_s)
        self._keep_links(now_s)
        self._comparing.compare_due(now_s)

    def failed(self, sent: Outgoing, now_s: float) -> None:
        """A request got no answer, or was refused."""
        peer = self._overlay.get(sent.peer)
        if peer is None:
            return
        if isinstance(sent.message, GossipHave):
            self._telling.failed(peer, now_s)
        elif isinstance(sent.message, GossipWant):
            self._asking.failed(peer, now_s)
        elif isinstance(sent.message, GossipDigest):
            self._comparing.failed(peer, now_s)
        elif isinstance(sent.message, GossipLink):
            peer.linking = False

    def receive_untrusted(
        self, sent: Outgoing, reply: Message, body: bytes | memoryview, now_s: float
    ) -> None:
        """The reply to a request of ours. Raises ProtocolError: the connection has to end."""
        peer = self._overlay.get(sent.peer)
        if peer is None:
            return
        if isinstance(reply, GossipRecords):
            self._receive_records(peer, body, now_s)
        elif isinstance(reply, GossipDifferences) and isinstance(sent.message, GossipDigest):
            self._comparing.receive_untrusted(peer, sent.body, reply, body, now_s)
        elif isinstance(reply, Ok) and isinstance(sent.message, GossipHave):
            self._telling.answered(peer)
        elif isinstance(reply, Ok) and isinstance(sent.message, GossipLink):
            peer.linking = False
            peer.linked = peer.ours = sent.message.scope != "none"
            self._tell_own(peer, now_s)
        elif isinstance(sent.message, GossipWant):
            self._asking.refused(peer)
        else:
            peer.next_link_s = now_s + self._config.link_retry_s
            self.failed(sent, now_s)

    def answer_untrusted(
        self, node_id: NodeId, message: Message, body: bytes | memoryview, now_s: float
    ) -> tuple[Message, bytes]:
        """The reply to a peer's request. Raises ProtocolError: the connection has to end."""
        peer = self._overlay.get(node_id)
        if peer is None:
            return Refused("not_allowed", "not connected", 0), b""
        if not self._work.take(peer, work_of(message, len(body), len(self.table)), now_s):
            return Refused("busy", "too many messages", self._config.busy_retry_ms), b""
        if isinstance(message, GossipHave):
            self._hear_offers(peer, bodies.read_offers_untrusted(body), now_s)
            return Ok(), b""
        if isinstance(message, GossipWant):
            return GossipRecords(), self._wanted_records(bodies.read_ids_untrusted(body), now_s)
        if isinstance(message, GossipDigest):
            return self._comparing.answer_untrusted(peer, message, bytes(body), now_s)
        if isinstance(message, GossipLink):
            return self._answer_link(peer, message, now_s), b""
        return Refused("unsupported", "no gossip", 0), b""

    # -- our own records

    def _issue(self, now_s: float, wall_s: float) -> None:
        for record in self._own.due(now_s, wall_s):
            self.table.offer(record, now_s)
            self._telling.spread(record, None, now_s)
            for peer in self._overlay:
                if peer.linked:
                    self._telling.tell(peer, now_s)

    def _send(self, peer: Peer, message: Message, body: bytes = b"") -> None:
        self._output.append(Outgoing(peer.node_id, message, body))

    # -- hearing and asking

    def _hear_offers(self, peer: Peer, offers: list[bodies.Offer], now_s: float) -> None:
        self._telling.knows(peer, offers)
        self._asking.offered(peer, offers, now_s)

    def _hear(self, peer: Peer, record_id: bytes, age: int, now_s: float) -> bool:
        """Whether we know the record; wrong ages are set right, here and at neighbours."""
        heard = self.table.hear(record_id, age, now_s)
        record = self.table.by_id(record_id) if heard in (Heard.YOUNGER, Heard.OLDER) else None
        if record is not None and heard is Heard.YOUNGER:
            self._telling.spread(record, peer.node_id, now_s)
        elif record is not None:
            self._telling.push(peer, record, now_s)
        return heard is not Heard.UNKNOWN

    def _have(self, peer: Peer, offers: list[bodies.Offer]) -> None:
        self._send(peer, GossipHave(), bodies.pack_offers(offers))

    def _want(self, peer: Peer, ids: bytes) -> None:
        self._send(peer, GossipWant(), ids)

    def _receive_records(self, peer: Peer, body: bytes | memoryview, now_s: float) -> None:
        missing = self._asking.take_wanted(peer)
        records = bodies.read_records_untrusted(body)
        for age, data in records:
            envelope = self._reader.read_envelope_untrusted(data)
            if missing.pop(envelope.id, None) is None:
                raise ProtocolError("bad_gossip", "a record that was not asked for")
            self._take(peer, envelope, age, now_s)
        self._asking.answered(peer, missing if records else {}, now_s)  # an empty answer has nothing more

    def _take(self, peer: Peer, envelope: Envelope, age: int, now_s: float) -> None:
        verdict = self.table.judge(envelope)
        if verdict.outcome is Outcome.REFUSED:
            raise ProtocolError("bad_gossip", f"a record of {verdict.reason}")
        if verdict.outcome is Outcome.OLD:
            self.table.pass_by(envelope.id)
            return
        if verdict.outcome is Outcome.SAME:
            self._hear(peer, envelope.id, age, now_s)
            return
        if not self._reader.is_genuine(envelope):
            raise ProtocolError("bad_gossip", "a record whose signature is wrong")
        record = self._reader.open_untrusted(envelope)
        verdict = self.table.offer(record, now_s, peer.node_id, age)
        if verdict.outcome is Outcome.OWN_NEWER:
            self._own.meet(record.kind, record.version, now_s)
        elif verdict.changed:
            self._telling.spread(record, peer.node_id, now_s)

    def _wanted_records(self, ids: list[bytes], now_s: float) -> bytes:
        found: list[tuple[int, bytes]] = []
        for record_id in ids:
            record = self.table.by_id(record_id)
            if record is None:
                continue
            age = self.table.age(record_id, now_s)
            if age < AGE_UNIT:
                found.append((age, record.data))
        return bodies.pack_records(found)

    # -- links

    def _keep_links(self, now_s: float) -> None:
        surplus = self._overlay.surplus(now_s)
        if surplus is not None:
            surplus.linked = surplus.ours = False
            surplus.next_link_s = now_s + self._config.link_retry_s
            self._send(surplus, GossipLink("none", (), (), ()))
        for peer in self._overlay.missing(now_s):
            self._link(peer)

    def _link(self, peer: Peer) -> None:
        peer.linking = True
        view = self._view
        self._send(peer, GossipLink(view.scope, view.roles, view.models, view.layers))

    def _answer_link(self, peer: Peer, message: GossipLink, now_s: float) -> Message:
        if message.scope == "none":
            peer.linked = peer.ours = False
            return Ok()
        if self._view.scope != "all" and not peer.linked:  # we ask for links ourselves, and say what we want
            return Refused("not_allowed", "a node with a view of its own", 0)
        if not self._overlay.accept(peer, View.of(message)):
            return Refused("busy", "enough neighbours", int(1000 * self._config.link_retry_s))
        self._tell_own(peer, now_s)
        return Ok()

    def _tell_own(self, peer: Peer, now_s: float) -> None:
        """A new neighbour may have missed what we issued before the link."""
        for record in self.table.of(self.node_id):
            self._telling.push(peer, record, now_s)
