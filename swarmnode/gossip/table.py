"""The records a node knows: at most one of each node and kind, the one with the highest version. Pure.

Merging is commutative, associative and idempotent: (incarnation, counter) decides, and of two records with the same
version and other bytes the one with the smaller hash stays. What is kept is bounded (`places.py`). Nobody can say that
another node is gone: a record ends by its node's signed leave, or `min(ttl, max_ttl_s)` after it was issued, by our own
monotonic clock (docs/gossip.md, "Age").
"""

from __future__ import annotations

import enum
import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from swarmnode.config import GossipConfig
from swarmnode.gossip.places import Entry, Key, Places
from swarmnode.gossip.rates import Dice
from swarmnode.gossip.records import (
    DEMAND,
    NODE,
    DemandRecord,
    Envelope,
    NodeRecord,
    Record,
    Version,
    record_key,
)
from swarmnode.gossip.sites import prefixes_of
from swarmnode.identity import NodeId

MAX_CONFLICTS = 1024
MUCH_YOUNGER = 16
"""A difference of ages, in 255ths of a life, that neighbours are told of."""
AGE_UNIT = 255
"""Ages travel in 255ths of a record's life, rounded up, so that they never shrink on the way."""


class Outcome(enum.Enum):
    """What became of a record."""

    NEW = "new"
    """A node that was not known."""
    NEWER = "newer"
    """A higher version than ours."""
    SAME = "same"
    """The very bytes that we have."""
    OLD = "old"
    """A lower version than ours, or one of a node that is gone."""
    CONFLICT = "conflict"
    """Our version with other bytes: its node signs two truths, or two nodes have one key."""
    OWN_NEWER = "own_newer"
    """Of our own key, and not ours: a restored disk, or another holder of the key."""
    REFUSED = "refused"
    """Not kept; `reason` says why."""


class Heard(enum.Enum):
    """What an id and an age that somebody tells are to us."""

    UNKNOWN = "unknown"
    """A record we lack."""
    PASSED = "passed"
    """One that we want no more."""
    KNOWN = "known"
    YOUNGER = "younger"
    """Known, and we thought it much older: neighbours may think so, too."""
    OLDER = "older"
    """Known, and whoever told it thinks it much older than it is."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`changed`: the table holds the record now, and neighbours want to know."""

    outcome: Outcome
    changed: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Change:
    """What subscribers hear: a record that is live now, or (None) that there is none of this key any more."""

    node_id: NodeId
    kind: int
    record: Record | None


