"""The gossip of one node as a state machine: messages and times in, messages and changes out. Pure.

The caller (services/gossip, or the simulator) says which peers are connected, sends what `take_output` gives as
requests, and hands every reply to `receive_untrusted` or says `failed`; a peer's requests are answered by
`answer_untrusted`. `tick` several times a second. docs/gossip.md has the rules.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from swarmnode.config import GossipConfig
from swarmnode.errors import ProtocolError
from swarmnode.gossip import anti_entropy, bodies
from swarmnode.gossip.asking import Asking
from swarmnode.gossip.overlay import Overlay, Peer
from swarmnode.gossip.own import OwnRecords
from swarmnode.gossip.rates import Dice, TokenBucket
from swarmnode.gossip.records import (
    Envelope,
    ModelDemand,
    OwnState,
    Record,
    is_genuine,
    network_id,
    open_untrusted,
    read_envelope_untrusted,
)
from swarmnode.gossip.table import AGE_UNIT, Change, Heard, Outcome, RecordTable
from swarmnode.gossip.view import ALL, View
from swarmnode.identity import NodeId, NodeKey
from swarmnode.wire import constants as c
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
DIGEST_WORK = 32.0
"""What a comparison counts for among the messages of a peer: DIGEST_WORK * (1 + records here / DIGEST_RECORDS)."""
DIGEST_RECORDS = 4096
QUIET_SHARE = 0.5
"""Of a peer's burst: who has saved so much is not refused, whatever the request costs (a comparison of a full table:
0.2 s). What it costs beyond is owed, and nothing is answered meanwhile."""
IDS_A_WORK = 64.0
RECORDS_A_WORK = 32.0


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A request to send."""

    peer: NodeId
    message: Message
    body: bytes = b""


class RecordReader(Protocol):
    """How bytes become records. The simulator shares parsed records and remembers checked signatures."""

    def read_envelope_untrusted(self, data: bytes) -> Envelope:
        """The head. Raises ProtocolError."""
        ...

    def is_genuine(self, envelope: Envelope) -> bool:
        """Whether the signature is right."""
        ...

    def open_untrusted(self, envelope: Envelope) -> Record:
        """The whole record. Raises ProtocolError."""
        ...


