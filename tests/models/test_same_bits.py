"""A token's logits are the same bit by bit, whatever it is computed with (decision 0028)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from swarmnode.config import Repack
from swarmnode.models import weight_spec
from swarmnode.models.backbone import Backbone
from swarmnode.models.base import F32Array
from swarmnode.testing.tiny_gguf import TinyModel, write_tiny_gguf
from tests.models.kit import SMALL, LocalModel, open_local

N_TOKENS = 560
"""More than 512, from where on ggml treats a single query in another way, and more than two paddings of the cells."""
TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, 200, N_TOKENS)]
REPACKED = TinyModel(
    n_layer=4, n_expert=6, n_expert_used=2, dense_type="Q4_0", up_type="Q4_0", down_types=("Q4_0",)
)
"""Of a type whose matrices are copied into another order (compute/repack.py) where ggml knows one."""
MODELS = {
    "F32": replace(SMALL, dense_type="F32", up_type="F32", down_types=("F32",)),
    "F16": replace(SMALL, dense_type="F16", up_type="F16", down_types=("F16",)),
    "BF16": replace(SMALL, dense_type="BF16"),
    "Q8_0": replace(SMALL, dense_type="Q8_0", up_type="Q8_0", down_types=("Q8_0",)),
    "Q4_0": REPACKED,
    "K": TinyModel(
        n_layer=4, n_expert=6, n_expert_used=2, dense_type="Q4_K", up_type="Q4_K", down_types=("Q6_K",)
    ),
    "one K/V head": replace(SMALL, n_head_kv=1),
    "fused": replace(SMALL, fused_qkv=True),
}


def in_cuts(local: LocalModel, cuts: Sequence[int]) -> F32Array:
    """Logits of all tokens, run in passes of these lengths (the last one again and again)."""
    local.model.reset(0)
    logits, start, number = [], 0, 0
    while start < N_TOKENS:
        end = start + cuts[min(number, len(cuts) - 1)]
        logits.append(local.run(TOKENS[start:end], all_logits=True))
        start, number = end, number + 1
    return np.concatenate(logits)


@pytest.mark.parametrize("name", list(MODELS))
def test_any_cut_gives_the_same_bits(tmp_path: Path, name: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, MODELS[name])
    with open_local(path, n_ctx=1024) as local:
        one_by_one = in_cuts(local, [1])
        for cuts in ([N_TOKENS], [2], [63], [64], [65, 1, 1, 200], [511, 1], [3, 128]):
            assert np.array_equal(in_cuts(local, cuts), one_by_one), cuts


def test_a_chunk_of_any_size_gives_the_same_bits(tmp_path: Path) -> None:
    """A graph has room for as many pieces of a chunk as attention makes (ModelsConfig.n_ubatch)."""
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, SMALL)
    tokens, found = (TOKENS * 4)[:2048], []
    for n_ubatch in (512, 2048):
        with open_local(path, n_ctx=2048, n_ubatch=n_ubatch) as local:
            found.append(local.run(tokens))
    assert np.array_equal(found[0], found[1])


@pytest.mark.parametrize("n_threads", [2, 3])
def test_any_number_of_threads_gives_the_same_bits(tmp_path: Path, n_threads: int) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, SMALL)
    found = []
    for n in (1, n_threads):
        with open_local(path, n_ctx=1024, n_threads=n) as local:
            found.append(in_cuts(local, [500, 1]))
    assert np.array_equal(found[0], found[1])


def test_repacked_or_not_the_logits_are_close(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, REPACKED)
    found: dict[str, F32Array] = {}
    modes: tuple[Repack, ...] = ("never", "auto", "always")
    for mode in modes:
        with open_local(path, repack=mode) as local:
            found[mode] = local.run(TOKENS[:100], all_logits=True)
    for mode in modes:
        # A last bit decides here and there which way a value is rounded to the 8 bits that it is multiplied with.
        assert np.abs(found[mode] - found["never"]).max() < 0.01 * np.abs(found["never"]).max()


def test_without_memory_for_copies_nothing_is_repacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, REPACKED)
    with open_local(path, repack="never") as local:
        plain = local.run(TOKENS[:9])
    monkeypatch.setattr(weight_spec, "available_bytes", lambda: 1000)
    with open_local(path) as local:
        assert np.array_equal(local.run(TOKENS[:9]), plain)
    monkeypatch.setattr(weight_spec, "available_bytes", lambda: 1 << 40)
    with open_local(path) as local:
        backbone = local.model
        assert isinstance(backbone, Backbone)
        copied = backbone._weights.allocated_bytes
        assert (copied > 0) is not np.array_equal(local.run(TOKENS[:9]), plain)
