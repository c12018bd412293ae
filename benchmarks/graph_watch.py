"""Looks at every graph that this process computes. Nothing of it is in the package, so that nobody pays for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from swarmnode.compute.graph import Graph


@contextmanager
def watching_graphs(watch: Callable[[Callable[[Graph], None], Graph], None]) -> Iterator[None]:
    """Inside, `watch(compute, graph)` is called for each graph, and has to call `compute(graph)`."""
    compute = Graph.compute

    def watched(graph: Graph) -> None:
        watch(compute, graph)

    with patch.object(Graph, "compute", watched):
        yield