class PlainReader:
    """Reads and checks everything, every time."""

    def read_envelope_untrusted(self, data: bytes) -> Envelope:
        return read_envelope_untrusted(data)

    def is_genuine(self, envelope: Envelope) -> bool:
        return is_genuine(envelope)

    def open_untrusted(self, envelope: Envelope) -> Record:
        return open_untrusted(envelope)


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
        self._rng = rng
        self._view = view
        self._reader = reader or PlainReader()
        network_bytes = network_id(network)
        self.node_id = key.node_id
        self.table = RecordTable(config, network_bytes, key.node_id, rng)
        self._own = OwnRecords(key, network_bytes, config, incarnation, rng)
        self._overlay = Overlay(config, rng)
        self._output: list[Outgoing] = []
        self._asking = Asking(config, self._overlay, self._hear, self._want)
        self._tellable: set[NodeId] = set()
        self._work = TokenBucket(config.all_work_per_s, config.all_work_burst, -math.inf)
        self._upkeep_s = -math.inf
        self._sync_s = math.inf

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
        known.sync_s = now_s + self._config.first_sync_s * self._rng.random()
        self._asking.joined()
        self.table.pin(peer, True)
        self._upkeep_s = -math.inf

    def disconnected(self, peer: NodeId, now_s: float) -> None:
        """The last connection to a peer closed."""
        gone = self._overlay.remove(peer)
        if gone is None:
            return
        self._asking.left(gone)
        self._tellable.discard(peer)
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
        if self._tellable:
            self._tell_due(now_s)
        if now_s < self._upkeep_s:
            return
        self._upkeep_s = now_s + UPKEEP_S
        self._asking.ask_all(now_s)
        self._keep_links(now_s)
        self._compare_due(now_s)

    def failed(self, sent: Outgoing, now_s: float) -> None:
        """A request got no answer, or was refused."""
        peer = self._overlay.get(sent.peer)
        if peer is None:
            return
        if isinstance(sent.message, GossipHave):
            again, peer.telling = peer.telling or [], None
            for record_id in again:
                self._note_pending(peer, record_id, now_s)
        elif isinstance(sent.message, GossipWant):
            self._asking.failed(peer, now_s)
        elif isinstance(sent.message, GossipDigest):
            peer.comparing = False
            peer.sync_s = now_s + self._config.request_timeout_s
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
            peer.comparing = False
            self._receive_differences(peer, sent, reply, body, now_s)
        elif isinstance(reply, Ok) and isinstance(sent.message, GossipHave):
            peer.telling = None
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
        if not self._has_time(peer, self._work_of(message, len(body)), now_s):
            return Refused("busy", "too many messages", self._config.busy_retry_ms), b""
        if isinstance(message, GossipHave):
            self._hear_offers(peer, bodies.read_offers_untrusted(body), now_s)
            return Ok(), b""
        if isinstance(message, GossipWant):
            return GossipRecords(), self._wanted_records(bodies.read_ids_untrusted(body), now_s)
        if isinstance(message, GossipDigest):
            return self._answer_digest(peer, message, bytes(body), now_s)
        if isinstance(message, GossipLink):
            return self._answer_link(peer, message, now_s), b""
        return Refused("unsupported", "no gossip", 0), b""

    def _has_time(self, peer: Peer, work: float, now_s: float) -> bool:
        """Whether the peer's request may be answered. When all together ask for too much, each has an even share.

        The peer's own bucket is asked first: what is refused takes nothing from others.
        """
        config = self._config
        quiet = QUIET_SHARE * config.work_burst
        left = peer.work.left(now_s)
        if left < min(work, quiet):
            return False
        cost = work
        if not self._work.take(work, now_s):
            share = config.all_work_per_s / (config.work_per_s * len(self._overlay))
            cost = work / min(1.0, share)
            if left < min(cost, quiet):
                return False
        peer.work.spend(cost, now_s)
        return True

    def _work_of(self, message: Message, body_bytes: int) -> float:
        if isinstance(message, GossipDigest):
            return DIGEST_WORK * (1.0 + len(self.table) / DIGEST_RECORDS)
        if isinstance(message, GossipWant):
            return 1.0 + body_bytes / c.GOSSIP_ID_BYTES / RECORDS_A_WORK
        return 1.0 + body_bytes / c.GOSSIP_OFFER_BYTES / IDS_A_WORK

    # -- our own records

    def _issue(self, now_s: float, wall_s: float) -> None:
        for record in self._own.due(now_s, wall_s):
            self.table.offer(record, now_s)
            self._spread(record, None, now_s)
            for peer in self._overlay:
                if peer.linked:
                    self._tell(peer, now_s)

    # -- telling

    def _spread(self, record: Record, source: NodeId | None, now_s: float) -> None:
        for peer in self._overlay:
            if peer.linked and peer.node_id != source and peer.view.matches(record):
                self._note_pending(peer, record.id, now_s)

    def _note_pending(self, peer: Peer, record_id: bytes, now_s: float) -> None:
        if not peer.pending:
            self._tellable.add(peer.node_id)
            peer.tell_s = max(now_s + self._config.have_wait_s, peer.told_s + self._config.have_interval_s)
        peer.pending[record_id] = None
        if len(peer.pending) > self._config.max_pending:
            del peer.pending[next(iter(peer.pending))]

    def _tell_due(self, now_s: float) -> None:
        for node_id in list(self._tellable):
            peer = self._overlay.get(node_id)
            if peer is not None and now_s >= peer.tell_s:
                self._tell(peer, now_s)

    def _tell(self, peer: Peer, now_s: float) -> None:
        """Send what is pending, unless the last GossipHave is still under way."""
        if peer.telling is not None or not peer.pending:
            return
        offers: list[bodies.Offer] = []
        for record_id in list(peer.pending)[: c.MAX_GOSSIP_IDS]:
            del peer.pending[record_id]
            age = self.table.age(record_id, now_s)
            if age < AGE_UNIT:  # else it was replaced meanwhile
                offers.append((record_id, age))
        if not peer.pending:
            self._tellable.discard(peer.node_id)
        if offers:
            peer.told_s = now_s
            peer.tell_s = now_s + self._config.have_interval_s
            peer.telling = [record_id for record_id, _ in offers]
            self._send(peer, GossipHave(), bodies.pack_offers(offers))

    def _send(self, peer: Peer, message: Message, body: bytes = b"") -> None:
        self._output.append(Outgoing(peer.node_id, message, body))

    # -- hearing and asking

    def _hear_offers(self, peer: Peer, offers: list[bodies.Offer], now_s: float) -> None:
        for record_id, _ in offers:
            peer.pending.pop(record_id, None)
        self._asking.offered(peer, offers, now_s)
        if not peer.pending:
            self._tellable.discard(peer.node_id)

    def _hear(self, peer: Peer, record_id: bytes, age: int, now_s: float) -> bool:
        """Whether we know the record; wrong ages are set right, here and at neighbours."""
        heard = self.table.hear(record_id, age, now_s)
        record = self.table.by_id(record_id) if heard in (Heard.YOUNGER, Heard.OLDER) else None
        if record is not None and heard is Heard.YOUNGER:
            self._spread(record, peer.node_id, now_s)
        elif record is not None and peer.linked and peer.view.matches(record):
            self._note_pending(peer, record_id, now_s)
        return heard is not Heard.UNKNOWN

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
            self._spread(record, peer.node_id, now_s)

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

    # -- comparing

    def _compare_due(self, now_s: float) -> None:
        if self._sync_s == math.inf:
            self._sync_s = now_s + self._config.sync_interval_s * self._rng.random()
        for peer in self._overlay:
            if peer.sync_s <= now_s:
                self._compare(peer)
        if now_s >= self._sync_s:
            self._sync_s = now_s + self._config.sync_interval_s
            chosen = self._overlay.any_peer()
            if chosen is not None:
                self._compare(chosen)

    def _compare(self, peer: Peer) -> None:
        if peer.comparing:
            return
        peer.comparing, peer.sync_s = True, math.inf
        ids = self._ids_in(self._view, self.node_id)
        n_buckets = anti_entropy.buckets_for(len(ids), self._config.bucket_records)
        salt = self._rng.randbytes(c.GOSSIP_SALT_BYTES)
        view = self._view
        message = GossipDigest(salt, view.scope, view.roles, view.models, view.layers)
        self._send(peer, message, anti_entropy.digest(anti_entropy.in_buckets(ids, n_buckets), salt))

    def _ids_in(self, view: View, asker: NodeId) -> list[bytes]:
        """What is compared: records of the view, and those of the asker itself, which everybody has to hear of."""
        if view.scope == "all":
            return self.table.ids()
        return [r.id for r in self.table.records() if view.matches(r) or r.node_id == asker]

    def _answer_digest(
        self, peer: Peer, message: GossipDigest, body: bytes, now_s: float
    ) -> tuple[Message, bytes]:
        message.check_body_untrusted(len(body))
        view = View.of(message)
        if self._view not in (ALL, view):  # the asker would push what we do not want
            return GossipDifferences(0), b""
        n_buckets = len(body) // c.GOSSIP_ID_BYTES
        buckets = anti_entropy.in_buckets(self._ids_in(view, peer.node_id), n_buckets)
        numbers = anti_entropy.differing(buckets, body, message.salt)
        if not numbers:
            peer.sync_s = math.inf  # compared just now
        self._rng.shuffle(numbers)
        told = [(number, self._with_ages(buckets[number], now_s)) for number in numbers]
        packed, left = bodies.pack_buckets(told)
        return GossipDifferences(left), packed

    def _with_ages(self, ids: list[bytes], now_s: float) -> list[bodies.Offer]:
        return [(record_id, self.table.age(record_id, now_s)) for record_id in ids]

    def _receive_differences(
        self, peer: Peer, sent: Outgoing, reply: GossipDifferences, body: bytes | memoryview, now_s: float
    ) -> None:
        n_buckets = len(sent.body) // c.GOSSIP_ID_BYTES
        theirs = bodies.read_buckets_untrusted(body, n_buckets)
        if not theirs:
            return
        ours = anti_entropy.in_buckets(self._ids_in(self._view, self.node_id), n_buckets)
        n_lacking = 0
        for bucket, offers in theirs.items():
            lacking = set(ours[bucket]).difference([record_id for record_id, _ in offers])
            n_lacking += len(lacking)
            for record_id in lacking:
                self._note_pending(peer, record_id, now_s)
            self._hear_offers(peer, offers, now_s)
        self._tell(peer, now_s)
        if reply.left or n_lacking > self._config.max_pending:
            peer.sync_s = now_s + 2 * self._config.have_interval_s

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
            if peer.linked and peer.view.matches(record):
                self._note_pending(peer, record.id, now_s)
