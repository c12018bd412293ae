"""What the rest of the node sees of a model: a forward pass that stops wherever routed experts are due."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from swarmnode.compute.expert_graph import StackedExperts

_Logits = TypeVar("_Logits")
F32Array: TypeAlias = npt.NDArray[np.float32]
I32Array: TypeAlias = npt.NDArray[np.int32]
Callback: TypeAlias = Callable[[str, int, npt.NDArray[Any]], None]
"""`callback(name, layer, values)`: llama.cpp's name of an intermediate, its layer (-1: none), its values
(shape = ggml's sizes reversed)."""


Stacked: TypeAlias = Callable[[int], StackedExperts | None]
"""`stacked(layer)`: the experts of a layer that may be computed within the model's own graph; None: a call for it."""


Chosen: TypeAlias = Callable[[int, I32Array], None]
"""`chosen(layer, ids)`: the experts of a layer, i32 [T, n_expert_used], that was computed without a call."""


class Part(NamedTuple):
    """What a pass over several slots does for one of them."""

    slot: int
    tokens: Sequence[int]
    n_out: int
    """Logits wanted: 0, 1 (of the last token) or len(tokens) (of all)."""
    tentative: bool = False
    """Whether the tokens may be taken back: the slot waits for `Model.accept`, at most
    `ModelsConfig.max_tentative_tokens` and `n_ubatch` of them."""


class ExpertCall(NamedTuple):
    """The routed experts of one layer, to be computed by somebody else.

    The arrays belong to the receiver: the model keeps no reference and never writes to them again.
    """

    layer: int
    rows: F32Array
    """f32 [T, n_embd]: what every chosen expert gets as input."""
    ids: I32Array
    """i32 [T, n_expert_used]: chosen experts, best first."""
    weights: F32Array
    """f32 [T, n_expert_used]: the gate's weights, which sum to 1 for each row."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What a slot cannot work out backwards, as it was at `n_past`, in host memory. Its KV entries stay in the slot."""

    slot: int
    n_past: int
    states: tuple[F32Array, ...]
    """The recurrent and convolution states of all recurrent layers."""
    hidden: F32Array | None = None
    """The last token's last hidden state, f32 [n_embd], if the model has an MTP block and there is a token."""

    @property
    def n_bytes(self) -> int:
        """Memory that it takes."""
        return sum(state.nbytes for state in self.states) + (0 if self.hidden is None else self.hidden.nbytes)


class Model(Protocol):
    """A loaded model with `n_slots` sequences, each with its own KV cache and recurrent state.

    Every method runs on the compute thread. Passes of different slots may be interleaved.
    """

    n_layer: int
    n_embd: int
    n_vocab: int
    n_expert: int
    n_expert_used: int
    n_ctx: int
    """Tokens a slot holds."""
    n_slots: int
    has_mtp: bool
    """Whether it has an MTP block to guess with: `draft`."""
    callback: Callback | None
    """Debugging only: called with every intermediate while set; costs copies and all graph caching."""

    @property
    def state_bytes(self) -> int:
        """Memory of all slots' KV caches and recurrent states and of buffers between graphs, allocated at opening."""
        ...

    def check(self, slot: int, tokens: Sequence[int]) -> None:
        """Raise what `forward` would raise at once: a refused part of a pass ends the pass for all parts."""
        ...

    def forward(
        self,
        slot: int,
        tokens: Sequence[int],
        *,
        all_logits: bool = False,
        stacked: Stacked | None = None,
        chosen: Chosen | None = None,
    ) -> Generator[ExpertCall, F32Array, F32Array]:
        """Append `tokens` to the slot's sequence; return logits f32 [1, n_vocab] of the last token, or of
        all tokens, f32 [T, n_vocab].

        Yields an ExpertCall for each MoE layer of each chunk of at most `n_ubatch` tokens and wants the routed
        output f32 [T, n_embd] sent back: for each row the sum over k, in k order, of weight times expert row.
        A pass of one token asks `stacked` (if given, and no callback is set) for each layer when it gets there, and
        computes layers that have an answer without a call: bit-equal, and without the cost of stopping. `chosen` is
        told what the gate chose in those.
        A pass that is not run to its end leaves the slot unusable until `reset` or `restore`.

        Raises UsageError (no tokens, a token id out of range, a bad slot, an unusable slot, an array of another
        shape sent in), ContextFullError (the tokens do not fit; the slot is unchanged), DeviceError.
        """
        ...

    def forward_batch(
        self, parts: Sequence[Part], *, stacked: Stacked | None = None, chosen: Chosen | None = None
    ) -> Generator[ExpertCall, F32Array, list[F32Array]]:
        """Append the tokens of each part to its slot; return the logits of each part, f32 [n_out, n_vocab].

        One part is a pass as `forward` makes it. Several have at most `n_ubatch` tokens together, and one ExpertCall a
        layer for the rows of all of them, in the parts' order; `stacked` is not asked then. Each row comes out as
        if its part were alone, bit by bit, wherever ggml's mat-muls compute a column without regard to how many there
        are: its CPU kernels without repacking do. The last layer's call is for the rows whose logits are wanted.
        Passes of different slots may be interleaved.
        The slot of a tentative part stands where it stood, and runs nothing until `accept`, `reset` or `restore`.
        A pass that is not run to its end leaves all of its slots unusable until `reset` or `restore`.

        Raises UsageError as `forward`, and for no parts, a slot named twice, another n_out, too many tokens, a callback
        that is set; ContextFullError; both before anything changed. DeviceError.
        """
        ...

    def accept(self, slot: int, n_tokens: int) -> None:
        """Keep the first `n_tokens` of the tentative part that the slot ran last, and take the others back.

        What follows is bit-equal to what would have followed had only those been run. Costs the recurrent layers' cores
        for the kept tokens: no weights are read, and no experts asked for.
        Raises UsageError (a bad slot, nothing to accept, another number of tokens), DeviceError, after which the slot
        is unusable until `reset` or `restore`.
        """
        ...

    def draft(self, slot: int, token: int) -> Iterator[int]:
        """Guess what comes behind `token`, which itself comes behind the slot's tokens: one more with each `next`, each
        a graph of one token for the MTP block (which attends, and computes its experts, here) and the logits.

        The slot stays as it is, whatever is guessed, but for checkpoints of later positions, which are void. Ends where
        the context does, where the block's numbers are not finite, in an empty slot.
        Raises UsageError (no MTP block, a bad or unusable slot, tokens that wait for `accept`, a bad token),
        DeviceError.
        """
        ...

    def reset(self, slot: int) -> None:
        """Empty the slot: position 0, zero state, its checkpoints are void. UsageError for a bad slot."""
        ...

    @property
    def checkpoint_bytes(self) -> int:
        """Memory that one checkpoint takes."""
        ...

    def checkpoint(self, slot: int) -> Checkpoint:
        """Copy what `restore` needs. UsageError for a bad slot, an unfinished pass, tokens that wait for `accept`;
        DeviceError.
        """
        ...

    def restore(self, slot: int, checkpoint: Checkpoint) -> None:
        """Take the slot back to a checkpoint of it, from any later position and from an unfinished pass, too.

        What follows is bit-equal to what would have followed then. KV entries behind it need not be taken back: no
        token may look at cells after its own, and each is written before it is looked at.
        Raises UsageError (a bad slot; a checkpoint of another slot or model, or one whose KV entries the slot does
        not hold any more: it was reset, or went another way from before there), DeviceError.
        """
        ...

    def n_past(self, slot: int) -> int:
        """Tokens the slot holds. UsageError for a bad slot."""
        ...

    def close(self) -> None:
        """Free graphs, states and weights; other methods must not be called afterwards."""
        ...


def run_pass(
    steps: Generator[ExpertCall, F32Array, _Logits], experts: Callable[[ExpertCall], F32Array]
) -> _Logits:
    """Run a pass to its end with `experts` computing every call (f32 [T, n_embd]); return the logits."""
    try:
        call = next(steps)
        while True:
            call = steps.send(experts(call))
    except StopIteration as end:
        logits: _Logits = end.value
        return logits
