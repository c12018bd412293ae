"""Whom to dial now: decisions only, no I/O, no clock.

WANTED nodes are always dialled. LISTED ones (bootstrap lists, LAN) are dialled until `max_contacts` of them are
connected; a dial that does not answer at once keeps the next one waiting for `attempt_delay_s` only. REMEMBERED ones,
of earlier runs, are dialled while nobody is connected. A node that failed waits for its pause, which doubles; a node
that is connected, whoever dialled, waits until it no longer is.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from swarmnode.config import ContactConfig
from swarmnode.identity import NodeId
from swarmnode.net.address import PeerAddress


class Source(enum.IntEnum):
    """Where a node to dial is known from; the lowest counts when there are several."""

    WANTED = 0
    LISTED = 1
    REMEMBERED = 2


@dataclass(eq=False)
class Target:
    """A node to dial."""

    node_id: NodeId
    rank: float
    """Drawn at random: a thousand nodes with the same list must not all begin with its first line."""
    delay_s: float
    """The next pause, before jitter."""
    sources: set[Source] = field(default_factory=set)
    addresses: list[PeerAddress] = field(default_factory=list)
    """In the order to try."""
    wrong: set[PeerAddress] = field(default_factory=set)
    """Addresses at which another node answered: tried only when there is no other."""
    due_s: float = 0.0
    is_tried: bool = False
    dialling_since_s: float | None = None

    @property
    def source(self) -> Source:
        """The one that counts."""
        return min(self.sources)

    @property
    def places(self) -> tuple[PeerAddress, ...]:
        """Where to dial, in order."""
        right = [address for address in self.addresses if address not in self.wrong]
        return tuple(right or self.addresses)


@dataclass(frozen=True)
class Step:
    """What to do now."""

    start: tuple[Target, ...]
    """Dial these; they count as dialling already."""
    abandon: tuple[Target, ...]
    """Give these dials up."""


class DialPlan:
    """The nodes to dial and what became of it."""

    def __init__(self, own: NodeId, config: ContactConfig, rng: random.Random) -> None:
        self._own = own
        self._config = config
        self._rng = rng
        self._targets: dict[NodeId, Target] = {}
        self._lonely_since_s: float | None = None

    def __len__(self) -> int:
        return len(self._targets)

    def get(self, node_id: NodeId) -> Target | None:
        """A node on the plan."""
        return self._targets.get(node_id)

    def add(self, addresses: Iterable[PeerAddress], source: Source) -> None:
        """Put nodes on the plan. Own addresses are left out, and nodes beyond `max_targets` that are not WANTED: those
        are few, and a long list must not keep the backbones out.
        """
        for address in addresses:
            if address.node_id == self._own:
                continue
            target = self._targets.get(address.node_id)
            if target is None:
                if source is not Source.WANTED and len(self._targets) >= self._config.max_targets:
                    continue
                target = Target(address.node_id, self._rng.random(), self._config.redial_min_s)
                self._targets[address.node_id] = target
            target.sources.add(source)
            if address not in target.addresses:
                target.addresses.append(address)
                del target.addresses[: -self._config.max_addresses]

    def remove(self, node_ids: Iterable[NodeId], source: Source | None = None) -> None:
        """Take nodes off the plan, or just out of one source. An open connection is none of the plan's business."""
        for node_id in tuple(node_ids):
            target = self._targets.get(node_id)
            if target is None:
                continue
            target.sources -= set(Source) if source is None else {source}
            if not target.sources:
                del self._targets[node_id]

    def replace(self, addresses: Iterable[PeerAddress], source: Source) -> None:
        """Make these the nodes of a source; those not named any more are removed."""
        addresses = tuple(addresses)
        named = {address.node_id for address in addresses}
        gone = [
            node for node, target in self._targets.items() if source in target.sources and node not in named
        ]
        self.remove(gone, source)
        self.add(addresses, source)

    def step(self, now_s: float, connected: Collection[NodeId]) -> Step:
        """Whom to dial now, and which dials to give up for it."""
        self._notice_loneliness(now_s, connected)
        waiting = self._waiting(now_s, connected)
        dialling = [target for target in self._targets.values() if target.dialling_since_s is not None]
        listed = [target for target in dialling if target.source is not Source.WANTED]
        listed_places = self._listed_places(now_s, connected, listed)
        start: list[Target] = []
        for target in waiting:
            if len(dialling) + len(start) >= self._config.dials_at_once:
                break
            if target.source is not Source.WANTED:
                if listed_places <= 0:
                    break
                listed_places -= 1
            start.append(target)
        n_untried = sum(not target.is_tried for target in waiting) - len(start)
        for target in start:
            target.dialling_since_s, target.is_tried = now_s, True
        return Step(tuple(start), self._to_abandon(now_s, connected, listed, n_untried))

    def wake_s(self, now_s: float) -> float:
        """When `step` may have something new to say, if nothing happens before."""
        config = self._config
        times = [float("inf")]
        for target in self._targets.values():
            since_s = target.dialling_since_s
            if since_s is None:
                times.append(target.due_s)
            else:
                times += (since_s + config.attempt_delay_s, since_s + config.patience_s)
        if self._lonely_since_s is not None:
            times.append(self._lonely_since_s + config.remembered_after_s)
        return min(time_s for time_s in times if time_s > now_s)

    def opened(self, target: Target, address: PeerAddress) -> None:
        """A dial has succeeded: this address is the first one next time."""
        target.dialling_since_s = None
        target.wrong.discard(address)
        if address in target.addresses:
            target.addresses.remove(address)
            target.addresses.insert(0, address)

    def ended(self, target: Target, now_s: float, *, is_well: bool, lasted_s: float) -> float:
        """A dial has failed or a connection ended: the pause before the next one, which is returned.

        The pause grows until a connection went well for longer than the last pause.
        """
        target.dialling_since_s = None
        if is_well and lasted_s >= target.delay_s:
            target.delay_s = self._config.redial_min_s
        pause_s = self._rng.uniform(0.5, 1.0) * target.delay_s
        target.due_s = now_s + pause_s
        target.delay_s = min(2 * target.delay_s, self._config.redial_max_s)
        return pause_s

    def left(self, target: Target, now_s: float) -> None:
        """The node said that it leaves: its next pause is the longest."""
        target.delay_s = self._config.redial_max_s
        target.due_s = now_s + self._rng.uniform(0.5, 1.0) * target.delay_s

    def postpone(self, target: Target, now_s: float) -> None:
        """Not the node's fault: the dial was given up, or the other side's was kept."""
        target.dialling_since_s = None
        target.due_s = now_s + self._rng.uniform(0.5, 1.0) * self._config.redial_min_s

    def reached_another(self, target: Target, address: PeerAddress) -> None:
        """Another node than this one is at that address."""
        if address in target.addresses:
            target.wrong.add(address)

    def _notice_loneliness(self, now_s: float, connected: Collection[NodeId]) -> None:
        if connected:
            self._lonely_since_s = None
        elif self._lonely_since_s is None:
            self._lonely_since_s = now_s

    def _is_lonely(self, now_s: float) -> bool:
        """Whether peers of earlier runs should be dialled: nobody else is known, or nobody else answers."""
        if self._lonely_since_s is None:
            return False
        others = any(target.source is not Source.REMEMBERED for target in self._targets.values())
        return not others or now_s - self._lonely_since_s >= self._config.remembered_after_s

    def _waiting(self, now_s: float, connected: Collection[NodeId]) -> list[Target]:
        """Who may be dialled, the most urgent first."""
        is_lonely = self._is_lonely(now_s)
        waiting = [
            target
            for target in self._targets.values()
            if target.dialling_since_s is None
            and target.due_s <= now_s
            and target.node_id not in connected
            and (is_lonely or target.source is not Source.REMEMBERED)
        ]
        return sorted(
            waiting,
            key=lambda target: (
                target.source is not Source.WANTED,
                target.is_tried,
                target.source,
                target.rank,
            ),
        )

    def _n_contacts(self, connected: Collection[NodeId]) -> int:
        """Connected nodes that count against `max_contacts`."""
        targets = (self._targets.get(node) for node in connected)
        return sum(target is not None and target.source is not Source.WANTED for target in targets)

    def _listed_places(self, now_s: float, connected: Collection[NodeId], listed: list[Target]) -> int:
        """How many more nodes that are not wanted may be dialled now."""
        n_fresh = sum(now_s - _since(target) < self._config.attempt_delay_s for target in listed)
        places = self._config.max_contacts - self._n_contacts(connected) - n_fresh
        return min(places, self._listed_cap - len(listed))

    @property
    def _listed_cap(self) -> int:
        """Dials at once for nodes that are not wanted: the wanted ones never wait for dead lists."""
        return max(1, 3 * self._config.dials_at_once // 4)

    def _to_abandon(
        self, now_s: float, connected: Collection[NodeId], listed: list[Target], n_untried: int
    ) -> tuple[Target, ...]:
        """All dials when there are contacts enough; old ones when there is no room for nodes that were never tried."""
        if self._n_contacts(connected) >= self._config.max_contacts:
            return tuple(listed)
        if len(listed) < self._listed_cap or n_untried <= 0:
            return ()
        old = [target for target in listed if now_s - _since(target) >= self._config.patience_s]
        return tuple(sorted(old, key=_since)[: min(n_untried, self._config.max_contacts)])


def _since(target: Target) -> float:
    return float("inf") if target.dialling_since_s is None else target.dialling_since_s
