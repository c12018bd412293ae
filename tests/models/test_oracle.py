"""Every intermediate of the graphs against the float64 oracle, for every variant of the file format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from swarmnode.testing.tiny_gguf import TinyModel

from .kit import SMALL, LocalModel, open_tiny, random_tokens
from .oracle_forward import ForwardOracle

TOLERANCE = 2e-3
"""Largest difference relative to the largest value of an intermediate: f16 in the KV cache and inside ggml's flash
attention leaves 7e-4 right behind attention; everything else stays under 2e-4."""
LOGITS_TOLERANCE = 2e-4
FAULT_SHOWS = 10 * LOGITS_TOLERANCE

VARIANTS: dict[str, TinyModel] = {
    "plain": SMALL,
    "fused qkv": replace(SMALL, fused_qkv=True),
    "fused gate_up": replace(SMALL, fused_gate_up=True),
    "tied embeddings": replace(SMALL, tied_embeddings=True),
    "recurrent_layers key": replace(SMALL, recurrent_layers_key=True, full_attention_interval=2),
    "mtp block": replace(SMALL, mtp_block=True, recurrent_layers_key=True),
    "other heads": replace(
        SMALL, n_head=6, n_head_kv=3, head_dim=48, n_k_heads=3, n_v_heads=9, state_size=16
    ),
    "one head of each": replace(SMALL, n_head=1, n_head_kv=1, n_k_heads=1, n_v_heads=1),
    "one expert": replace(SMALL, n_expert_used=1),
    "all experts": replace(SMALL, n_expert=4, n_expert_used=4),
    "attention only": replace(SMALL, full_attention_interval=1, n_layer=2),
    "recurrent only": replace(SMALL, full_attention_interval=9, n_layer=2),
    "split": replace(SMALL, n_parts=3, empty_first_part=True),
}

Named = dict[tuple[str, int], list[npt.NDArray[Any]]]


def record(local: LocalModel, chunks: list[list[int]]) -> Named:
    """Run the chunks one after another; the values of every intermediate, a piece for each chunk."""
    named: Named = {}

    def callback(name: str, layer: int, values: npt.NDArray[Any]) -> None:
        named.setdefault((name, layer), []).append(values.copy())

    local.model.callback = callback
    for chunk in chunks:
        local.run(chunk, all_logits=True)
    local.model.callback = None
    return named


def worst(named: Named, oracle: ForwardOracle) -> dict[tuple[str, int], float]:
    """For each intermediate: largest difference over largest value."""
    errors = {}
    for key, pieces in named.items():
        ours = np.concatenate([piece.ravel() for piece in pieces])
        theirs = oracle.named[key].ravel()
        assert ours.shape == theirs.shape, key
        errors[key] = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
    return errors


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_intermediate_agrees_with_the_oracle(variant: str, tmp_path: Path) -> None:
    tokens = random_tokens(12, SMALL.n_vocab)
    with open_tiny(tmp_path, VARIANTS[variant]) as local:
        named = record(local, [tokens[:8], tokens[8:11], tokens[11:]])
        oracle = ForwardOracle(local.index)
        oracle.run(tokens)
        assert named.keys() == oracle.named.keys()
        assert {key: error for key, error in worst(named, oracle).items() if error > TOLERANCE} == {}


@pytest.mark.parametrize(
    ("attribute", "value"), [("rope_base", 1e4), ("moe_factor", 0.9), ("shared_factor", 0.9), ("n_used", 2)]
)
def test_the_tolerance_would_show_a_fault(attribute: str, value: float, tmp_path: Path) -> None:
    tokens = random_tokens(12, SMALL.n_vocab)
    with open_tiny(tmp_path) as local:
        ours = local.run(tokens, all_logits=True)
        oracle = ForwardOracle(local.index)
        truth = oracle.run(tokens)
        setattr(oracle, attribute, value)
        faulty = oracle.run(tokens)
    scale = np.abs(truth).max()
    assert np.abs(ours - truth).max() / scale < LOGITS_TOLERANCE
    assert np.abs(ours - faulty).max() / scale > FAULT_SHOWS
