"""Layers whose experts are all here need no cut: the same bits, and nothing that ggml would abort on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from swarmnode.compute.expert_graph import StackedExperts
from swarmnode.compute.graph import Graph, GraphBuilder, Workspace
from swarmnode.errors import DeviceError
from swarmnode.models.base import ExpertCall, F32Array, run_pass
from swarmnode.testing.tiny_gguf import write_tiny_gguf
from swarmnode.weights.index import ModelIndex

from .kit import SMALL, LocalModel, open_local, open_tiny, random_tokens

TOKENS = random_tokens(20, SMALL.n_vocab)


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalModel]:
    with open_tiny(tmp_path, n_slots=2) as opened:
        yield opened


def stacked_of(local: LocalModel, layers: set[int]) -> Callable[[int], StackedExperts | None]:
    return lambda layer: local.bank.stacked(layer, SMALL.n_expert_used) if layer in layers else None


def run_uncut(local: LocalModel, token: int, layers: set[int], slot: int = 0) -> tuple[F32Array, list[int]]:
    """Logits of one token, and the layers that were cut."""
    cuts = []

    def experts(call: ExpertCall) -> F32Array:
        cuts.append(call.layer)
        return local.experts(call)

    steps = local.model.forward(slot, [token], stacked=stacked_of(local, layers))
    return run_pass(steps, experts), cuts


@pytest.mark.parametrize("own_memory", [False, True])
def test_wherever_the_cuts_are_the_logits_are_bit_equal(tmp_path: Path, own_memory: bool) -> None:
    n_layer = SMALL.n_layer
    with open_tiny(tmp_path, own_memory=own_memory, n_slots=2) as local:
        for token, mask in enumerate(range(2**n_layer)):
            whole = {layer for layer in range(n_layer) if mask >> layer & 1}
            logits, cuts = run_uncut(local, token, whole)
            np.testing.assert_array_equal(logits, local.run([token], 1))
            assert cuts == sorted(set(range(n_layer)) - whole)


def test_an_uncut_sequence_crosses_the_padding_of_the_kv_cache(local: LocalModel) -> None:
    tokens = random_tokens(260, SMALL.n_vocab)
    for slot in (0, 1):
        local.run(tokens[:254], slot)
    for token in tokens[254:]:
        logits, cuts = run_uncut(local, token, set(range(SMALL.n_layer)))
        assert cuts == []
        np.testing.assert_array_equal(logits, local.run([token], 1))


def test_several_tokens_and_a_callback_cut_every_layer(local: LocalModel) -> None:
    everything = set(range(SMALL.n_layer))
    steps = local.model.forward(0, TOKENS, stacked=stacked_of(local, everything))
    assert next(steps).layer == 0
    local.model.reset(0)
    local.model.callback = lambda name, layer, values: None
    assert run_uncut(local, 1, everything)[1] == sorted(everything)


def test_experts_that_moved_are_not_computed_with_the_old_graph(tmp_path: Path) -> None:
    """A graph holds the tensors it was built with."""
    with open_tiny(tmp_path, n_slots=2) as local:
        before, _ = run_uncut(local, 1, {0})
        layout = local.index.expert_layers[0]
        for expert in range(SMALL.n_expert):
            local.bank.remove(0, expert)
        assert local.bank.stacked(0, 1) is None
        order = [*range(1, SMALL.n_expert), 0]  # expert e now holds the weights of its neighbour
        local.bank.reserve(layout, SMALL.n_expert)
        for expert, source in enumerate(order):
            slabs = {kind: local.index.slab(0, source, kind) for kind in layout.kinds}
            local.bank.add(layout, expert, slabs)
        local.model.reset(0)
        after, cuts = run_uncut(local, 1, {0})
        assert 0 not in cuts
        np.testing.assert_array_equal(after, local.run([1], 1))
        assert not np.array_equal(after, before)


class LiveGraphs:
    """Counts what graphs that are built and not closed hold."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._graphs: list[Graph] = []
        build, close = GraphBuilder.build, Graph.close

        def counted(builder: GraphBuilder, workspace: Workspace | None = None) -> Graph:
            self._graphs.append(build(builder, workspace))
            return self._graphs[-1]

        def uncounted(graph: Graph) -> None:
            self._graphs.remove(graph)
            close(graph)

        monkeypatch.setattr(GraphBuilder, "build", counted)
        monkeypatch.setattr(Graph, "close", uncounted)

    @property
    def n_bytes(self) -> int:
        return sum(graph.n_bytes for graph in self._graphs)


def test_cuts_that_move_leave_no_graphs_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each set of cuts has graphs of its own, which together reach through all layers."""
    n_layer = 12
    everything = set(range(n_layer))
    with open_tiny(tmp_path, replace(SMALL, n_layer=n_layer)) as local:
        live = LiveGraphs(monkeypatch)
        run_uncut(local, 1, everything)
        pass_bytes = live.n_bytes
        for cut in everything:
            run_uncut(local, 1, everything - {cut})
        assert pass_bytes < live.n_bytes < 2.5 * pass_bytes


def test_a_damaged_expert_ends_an_uncut_pass_too(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "damaged.gguf", SMALL)
    with ModelIndex.open(path) as index:
        tensor = index.tensors["blk.1.ffn_down_exps.weight"]
    with path.open("r+b") as file:
        file.seek(tensor.offset)
        file.write(b"\xff" * tensor.n_bytes)
    with open_local(path) as local:
        with pytest.raises(DeviceError, match="not finite in layers 0 to 3: "):
            run_uncut(local, 1, set(range(SMALL.n_layer)))
        local.model.reset(0)
        with pytest.raises(DeviceError, match="not finite in layer 2: "):
            run_uncut(local, 1, set())


def test_numbers_without_an_order_choose_experts_that_exist(local: LocalModel) -> None:
    """ggml sorts the gate's numbers: NaN among them must not lead to ids that make it abort."""
    local.model.reset(0)
    steps = local.model.forward(0, [1], stacked=stacked_of(local, {1, 2, 3}))
    call = next(steps)
    with pytest.raises(DeviceError, match="not finite in layers 1 to 3"):
        steps.send(np.full_like(call.rows, np.nan))
