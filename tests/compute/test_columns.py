"""Columns that come out the same in whatever company."""

from __future__ import annotations

import numpy as np
import pytest

from swarmnode.compute import ggml
from swarmnode.compute.columns import keeps_columns, mul_column, mul_columns
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
        if len(columns) == 1:
            out = mul_column(g, w, given)
        else:
            out = g.mul_mat(w, given) if keeps else mul_columns(g, w, given)
        g.output("y", g.cont(out))
        graph = g.build()
        graph.set("x", columns)
        graph.compute()
        outputs.append(graph.get("y"))
        graph.close()
    np.testing.assert_array_equal(outputs[0], np.concatenate(outputs[1:]))
    weights.close()


@pytest.mark.parametrize("kind", TYPES)
def test_columns_one_by_one_have_the_bits_of_plain_ones(device: Device, kind: str) -> None:
    """On a device that keeps them, so that it does not matter which way was taken."""
    rng = np.random.default_rng(3)
    number = TYPE_NUMBERS[kind]
    if not keeps_columns(device, number):
        return
    weights = WeightSet(device)
    w = weights.bind("w", number, (768, 96), ggml.quantize(number, rng.standard_normal((96, 768), "f4")))
    x = rng.standard_normal((5, 768), np.float32)
    outputs = []
    for multiply in (GraphBuilder.mul_mat, mul_columns):
        g = GraphBuilder(device, 8)
        g.output("y", g.cont(multiply(g, w, g.input("x", ggml.F32, 768, 5))))
        graph = g.build()
        graph.set("x", x)
        graph.compute()
        outputs.append(graph.get("y"))
        graph.close()
    np.testing.assert_array_equal(outputs[0], outputs[1])
    weights.close()


def test_a_type_that_cannot_be_tried_out_is_taken_column_by_column(device: Device) -> None:
    assert not keeps_columns(device, TYPE_NUMBERS["IQ2_XXS"])
