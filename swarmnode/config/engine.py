"""Steps of the engine, and what it keeps of conversations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from swarmnode.config.units import MIB

Speculate: TypeAlias = Literal["auto", "always", "never"]
Drafts: TypeAlias = Literal["auto", "mtp", "ngram"]


@dataclass(frozen=True)
class EngineConfig:
    """Steps (services/batcher), and what is kept of conversations so as not to run it again (services/prefix_cache)."""

    tokens_ahead: int = 16
    """Tokens of an answer that may wait for whoever asked for it; then its sequence pauses, and holds nobody up."""
    mixed_rows: int = 64
    """Rows of prompts in a step that also has rows of answers: 64 rows take 15 to 20 times as long as one."""
    patience_steps: int = 8
    """Steps that may begin without a sequence that waits for rows; then it goes before all others. A chunk of a prompt
    beside answers takes eight (512 rows by mixed_rows), so that it is done before the next prompt interrupts it."""
    max_steps: int = 4
    """Steps under way at once, of different sequences, where they wait for workers."""
    short_wait: float = 0.1
    """Steps that wait less than this share of their compute time are not divided: each reads the experts' weights."""

    trial_share: float = 0.02
    """Share of the time that may be lost by trying whether one step is faster than several, or the other way round."""

    speculate: Speculate = "auto"
    """When steps also try out guessed tokens: "auto" where the compute thread is idle most of the time, because steps
    wait for workers. Tokens do not depend on it."""
    drafts: Drafts = "auto"
    """Where guesses come from: the model's MTP block, if it has one and unless this is "ngram", and the text so far,
    unless this is "mtp"."""
    draft_tokens: int = 7
    """Most guessed tokens of a sequence in a step: eight rows wait for workers no longer than one (decision 0031). Less
    than ModelsConfig.max_tentative_tokens."""
    draft_match: int = 3
    """Tokens at the end of the text that must have occurred before, for what came then to be guessed."""
    draft_longest_match: int = 8
    """Of several places the one with the longest match counts, and the latest of those that match this far."""
    draft_places: int = 8
    """So many are looked at, the latest."""
    draft_sure_match: int = 8
    """What the text says counts for more than what an MTP block says if this many tokens at its end occurred before:
    then it is being repeated word for word. Three tokens are as likely a phrase, which a block knows better how to end.
    """
    draft_pause_tokens: int = 31
    """Longest time without guesses after wrong ones: a token without any costs nothing."""

    checkpoint_bytes: int = 1024 * MIB
    """All checkpoints of all slots. One takes 156 MB at the real sizes (36 recurrent layers of 64 f32 matrices of 128 x
    128, 4.2 MB, and 147 KB of convolution): six, which is three turns of one conversation or the last one of three."""
    min_checkpoint_tokens: int = 32
    """No checkpoint is made so close behind another: it would save less than it costs, a pass of its own."""
    checkpoint_tokens: int = 2048
    """Within a long prompt one is made at least so many tokens behind the one before: four chunks."""
    checkpoints_a_prompt: int = 4
    """... and about so many at most, or one long prompt would drive out all others."""
    continued_share: float = 0.5
    """A prompt goes on in a slot if that keeps at least this share of its tokens (or holds all of the prompt), and else
    takes the one not used for the longest time: a beginning that two conversations share must not make them take one
    slot in turns."""
