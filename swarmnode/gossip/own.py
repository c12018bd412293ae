"""Our own records: when they are issued, and what happens when somebody else speaks with our key. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from swarmnode.config import GossipConfig
from swarmnode.errors import UsageError
from swarmnode.gossip.rates import Dice, Pace
from swarmnode.gossip.records import (
    DEMAND,
    MAX_COUNTER,
    MAX_INCARNATION,
    NODE,
    ModelDemand,
    OwnState,
    Record,
    Version,
    sign_demand,
    sign_record,
)
from swarmnode.identity import NodeKey

Content = OwnState | tuple[ModelDemand, ...]

MAX_WALL_S = 2**40
MAX_REFRESHES = 2**32
"""Records that one incarnation may still issue: more than anybody lives to see."""


@dataclass
class _Slot:
    """One kind of record of ours."""

    content: Content
    pace: Pace
    dirty: bool = True
    refresh_s: float = -math.inf
    """Issued again at this time, changed or not."""
    issued: Version | None = None
    """The version of the last record."""


class OwnRecords:
    """`incarnation` is higher than any before of this key: max(the stored one + 1, unix time in ms), stored by the
    caller before its first use."""

    def __init__(
        self, key: NodeKey, network: bytes, config: GossipConfig, incarnation: int, rng: Dice
    ) -> None:
        if not 0 <= incarnation <= MAX_INCARNATION:
            raise UsageError(f"incarnation {incarnation} is not within 0 .. {MAX_INCARNATION}")
        self._key = key
        self._network = network
        self._config = config
        self._rng = rng
        self._slots: dict[int, _Slot] = {}
        self._jumps_s: list[float] = []
        self.version: Version = (incarnation, 0)
        """Of the record that was issued last."""
        self.conflict = False
        """Somebody else lives with our key: seen max_jumps times, or no higher version is left. We stop competing."""

    def set(self, content: Content, now_s: float) -> None:
        """What the next record says; the same as before changes nothing. UsageError if no record can hold it."""
        kind = NODE if isinstance(content, OwnState) else DEMAND
        slot = self._slots.get(kind)
        if slot is not None and slot.content == content:
            return
        self._sign(content, self.version, 0.0)  # so that a content over its caps is its giver's error
        if slot is None:
            self._slots[kind] = _Slot(content, self._pace())
            return
        slot.content, slot.dirty = content, True
        if _leaving(content):
            slot.pace.next_s = now_s

    def due(self, now_s: float, wall_s: float) -> list[Record]:
        """Records to issue now."""
        issued: list[Record] = []
        for slot in self._slots.values():
            again = now_s >= slot.refresh_s and not _leaving(slot.content)
            if now_s < slot.pace.next_s or not (slot.dirty or again):
                continue
            self.version = (self.version[0], self.version[1] + 1)
            issued.append(self._sign(slot.content, self.version, wall_s))
            slot.dirty, slot.issued = False, self.version
            slot.pace.happened(now_s)
            slot.refresh_s = now_s + self._config.ttl_s / 3 * (0.9 + 0.2 * self._rng.random())
        return issued

    def slept(self, asleep_s: float) -> None:
        """Our clock stood still for so long: our records are as much older."""
        for slot in self._slots.values():
            slot.refresh_s -= asleep_s

    def meet(self, kind: int, version: Version, now_s: float) -> None:
        """Another record with our key and signature, that we did not issue: the next ones of ours are above it.

        Once is a restored disk. Who answers again and again is alive, and then one of the two has to go.
        """
        slot = self._slots.get(kind)
        ours = self.version if slot is None or slot.issued is None else slot.issued
        if version < ours or self.conflict:
            return
        self._jumps_s = [then_s for then_s in self._jumps_s if now_s - then_s < self._config.max_ttl_s]
        self._jumps_s.append(now_s)
        incarnation, counter = max(version, self.version)
        if counter >= MAX_COUNTER - MAX_REFRESHES:
            incarnation, counter = incarnation + 1, 0
        if incarnation > MAX_INCARNATION or len(self._jumps_s) > self._config.max_jumps:
            self.conflict = True
            return
        self.version = (incarnation, counter)
        for other in self._slots.values():
            other.dirty = True
            other.pace.next_s = now_s

    def _pace(self) -> Pace:
        config = self._config
        return Pace(config.issue_interval_s, config.issue_burst, config.have_interval_s)

    def _sign(self, content: Content, version: Version, wall_s: float) -> Record:
        issued_s = max(0, min(int(wall_s), MAX_WALL_S))
        head = (self._key, self._network, version, self._config.ttl_s, issued_s)
        if isinstance(content, OwnState):
            return sign_record(*head, content)
        return sign_demand(*head, content)


def _leaving(content: Content) -> bool:
    return isinstance(content, OwnState) and content.leaving
