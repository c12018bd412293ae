"""Which source is asked for which block of a download, and when another one takes over. Pure.

Each source has as many blocks under way as fill its path, so a fast one takes more of them. What one of them holds for
too long is asked of another as well; whoever is first counts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from swarmnode.config import StoreConfig
from swarmnode.identity import NodeId

B = TypeVar("B", bound=Hashable)

_SMOOTHING = 0.25
"""Weight of the latest block in a source's speed."""


@dataclass
class Standing:
    """What is known of a source, over all it was asked for."""

    s_per_byte: float = 0.0
    """Smoothed time between two arrivals while something was under way; 0 before the first."""
    least_block_s: float = math.inf
    """Shortest time from asking to arrival: the round trip and one block's transfer."""
    n_bytes: int = 0
    n_wrong: int = 0
    """Slabs that this source is known to have given wrong bytes for."""
    n_refused: int = 0
    n_lost: int = 0
    """Requests that ended with a lost connection or a deadline."""

    def arrived(self, n_bytes: int, took_s: float, since_last_s: float) -> None:
        """A block came `took_s` after it was asked for and `since_last_s` after this source could have sent another."""
        sample = since_last_s / n_bytes
        self.s_per_byte += (sample - self.s_per_byte) * (_SMOOTHING if self.n_bytes else 1.0)
        self.least_block_s = min(self.least_block_s, took_s)
        self.n_bytes += n_bytes

    def window(self, config: StoreConfig) -> int:
        """Blocks to have under way: 1 + speed * window_round_trips * shortest time, from 2 to blocks_in_flight.

        So what waits in the path's queues is bounded by its own round trip, and rows that share it do not wait for
        megabytes.
        """
        if not self.n_bytes:
            return config.first_blocks
        if self.s_per_byte <= 0:
            return config.blocks_in_flight
        ahead_bytes = config.window_round_trips * self.least_block_s / self.s_per_byte
        return min(max(2, 1 + math.ceil(ahead_bytes / config.block_bytes)), config.blocks_in_flight)

    def block_s(self, config: StoreConfig) -> float:
        """How long a block from this source may take: the round trip and one block at its speed."""
        return self.least_block_s + config.block_bytes * self.s_per_byte if self.n_bytes else 0.0


@dataclass
class _Source(Generic[B]):
    node: NodeId
    standing: Standing
    asked_s: dict[B, float] = field(default_factory=dict)
    """When each block that is under way was asked for."""
    n_storing: int = 0
    """Its blocks that came and are not on disk: they are under way, too, for a crash loses them."""
    arrived_s: float = -math.inf
    paused_until_s: float = -math.inf
    rests_until_s: float = -math.inf
    """Only while rows travel: as long as its last block took, times `rest_share`, at most `max_rest_s`."""


