"""One token of each of several slots: the dense path of a layer is run once for all of them, the cores slot by slot."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import numpy as np

from swarmnode.compute.row_table import RowTable
from swarmnode.compute.tensors import read_part, write_part
from swarmnode.models.base import ExpertCall, F32Array
from swarmnode.models.batch_buffers import BatchBuffers
from swarmnode.models.batch_graphs import BatchGraphs
from swarmnode.models.hparams import Hparams
from swarmnode.models.layer_graphs import AttentionInputs
from swarmnode.models.slot import Slot, not_finite


class TokenBatches:
    """Runs them, several side by side: between two calls a pass has in the buffers what it needs again, unless another
    one ran meanwhile; then it brings it back from a copy.

    `n_kv_of(n)`: cells that attention looks at for the first n tokens of a slot. `keep_hidden(slot, ids, hidden)` is
    told the last hidden state of each token, f32 [1, n_embd], if the model has an MTP block.
    """

    def __init__(
        self,
        graphs: BatchGraphs,
        buffers: BatchBuffers,
        hparams: Hparams,
        embeddings: RowTable,
        attention_inputs: AttentionInputs,
        n_kv_of: Callable[[int], int],
        keep_hidden: Callable[[Slot, list[int], F32Array], None],
    ) -> None:
        self._graphs = graphs
        self._buffers = buffers
        self._hparams = hparams
        self._embeddings = embeddings
        self._attention_inputs = attention_inputs
        self._n_kv_of = n_kv_of
        self._keep_hidden = keep_hidden
        self._turn = 0
        """Counts turns: whoever has the last one has the buffers."""

    def run(
        self, slots: Sequence[Slot], tokens: Sequence[int], n_out: int
    ) -> Generator[ExpertCall, F32Array, F32Array | None]:
        """Run tokens[i] of slots[i] through all layers; logits f32 [n_out, n_vocab] of the first ones, None for 0.

        The caller has checked everything and keeps the slots' positions. The last layer's call has the first `n_out`
        rows, and is left out without any; the other rows are only looked at for numbers that are not finite. With an
        MTP block it has all rows. Raises DeviceError.
        """
        turn, n_layer, n_rows = self._next_turn(), self._hparams.n_layer, len(slots)
        cells_seen = self._write_inputs(slots)
        values = self._embeddings.rows(tokens)
        for layer in range(n_layer):
            self._run_layer(layer, slots, cells_seen, values)
            self._check_finite(slots, read_part(self._buffers.squares, n_rows), layer)
            n = n_rows if layer < n_layer - 1 or self._hparams.n_mtp else n_out
            if n == 0:
                return None
            call, kept = self._take_call(layer, n), self._take_residual(n)
            values = yield call
            if turn != self._turn:
                turn = self._next_turn()
                self._write_inputs(slots)
                self._put_back(kept)
        write_part(self._buffers.given, values)
        self._graphs.run_dense("logits", n_layer, n)
        self._check_finite(slots, read_part(self._buffers.squares, n), n_layer - 1)
        self._tell_hidden(slots, tokens)
        return read_part(self._buffers.logits, n_out, self._hparams.n_vocab) if n_out else None

    def _tell_hidden(self, slots: Sequence[Slot], tokens: Sequence[int]) -> None:
        if self._buffers.hidden is not None:
            hidden = read_part(self._buffers.hidden, len(slots), self._hparams.n_embd)
            for row, (slot, token) in enumerate(zip(slots, tokens, strict=True)):
                self._keep_hidden(slot, [token], hidden[row : row + 1])

    def _next_turn(self) -> int:
        self._turn += 1
        return self._turn

    def _take_residual(self, n: int) -> tuple[F32Array, F32Array]:
        """What a layer adds to the routed output: residual and shared expert, f32 [n, n_embd] each."""
        buffers, n_embd = self._buffers, self._hparams.n_embd
        return read_part(buffers.residual, n, n_embd), read_part(buffers.shared, n, n_embd)

    def _put_back(self, kept: tuple[F32Array, F32Array]) -> None:
        for buffer, values in zip((self._buffers.residual, self._buffers.shared), kept, strict=True):
            write_part(buffer, values)

    def _run_layer(
        self, layer: int, slots: Sequence[Slot], cells_seen: Sequence[int], values: F32Array
    ) -> None:
        """Up to the experts; `values`: embeddings, or the routed output of the layer before."""
        write_part(self._buffers.given, values)
        self._graphs.run_dense("pre", layer, len(slots))
        for slot, n_kv in zip(slots, cells_seen, strict=True):
            self._graphs.run_core(slot.index, layer, n_kv)
        self._graphs.run_dense("post", layer, len(slots))

    def _write_inputs(self, slots: Sequence[Slot]) -> list[int]:
        """Write what the graphs of all layers read; how many cells each slot's attention looks at."""
        buffers, n_rows = self._buffers, len(slots)
        n_cells, n_slots = buffers.masks.ne[:2]
        positions = np.zeros((4, n_rows), np.int32)
        positions[:3] = [slot.n_past for slot in slots]
        columns = np.array([slot.index for slot in slots], np.int32)
        cells = np.zeros(n_slots, np.int64)
        cells[columns] = positions[0]
        cells_seen = [self._n_kv_of(slot.n_past + 1) for slot in slots]
        for slot, n_kv in zip(slots, cells_seen, strict=True):
            mask = self._attention_inputs.mask(slot.n_past, n_kv)
            write_part(buffers.masks, mask, slot.index * n_cells)
        write_part(buffers.positions, positions)
        write_part(buffers.columns, columns)
        write_part(buffers.cells, cells)
        return cells_seen

    def _take_call(self, layer: int, n: int) -> ExpertCall:
        buffers, n_used = self._buffers, self._hparams.n_expert_used
        return ExpertCall(
            layer,
            read_part(buffers.rows, n, self._hparams.n_embd),
            read_part(buffers.ids, n, n_used),
            read_part(buffers.weights, n, n_used),
        )

    def _check_finite(self, slots: Sequence[Slot], squares: F32Array, layer: int) -> None:
        """DeviceError unless all of the first slots' rows are; the others' slots are poisoned."""
        is_finite = np.isfinite(squares).ravel()
        if is_finite.all():
            return
        for slot, is_good in zip(slots, is_finite.tolist(), strict=False):
            if not is_good:
                slot.poison()
        raise not_finite(layer, layer)
