"""Shard files: opened by every reader there is, byte-equal to the model they were cut from."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import ggml as api
import numpy as np
import pytest
from gguf import GGUFReader

from swarmnode.errors import ModelFileError, StoreError
from swarmnode.testing.tiny_gguf import TinyModel, write_tiny_gguf
from swarmnode.weights.hashing import build_manifest
from swarmnode.weights.index import ModelIndex
from swarmnode.weights.manifest import Manifest
from swarmnode.weights.parts import split_name
from swarmnode.weights.shard import ShardFile, shard_name, write_shard
from swarmnode.weights.slices import ExpertRange

RANGES = (ExpertRange(0, 1, 2), ExpertRange(3, 0, 6), ExpertRange(0, 4, 1))
HELD = {0: (1, 2, 4), 3: (0, 1, 2, 3, 4, 5)}


@pytest.fixture
def shard_path(mixed: ModelIndex, manifest: Manifest, tmp_path: Path) -> Path:
    path = tmp_path / "some.gguf"
    write_shard(path, mixed, manifest, RANGES)
    return path


def expected_tensors(index: ModelIndex) -> dict[str, bytes]:
    return {
        f"blk.{layer}.{kind}.weight": b"".join(index.slab(layer, expert, kind) for expert in experts)
        for layer, experts in HELD.items()
        for kind in index.expert_layers[layer].kinds
    }


def test_own_reader_finds_the_slabs(shard_path: Path, mixed: ModelIndex, manifest: Manifest) -> None:
    shard = ShardFile(shard_path)
    assert shard.experts == HELD
    assert shard.model_id == manifest.model_id
    assert shard.verify(manifest)
    for layer, experts in HELD.items():
        for expert in experts:
            for kind in mixed.expert_layers[layer].kinds:
                assert shard.slab(layer, expert, kind) == mixed.slab(layer, expert, kind)
    with pytest.raises(KeyError):
        shard.slab(0, 3, "ffn_up_exps")


def test_gguf_py_reads_tensors_and_metadata(shard_path: Path, mixed: ModelIndex, manifest: Manifest) -> None:
    reader = GGUFReader(shard_path)
    found = {tensor.name: tensor.data.reshape(-1).view(np.uint8).tobytes() for tensor in reader.tensors}
    assert found == expected_tensors(mixed)
    assert [tensor.shape.tolist() for tensor in reader.tensors[:3]] == [[256, 256, 3]] * 3
    fields = {key: (field.contents(), field.types) for key, field in reader.fields.items()}
    source = {
        key: (field.contents(), field.types) for key, field in GGUFReader(mixed.paths[0]).fields.items()
    }
    kept = [key for key in source if key.startswith(("qwen35moe.", "general."))]
    assert {key: fields[key] for key in kept} == {key: source[key] for key in kept}
    assert fields["swarmnode.model_id"][0] == manifest.model_id.hex()
    assert fields["swarmnode.layers"][0] == [0, 3]
    assert fields["swarmnode.layer.0.experts"][0] == [1, 2, 4]


def test_ggml_reads_the_same_bytes(shard_path: Path, mixed: ModelIndex) -> None:
    context = api.gguf_init_from_file(str(shard_path).encode(), api.gguf_init_params(no_alloc=True, ctx=None))
    assert context
    try:
        content = shard_path.read_bytes()
        start = api.gguf_get_data_offset(context)
        found = {}
        for i in range(api.gguf_get_n_tensors(context)):
            offset = start + api.gguf_get_tensor_offset(context, i)
            found[api.gguf_get_tensor_name(context, i).decode()] = content[
                offset : offset + api.gguf_get_tensor_size(context, i)
            ]
        assert found == expected_tensors(mixed)
    finally:
        api.gguf_free(context)


@pytest.mark.parametrize("up_type", ["F32", "Q8_0", "Q4_K"])
def test_fused_experts_and_sizes_that_need_padding(up_type: str, tmp_path: Path) -> None:
    model = TinyModel(n_layer=1, n_expert=3, n_expert_used=1, n_ff=32, fused_gate_up=True, up_type=up_type)
    with ModelIndex.open(write_tiny_gguf(tmp_path / "m.gguf", model)) as index:
        manifest = build_manifest(index)
        write_shard(tmp_path / "s.gguf", index, manifest, [ExpertRange(0, 2, 1)])
        shard = ShardFile(tmp_path / "s.gguf")
        assert shard.verify(manifest)
        assert len(GGUFReader(tmp_path / "s.gguf").tensors) == 2
        assert shard.slab(0, 2, "ffn_gate_up_exps") == index.slab(0, 2, "ffn_gate_up_exps")


def test_a_shard_of_a_shard_is_the_same(shard_path: Path, mixed: ModelIndex, manifest: Manifest) -> None:
    for source, name in ((mixed, "a"), (ShardFile(shard_path), "b")):
        write_shard(shard_path.with_name(name), source, manifest, [ExpertRange(3, 1, 3)])
    assert shard_path.with_name("a").read_bytes() == shard_path.with_name("b").read_bytes()


def test_names_never_look_like_a_part_of_a_split_model() -> None:
    """Mesh-LLM 311: a derived file kept -00001-of-00013 in its name, and the loader refused it."""
    for item in (ExpertRange(0, 0, 1), ExpertRange(1, 1, 13), ExpertRange(10000, 10000, 10000)):
        assert split_name(shard_name(item)) is None
        assert not re.search(r"\d{5}-of-\d{5}", shard_name(item))


def test_changed_source_is_told_and_leaves_nothing(
    mixed_path: Path, manifest: Manifest, tmp_path: Path
) -> None:
    content = bytearray(mixed_path.read_bytes())
    with ModelIndex.open(mixed_path) as index:
        content[index.tensors["blk.0.ffn_down_exps.weight"].offset] ^= 1
    (tmp_path / "changed.gguf").write_bytes(content)
    with ModelIndex.open(tmp_path / "changed.gguf") as index:
        (tmp_path / "out").mkdir()
        with pytest.raises(ModelFileError, match="layer 0, expert 0, ffn_down_exps"):
            write_shard(tmp_path / "out" / "s.gguf", index, manifest, [ExpertRange(0, 0, 2)])
    assert not list((tmp_path / "out").iterdir())


def test_experts_the_model_lacks_are_refused(mixed: ModelIndex, manifest: Manifest, tmp_path: Path) -> None:
    for item in (ExpertRange(4, 0, 1), ExpertRange(0, 5, 2)):
        with pytest.raises(ModelFileError, match="no such routed experts"):
            write_shard(tmp_path / "s.gguf", mixed, manifest, [item])
    with pytest.raises(ModelFileError, match="no experts"):
        write_shard(tmp_path / "s.gguf", mixed, manifest, [])
    with pytest.raises(StoreError, match="nowhere"):
        write_shard(tmp_path / "nowhere" / "s.gguf", mixed, manifest, RANGES)


def test_shard_of_another_model_or_a_plain_model_is_not_taken(
    shard_path: Path, mixed_path: Path, manifest: Manifest
) -> None:
    assert not ShardFile(shard_path).verify(replace(manifest, name="another"))
    with pytest.raises(ModelFileError, match="not a swarmnode shard"):
        ShardFile(mixed_path)


def test_broken_shards_are_refused_or_fail_verification(shard_path: Path, manifest: Manifest) -> None:
    content = shard_path.read_bytes()
    changes = [
        (b"swarmnode.layers", b"swarmnode.lAyers"),
        (b"swarmnode.layer.3.experts", b"swarmnode.layer.2.experts"),
        (manifest.model_id.hex().encode(), b"z" * 64),
        (manifest.model_id.hex().encode(), b"0" * 64),
        (b"blk.3.ffn_up_exps", b"blk.2.ffn_up_exps"),
        (
            (1).to_bytes(4, "little") + (2).to_bytes(4, "little") + (4).to_bytes(4, "little"),
            b"\1\0\0\0\2\0\0\0\2\0\0\0",
        ),
        (content[-300:-290], b"0123456789"),
    ]
    for before, after in changes:
        assert before in content
        shard_path.write_bytes(content.replace(before, after))
        try:
            sound = ShardFile(shard_path).verify(manifest)
        except ModelFileError:
            sound = False
        assert not sound


def test_a_shard_is_no_model(shard_path: Path) -> None:
    """It has the model's metadata, so what it lacks would be told one after the other."""
    with pytest.raises(
        ModelFileError, match=rf"{re.escape(str(shard_path))}: a shard, with some of a model's experts"
    ):
        ModelIndex.open(shard_path)
