"""Which tokens each slot holds, and from where a new prompt can go on. Pure: no model, no thread.

A slot can go on from where it stands, or from one of its checkpoints. Attention alone could stop anywhere, but
recurrent states cannot be taken back, so what a prompt has in common with a slot counts only up to one of these places.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from swarmnode.config import EngineConfig
from swarmnode.models.base import Checkpoint

Tokens: TypeAlias = Sequence[int] | npt.NDArray[np.int32]
"""Ids. A long prompt is an array, which is compared in C: 262,144 tokens in 0.2 ms, as a list in 10."""


@dataclass(frozen=True)
class Piece:
    """A part of a prompt that is one pass: up to token `end`; `keeps`: make a checkpoint behind it."""

    end: int
    keeps: bool


@dataclass
class Kept:
    """A checkpoint in the cache."""

    checkpoint: Checkpoint
    floor: int
    """See PrefixCache._worth."""
    helpers: frozenset[str]
    """The workers that computed anything of what it stands on."""

    @property
    def position(self) -> int:
        """Tokens before it."""
        return self.checkpoint.n_past


class _TokenList:
    """Tokens that are added at the end, as an array."""

    def __init__(self) -> None:
        self._room: npt.NDArray[np.int32] = np.empty(256, np.int32)
        self._n = 0

    def __len__(self) -> int:
        return self._n

    @property
    def array(self) -> npt.NDArray[np.int32]:
        """i32 [n], not to be kept."""
        return self._room[: self._n]

    def extend(self, tokens: Tokens) -> None:
        n = self._n + len(tokens)
        if n > len(self._room):
            self._room = np.resize(self._room, 2 * n)
        self._room[self._n : n] = tokens
        self._n = n

    def cut(self, n: int) -> None:
        """Keep the first n."""
        self._n = min(n, self._n)


@dataclass
class _Held:
    """What one slot holds."""

    tokens: _TokenList = field(default_factory=_TokenList)
    helpers: set[str] = field(default_factory=set)
    """The workers that computed anything of it."""
    kept: list[Kept] = field(default_factory=list)
    """By position."""
    is_torn: bool = False
    """A pass began and did not end: the slot cannot go on from where it stands."""
    is_doubtful: bool = False
    """The numbers where it stands may be wrong: only checkpoints are good."""
    doubted: set[str] = field(default_factory=set)
    """While it is torn: workers that were found out since the pass began, to which they may have helped."""
    used: int = 0
    """When it was taken last, counted in takings."""

    def clear(self) -> None:
        self.tokens.cut(0)
        self.helpers.clear()
        self.doubted.clear()
        self.kept = []
        self.is_torn = self.is_doubtful = False

    @property
    def is_good(self) -> bool:
        """Whether a sequence can go on from where it stands."""
        return not self.is_torn and not self.is_doubtful


class PrefixCache:
    """The tokens and checkpoints of all slots. All checkpoints together take at most `config.checkpoint_bytes`."""

    def __init__(self, n_slots: int, config: EngineConfig) -> None:
        self._config = config
        self._slots = [_Held() for _ in range(n_slots)]
        self._taken = 0
        self._floor = 0
        self._reserved = 0

    @property
    def n_bytes(self) -> int:
        """Memory of all checkpoints kept."""
        return sum(kept.checkpoint.n_bytes for _, kept in self._all_kept())

    # -- taking a slot

    def choose(self, prompt: Tokens, free: Collection[int]) -> int:
        """The free slot (of at least one) in which to run a prompt; it counts as used now.

        The one with the longest usable prefix among those whose conversation it continues; if it continues none, the
        least recently used.
        """
        best, n_best = -1, 0
        for slot in free:
            n_usable = self.usable(slot, prompt)
            if n_usable > n_best and self._continues(slot, prompt, n_usable):
                best, n_best = slot, n_usable
        if best < 0:
            best = min(free, key=lambda slot: (self._slots[slot].used, slot))
        self._taken += 1
        self._slots[best].used = self._taken
        return best

    def _continues(self, slot: int, prompt: Tokens, n_usable: int) -> bool:
        """Whether it is the slot's conversation: most of that stays, or the same is asked again."""
        tokens = self._slots[slot].tokens.array
        if n_usable >= self._config.continued_share * len(tokens):
            return True
        return common_prefix(tokens, prompt) == len(prompt)

    def usable(self, slot: int, prompt: Tokens) -> int:
        """Tokens of the prompt that need not be run in this slot: never the last one, whose logits are wanted."""
        held = self._slots[slot]
        n_common = min(common_prefix(held.tokens.array, prompt), len(prompt) - 1)
        if n_common == len(held.tokens) and held.is_good:
            return n_common
        return max((kept.position for kept in held.kept if kept.position <= n_common), default=0)

    def stands_at(self, slot: int, position: int) -> bool:
        """Whether the slot can go on from there as it is."""
        held = self._slots[slot]
        return position == len(held.tokens) and held.is_good

    def rewind(self, slot: int, position: int) -> Checkpoint | None:
        """The prompt goes on from `position`, which `usable` gave: what is behind it is given up, as its KV entries are
        about to be overwritten. The checkpoint to restore; None if the slot stands there, or has to be reset (0).
        """
        held = self._slots[slot]
        if position == 0:
            held.clear()
            return None
        stands = self.stands_at(slot, position)
        held.kept = [kept for kept in held.kept if kept.position <= position]
        held.tokens.cut(position)
        if stands:
            return None
        last = held.kept[-1]
        assert last.position == position, "a checkpoint that `usable` did not give"
        last.floor = self._floor
        held.helpers = set(last.helpers)
        held.is_torn = held.is_doubtful = False
        return last.checkpoint

    # -- while it runs

    def begin(self, slot: int) -> None:
        """A pass begins in the slot."""
        held = self._slots[slot]
        held.is_torn = True
        held.doubted.clear()

    def append(self, slot: int, tokens: Tokens, helpers: Iterable[str] = ()) -> None:
        """The pass ended, to which these workers helped: the slot holds these tokens, too."""
        held = self._slots[slot]
        held.tokens.extend(tokens)
        held.helpers.update(helpers)
        held.is_doubtful |= not held.doubted.isdisjoint(held.helpers)
        held.is_torn = False

    def wants(self, slot: int) -> bool:
        """Whether a checkpoint where the slot stands would save enough."""
        held = self._slots[slot]
        behind = held.kept[-1].position if held.kept else 0
        return len(held.tokens) - behind >= self._config.min_checkpoint_tokens

    def reserve(self, slot: int, n_bytes: int) -> bool:
        """Drop what is worth least until a checkpoint of so many bytes fits; False if it cannot, or if where the slot
        stands is not worth keeping. Until `release` nobody else gets this room.
        """
        room = self._config.checkpoint_bytes - self._reserved - n_bytes
        if room < 0 or self._slots[slot].is_doubtful:
            return False
        while self.n_bytes > room:
            held, kept = min(self._all_kept(), key=lambda item: self._worth(*item))
            self._floor = self._worth(held, kept)
            held.kept.remove(kept)
        self._reserved += n_bytes
        return True

    def release(self, n_bytes: int) -> None:
        """What was reserved is kept now, or was not needed."""
        self._reserved -= n_bytes

    def add(self, slot: int, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint of where the slot stands, unless that became doubtful while it was made."""
        held = self._slots[slot]
        if not held.is_doubtful:
            held.kept.append(Kept(checkpoint, self._floor, frozenset(held.helpers)))

    # -- forgetting

    def forget(self, slot: int) -> None:
        """The slot's contents are not known any more, or no good."""
        self._slots[slot].clear()

    def doubt(self, helper: str) -> None:
        """A worker was found to compute wrong numbers: whatever stands on any of it is not used for another prompt.

        Whether it helped to a pass under way is known when that ends. Strangers that are found out before they got any
        rows spoil nothing: anybody can be one.
        """
        for held in self._slots:
            held.is_doubtful |= helper in held.helpers
            if held.is_torn:
                held.doubted.add(helper)
            held.kept = [kept for kept in held.kept if helper not in kept.helpers]

    def _all_kept(self) -> Iterator[tuple[_Held, Kept]]:
        return ((held, kept) for held in self._slots for kept in held.kept)

    def _worth(self, held: _Held, kept: Kept) -> int:
        """The tokens that it saves, on top of what the last one that was dropped was worth when this one was made or
        used last: so what is not used grows worthless in time (GreedyDual, Cao and Irani 1997).
        """
        place = held.kept.index(kept)
        before = held.kept[place - 1].position if place else 0
        return kept.floor + kept.position - before


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many tokens two sequences have in common at their beginning."""
    n = min(len(a), len(b))
    differs = np.asarray(a[:n], np.int32) != np.asarray(b[:n], np.int32)
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


def plan_prefill(
    tokens: Tokens, start: int, turn_ends: Collection[int], chunk_tokens: int, config: EngineConfig
) -> list[Piece]:
    """How to run a prompt from token `start` (less than its length): pieces of at most `chunk_tokens`.

    Checkpoints are made behind the prompt's first one of the `turn_ends` (token ids), where a system prompt ends that
    other conversations share; behind its last one, because a chat template may render what comes after it in another
    way next time (an answer's thoughts are left out); before its last token, which is always run, for when the same is
    asked again; and now and then in a long prompt. None closer than `min_checkpoint_tokens` behind another.
    """
    end, keeps_after = len(tokens), start + config.min_checkpoint_tokens
    cuts = [cut for cut in (*_turn_ends(tokens, turn_ends), end - 1) if start < cut < end]
    every = max(config.checkpoint_tokens, (end - start) // config.checkpoints_a_prompt)
    pieces: list[Piece] = []
    position = last = start
    while position < end:
        while cuts and cuts[0] < keeps_after:
            cuts.pop(0)
        position = min(position + chunk_tokens, cuts[0] if cuts else end, end)
        is_cut = bool(cuts) and position == cuts[0]
        keeps = position >= keeps_after and position < end and (is_cut or position - last >= every)
        pieces.append(Piece(position, keeps))
        if keeps:
            last, keeps_after = position, position + config.min_checkpoint_tokens
    return pieces


def _turn_ends(tokens: Tokens, turn_ends: Collection[int]) -> list[int]:
    """The positions behind the first and the last end of a turn."""
    found = np.flatnonzero(np.isin(np.asarray(tokens, np.int32), list(turn_ends)))
    return sorted({int(found[0]) + 1, int(found[-1]) + 1}) if len(found) else []
