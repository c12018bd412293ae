"""Which tokens each slot holds, and from where a new prompt can go on. Pure: no model, no thread.

A slot can go on from where it stands, or from one of its checkpoints. Attention alone could stop anywhere, but
recurrent states cannot be taken back, so what a prompt has in common with a slot counts only up to one of these places.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from swarmnode.config import EngineConfig
from swarmnode.models.base import Checkpoint

_COMPARED_AT_ONCE = 1024


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

    @property
    def position(self) -> int:
        """Tokens before it."""
        return self.checkpoint.n_past


@dataclass
class _Held:
    """What one slot holds."""

    tokens: list[int] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    """By position."""
    is_torn: bool = False
    """A pass began and did not end: the slot cannot go on from where it stands."""
    is_doubtful: bool = False
    """The tokens may have been computed wrongly."""
    used: int = 0
    """When it was taken last, counted in takings."""

    def clear(self) -> None:
        self.tokens, self.kept = [], []
        self.is_torn = self.is_doubtful = False


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

    def choose(self, prompt: Sequence[int], free: Collection[int]) -> int:
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

    def _continues(self, slot: int, prompt: Sequence[int], n_usable: int) -> bool:
        """Whether it is the slot's conversation: most of that stays, or the same is asked again."""
        tokens = self._slots[slot].tokens
        if n_usable >= self._config.continued_share * len(tokens):
            return True
        return common_prefix(tokens, prompt) == len(prompt)

    def usable(self, slot: int, prompt: Sequence[int]) -> int:
        """Tokens of the prompt that need not be run in this slot: never the last one, whose logits are wanted."""
        held = self._slots[slot]
        if held.is_doubtful:
            return 0
        n_common = common_prefix(held.tokens, prompt[:-1])
        if n_common == len(held.tokens) and not held.is_torn:
            return n_common
        return max((kept.position for kept in held.kept if kept.position <= n_common), default=0)

    def stands_at(self, slot: int, position: int) -> bool:
        """Whether the slot can go on from there as it is."""
        held = self._slots[slot]
        return position == len(held.tokens) and not held.is_torn

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
        del held.tokens[position:]
        held.is_torn = False
        if stands:
            return None
        held.kept[-1].floor = self._floor
        return held.kept[-1].checkpoint

    # -- while it runs

    def begin(self, slot: int) -> None:
        """A pass begins in the slot."""
        self._slots[slot].is_torn = True

    def append(self, slot: int, tokens: Sequence[int]) -> None:
        """The pass ended: the slot holds these tokens, too."""
        self._slots[slot].tokens.extend(tokens)
        self._slots[slot].is_torn = False

    def wants(self, slot: int) -> bool:
        """Whether a checkpoint where the slot stands would save enough."""
        held = self._slots[slot]
        behind = held.kept[-1].position if held.kept else 0
        return len(held.tokens) - behind >= self._config.min_checkpoint_tokens

    def reserve(self, n_bytes: int) -> bool:
        """Drop what is worth least until a checkpoint of so many bytes fits; False if it cannot. Until `release` nobody
        else gets this room.
        """
        room = self._config.checkpoint_bytes - self._reserved - n_bytes
        if room < 0:
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
        """Keep a checkpoint of where the slot stands."""
        self._slots[slot].kept.append(Kept(checkpoint, self._floor))

    # -- forgetting

    def forget(self, slot: int) -> None:
        """The slot's contents are not known any more, or no good."""
        self._slots[slot].clear()

    def doubt(self) -> None:
        """What all slots hold now may be wrong: use none of it for another prompt."""
        for held in self._slots:
            held.is_doubtful = True
            held.kept = []

    def _all_kept(self) -> Iterator[tuple[_Held, Kept]]:
        return ((held, kept) for held in self._slots for kept in held.kept)

    def _worth(self, held: _Held, kept: Kept) -> int:
        """The tokens that it saves, on top of what the last one that was dropped was worth when this one was made or
        used last: so what is not used grows worthless in time (GreedyDual, Cao and Irani 1997).
        """
        place = held.kept.index(kept)
        before = held.kept[place - 1].position if place else 0
        return kept.floor + kept.position - before


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences have in common at their beginning. Pieces are compared in C: 262,144 take 2 ms."""
    n = min(len(a), len(b))
    for start in range(0, n, _COMPARED_AT_ONCE):
        end = min(n, start + _COMPARED_AT_ONCE)
        if list(a[start:end]) != list(b[start:end]):
            return next(i for i in range(start, end) if a[i] != b[i])
    return n


def plan_prefill(
    tokens: Sequence[int], start: int, turn_ends: Collection[int], chunk_tokens: int, config: EngineConfig
) -> list[Piece]:
    """How to run a prompt from token `start` (less than its length): pieces of at most `chunk_tokens`.

    Checkpoints are made behind the first of the `turn_ends` (token ids), where a system prompt ends that other
    conversations share; behind the last one, because a chat template may render what comes after it in another way
    next time (an answer's thoughts are left out); at the end; and now and then in a long prompt. None closer than
    `min_checkpoint_tokens` behind another.
    """
    end, keeps_after = len(tokens), start + config.min_checkpoint_tokens
    cuts = [cut for cut in _turn_ends(tokens, start, turn_ends) if cut < end]
    every = max(config.checkpoint_tokens, (end - start) // config.checkpoints_a_prompt)
    pieces: list[Piece] = []
    position = last = start
    while position < end:
        while cuts and cuts[0] < keeps_after:
            cuts.pop(0)
        position = min(position + chunk_tokens, cuts[0] if cuts else end, end)
        is_cut = bool(cuts) and position == cuts[0]
        keeps = position >= keeps_after and (is_cut or position == end or position - last >= every)
        pieces.append(Piece(position, keeps))
        if keeps:
            last, keeps_after = position, position + config.min_checkpoint_tokens
    return pieces


def _turn_ends(tokens: Sequence[int], start: int, turn_ends: Collection[int]) -> list[int]:
    """The positions behind the first and the last end of a turn, from `start` on."""
    found = [i + 1 for i in range(start, len(tokens)) if tokens[i] in turn_ends]
    return sorted({found[0], found[-1]}) if found else []
