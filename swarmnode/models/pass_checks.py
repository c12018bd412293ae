"""What a pass may ask for: everything is checked before anything changes, and before ggml, which aborts, sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from swarmnode.config import ModelsConfig
from swarmnode.counts import counted
from swarmnode.errors import ContextFullError, UnsupportedModelError, UsageError
from swarmnode.models.slot import Slot
from swarmnode.weights.index import ModelIndex

_MAX_SLOTS = 1024


class Member(NamedTuple):
    """A part of a pass, with its slot."""

    slot: Slot
    ids: list[int]
    n_out: int
    """0, 1 or len(ids)"""
    tentative: bool = False


class PassChecks:
    """For a model of `n_vocab` tokens and `n_ctx` a slot."""

    def __init__(self, n_vocab: int, n_ctx: int, config: ModelsConfig) -> None:
        self._n_vocab = n_vocab
        self._n_ctx = n_ctx
        self._n_ubatch = config.n_ubatch
        self._max_tentative = min(config.n_ubatch, config.max_tentative_tokens)

    def check(self, slot: Slot, ids: list[int]) -> None:
        """That these tokens may be run in the slot now: UsageError, ContextFullError."""
        if not ids:
            raise UsageError("there are no tokens to compute")
        self.check_tokens(slot, ids)
        if slot.n_past + len(ids) > self._n_ctx:
            raise ContextFullError(
                f"{slot.n_past} + {counted(len(ids), 'token')}: too many for the context of {self._n_ctx}"
            )

    def check_tokens(self, slot: Slot, ids: list[int]) -> None:
        """That these, at least one, are tokens, and that some may come next in the slot: UsageError."""
        if min(ids) < 0 or max(ids) >= self._n_vocab:
            wrong = next(token for token in ids if not 0 <= token < self._n_vocab)
            raise UsageError(f"token id {wrong} is outside the vocabulary of {self._n_vocab}")
        if slot.unfinished:
            raise UsageError(f"slot {slot.index} holds an unfinished pass; reset it first")
        if slot.tentative is not None:
            raise UsageError(
                f"slot {slot.index} holds tokens that are not accepted; accept none, some or all"
            )

    def check_all(self, members: Sequence[Member], has_callback: bool) -> None:
        """The same for each part, and that they may share a pass."""
        if not members:
            raise UsageError("there are no parts to compute")
        for slot, ids, n_out, tentative in members:
            self.check(slot, ids)
            if tentative and len(ids) > self._max_tentative:
                raise UsageError(f"{len(ids)} tentative tokens are more than {self._max_tentative}")
            if n_out not in (0, 1, len(ids)):
                raise UsageError(f"logits of {n_out} of {len(ids)} tokens are not none, one or all")
        if len(members) == 1:
            return
        if len({member.slot.index for member in members}) < len(members):
            raise UsageError("a slot has two parts in one pass")
        n_tokens = sum(len(member.ids) for member in members)
        if n_tokens > self._n_ubatch:
            raise UsageError(f"{n_tokens} tokens of several slots are more than {self._n_ubatch}")
        if has_callback:
            raise UsageError("a callback takes passes of one slot only")


def check_sizes(index: ModelIndex, n_ctx: int, n_slots: int, n_ctx_train: int) -> None:
    """UsageError for a context or a number of slots out of range, UnsupportedModelError for a layer without experts."""
    if not 2 <= n_ctx <= n_ctx_train:  # one of the prompt, one of the answer
        raise UsageError(
            f"a context of {n_ctx} tokens is not 2 to {n_ctx_train}, which the model was made for"
        )
    if not 1 <= n_slots <= _MAX_SLOTS:
        raise UsageError(f"{n_slots} slots are not 1 to {_MAX_SLOTS}")
    dense = [layer for layer in range(index.n_layer) if layer not in index.expert_layers]
    if dense:
        raise UnsupportedModelError(f"{index.paths[0]}: layer {dense[0]} has no routed experts")
