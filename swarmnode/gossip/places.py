"""The places of a record table: how many there are, in all, of one prefix and of what one peer brought. Pure.

Where none is left, the one known for the shortest time among a random sample is evicted for a newcomer, so that a flood
evicts itself and old acquaintances stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, ValuesView
from typing import TypeAlias

from swarmnode.config import GossipConfig
from swarmnode.gossip.rates import Dice
from swarmnode.gossip.records import Record
from swarmnode.identity import NodeId

Key: TypeAlias = bytes
"""A kind of record and a node (records.record_key)."""

GRACE_S = 30.0
"""How long a record stands at least, however old it is said to be: all neighbours have told its age by then."""


class Entry:
    """A record and what is known of it here."""

    __slots__ = ("born_s", "known_s", "life_s", "place", "prefixes", "record", "seen_s", "source")

    def __init__(self, known_s: float, source: NodeId | None, place: int) -> None:
        self.known_s = known_s
        """When the node was first seen, without a gap since."""
        self.source = source
        """The peer that brought the node's first record; None: ourselves."""
        self.place = place
        """Where the key stands in the list of all."""
        self.prefixes: tuple[str, ...] = ()
        """What the record is counted by (sites.prefixes_of)."""

    def take(self, record: Record, seen_s: float, born_s: float, life_s: float) -> None:
        """The first record, or another in its place."""
        self.record = record
        self.seen_s = seen_s
        """When this version was first seen."""
        self.born_s = born_s
        """When it was issued, by the least age that anybody told; never after `seen_s`."""
        self.life_s = life_s

    @property
    def end_s(self) -> float:
        """When the record has lived its time. A stranger's word that it is old counts only after GRACE_S."""
        return max(self.born_s + self.life_s, self.seen_s + min(self.life_s, GRACE_S))


class Places:
    """The entries of a table, at most one a key. `own`'s are never evicted."""

    def __init__(self, config: GossipConfig, own: NodeId, rng: Dice) -> None:
        self._config = config
        self._rng = rng
        self._entries: dict[Key, Entry] = {}
        self._keys: list[Key] = []
        self._by_source: Counter[NodeId] = Counter()
        self._by_prefix: dict[str, list[Key]] = {}
        self._pinned: set[NodeId] = {own}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Entry | None:
        """The entry of this key."""
        return self._entries.get(key)

    def entries(self) -> ValuesView[Entry]:
        """All entries, in the order in which their keys came."""
        return self._entries.values()

    def pin(self, node_id: NodeId, pinned: bool) -> None:
        """A node with an open connection is never evicted."""
        (self._pinned.add if pinned else self._pinned.discard)(node_id)

    def make_room(
        self, key: Key, prefixes: tuple[str, ...], source: NodeId | None
    ) -> tuple[list[Entry], str]:
        """(entries that lost their place to a record of `key`, why there is none for it all the same or "")."""
        evicted: list[Entry] = []
        entry = self._entries.get(key)
        config = self._config
        for prefix in prefixes:
            if entry is not None and prefix in entry.prefixes:
                continue
            group = self._by_prefix.get(prefix, ())
            if len(group) >= config.max_per_prefix and not self._evict(group, key, None, evicted):
                return evicted, "too many nodes of one prefix"
        if entry is not None:
            return evicted, ""
        most = int(config.max_records * config.max_source_share)
        crowded = source is not None and self._by_source[source] >= most
        if crowded and not self._evict(self._keys, key, source, evicted):
            return evicted, "too many nodes from one peer"
        is_full = len(self._entries) >= config.max_records
        if is_full and not self._evict(self._keys, key, None, evicted):
            return evicted, "the table is full"
        return evicted, ""

    def put(self, key: Key, prefixes: tuple[str, ...], now_s: float, source: NodeId | None) -> Entry:
        """The entry for a record that is kept from now on: a new one, or the one that the key has."""
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = Entry(now_s, source, len(self._keys))
            self._keys.append(key)
            if source is not None:
                self._by_source[source] += 1
        else:
            self._leave_prefixes(key, entry)
        entry.prefixes = prefixes
        for prefix in prefixes:
            self._by_prefix.setdefault(prefix, []).append(key)
        return entry

    def remove(self, entry: Entry) -> None:
        """The entry's place is free again."""
        key = entry.record.key
        self._leave_prefixes(key, entry)
        del self._entries[key]
        last = self._keys.pop()
        if last != key:
            self._keys[entry.place] = last
            self._entries[last].place = entry.place
        if entry.source is not None:
            self._by_source[entry.source] -= 1
            if not self._by_source[entry.source]:
                del self._by_source[entry.source]

    def _evict(self, group: Sequence[Key], but: Key, source: NodeId | None, evicted: list[Entry]) -> bool:
        """Drop the youngest-known of a random sample of `group` (of those that `source` brought)."""
        config = self._config
        youngest: Entry | None = None
        found = 0
        for _ in range(8 * config.eviction_sample):
            key = group[self._rng.randrange(len(group))]
            entry = self._entries[key]
            pinned = entry.record.node_id in self._pinned
            if key == but or pinned or (source is not None and entry.source != source):
                continue
            if youngest is None or entry.known_s > youngest.known_s:
                youngest = entry
            found += 1
            if found == config.eviction_sample:
                break
        if youngest is None:
            return False
        self.remove(youngest)
        evicted.append(youngest)
        return True

    def _leave_prefixes(self, key: Key, entry: Entry) -> None:
        for prefix in entry.prefixes:
            group = self._by_prefix[prefix]
            group.remove(key)
            if not group:
                del self._by_prefix[prefix]
