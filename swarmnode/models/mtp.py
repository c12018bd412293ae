"""Keeps the KV cache of a model's MTP block in step with the sequences, and guesses with it.

Cell p of the block belongs to token p's hidden state *and* token p + 1: it can be written when that token is known, one
token later than the model's own cells. Until then, and as long as nobody wants guesses, hidden states wait here, 12 KB
a token at the real sizes; they are entered together, without experts or attention, because later tokens look at nothing
but K and V. What was run tentatively waits in its slot until it is accepted, so that only what stays is entered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from swarmnode.models.base import F32Array
from swarmnode.models.mtp_block import MtpBlock
from swarmnode.models.slot import Slot


@dataclass(eq=False)
class _Kept:
    """What one slot's cache has, and what it is still to get."""

    n_filled: int = 0
    """Cells that are written and stay."""
    hidden: list[F32Array] = field(default_factory=list)
    """Of tokens n_filled.., f32 [n, n_embd] each: of all that have no cell. Empty in an empty slot only."""
    tokens: list[int] = field(default_factory=list)
    """Those behind each of `hidden` but the last one, whose next token is not known yet."""
    is_bad: bool = False
    """Numbers were not finite: some may be in the cache, where no mask hides them."""

    def clear(self) -> None:
        self.n_filled = 0
        self.hidden.clear()
        self.tokens.clear()

    def stand(self, n_filled: int, hidden: F32Array) -> None:
        """All but the last token, whose hidden state this is, f32 [1, n_embd], have their cells."""
        self.n_filled, self.hidden, self.tokens = n_filled, [hidden], []


class Mtp:
    """One for a model; `kept` by slot."""

    def __init__(self, block: MtpBlock, n_slots: int, n_cells: int, fill_tokens: int) -> None:
        """`n_cells`: of each slot; `fill_tokens`: as many at most wait to be entered."""
        self._block = block
        self._kept = [_Kept() for _ in range(n_slots)]
        self._n_cells = n_cells
        self._fill_tokens = fill_tokens

    # -- what the model tells

    def ran(self, slot: Slot, ids: list[int], hidden: F32Array) -> None:
        """Tokens went through the model in this slot, with these last hidden states, f32 [len(ids), n_embd].

        DeviceError.
        """
        if slot.tentative is not None:
            slot.tentative.ids, slot.tentative.hidden = ids, hidden
            return
        kept = self._kept[slot.index]
        kept.tokens.extend(ids if kept.hidden else ids[1:])
        kept.hidden.append(hidden)
        if len(kept.tokens) >= self._fill_tokens:
            self._fill(slot.index)

    def accept(self, slot: Slot, n_tokens: int) -> None:
        """Of the tokens that ran tentatively the first ones stay. The slot stands behind them already. DeviceError."""
        tentative, slot.tentative = slot.tentative, None
        if n_tokens and tentative is not None and tentative.hidden is not None:
            self.ran(slot, tentative.ids[:n_tokens], tentative.hidden[:n_tokens])

    def reset(self, slot: int) -> bool:
        """The slot is empty. Whether its cache has to be cleared before anything else is entered."""
        kept = self._kept[slot]
        is_bad, kept.is_bad = kept.is_bad, False
        kept.clear()
        return is_bad

    def checkpoint(self, slot: int) -> F32Array | None:
        """What `restore` needs, f32 [n_embd]; None in an empty slot. DeviceError."""
        self._fill(slot)
        kept = self._kept[slot]
        return kept.hidden[-1][-1].copy() if kept.hidden else None

    def restore(self, slot: int, n_past: int, hidden: F32Array | None) -> None:
        """The slot stands where `checkpoint` gave `hidden`, and cells before that have not been written since."""
        if hidden is None:
            self._kept[slot].clear()
        else:
            self._kept[slot].stand(n_past - 1, hidden[None])

    # -- guessing

    def draft(self, slot: int, token: int) -> Iterator[int]:
        """See Model.draft; everything is checked. Cells of guesses are not counted: what is run writes them anew."""
        self._fill(slot)
        kept = self._kept[slot]
        if not kept.hidden or kept.is_bad:
            return
        hidden = kept.hidden[-1][-1:]
        for cell in range(kept.n_filled, self._n_cells):
            guess = self._block.step(slot, cell, token, hidden)
            if guess is None:
                kept.is_bad = True
                return
            logits, hidden = guess
            token = int(np.argmax(logits))
            yield token

    def close(self) -> None:
        """Free everything."""
        self._block.close()

    def _fill(self, slot: int) -> None:
        """Enter what waits. DeviceError."""
        kept = self._kept[slot]
        if not kept.tokens:
            return
        hidden = kept.hidden[0] if len(kept.hidden) == 1 else np.concatenate(kept.hidden)
        n = len(kept.tokens)
        self._block.fill(slot, kept.n_filled, kept.tokens, hidden[:n])
        kept.stand(kept.n_filled + n, hidden[n:].copy())
