"""Columns that come out the same in whatever company."""

from __future__ import annotations

import numpy as np
import pytest

from swarmnode.compute import ggml
from swarmnode.compute.columns import keeps_columns, mul_columns
from swarmnode.compute.devices import Device
from swarmnode.compute.graph import GraphBuilder
from swarmnode.compute.tensors import WeightSet
from swarmnode.weights.ggml_types import TYPE_NUMBERS

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("n_out", [1, 8, 96])
def test_a_column_has_the_bits_that_it_has_alone(device: Device, kind: str, n_out: int) -> None:
    """Where the device says that it keeps them, a plain mat-mul; else column by column."""
    rng = np.random.default_rng(3)
    number = TYPE_NUMBERS[kind]
    weights = WeightSet(device)
    w = weights.bind(
        "w", number, (768, n_out), ggml.quantize(number, rng.standard_normal((n_out, 768), "f4"))
    )
    x = rng.standard_normal((13, 768), np.float32)
    keeps = keeps_columns(device, number)
    outputs = []
    for columns in (x, *(row[None] for row in x)):
        g = GraphBuilder(device, 8)
        given = g.input("x", ggml.F32, 768, len(columns))
        plain = keeps or len(columns) == 1
        g.output("y", g.mul_mat(w, given) if plain else mul_columns(g, w, given))
        graph = g.build()
        graph.set("x", columns)
        graph.compute()
        outputs.append(graph.get("y"))
        graph.close()
    np.testing.assert_array_equal(outputs[0], np.concatenate(outputs[1:]))
    weights.close()


def test_a_type_that_cannot_be_tried_out_is_taken_column_by_column(device: Device) -> None:
    assert not keeps_columns(device, TYPE_NUMBERS["IQ2_XXS"])
