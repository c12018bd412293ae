"""The index against gguf-py's reader: every byte range, over parts, with and without the odd shapes of real
files.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from swarmnode.testing.tiny_gguf import TinyModel, write_tiny_gguf
from swarmnode.weights.index import ModelIndex
from tests.weights.conftest import MIXED

VARIANTS = {
    "plain": TinyModel(n_layer=2, n_expert=4),
    "fused": TinyModel(n_layer=2, n_expert=4, fused_gate_up=True, fused_qkv=True, up_type="Q8_0"),
    "tied_f16": TinyModel(n_layer=1, n_expert=4, tied_embeddings=True, up_type="F16", down_types=("BF16",)),
    "mixed": MIXED,
}


def stacked(paths: tuple[Path, ...]) -> dict[str, np.ndarray]:
    """Name -> raw bytes, as gguf-py reads them."""
    return {t.name: t.data.reshape(-1).view(np.uint8) for path in paths for t in GGUFReader(path).tensors}


@pytest.mark.parametrize("variant", VARIANTS)
def test_tensors_metadata_and_slabs_equal_those_of_gguf_py(variant: str, tmp_path: Path) -> None:
    with ModelIndex.open(write_tiny_gguf(tmp_path / "m.gguf", VARIANTS[variant])) as index:
        expected = stacked(index.paths)
        assert set(index.tensors) == set(expected)
        for name, raw in expected.items():
            assert index.data(name) == raw.tobytes()
        for layer, layout in index.expert_layers.items():
            for tensor in layout.tensors:
                rows = expected[f"blk.{layer}.{tensor.kind}.weight"].reshape(layout.n_expert, tensor.n_bytes)
                for expert in range(layout.n_expert):
                    assert index.slab(layer, expert, tensor.kind) == rows[expert].tobytes()
        for key, field in GGUFReader(index.paths[0]).fields.items():
            if not key.startswith("GGUF."):
                value = index.metadata[key]
                scalar = isinstance(value, (int, float, str))
                assert (value if scalar else list(value)) == field.contents()


@pytest.mark.parametrize("n_parts", [2, 3, 5])
@pytest.mark.parametrize("empty_first", [False, True])
def test_slices_of_a_split_model_equal_those_of_the_whole(
    n_parts: int, empty_first: bool, tmp_path: Path
) -> None:
    """Mesh-LLM 177: only part 1 was read; 1199: a first part without tensors gave no layers."""
    model = replace(MIXED, mtp_block=True, recurrent_layers_key=True)
    whole = ModelIndex.open(write_tiny_gguf(tmp_path / "whole.gguf", model))
    split = write_tiny_gguf(
        tmp_path / "split.gguf", replace(model, n_parts=n_parts, empty_first_part=empty_first)
    )
    parts = sorted(tmp_path.glob("split-*.gguf"))
    assert len(parts) == n_parts
    for path in (split, parts[-1]):
        with ModelIndex.open(path) as index:
            assert index.paths == tuple(parts)
            assert index.expert_layers == whole.expert_layers
            for name in whole.tensors:
                assert index.data(name) == whole.data(name)


def test_dense_leading_layers_offer_nothing(tmp_path: Path) -> None:
    model = TinyModel(n_layer=5, n_expert=4, dense_layers=(0, 1, 2), n_parts=3)
    with ModelIndex.open(write_tiny_gguf(tmp_path / "m.gguf", model)) as index:
        assert list(index.expert_layers) == [3, 4]
        assert "blk.0.ffn_gate.weight" in index.dense_tensors
        with pytest.raises(KeyError):
            index.slab(0, 0, "ffn_up_exps")


def test_mtp_block_is_neither_layer_nor_dense_path(tmp_path: Path) -> None:
    model = TinyModel(n_layer=2, n_expert=4, mtp_block=True)
    with ModelIndex.open(write_tiny_gguf(tmp_path / "m.gguf", model)) as index:
        assert index.n_layer == 2
        assert list(index.expert_layers) == [0, 1]
        assert index.metadata["qwen35moe.block_count"] == 3
        assert "blk.2.ffn_up_exps.weight" in index.tensors
        assert not [name for name in index.dense_tensors if name.startswith("blk.2.") or "_exps" in name]
        dense_and_routed = len(index.dense_tensors) + 2 * 3
        assert len([name for name in index.tensors if not name.startswith("blk.2.")]) == dense_and_routed


def test_experts_are_priced_by_their_own_layer(mixed: ModelIndex) -> None:
    """colibri 943: every expert was priced at the widest quantisation."""
    sizes = [layout.expert_bytes for layout in mixed.expert_layers.values()]
    assert sizes[0] == sizes[2] == (2 * 144 + 210) * 256
    assert sizes[1] == sizes[3] == 3 * 144 * 256


def test_views_are_read_only_aligned_and_outlive_the_index(mixed_path: Path) -> None:
    index = ModelIndex.open(mixed_path)
    slab = index.slab(1, 5, "ffn_down_exps")
    address = index.address("blk.1.ffn_down_exps.weight")
    assert address % 32 == 0
    assert ctypes.string_at(address + 5 * len(slab), len(slab)) == slab
    assert slab.readonly
    copied = bytes(slab)
    index.close()
    assert slab == copied


def test_slab_outside_the_model_is_a_key_error(mixed: ModelIndex) -> None:
    for layer, expert, kind in [
        (0, 6, "ffn_up_exps"),
        (0, -1, "ffn_up_exps"),
        (4, 0, "ffn_up_exps"),
        (0, 0, "x"),
    ]:
        with pytest.raises(KeyError):
            mixed.slab(layer, expert, kind)


def test_read_only_folder_and_file_work(mixed_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    copy = folder / "m.gguf"
    copy.write_bytes(mixed_path.read_bytes())
    copy.chmod(0o444)
    folder.chmod(0o555)
    before = sorted(folder.iterdir())
    with ModelIndex.open(copy) as index:
        assert len(index.expert_layers) == 4
    assert sorted(folder.iterdir()) == before
