"""Ranges of experts: what is offered, fetched and held. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from swarmnode.errors import UsageError

_SPAN = re.compile(r"([0-9]{1,9}):([0-9]{1,9})")


@dataclass(frozen=True, order=True)
class ExpertRange:
    """`count` experts of one layer from expert `first` on. UsageError unless layer, first >= 0 and count >=
    1.
    """

    layer: int
    first: int
    count: int

    def __post_init__(self) -> None:
        if self.layer < 0 or self.first < 0 or self.count < 1:
            raise UsageError(
                f"layer {self.layer}, {self.count} experts from {self.first} is no range of experts"
            )

    @property
    def stop(self) -> int:
        """The expert behind the last."""
        return self.first + self.count

    @property
    def experts(self) -> range:
        return range(self.first, self.stop)

    def pieces(self, most: int) -> tuple[ExpertRange, ...]:
        """The same experts as ranges of at most `most` (>= 1) each, in order."""
        return tuple(
            ExpertRange(self.layer, first, min(most, self.stop - first))
            for first in range(self.first, self.stop, most)
        )

    def aligned(self, run: int) -> tuple[ExpertRange, ...]:
        """The same experts as ranges that cross no multiple of `run` (>= 1), in order."""
        return tuple(
            ExpertRange(
                self.layer, max(start, self.first), min(start + run, self.stop) - max(start, self.first)
            )
            for start in range(self.first - self.first % run, self.stop, run)
        )

    def __str__(self) -> str:
        return f"layer {self.layer}, experts {self.first}:{self.stop}"


def parse_span(text: str) -> range:
    """`'0:16'` -> range(0, 16), half open as in Python. UsageError if it is not of that form or empty."""
    match = _SPAN.fullmatch(text.strip())
    if match is None or int(match[1]) >= int(match[2]):
        raise UsageError(f"{text!r} is no range; write first:stop, as in 0:16 for 0 to 15")
    return range(int(match[1]), int(match[2]))


def holdings_of(ranges: Iterable[ExpertRange]) -> dict[int, frozenset[int]]:
    """Layer -> experts in any of the ranges (which may overlap)."""
    experts: dict[int, set[int]] = {}
    for item in ranges:
        experts.setdefault(item.layer, set()).update(item.experts)
    return {layer: frozenset(held) for layer, held in experts.items()}


def ranges_of(holdings: Mapping[int, Iterable[int]]) -> tuple[ExpertRange, ...]:
    """The fewest ranges that hold exactly these experts, in order; the inverse of `holdings_of`."""
    return tuple(item for layer in sorted(holdings) for item in _runs(layer, sorted(set(holdings[layer]))))


def merge_pairs(pairs: Iterable[tuple[int, int]]) -> tuple[ExpertRange, ...]:
    """The fewest ranges that hold exactly these (layer, expert) pairs, in order."""
    holdings: dict[int, set[int]] = {}
    for layer, expert in pairs:
        holdings.setdefault(layer, set()).add(expert)
    return ranges_of(holdings)


def overlapping(ranges: Iterable[ExpertRange]) -> ExpertRange | None:
    """A range that shares an expert with another one, or None. Never looks at single experts."""
    ordered = sorted(ranges)
    stop = {item.layer: 0 for item in ordered}
    for item in ordered:
        if item.first < stop[item.layer]:
            return item
        stop[item.layer] = item.stop
    return None


def _runs(layer: int, experts: list[int]) -> Iterator[ExpertRange]:
    start = 0
    for i in range(1, len(experts) + 1):
        if i == len(experts) or experts[i] != experts[i - 1] + 1:
            yield ExpertRange(layer, experts[start], i - start)
            start = i
