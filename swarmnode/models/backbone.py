"""The forward pass of any architecture: slots, chunks, and the exchange of routed experts layer by layer."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

import numpy as np

from swarmnode.compute.devices import Device
from swarmnode.compute.row_table import RowTable
from swarmnode.config import ModelsConfig
from swarmnode.errors import UsageError
from swarmnode.models.architecture import Architecture
from swarmnode.models.base import Callback, Checkpoint, Chosen, ExpertCall, F32Array, Part, Stacked
from swarmnode.models.batch import TokenBatches
from swarmnode.models.batch_buffers import BatchBuffers
from swarmnode.models.batch_graphs import BatchGraphs
from swarmnode.models.graph_sources import GraphSources
from swarmnode.models.layer_builder import INP_POS, KQ_MASK, KV_IDX
from swarmnode.models.layer_graphs import (
    HIDDEN,
    IDS,
    INPUT,
    LOGITS,
    ROWS,
    WEIGHTS,
    AttentionInputs,
    LayerGraph,
    LayerGraphs,
    ids_name,
    whole_layers,
)
from swarmnode.models.lockstep import Lane, check_routed, run_together
from swarmnode.models.mtp import Mtp
from swarmnode.models.mtp_block import MtpBlock
from swarmnode.models.pass_checks import Member, PassChecks, check_sizes
from swarmnode.models.replay import CoreReplay
from swarmnode.models.slot import Slot, Tentative, not_finite
from swarmnode.models.state import SlotStates, n_cells
from swarmnode.models.weight_spec import bind_weights
from swarmnode.weights.index import ModelIndex


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
        self.has_mtp = config.mtp and index.n_mtp > 0
        self.hparams = architecture.read_hparams(index, with_mtp=self.has_mtp)
        check_sizes(index, n_ctx, n_slots, self.hparams.n_ctx_train)
        self.n_layer = self.hparams.n_layer
        self.n_embd = self.hparams.n_embd
        self.n_vocab = self.hparams.n_vocab
        self.n_expert = self.hparams.n_expert
        self.n_expert_used = self.hparams.n_expert_used
        self.n_ctx = n_ctx
        self.n_slots = n_slots
        self.callback: Callback | None = None
        self._n_ubatch = config.n_ubatch
        self._checks = PassChecks(self.n_vocab, n_ctx, config)
        self._kv_pad = config.kv_pad
        self._n_cells = n_cells(n_ctx, config.kv_pad)
        self._attention_inputs = AttentionInputs(self._n_cells)
        embedding = index.tensors["token_embd.weight"]
        specs = architecture.weights(self.hparams, index.tensors)
        self._weights = bind_weights(index, device, specs, config, with_mtp=self.has_mtp)
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
        self._mtp = self._open_mtp(sources, index, config) if self.has_mtp else None

    def _open_mtp(self, sources: GraphSources, index: ModelIndex, config: ModelsConfig) -> Mtp:
        try:
            block = MtpBlock(sources, index, self._embeddings, self._attention_inputs, self._n_kv)
        except BaseException:
            self._mtp = None
            self.close()
            raise
        return Mtp(block, self.n_slots, self._n_cells, config.mtp_fill_tokens)

    def _open_batches(self, sources: GraphSources, buffers: BatchBuffers) -> None:
        self._batch_graphs = BatchGraphs(sources, buffers)
        self._batches = TokenBatches(
            self._batch_graphs,
            buffers,
            self.hparams,
            self._embeddings,
            self._attention_inputs,
            self._n_kv,
            self._keep_hidden,
        )

    @property
    def state_bytes(self) -> int:
        return self._states.n_bytes

    def check(self, slot: int, tokens: Sequence[int]) -> None:
        self._checks.check(self._slot(slot), list(tokens))

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
        self._checks.check(self._slot(slot), ids)
        n_out = len(ids) if all_logits else 1
        return self._run(Member(self._slot(slot), ids, n_out), stacked, chosen)

    def forward_batch(
        self, parts: Sequence[Part], *, stacked: Stacked | None = None, chosen: Chosen | None = None
    ) -> Generator[ExpertCall, F32Array, list[F32Array]]:
        members = [
            Member(self._slot(slot), list(tokens), n_out, tentative)
            for slot, tokens, n_out, tentative in parts
        ]
        self._checks.check_all(members, self.callback is not None)
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
        if self._mtp is not None:
            self._mtp.accept(state, n_tokens)
        state.stand(state.n_past + n_tokens)

    def draft(self, slot: int, token: int) -> Iterator[int]:
        state = self._slot(slot)
        if self._mtp is None:
            raise UsageError("the model has no MTP block to guess with, or it was not loaded")
        self._checks.check_tokens(state, [token])
        state.forget_later()
        return self._mtp.draft(slot, token)

    def reset(self, slot: int) -> None:
        state = self._slot(slot)
        is_bad = self._mtp is not None and self._mtp.reset(slot)
        self._states.clear(slot, with_cache=state.poisoned or is_bad)
        state.stand(0)
        state.poisoned = False
        state.checkpoints.clear()

    @property
    def checkpoint_bytes(self) -> int:
        return self._states.recurrent_bytes + (4 * self.n_embd if self.has_mtp else 0)

    def checkpoint(self, slot: int) -> Checkpoint:
        state = self._slot(slot)
        if state.unfinished:
            raise UsageError(f"slot {slot} holds an unfinished pass: there is nothing to come back to")
        if state.tentative is not None:
            raise UsageError(f"slot {slot} holds tokens that are not accepted: it is nowhere to come back to")
        hidden = None if self._mtp is None else self._mtp.checkpoint(slot)
        checkpoint = Checkpoint(slot, state.n_past, self._states.read_recurrent(slot), hidden)
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
        if self._mtp is not None:
            self._mtp.restore(slot, checkpoint.n_past, checkpoint.hidden)
        state.stand(checkpoint.n_past)

    def n_past(self, slot: int) -> int:
        return self._slot(slot).n_past

    def close(self) -> None:
        if self._mtp is not None:
            self._mtp.close()
        if self._batch_graphs is not None:
            self._batch_graphs.close()
        self._replay.close()
        self._graphs.close()
        self._states.close()
        self._weights.close()

    # -- one pass

    def _run_batch(
        self, members: list[Member], stacked: Stacked | None, chosen: Chosen | None
    ) -> Generator[ExpertCall, F32Array, list[F32Array]]:
        if len(members) == 1:
            return [(yield from self._run(members[0], stacked, chosen))]
        # Again: slots may have moved since `forward_batch` was called.
        self._checks.check_all(members, self.callback is not None)
        for member in members:
            member.slot.begin(len(member.ids) if member.tentative else 0)
        lanes = self._lanes(members)
        results = yield from run_together(lanes, self.n_layer, self.n_embd)
        logits = [np.empty((0, self.n_vocab), np.float32) for _ in members]
        for lane, result in zip(lanes, results, strict=True):
            start = 0
            for place in lane.places:
                n = members[place].n_out
                if result is not None and n:
                    logits[place] = result[start : start + n]
                start += n
        for member in members:
            member.slot.ran(len(member.ids))
            member.slot.unfinished = False
        return logits

    def _lanes(self, members: list[Member]) -> list[Lane]:
        """Single tokens go together. Several of a slot go on their own, as they would alone: so many rows gain little
        by more, and float mat-muls of several columns have other last bits than those of one. So do tentative ones.

        An MTP block needs all rows of the last layer, too.
        """
        lanes = []
        for place, (slot, ids, n, tentative) in enumerate(members):
            if len(ids) > 1 or tentative:
                steps = self._chunk(slot, ids, max(1, n), n > 0, None, None)
                lanes.append(Lane(steps, [place], [len(ids)], [len(ids) if self.has_mtp else n]))
        singles = [
            place for place, member in enumerate(members) if len(member.ids) == 1 and not member.tentative
        ]
        if singles and self._batches is not None:
            singles.sort(key=lambda place: -members[place].n_out)  # those with logits first
            n_out = [members[place].n_out for place in singles]
            slots = [members[place].slot for place in singles]
            steps = self._batches.run(slots, [members[place].ids[0] for place in singles], sum(n_out))
            n_rows = [1] * len(singles)
            lanes.append(Lane(steps, singles, n_rows, n_rows if self.has_mtp else n_out))
        return lanes

    def _run(
        self, member: Member, stacked: Stacked | None, chosen: Chosen | None
    ) -> Generator[ExpertCall, F32Array, F32Array]:
        slot, ids, n_wanted, tentative = member
        self._checks.check(slot, ids)  # again: the slot may have moved since `forward` was called
        slot.begin(len(ids) if tentative else 0)
        logits: list[F32Array] = []
        for start in range(0, len(ids), self._n_ubatch):
            chunk = ids[start : start + self._n_ubatch]
            is_all, is_last = n_wanted == len(ids), start + len(chunk) == len(ids)
            wants_logits = is_all or (is_last and n_wanted > 0)
            n_out = len(chunk) if is_all else 1
            out = yield from self._chunk(slot, chunk, n_out, wants_logits, stacked, chosen)
            if out is not None and wants_logits:
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
        """Run a chunk through all layers; logits f32 [n_out, n_vocab], if they are wanted (or cost nothing).

        The last layer goes on with `n_out` tokens only, and without its experts if no logits are wanted; with an MTP
        block it goes on with all.
        """
        n_tokens, last = len(ids), self.n_layer - 1
        n_kv = self._n_kv(slot.n_past + n_tokens)
        kv_inputs = self._attention_inputs(slot.n_past, n_tokens, n_kv)
        tentative = slot.tentative
        fuses = n_tokens == 1 and wants_logits and self.callback is None and tentative is None
        skips_experts = not wants_logits and not self.has_mtp
        n_logits = n_out if wants_logits or n_tokens == 1 else 0
        self._graphs.traces = self.callback is not None
        values, first = self._embeddings.rows(ids), 0
        while True:
            whole = whole_layers(first, self.n_layer, stacked) if fuses and stacked is not None else ()
            cut = first + len(whole)
            n = n_out if cut >= last and not self.has_mtp else n_tokens
            graph = self._graphs.get(
                slot.index,
                first,
                whole,
                n_tokens=min(n_tokens, len(values)),
                n_out=n,
                n_logits=n_logits,
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
                return self._take_last(slot, graph, first, ids, n_logits)
            call = self._take_call(slot, graph, first, cut)
            if cut == last and skips_experts:
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

    def _take_last(
        self, slot: Slot, graph: LayerGraph, first: int, ids: list[int], n_logits: int
    ) -> F32Array | None:
        """The logits, if there are any. Hidden states are kept for the MTP block."""
        hidden = graph.read(HIDDEN) if self.has_mtp else None
        logits = graph.read(LOGITS) if n_logits else None
        last = self.n_layer - 1
        self._finish(slot, graph, min(first, last), last)
        if hidden is not None:
            self._keep_hidden(slot, ids, hidden)
        return logits

    def _keep_hidden(self, slot: Slot, ids: list[int], hidden: F32Array) -> None:
        """Tokens went through all layers; their last hidden states."""
        if self._mtp is not None:
            self._mtp.ran(slot, ids, hidden)

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
        return min(self._n_cells, n_cells(n_tokens, self._kv_pad))

    def _slot(self, slot: int) -> Slot:
        if not 0 <= slot < self.n_slots:
            raise UsageError(f"slot {slot} does not exist; there are {self.n_slots}")
        return self._slots[slot]
