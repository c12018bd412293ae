"""The forward pass of any architecture: slots, chunks, and the exchange of routed experts layer by layer."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence

import numpy as np

from swarmnode.compute import ggml
from swarmnode.compute.devices import Device
from swarmnode.config import ModelsConfig
from swarmnode.errors import ContextFullError, DeviceError, UnsupportedModelError, UsageError
from swarmnode.models.architecture import Architecture
from swarmnode.models.base import Callback, ExpertCall, F32Array
from swarmnode.models.layer_builder import INP_POS, KQ_MASK, KV_IDX
from swarmnode.models.layer_graphs import (
    IDS,
    INPUT,
    LOGITS,
    ROWS,
    WEIGHTS,
    LayerGraph,
    LayerGraphs,
    attention_inputs,
)
from swarmnode.models.state import SlotStates
from swarmnode.models.weight_spec import bind_weights
from swarmnode.weights.index import ModelIndex

_MAX_SLOTS = 1024
_F32 = np.dtype(np.float32)


class _Slot:
    """Where one sequence stands."""

    __slots__ = ("index", "n_past", "poisoned", "unfinished")

    def __init__(self, index: int) -> None:
        self.index = index
        self.n_past = 0
        self.unfinished = False
        """A pass began and did not end: some layers have seen tokens that others have not."""
        self.poisoned = False
        """A pass ended in numbers that are not finite: some may be in the KV cache."""


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
        self._kv_pad = config.kv_pad
        self._n_cells = _round_up(n_ctx, config.kv_pad)
        embedding = index.tensors["token_embd.weight"]
        self._embedding_type = embedding.ggml_type
        self._embedding = index.data("token_embd.weight")
        self._weights = bind_weights(index, device, architecture.weights(self.hparams, index.tensors))
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
        self._graphs = LayerGraphs(
            device, architecture, self.hparams, self._weights, self._states, n_slots=n_slots
        )
        self._slots = [_Slot(slot) for slot in range(n_slots)]

    @property
    def state_bytes(self) -> int:
        return self._states.n_bytes

    def forward(
        self, slot: int, tokens: Sequence[int], *, all_logits: bool = False
    ) -> Generator[ExpertCall, F32Array, F32Array]:
        ids = list(tokens)
        self._check_pass(self._slot(slot), ids)
        return self._run(self._slot(slot), ids, all_logits)

    def reset(self, slot: int) -> None:
        state = self._slot(slot)
        self._states.clear(slot, with_cache=state.poisoned)
        state.n_past = 0
        state.unfinished = state.poisoned = False

    def n_past(self, slot: int) -> int:
        return self._slot(slot).n_past

    def close(self) -> None:
        self._graphs.close()
        self._states.close()
        self._weights.close()

    # -- one pass

    def _run(
        self, slot: _Slot, ids: list[int], all_logits: bool
    ) -> Generator[ExpertCall, F32Array, F32Array]:
        self._check_pass(slot, ids)  # again: the slot may have moved since `forward` was called
        slot.unfinished = True
        logits: list[F32Array] = []
        for start in range(0, len(ids), self._n_ubatch):
            chunk = ids[start : start + self._n_ubatch]
            wants_logits = all_logits or start + len(chunk) == len(ids)
            n_out = len(chunk) if all_logits else 1
            x = yield from self._layers(slot, chunk, n_out, wants_logits)
            if wants_logits:
                logits.append(self._logits(slot, x))
            slot.n_past += len(chunk)
        slot.unfinished = False
        return logits[0] if len(logits) == 1 else np.concatenate(logits)

    def _layers(
        self, slot: _Slot, ids: list[int], n_out: int, wants_logits: bool
    ) -> Generator[ExpertCall, F32Array, F32Array]:
        """Run a chunk through all layers and return the routed output of the last one, f32 [n_out, n_embd].

        The last layer goes on with `n_out` tokens only, and without its experts if no logits are wanted.
        """
        n_tokens, last = len(ids), self.n_layer - 1
        n_kv = min(self._n_cells, _round_up(slot.n_past + n_tokens, self._kv_pad))
        positions, cells, mask = attention_inputs(slot.n_past, n_tokens, n_kv)
        values = self._embed(ids)
        for layer in range(self.n_layer):
            n = n_out if layer == last else n_tokens
            self._graphs.traces = self.callback is not None
            graph = self._graphs.layer(slot.index, layer, n_tokens=n_tokens, n_out=n, n_kv=n_kv)
            graph.write(INPUT, values)
            if graph.uses_kv:
                graph.write(INP_POS, positions)
                graph.write(KV_IDX, cells)
                graph.write(KQ_MASK, mask)
            graph.compute()
            call = ExpertCall(layer, graph.read(ROWS), graph.read(IDS), graph.read(WEIGHTS))
            self._finish(graph)
            self._check_numbers(slot, layer, call.rows, call.weights)
            if layer == last and not wants_logits:
                break
            values = yield call
            self._check_routed(values, n)
            if self.callback is not None:
                self.callback("ffn_moe_out", layer, values)
        return values

    def _logits(self, slot: _Slot, routed: F32Array) -> F32Array:
        n = len(routed)
        self._graphs.traces = self.callback is not None
        graph = self._graphs.layer(slot.index, self.n_layer, n_tokens=n, n_out=n, n_kv=0)
        graph.write(INPUT, routed)
        graph.compute()
        logits: F32Array = graph.read(LOGITS)
        rows: F32Array = graph.read(ROWS)
        self._finish(graph)
        self._check_numbers(slot, self.n_layer - 1, rows)
        return logits

    def _finish(self, graph: LayerGraph) -> None:
        if self.callback is not None:
            graph.report(self.callback)
        if not graph.is_cached:
            graph.close()

    def _embed(self, ids: list[int]) -> F32Array:
        """Rows of the embedding matrix, f32 [T, n_embd].

        On the host: some devices cannot gather rows of quantised types, and the matrix may be 1 GB.
        """
        row_bytes = len(self._embedding) // self.n_vocab
        rows = np.empty((len(ids), self.n_embd), np.float32)
        for row, token in zip(rows, ids, strict=True):
            data = self._embedding[token * row_bytes : (token + 1) * row_bytes]
            row[:] = ggml.dequantize(self._embedding_type, data, self.n_embd)
        return rows

    # -- checks

    def _slot(self, slot: int) -> _Slot:
        if not 0 <= slot < self.n_slots:
            raise UsageError(f"slot {slot} does not exist; there are {self.n_slots}")
        return self._slots[slot]

    def _check_pass(self, slot: _Slot, ids: list[int]) -> None:
        if not ids:
            raise UsageError("there are no tokens to compute")
        if min(ids) < 0 or max(ids) >= self.n_vocab:
            wrong = next(token for token in ids if not 0 <= token < self.n_vocab)
            raise UsageError(f"token id {wrong} is outside the vocabulary of {self.n_vocab}")
        if slot.unfinished:
            raise UsageError(f"slot {slot.index} holds an unfinished pass; reset it first")
        if slot.n_past + len(ids) > self.n_ctx:
            raise ContextFullError(
                f"{slot.n_past} + {len(ids)} tokens do not fit the context of {self.n_ctx}"
            )

    def _check_numbers(self, slot: _Slot, layer: int, *arrays: F32Array) -> None:
        """DeviceError for NaN or infinity: mat-muls of quantised weights turn them into zeros, and the zeros into an
        answer that looks like one.
        """
        if not all(map(_is_finite, arrays)):
            slot.poisoned = True
            raise DeviceError(
                f"the model's numbers are not finite in layer {layer}: the file is damaged (compare its checksum), or "
                "the layer before got a wrong answer from its experts"
            )

    def _check_routed(self, values: object, n: int) -> None:
        expected = (n, self.n_embd)
        if not isinstance(values, np.ndarray) or values.dtype != _F32 or values.shape != expected:
            raise UsageError(f"the routed output must be float32{list(expected)}")


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


def _is_finite(rows: F32Array) -> bool:
    """Whether all of f32 [T, n] are finite; for T = 1, also whether their norm is."""
    if len(rows) == 1:  # numpy's reductions cost ten times as much
        row = rows[0]
        return math.isfinite(np.dot(row, row))
    return bool(np.isfinite(rows).all())


def _round_up(n: int, unit: int) -> int:
    return (n + unit - 1) // unit * unit
