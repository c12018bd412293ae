"""Whose blocks were wrong: a slab mixed from several sources failed its hash, a later copy of it was right. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from swarmnode.identity import NodeId


@dataclass
class Suspects:
    """The wrong copies of one slab: who gave each block, and its hash. True if there were any."""

    _copies: list[tuple[tuple[NodeId | None, ...], tuple[bytes, ...]]] = field(default_factory=list)

    def remember(self, holders: Sequence[NodeId | None], digests: Sequence[bytes]) -> None:
        """A copy that was wrong. A holder None is nobody to blame: the disk."""
        self._copies.append((tuple(holders), tuple(digests)))

    def liars(self, digests: Sequence[bytes]) -> set[NodeId | None]:
        """Who gave blocks that differ from those of the right copy."""
        return {
            holder
            for holders, wrong in self._copies
            for holder, digest, right in zip(holders, wrong, digests, strict=True)
            if digest != right and holder is not None
        }

    def __len__(self) -> int:
        return len(self._copies)