class RecordTable:
    """Everything known, bounded. `own`'s records are kept like others' but never evicted."""

    def __init__(self, config: GossipConfig, network: bytes, own: NodeId, rng: Dice) -> None:
        self._config = config
        self._network = network
        self._own = own
        self._places = Places(config, own, rng)
        self._ids: dict[bytes, Entry] = {}
        self._gone: OrderedDict[Key, tuple[Version, float]] = OrderedDict()
        self._passed: OrderedDict[bytes, None] = OrderedDict()  # a dict's first key is not found in O(1)
        self._changes: dict[Key, Change] = {}
        self._conflicts: OrderedDict[NodeId, int] = OrderedDict()
        self._next_expiry_s = math.inf

    # -- reading

    def __len__(self) -> int:
        return len(self._places)

    def live(self) -> Iterator[NodeRecord]:
        """Records of nodes that are there, in no order; not those that leave."""
        for entry in self._places.entries():
            record = entry.record
            if isinstance(record, NodeRecord) and not record.leaving:
                yield record

    def demands(self) -> Iterator[DemandRecord]:
        """Demand of backbones, those first whose demand is known for the longest (a newer record keeps its place); not
        of those that leave.
        """
        for entry in self._places.entries():
            record = entry.record
            if isinstance(record, DemandRecord) and not self._leaves(record.node_id):
                yield record

    def get(self, node_id: NodeId) -> NodeRecord | None:
        """The node's record, also one that says that it leaves."""
        entry = self._places.get(record_key(node_id, NODE))
        return entry.record if entry is not None and isinstance(entry.record, NodeRecord) else None

    def demand(self, node_id: NodeId) -> DemandRecord | None:
        """The node's demand."""
        entry = self._places.get(record_key(node_id, DEMAND))
        return entry.record if entry is not None and isinstance(entry.record, DemandRecord) else None

    def by_id(self, record_id: bytes) -> Record | None:
        """The record with this id, if it is the one we keep."""
        entry = self._ids.get(record_id)
        return None if entry is None else entry.record

    def records(self) -> Iterator[Record]:
        """All records, also of nodes that leave."""
        return (entry.record for entry in self._places.entries())

    def ids(self) -> list[bytes]:
        """Ids of all records, in no order."""
        return list(self._ids)

    def of(self, node_id: NodeId) -> list[Record]:
        """The node's records, of every kind."""
        entries = [self._places.get(record_key(node_id, kind)) for kind in (NODE, DEMAND)]
        return [entry.record for entry in entries if entry is not None]

    @property
    def conflicts(self) -> dict[NodeId, int]:
        """Nodes that signed two records with one version, and how often that was seen; the last 1,024."""
        return dict(self._conflicts)

    def first_known_s(self, node_id: NodeId) -> float | None:
        """Since when the node is known without a gap, by our monotonic clock."""
        entry = self._places.get(record_key(node_id, NODE))
        return None if entry is None else entry.known_s

    def issued_s(self, node_id: NodeId) -> float | None:
        """When the node's record was issued, by our monotonic clock and the least age that anybody told: some seconds
        early, as ages are rounded up."""
        entry = self._places.get(record_key(node_id, NODE))
        return None if entry is None else entry.born_s

    def take_changes(self) -> list[Change]:
        """What changed since the last call, one entry a key."""
        changes = list(self._changes.values())
        self._changes.clear()
        return changes

    # -- ages

    def age(self, record_id: bytes, now_s: float) -> int:
        """Age of a record in 255ths of its life, rounded up: what others are told. AGE_UNIT if it is at its end or not
        here."""
        entry = self._ids.get(record_id)
        if entry is None:
            return AGE_UNIT
        age = math.ceil((now_s - entry.born_s) / entry.life_s * AGE_UNIT)
        return age if 0 <= age < AGE_UNIT else AGE_UNIT if age > 0 else 0

    def hear(self, record_id: bytes, age: int, now_s: float) -> Heard:
        """Somebody says that there is this record, and how old it is.

        The youngest age told counts, so that nobody can end another's record; it was never issued after we first saw
        it, so that nobody can prolong one.
        """
        entry = self._ids.get(record_id)
        if entry is None:
            return Heard.PASSED if record_id in self._passed else Heard.UNKNOWN
        step_s = entry.life_s / AGE_UNIT
        younger_s = min(entry.seen_s, now_s - age * step_s) - entry.born_s
        if younger_s > 0:
            entry.born_s += younger_s
            if younger_s > MUCH_YOUNGER * step_s:
                return Heard.YOUNGER
        elif younger_s < -MUCH_YOUNGER * step_s:
            return Heard.OLDER
        return Heard.KNOWN

    # -- merging

    def judge(self, envelope: Envelope) -> Verdict:
        """What `offer` would say, before the signature is checked or the body read."""
        if envelope.network != self._network:
            return Verdict(Outcome.REFUSED, reason="another network")
        entry = self._places.get(envelope.key)
        if envelope.node_id == self._own:
            return self._judge_own(envelope, entry)
        if entry is None:
            gone = self._gone.get(envelope.key)
            if gone is not None and envelope.version <= gone[0]:
                return Verdict(Outcome.OLD)
            return Verdict(Outcome.NEW, changed=True)
        return _compare(envelope, entry.record)

    def offer(self, record: Record, now_s: float, source: NodeId | None = None, age: int = 0) -> Verdict:
        """Merge a record whose signature is right, which the peer `source` (None: ourselves) says is `age` old."""
        verdict = self.judge(record)
        if source is None and verdict.outcome is Outcome.OWN_NEWER:
            verdict = Verdict(Outcome.NEWER, changed=True)
        if verdict.outcome is Outcome.CONFLICT:
            self._note_conflict(record.node_id)
        if verdict.outcome is Outcome.SAME:
            self.hear(record.id, age, now_s)
        elif verdict.changed:
            return self._put(record, now_s, source, age, verdict)
        else:
            self._pass(record.id)
        return verdict

    def expire(self, now_s: float) -> None:
        """Drop what has lived its time; `take_changes` tells. Cheap while nothing is due."""
        if now_s < self._next_expiry_s:
            return
        for entry in [entry for entry in self._places.entries() if entry.end_s <= now_s]:
            self._remember_gone(entry.record, now_s)
            self._places.remove(entry)
            self._dropped(entry)
        for key in [key for key, (_, until_s) in self._gone.items() if until_s <= now_s]:
            del self._gone[key]
        self._next_expiry_s = min(
            min((entry.end_s for entry in self._places.entries()), default=math.inf),
            min((until_s for _, until_s in self._gone.values()), default=math.inf),
        )
        self._next_expiry_s = max(self._next_expiry_s, now_s + 1.0)

    def slept(self, asleep_s: float) -> None:
        """Our clock stood still for so long: everything was seen as much earlier."""
        for entry in self._places.entries():
            entry.known_s -= asleep_s
            entry.seen_s -= asleep_s
            entry.born_s -= asleep_s
        for key, (version, until_s) in self._gone.items():
            self._gone[key] = version, until_s - asleep_s
        self._next_expiry_s = -math.inf

    def pass_by(self, record_id: bytes) -> None:
        """Remember that this record is not wanted, so that it is not asked for again."""
        if record_id not in self._ids:
            self._pass(record_id)

    def pin(self, node_id: NodeId, pinned: bool) -> None:
        """A node with an open connection is never evicted."""
        self._places.pin(node_id, pinned)

    # -- the parts

    def _judge_own(self, envelope: Envelope, entry: Entry | None) -> Verdict:
        if entry is None or envelope.version > entry.record.version:
            return Verdict(Outcome.OWN_NEWER)
        verdict = _compare(envelope, entry.record)
        return Verdict(Outcome.OWN_NEWER) if verdict.outcome is Outcome.CONFLICT else verdict

    def _leaves(self, node_id: NodeId) -> bool:
        record = self.get(node_id)
        return record is not None and record.leaving

    def _life_s(self, record: Envelope) -> float:
        return min(record.ttl_s, self._config.max_ttl_s)

    def _put(
        self, record: Record, now_s: float, source: NodeId | None, age: int, verdict: Verdict
    ) -> Verdict:
        life_s = self._life_s(record)
        born_s = now_s - age / AGE_UNIT * life_s
        if born_s + life_s <= now_s:
            return Verdict(Outcome.REFUSED, reason="at its end")
        prefixes = prefixes_of(record)
        evicted, reason = self._places.make_room(record.key, prefixes, source)
        for entry in evicted:
            self._dropped(entry)
        if reason:
            self._pass(record.id)
            return Verdict(Outcome.REFUSED, reason=reason)
        before = self._places.get(record.key)
        if before is not None:
            self._forget(before.record)
        entry = self._places.put(record.key, prefixes, now_s, source)
        entry.take(record, now_s, born_s, life_s)
        self._ids[record.id] = entry
        self._gone.pop(record.key, None)
        self._next_expiry_s = min(self._next_expiry_s, entry.end_s)
        self._changes[record.key] = Change(record.node_id, record.kind, None if record.leaving else record)
        return verdict

    def _dropped(self, entry: Entry) -> None:
        """The entry is none any more."""
        record = entry.record
        self._forget(record)
        self._changes[record.key] = Change(record.node_id, record.kind, None)

    def _forget(self, record: Record) -> None:
        """It was replaced or removed."""
        self._ids.pop(record.id, None)
        self._pass(record.id)

    def _remember_gone(self, record: Record, now_s: float) -> None:
        self._gone[record.key] = (record.version, now_s + self._config.gone_s)
        while len(self._gone) > self._config.max_gone:
            self._gone.popitem(last=False)

    def _pass(self, record_id: bytes) -> None:
        self._passed.pop(record_id, None)
        self._passed[record_id] = None
        if len(self._passed) > self._config.max_passed:
            self._passed.popitem(last=False)

    def _note_conflict(self, node_id: NodeId) -> None:
        self._conflicts[node_id] = self._conflicts.pop(node_id, 0) + 1
        if len(self._conflicts) > MAX_CONFLICTS:
            self._conflicts.popitem(last=False)


def _compare(envelope: Envelope, ours: Envelope) -> Verdict:
    """A record beside the one we have of its key."""
    if envelope.version != ours.version:
        newer = envelope.version > ours.version
        return Verdict(Outcome.NEWER if newer else Outcome.OLD, changed=newer)
    if envelope.digest == ours.digest:
        return Verdict(Outcome.SAME)
    return Verdict(Outcome.CONFLICT, changed=envelope.digest < ours.digest)