class BlockScheduler(Generic[B]):
    """The blocks of one download. `may_ask(node, block)`: whether that source is to be asked for that block at all."""

    def __init__(self, config: StoreConfig, may_ask: Callable[[NodeId, B], bool]) -> None:
        self._config = config
        self._may_ask = may_ask
        self._wanted: deque[B] = deque()
        self._sources: dict[NodeId, _Source[B]] = {}
        self.is_gentle = False
        """Rows travel: one block a source, and pauses, so that they find the path and the processor free."""
        self._n_holders: dict[B, int] = {}
        """Sources that were asked for a block and have not answered."""

    @property
    def n_in_flight(self) -> int:
        """Requests under way."""
        return sum(len(source.asked_s) for source in self._sources.values())

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """The sources that have joined and not left."""
        return tuple(self._sources)

    def want(self, blocks: Iterable[B]) -> None:
        """These are to be fetched, behind those wanted already."""
        self._wanted.extend(blocks)

    def join(self, node: NodeId, standing: Standing) -> None:
        """A source may be asked from now on."""
        self._sources[node] = _Source(node, standing)

    def leave(self, node: NodeId) -> None:
        """A source is gone, or no longer trusted; what only it was asked for is wanted again, before the rest."""
        for block in list(self._sources[node].asked_s):
            self.failed(node, block)
        del self._sources[node]

    def is_stuck(self) -> bool:
        """Nothing is under way, and no source that is here may be asked for what is wanted."""
        return not self.n_in_flight and not any(
            self._may_ask(node, block) for node in self._sources for block in self._wanted
        )

    def pause(self, node: NodeId, until_s: float) -> None:
        """A source asked for a pause."""
        if node in self._sources:
            self._sources[node].paused_until_s = until_s

    def next(self, now_s: float) -> tuple[NodeId, B] | None:
        """A block to ask a source for now; it counts as asked. None if there is none, or nobody has room."""
        ready = [source for source in self._sources.values() if self._has_room(source, now_s)]
        ready.sort(
            key=lambda source: (source.standing.n_wrong, len(source.asked_s), source.standing.s_per_byte)
        )
        for choose in (self._choose_wanted, self._choose_overdue):
            for source in ready:
                block = choose(source, now_s)
                if block is not None:
                    source.asked_s[block] = now_s
                    self._n_holders[block] = self._n_holders.get(block, 0) + 1
                    return source.node, block
        return None

    def arrived(self, node: NodeId, block: B, n_bytes: int, now_s: float) -> tuple[NodeId, ...]:
        """A block came whole; `stored` follows. Returns the other sources that were asked for it: wanted no more."""
        source = self._sources[node]
        asked_s = source.asked_s.pop(block)
        since_s = now_s - max(asked_s, source.arrived_s)
        source.arrived_s = now_s
        source.n_storing += 1
        source.rests_until_s = now_s + min(self._config.rest_share * since_s, self._config.max_rest_s)
        source.standing.arrived(n_bytes, now_s - asked_s, since_s)
        del self._n_holders[block]
        others = [other for other in self._sources.values() if block in other.asked_s]
        for other in others:
            if other.arrived_s < other.asked_s.pop(
                block
            ):  # nothing came from it meanwhile: is it still there?
                other.paused_until_s = now_s + self._config.block_timeout_s
        return tuple(other.node for other in others)

    def stored(self, node: NodeId) -> None:
        """A block of this source that has arrived is on disk."""
        source = self._sources.get(node)
        if source is not None and source.n_storing:
            source.n_storing -= 1

    def failed(self, node: NodeId, block: B) -> None:
        """A source did not give a block; it is wanted again unless another source is on it."""
        source = self._sources.get(node)
        if source is None or source.asked_s.pop(block, None) is None:
            return
        self._n_holders[block] -= 1
        if not self._n_holders[block]:
            del self._n_holders[block]
            self._wanted.appendleft(block)

    def silent(self, now_s: float) -> tuple[NodeId, ...]:
        """Sources of which nothing has come for `block_timeout_s`, although they were asked."""
        return tuple(node for node, until_s in self._deadlines() if until_s <= now_s)

    def wake_s(self, now_s: float) -> float:
        """When to look again although nothing has come: a deadline, or a block that another source might take over."""
        times_s = [until_s for _, until_s in self._deadlines()]
        if self._sources:
            times_s.append(now_s + self._config.takeover_s / 2)
        if self.is_gentle and self._wanted:
            times_s += [
                source.rests_until_s for source in self._sources.values() if source.rests_until_s > now_s
            ]
        return min(times_s, default=math.inf)

    def _deadlines(self) -> Iterator[tuple[NodeId, float]]:
        for node, source in self._sources.items():
            if source.asked_s:
                # Blocks that travel at once share a link, so each one that arrives gives the others as long again.
                since_s = max(source.arrived_s, min(source.asked_s.values()))
                yield node, since_s + self._config.block_timeout_s

    def _has_room(self, source: _Source[B], now_s: float) -> bool:
        if self.is_gentle:
            return max(source.paused_until_s, source.rests_until_s) <= now_s and not source.asked_s
        n_under_way = len(source.asked_s) + source.n_storing
        return source.paused_until_s <= now_s and n_under_way < source.standing.window(self._config)

    def _choose_wanted(self, source: _Source[B], now_s: float) -> B | None:
        for block in self._wanted:
            if self._may_ask(source.node, block) and not self._has_better(source, block):
                self._wanted.remove(block)
                return block
        return None

    def _has_better(self, source: _Source[B], block: B) -> bool:
        """Whether the block is left to a source that gave fewer wrong ones."""
        return any(
            other.standing.n_wrong < source.standing.n_wrong and self._may_ask(other.node, block)
            for other in self._sources.values()
        )

    def _choose_overdue(self, source: _Source[B], now_s: float) -> B | None:
        """The block that another source has held for longest, if that is long for both."""
        oldest: tuple[float, B] | None = None
        patience_s = max(
            self._config.takeover_s, self._config.takeover_times * source.standing.block_s(self._config)
        )
        for other in self._sources.values():
            for block, asked_s in other.asked_s.items():
                is_late = now_s - asked_s >= patience_s and (oldest is None or asked_s < oldest[0])
                if (
                    is_late
                    and self._n_holders[block] == 1
                    and other is not source
                    and self._may_ask(source.node, block)
                ):
                    oldest = (asked_s, block)
        return None if oldest is None else oldest[1]
