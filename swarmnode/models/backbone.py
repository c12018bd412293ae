"""The forward pass of any architecture: slots, chunks, and the exchange of routed experts layer by layer."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple

import numpy as np

from swarmnode.compute.devices import Device
from swarmnode.compute.expert_graph import StackedExperts
from swarmnode.compute.row_table import RowTable
from swarmnode.config import ModelsConfig
from swarmnode.errors import ContextFullError, UnsupportedModelError, UsageError
from swarmnode.models.architecture import Architecture
from swarmnode.models.base import Callback, Checkpoint, Chosen, ExpertCall, F32Array, Part, Stacked
from swarmnode.models.batch import TokenBatches
from swarmnode.models.batch_buffers import BatchBuffers
from swarmnode.models.batch_graphs import BatchGraphs
from swarmnode.models.graph_sources import GraphSources
from swarmnode.models.layer_builder import INP_POS, KQ_MASK, KV_IDX
from swarmnode.models.layer_graphs import (
    IDS,
    INPUT,
    LOGITS,
    ROWS,
    WEIGHTS,
    AttentionInputs,
    LayerGraph,
    LayerGraphs,
    ids_name,
)
from swarmnode.models.lockstep import Lane, check_routed, run_together
from swarmnode.models.replay import CoreReplay
from swarmnode.models.slot import Slot, Tentative, not_finite
from swarmnode.models.state import SlotStates
from swarmnode.models.weight_spec import bind_weights
from swarmnode.weights.index import ModelIndex

_MAX_SLOTS = 1024


class _Member(NamedTuple):
    """A part of a pass, checked."""

    slot: Slot
    ids: list[int]
    n_out: int
    """0, 1 or len(ids)"""
    tentative: bool = False


class Backbone:
    """A loaded model: the `Model` of models/base.py, where its methods are described."""

    def __init__(
        self,
        index: ModelIndex,
        device: Device,
        architecture: Architecture,
        *,
        n_ctx: int,
        n_slots: int,
        config: ModelsConfig,
    ) -> None:
        """Check everything, bind the weights, allocate the states; see `registry.open_model` for the errors."""
        self.hparams = architecture.read_hparams(index)
        _check_sizes(index, n_ctx, n_slots, self.hparams.n_ctx_train)
        self.n_layer = self.hparams.n_layer
        self.n_embd = self.hparams.n_embd
        self.n_vocab = self.hparams.n_vocab
        self.n_expert = self.hparams.n_expert
        self.n_expert_used = self.hparams.n_expert_used
        self.n_ctx = n_ctx
        self.n_slots = n_slots
        self.callback: Callback | None = None
        self._n_ubatch = config.n_ubatch
        self._max_tentative = min(config.n_ubatch, config.max_tentative_tokens)
        self._kv_pad = config.kv_pad
        self._n_cells = _round_up(n_ctx, config.kv_pad)
        self._attention_inputs = AttentionInputs(self._n_cells)
        embedding = index.tensors["token_embd.weight"]
        self._weights = bind_weights(index, device, architecture.weights(self.hparams, index.tensors), config)
        data = index.data("token_embd.weight")
        self._embeddings = RowTable(embedding.ggml_type, data, self.n_vocab, self.n_embd)
        try:
            self._states = SlotStates(
                device,
                architecture,
                self.hparams,
                n_slots=n_slots,
                n_ctx=self._n_cells,
                n_ubatch=config.n_ubatch,
            )
        except BaseException:
            self._weights.close()
            raise
        sources = GraphSources(device, architecture, self.hparams, self._weights, self._states)
        self._graphs = LayerGraphs(sources, n_slots=n_slots)
        self._replay = CoreReplay(sources)
        self._batch_graphs: BatchGraphs | None = None
        self._batches: TokenBatches | None = None
        if self._states.batch is not None:
            self._open_batches(sources, self._states.batch)
        self._slots = [Slot(slot) for slot in range(n_slots)]

    def _open_batches(self, sources: GraphSources, buffers: BatchBuffers) -> None:
        self._batch_graphs = BatchGraphs(sources, buffers)
        self._batches = TokenBatches(
            self._batch_graphs,
            buffers,
            self.hparams,
            self._embeddings,
            self._attention_inputs,
            self._n_kv,
        )

    @property
    def state_bytes(self) -> int:
        return self._states.n_bytes

    def check(self, slot: int, tokens: Sequence[int]) -> None:
        self._check_pass(self._slot(slot), list(tokens))

    def forward(
        self,
        slot: int,
        tokens: Sequence[int],
        *,
        all_logits: bool = False,
        stacked: Stacked | None = None,
        chosen: Chosen | None = None,
    ) -> Generator[ExpertCall, F32Array, F32Array]:
        ids = list(tokens)
        self._check_pass(self._slot(slot), ids)
        n_out = len(ids) if all_logits else 1
        return self._run(_Member(self._slot(slot), ids, n_out), stacked, chosen)

    def forward_batch(
        self, parts: Sequence[Part], *, stacked: Stacked | None = None, chosen: Chosen | None = None
    ) -> Generator[ExpertCall, F32Array, list[F32Array]]:
        members = [
            _Member(self._slot(slot), list(tokens), n_out, tentative)
            for slot, tokens, n_out, tentative in parts
        ]
        self._check_batch(members)
        return self._run_batch(members, stacked, chosen)

    def accept(self, slot: int, n_tokens: int) -> None:
        state = self._slot(slot)
        tentative = None if state.unfinished else state.tentative
        if tentative is None:
            raise UsageError(f"slot {slot} has no tokens that could be accepted")
        if not 0 <= n_tokens <= tentative.n_tokens:
            raise UsageError(f"{n_tokens} tokens to accept are not 0 to {tentative.n_tokens}")
        state.unfinished = True
        if n_tokens:
            self._replay.run(slot, tentative.inputs, n_tokens)
        state.stand(state.n_past + n_tokens)

    def reset(self, slot: int) -> None:
        state = self._slot(slot)
        self._states.clear(slot, with_cache=state.poisoned)
        state.stand(0)
        state.poisoned = False
        state.checkpoints.clear()

    @property
    def checkpoint_bytes(self) -> int:
        return self._states.recurrent_bytes

    def checkpoint(self, slot: int) -> Checkpoint:
        state = self._slot(slot)
        if state.unfinished:
            raise UsageError(f"slot {slot} holds an unfinished pass: there is nothing to come back to")
        if state.tentative is not None:
            raise UsageError(f"slot {slot} holds tokens that are not accepted: it is nowhere to come back to")
        checkpoint = Checkpoint(slot, state.n_past, self._states.read_recurrent(slot))
        state.checkpoints.add(checkpoint)
        return checkpoint

    def restore(self, slot: int, checkpoint: Checkpoint) -> None:
        state = self._slot(slot)
        if checkpoint not in state.checkpoints:
            raise UsageError(
                f"slot {slot} cannot go back to token {checkpoint.n_past}: it is another slot's or model's "
                "checkpoint, or the slot does not hold the tokens before it any more"
            )
        self._states.write_recurrent(slot, checkpoint.states)
        state.stand(checkpoint.n_past)

    def n_past(self, slot: int) -> int:
        return self._slot(slot).n_past

    def close(self) -> None:
        if self._batch_graphs is not None:
            self._batch_graphs.close()
        self._replay.close()
        self._graphs.close()
        self._states.close()
        self._weights.close()

    # -- one pass

    def _run_batch(
        self, members: list[_Member], stacked: Stacked | None, chosen: Chosen | None
    ) -> Generator[ExpertCall, F32Array, list[F32Array]]:
        if len(members) == 1:
            return [(yield from self._run(members[0], stacked, chosen))]
        self._check_batch(members)  # again: slots may have moved since `forward_batch` was called
        for member in members:
            member.slot.begin(len(member.ids) if member.tentative else 0)
        lanes = self._lanes(members)
        results = yield from run_together(lanes, self.n_layer, self.n_embd)
        logits = [np.empty((0, self.n_vocab), np.float32) for _ in members]
        for lane, result in zip(lanes, results, strict=True):
            start = 0
            for place, n in zip(lane.places, lane.n_last, strict=True):
                if result is not None and n:
                    logits[place] = result[start : start + n]
                start += n
        for member in members:
            member.slot.ran(len(member.ids))
            member.slot.unfinished = False
        return logits

    def _lanes(self, members: list[_Member]) -> list[Lane]:
        """Single tokens go together. Several of a slot go on their own, as they would alone: so many rows gain little
        by more, and float mat-muls of several columns have other last bits than those of one. So do tentative ones.
        """
        lanes = []
        for place, (slot, ids, n, tentative) in enumerate(members):
            if len(ids) > 1 or tentative:
                steps = self._chunk(slot, ids, max(1, n), n > 0, None, None)
                lanes.append(Lane(steps, [place], [len(ids)], [n]))
        singles = [
            place for place, member in enumerate(members) if len(member.ids) == 1 and not member.tentative
        ]
        if singles and self._batches is not None:
            singles.sort(key=lambda place: -members[place].n_out)  # those with logits first
            n_out = [members[place].n_out for place in singles]
            slots = [members[place].slot for place in singles]
            steps = self._batches.run(slots, [members[place].ids[0] for place in singles], sum(n_out))
            lanes.append(Lane(steps, singles, [1] * len(singles), n_out))
        return lanes

    def _run(
        self, member: _Member, stacked: Stacked | None, chosen: Chosen | None
    ) -> Generator[ExpertCall, F32Array, F32Array]:
        slot, ids, n_wanted, tentative = member
        self._check_pass(slot, ids)  # again: the slot may have moved since `forward` was called
        slot.begin(len(ids) if tentative else 0)
        logits: list[F32Array] = []
        for start in range(0, len(ids), self._n_ubatch):
            chunk = ids[start : start + self._n_ubatch]
            is_all, is_last = n_wanted == len(ids), start + len(chunk) == len(ids)
            wants_logits = is_all or (is_last and n_wanted > 0)
            n_out = len(chunk) if is_all else 1
            out = yield from self._chunk(slot, chunk, n_out, wants_logits, stacked, chosen)
            if out is not None:
                logits.append(out)
            slot.ran(len(chunk))
        slot.unfinished = False
        if len(logits) == 1:
            return logits[0]
        return np.concatenate(logits) if logits else np.empty((0, self.n_vocab), np.float32)

    def _chunk(
        self,
        slot: Slot,
        ids: list[int],
        n_out: int,
        wants_logits: bool,
        stacked: Stacked | None,
        chosen: Chosen | None,
    ) -> Generator[ExpertCall, F32Array, F32Array | None]:
        """Run a chunk through all layers; logits f32 [n_out, n_vocab], if they are wanted.

        The last layer goes on with `n_out` tokens only, and without its experts if no logits are wanted.
        """
        n_tokens, last = len(ids), self.n_layer - 1
        n_kv = self._n_kv(slot.n_past + n_tokens)
        kv_inputs = self._attention_inputs(slot.n_past, n_tokens, n_kv)
        tentative = slot.tentative
        fuses = n_tokens == 1 and wants_logits and self.callback is None and tentative is None
        self._graphs.traces = self.callback is not None
        values, first = self._embeddings.rows(ids), 0
        while True:
            whole = _whole_layers(first, self.n_layer, stacked) if fuses and stacked is not None else ()
            cut = first + len(whole)
            n = n_out if cut >= last else n_tokens
            graph = self._graphs.get(
                slot.index,
                first,
                whole,
                n_tokens=min(n_tokens, len(values)),
                n_out=n,
                n_kv=n_kv,
                tentative=tentative is not None,
            )
            graph.write(INPUT, values)
            if graph.uses_kv:
                for name, array in zip((INP_POS, KV_IDX, KQ_MASK), kv_inputs, strict=True):
                    graph.write(name, array)
            graph.compute()
            if tentative is not None:
                self._keep_inputs(tentative, graph, cut)
            if chosen is not None:
                for layer in range(first, cut):
                    chosen(layer, graph.read(ids_name(layer)))
            if cut == self.n_layer:
                return self._take_logits(slot, graph, first)
            call = self._take_call(slot, graph, first, cut)
            if cut == last and not wants_logits:
                return None
            values = yield call
            check_routed(values, n, self.n_embd)
            if self.callback is not None:
                self.callback("ffn_moe_out", cut, values)
            first = cut + 1

    def _keep_inputs(self, tentative: Tentative, graph: LayerGraph, layer: int) -> None:
        """Of a recurrent layer's core, for `accept`."""
        if layer < self.n_layer and self.hparams.recurrent[layer]:
            tentative.inputs[layer] = self._replay.take(graph, layer, tentative.n_tokens)

    def _take_call(self, slot: Slot, graph: LayerGraph, first: int, cut: int) -> ExpertCall:
        call = ExpertCall(cut, graph.read(ROWS), graph.read(IDS), graph.read(WEIGHTS))
        self._finish(slot, graph, first, cut)
        return call

    def _take_logits(self, slot: Slot, graph: LayerGraph, first: int) -> F32Array:
        logits: F32Array = graph.read(LOGITS)
        last = self.n_layer - 1
        self._finish(slot, graph, min(first, last), last)
        return logits

    def _finish(self, slot: Slot, graph: LayerGraph, first: int, last: int) -> None:
        """Behind layers first..last: report, check, close. DeviceError for NaN or infinity."""
        is_finite = graph.is_finite()
        if self.callback is not None:
            graph.report(self.callback)
        if not graph.is_cached:
            graph.close()
        if not is_finite:
            slot.poison()
            raise not_finite(first, last)

    def _n_kv(self, n_tokens: int) -> int:
        """Cells that attention looks at for the first n tokens of a slot."""
        return min(self._n_cells, _round_up(n_tokens, self._kv_pad))

    # -- checks

    def _slot(self, slot: int) -> Slot:
        if not 0 <= slot < self.n_slots:
            raise UsageError(f"slot {slot} does not exist; there are {self.n_slots}")
        return self._slots[slot]

    def _check_pass(self, slot: Slot, ids: list[int]) -> None:
        if not ids:
            raise UsageError("there are no tokens to compute")
        if min(ids) < 0 or max(ids) >= self.n_vocab:
            wrong = next(token for token in ids if not 0 <= token < self.n_vocab)
            raise UsageError(f"token id {wrong} is outside the vocabulary of {self.n_vocab}")
        if slot.unfinished:
            raise UsageError(f"slot {slot.index} holds an unfinished pass; reset it first")
        if slot.tentative is not None:
            raise UsageError(
                f"slot {slot.index} holds tokens that are not accepted; accept none, some or all"
            )
        if slot.n_past + len(ids) > self.n_ctx:
            raise ContextFullError(
                f"{slot.n_past} + {len(ids)} tokens do not fit the context of {self.n_ctx}"
            )

    def _check_batch(self, members: list[_Member]) -> None:
        if not members:
            raise UsageError("there are no parts to compute")
        for slot, ids, n_out, tentative in members:
            self._check_pass(slot, ids)
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
        if self.callback is not None:
            raise UsageError("a callback takes passes of one slot only")


def _check_sizes(index: ModelIndex, n_ctx: int, n_slots: int, n_ctx_train: int) -> None:
    if not 1 <= n_ctx <= n_ctx_train:
        raise UsageError(
            f"a context of {n_ctx} tokens is not 1 to {n_ctx_train}, which the model was made for"
        )
    if not 1 <= n_slots <= _MAX_SLOTS:
        raise UsageError(f"{n_slots} slots are not 1 to {_MAX_SLOTS}")
    dense = [layer for layer in range(index.n_layer) if layer not in index.expert_layers]
    if dense:
        raise UnsupportedModelError(f"{index.paths[0]}: layer {dense[0]} has no routed experts")


def _whole_layers(first: int, n_layer: int, stacked: Stacked) -> tuple[StackedExperts, ...]:
    """The routed experts of the layers from `first` up to the next that has to be cut."""
    whole = []
    for layer in range(first, n_layer):
        experts = stacked(layer)
        if experts is None:
            break
        whole.append(experts)
    return tuple(whole)


def _round_up(n: int, unit: int) -> int:
    return (n + unit - 1) // unit * unit
