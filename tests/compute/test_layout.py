"""Layouts say what is wrong with them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarmnode.compute.layout import DOWN, GATE, GATE_UP, UP, ExpertTensor, LayerLayout, layout_problem

GOOD = LayerLayout(
    3,
    256,
    128,
    8,
    (
        ExpertTensor(GATE, 0, 256, 128, 256 * 128 * 4),
        ExpertTensor(UP, 0, 256, 128, 256 * 128 * 4),
        ExpertTensor(DOWN, 1, 128, 256, 256 * 128 * 2),
    ),
)
FUSED = replace(GOOD, tensors=(ExpertTensor(GATE_UP, 0, 256, 256, 256 * 256 * 4), GOOD.tensors[2]))


def test_facts() -> None:
    assert layout_problem(GOOD) is None
    assert layout_problem(FUSED) is None
    assert GOOD.expert_bytes == 256 * 128 * 10
    assert not GOOD.fused
    assert FUSED.fused
    assert FUSED.kinds == (GATE_UP, DOWN)
    assert GOOD.tensor(DOWN).ne1 == 256
    with pytest.raises(KeyError):
        FUSED.tensor(UP)


@pytest.mark.parametrize(
    ("layout", "problem"),
    [
        (replace(GOOD, layer=-1), "negative"),
        (replace(GOOD, n_expert=0), "at least 1"),
        (replace(GOOD, n_embd=512), "ffn_gate_exps is"),
        (replace(GOOD, tensors=GOOD.tensors[:2]), "neither"),
        (replace(GOOD, tensors=GOOD.tensors[::-1]), "neither"),
        (replace(GOOD, tensors=(*GOOD.tensors[:2], replace(GOOD.tensors[2], n_bytes=255))), "255 bytes"),
        (replace(FUSED, n_ff=256), "ffn_gate_up_exps is"),
    ],
)
def test_problems_are_named(layout: LayerLayout, problem: str) -> None:
    assert problem in (layout_problem(layout) or "")
