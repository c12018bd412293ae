"""Takes a slot's recurrent states on by tokens that ran tentatively: their cores again, from what those were given.

A pass whose tokens may be taken back leaves the states alone and keeps the inputs of the cores (`Tentative`), 50 KB a
token and layer at the real sizes; a copy of the states would take 4.3 MB a layer, there and back. What a core gives
its states does not depend on how many tokens it runs at once (decision 0028).
"""

from __future__ import annotations

from collections.abc import Mapping

from swarmnode.compute import ggml
from swarmnode.compute.graph import Graph, GraphBuilder, Workspace
from swarmnode.models.architecture import into_name
from swarmnode.models.base import F32Array
from swarmnode.models.graph_sources import GraphSources
from swarmnode.models.layer_builder import LayerBuilder
from swarmnode.models.layer_graphs import LayerGraph

_MAX_NODES = 48
"""Tensors of a core's graph; qwen35moe has 32."""


class CoreReplay:
    """Runs the cores of recurrent layers alone, one graph a layer, built, run and freed in memory of its own."""

    def __init__(
        self,
        sources: GraphSources,
    ) -> None:
        self._sources = sources
        self._workspace: Workspace | None = None
        """Made when it is first needed: as large as one layer's state, and what a core works with."""

    def take(self, graph: LayerGraph, layer: int, n_tokens: int) -> tuple[F32Array, ...]:
        """What a tentative pass gave the core of a layer, f32 [n_tokens, ...] each; copies."""
        shapes = self._sources.architecture.step_shapes(self._sources.hparams, layer).into
        return tuple(
            graph.read(into_name(layer, place)).reshape(n_tokens, *reversed(ne))
            for place, ne in enumerate(shapes)
        )

    def run(self, slot: int, inputs: Mapping[int, tuple[F32Array, ...]], n_tokens: int) -> None:
        """Run the cores of all layers in `inputs` (as `take` gave them) for the first `n_tokens`. DeviceError."""
        for layer, values in inputs.items():
            graph = self._build(slot, layer, n_tokens)
            try:
                for place, value in enumerate(values):
                    graph.set(into_name(layer, place), value[:n_tokens])
                graph.compute()
            finally:
                graph.close()

    def _build(self, slot: int, layer: int, n_tokens: int) -> Graph:
        if self._workspace is None:
            self._workspace = Workspace(self._sources.device)
        g = GraphBuilder(self._sources.device, _MAX_NODES)
        b = LayerBuilder(
            g,
            self._sources.weights,
            self._sources.states.tensors,
            self._sources.hparams,
            slot=slot,
            layer=layer,
            n_tokens=n_tokens,
            n_out=n_tokens,
            n_kv=0,
            inputs={},
            traced=None,
        )
        shapes = self._sources.architecture.step_shapes(self._sources.hparams, layer).into
        into = [
            g.input(into_name(layer, place), ggml.F32, *ne, n_tokens, keep=False)
            for place, ne in enumerate(shapes)
        ]
        self._sources.architecture.build_core(b, into)  # the states are its effect
        return g.build(self._workspace)

    def close(self) -> None:
        """Free the memory."""
        if self._workspace is not None:
            self._workspace.close()
