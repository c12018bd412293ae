"""The manifest: what it hashes, how it is encoded, and what it refuses from a peer."""

from __future__ import annotations

import hashlib
import os
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest

from swarmnode.errors import ModelFileError, ProtocolError, StoreError, UnsupportedModelError
from swarmnode.testing.tiny_gguf import TinyModel, write_tiny_gguf
from swarmnode.weights import hashing
from swarmnode.weights.hashing import build_manifest, load_or_build_manifest
from swarmnode.weights.index import ModelIndex
from swarmnode.weights.manifest import MAX_MANIFEST_BYTES, Manifest
from swarmnode.weights.slices import ExpertRange
from tests.weights.conftest import MIXED


def manifest_of(path: Path) -> Manifest:
    with ModelIndex.open(path) as index:
        return build_manifest(index)


def test_every_slab_has_its_hash(mixed: ModelIndex, manifest: Manifest) -> None:
    for layer, layout in mixed.expert_layers.items():
        for kind in layout.kinds:
            for expert in range(layout.n_expert):
                slab = mixed.slab(layer, expert, kind)
                assert manifest.layers[layer].sha256(expert, kind) == hashlib.sha256(slab).digest()
                assert manifest.check_slab(layer, expert, kind, slab)


def test_wrong_slabs_are_told(mixed: ModelIndex, manifest: Manifest) -> None:
    slab = bytearray(mixed.slab(1, 2, "ffn_up_exps"))
    assert not manifest.check_slab(1, 3, "ffn_up_exps", slab)
    assert not manifest.check_slab(1, 2, "ffn_gate_exps", slab)
    assert not manifest.check_slab(1, 2, "ffn_gate_up_exps", slab)
    assert not manifest.check_slab(9, 2, "ffn_up_exps", slab)
    assert not manifest.check_slab(1, -1, "ffn_up_exps", slab)
    assert not manifest.check_slab(1, 2, "ffn_up_exps", slab[:-1])
    assert not manifest.check_slab(1, 2, "ffn_up_exps", slab + b"\0")
    slab[-1] ^= 1
    assert not manifest.check_slab(1, 2, "ffn_up_exps", slab)


def test_split_and_whole_file_are_the_same_model(manifest: Manifest, tmp_path: Path) -> None:
    split = write_tiny_gguf(tmp_path / "renamed.gguf", replace(MIXED, n_parts=3, empty_first_part=True))
    assert manifest_of(split).model_id == manifest.model_id


def test_two_quantisations_are_two_models(tmp_path: Path) -> None:
    small = TinyModel(n_layer=1, n_expert=2)
    variants = [
        small,
        replace(small, up_type="Q8_0"),
        replace(small, down_types=("Q8_0",)),
        replace(small, dense_type="Q8_0"),
        replace(small, fused_gate_up=True),
        replace(small, n_expert_used=1),
        replace(small, seed=1),
    ]
    ids = [manifest_of(write_tiny_gguf(tmp_path / f"{i}.gguf", m)).model_id for i, m in enumerate(variants)]
    assert len(set(ids)) == len(variants)


def test_one_changed_byte_anywhere_changes_the_model_id(
    mixed_path: Path, manifest: Manifest, tmp_path: Path
) -> None:
    with ModelIndex.open(mixed_path) as index:
        offsets = [index.tensors[name].offset for name in ("token_embd.weight", "blk.3.ffn_down_exps.weight")]
    for offset in offsets:
        content = bytearray(mixed_path.read_bytes())
        content[offset + 17] ^= 0x40
        (tmp_path / "changed.gguf").write_bytes(content)
        assert manifest_of(tmp_path / "changed.gguf").model_id != manifest.model_id


def test_only_layers_with_experts_are_listed(tmp_path: Path) -> None:
    model = TinyModel(n_layer=3, n_expert=2, dense_layers=(0,), mtp_block=True)
    manifest = manifest_of(write_tiny_gguf(tmp_path / "m.gguf", model))
    assert list(manifest.layers) == [1, 2]
    assert manifest.holds(ExpertRange(1, 0, 2))
    assert not manifest.holds(ExpertRange(0, 0, 1))
    assert not manifest.holds(ExpertRange(3, 0, 1))
    assert not manifest.holds(ExpertRange(1, 1, 2))


def test_budgets_count_the_real_bytes_of_each_layer(manifest: Manifest) -> None:
    assert manifest.range_bytes(ExpertRange(0, 0, 2)) == 2 * (2 * 144 + 210) * 256
    assert manifest.range_bytes(ExpertRange(1, 0, 2)) == 2 * (3 * 144) * 256


def test_encoding_round_trips_without_the_vocabulary(manifest: Manifest) -> None:
    encoded = manifest.encode()
    assert Manifest.decode_untrusted(encoded, manifest.model_id) == manifest
    assert hashlib.sha256(encoded).digest() == manifest.model_id
    assert "qwen35moe.rope.dimension_sections" in manifest.metadata
    assert not [key for key in manifest.metadata if key.startswith(("tokenizer", "split", "general.arch"))]


def test_threads_do_not_change_the_result_and_progress_reaches_the_end(
    mixed: ModelIndex, manifest: Manifest
) -> None:
    steps: list[tuple[int, int]] = []
    again = build_manifest(mixed, lambda done, total: steps.append((done, total)), n_threads=1)
    assert again == manifest
    assert steps == sorted(steps)
    assert (
        steps[-1][0]
        == steps[-1][1]
        == sum(mixed.tensors[name].n_bytes for name in mixed.dense_tensors)
        + sum(layout.n_expert * layout.expert_bytes for layout in mixed.expert_layers.values())
    )


def test_what_progress_raises_ends_the_work(mixed: ModelIndex) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_manifest(mixed, stop)


# ---- from a peer ------------------------------------------------------------------------------------------------


def decode_changed(manifest: Manifest, change: Callable[[list[Any]], object]) -> None:
    """Decode the manifest with a change, under the id that fits the changed bytes."""
    fields = msgpack.unpackb(manifest.encode(), use_list=True)
    change(fields)
    data = msgpack.packb(fields)
    Manifest.decode_untrusted(data, hashlib.sha256(data).digest())


def setter(*path_and_value: Any) -> Callable[[list[Any]], object]:
    *path, last, value = path_and_value

    def change(fields: list[Any]) -> None:
        target: Any = fields
        for step in path:
            target = target[step]
        target[last] = value

    return change


LAYERS, METADATA, DENSE = 9, 8, 10
CHANGES: dict[str, Callable[[list[Any]], object]] = {
    "magic": setter(0, "other"),
    "version": setter(1, 2),
    "architecture_bytes": setter(2, b"qwen35moe"),
    "name_long": setter(3, "x" * 5000),
    "n_embd_0": setter(4, 0),
    "n_embd_negative": setter(4, -256),
    "n_embd_other": setter(4, 512),
    "n_embd_float": setter(4, 256.0),
    "n_layer_bool": setter(5, True),
    "n_layer_2_30": setter(5, 2**30),
    "n_layer_fewer": setter(5, 2),
    "n_expert_2_28": setter(6, 2**28),
    "n_expert_more": setter(6, 7),
    "n_expert_used_more": setter(7, 7),
    "metadata_map": setter(METADATA, {}),
    "metadata_many": lambda f: f[METADATA].extend([["a", 4, None, 1]] * 600),
    "metadata_twice": lambda f: f[METADATA].append(f[METADATA][0]),
    "metadata_unsorted": lambda f: f[METADATA].reverse(),
    "metadata_type": setter(METADATA, 0, 1, 13),
    "metadata_nested": setter(METADATA, 0, 1, 9),
    "metadata_range": lambda f: f[METADATA].append(["qwen35moe.z", 0, None, 256]),
    "metadata_item_type": lambda f: f[METADATA].append(["qwen35moe.z", 4, 4, 1]),
    "metadata_array_empty": lambda f: f[METADATA].append(["qwen35moe.z", 9, 4, []]),
    "metadata_array_long": lambda f: f[METADATA].append(["qwen35moe.z", 9, 4, [1] * 2000]),
    "metadata_array_mixed": lambda f: f[METADATA].append(["qwen35moe.z", 9, 4, [1, "x"]]),
    "metadata_float": lambda f: f[METADATA].append(["qwen35moe.z", 6, None, 1]),
    "layer_twice": lambda f: f[LAYERS].append(f[LAYERS][-1]),
    "layers_unsorted": lambda f: f[LAYERS].reverse(),
    "layer_outside": setter(LAYERS, 0, 0, 99),
    "layer_negative": setter(LAYERS, 0, 0, -1),
    "layer_short": lambda f: f[LAYERS][0].pop(),
    "n_ff_other": setter(LAYERS, 0, 1, 128),
    "kind_unknown": setter(LAYERS, 0, 2, 0, 0, "ffn_norm"),
    "kind_twice": setter(LAYERS, 0, 2, 0, 0, "ffn_up_exps"),
    "kinds_swapped": lambda f: f[LAYERS][0][2].reverse(),
    "tensor_missing": lambda f: f[LAYERS][0][2].pop(),
    "type_unknown": setter(LAYERS, 0, 2, 0, 1, 99),
    "type_integer": setter(LAYERS, 0, 2, 0, 1, 26),
    "type_does_not_divide": setter(LAYERS, 0, 2, 0, 2, 255),
    "rows_other": setter(LAYERS, 0, 2, 0, 3, 255),
    "rows_2_31": setter(LAYERS, 0, 2, 0, 3, 2**31),
    "hashes_short": setter(LAYERS, 0, 2, 0, 4, b"\0" * 31),
    "hashes_text": setter(LAYERS, 0, 2, 0, 4, "x" * 192),
    "n_expert_used_0": setter(7, 0),
    "n_embd_2_17": setter(4, 2**17),
    "n_embd_2_20": setter(4, 2**20),
    "n_ff_2_20": setter(LAYERS, 0, 1, 2**20),
    "no_layers": setter(LAYERS, []),
    "architecture_empty": setter(2, ""),
    "architecture_escapes": setter(2, "\x1b[31m"),
    "architecture_of_our_keys": setter(2, "swarmnode"),
    "metadata_of_a_shard": lambda f: f[METADATA].append(["swarmnode.layers", 4, None, 1]),
    "metadata_of_a_split": lambda f: f[METADATA].append(["split.count", 2, None, 1]),
    "metadata_tokenizer": lambda f: f[METADATA].append(["tokenizer.ggml.bos_token_id", 4, None, 1]),
    "metadata_alignment": lambda f: f[METADATA].insert(0, ["general.alignment", 4, None, 3]),
    "metadata_architecture": lambda f: f[METADATA].insert(0, ["general.architecture", 8, None, "llama"]),
    "metadata_key_empty": lambda f: f[METADATA].insert(0, ["", 4, None, 1]),
    "metadata_key_escapes": lambda f: f[METADATA].insert(0, ["general.\x1b", 4, None, 1]),
    "metadata_f32_too_large": lambda f: f[METADATA].append(["qwen35moe.z", 6, None, 1e300]),
    "metadata_f32_too_exact": lambda f: f[METADATA].append(["qwen35moe.z", 6, None, 0.1]),
    "metadata_strings": lambda f: f[METADATA].append(["qwen35moe.z", 9, 8, ["a"]]),
    "type_removed": setter(LAYERS, 0, 2, 0, 1, 4),
    "type_only_inside_ggml": setter(LAYERS, 0, 2, 0, 1, 15),
    "type_2_32": setter(LAYERS, 0, 2, 0, 1, 2**32),
    "dense_short": setter(DENSE, b"\0" * 31),
    "field_missing": lambda f: f.pop(),
    "field_more": lambda f: f.append(0),
}


@pytest.mark.parametrize("case", CHANGES)
def test_changed_manifests_are_refused_even_under_their_own_hash(case: str, manifest: Manifest) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode_changed(manifest, CHANGES[case])
    assert caught.value.code == "bad_manifest"


def test_metadata_that_belongs_there_is_taken(manifest: Manifest) -> None:
    """The cases above are refused for what is wrong with them, not for their place."""
    decode_changed(manifest, lambda f: f[METADATA].append(["qwen35moe.z", 6, None, 0.5]))
    decode_changed(manifest, lambda f: f[METADATA].append(["qwen35moe.z", 9, 4, [1, 2]]))
    decode_changed(manifest, lambda f: f[METADATA].insert(0, ["general.a", 8, None, "x"]))


def test_a_bomb_of_tiny_arrays_is_refused_before_it_unfolds() -> None:
    """16 MiB that would become a gigabyte of objects."""
    inner = b"\xdc\x04\x00" + b"\x91\x00" * 1024
    data = b"\xdc\x03\xe8" + (b"\xdc\x00\x08" + inner * 8) * 1000
    assert 0.97 * MAX_MANIFEST_BYTES < len(data) < MAX_MANIFEST_BYTES
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="too many items"):
            Manifest.decode_untrusted(data, hashlib.sha256(data).digest())
        assert tracemalloc.get_traced_memory()[1] < 40 * 1024 * 1024
    finally:
        tracemalloc.stop()


def test_unchanged_manifest_is_taken(manifest: Manifest) -> None:
    decode_changed(manifest, lambda fields: None)


def test_other_bytes_are_refused(manifest: Manifest) -> None:
    encoded = manifest.encode()
    longer_form = b"\xdc\x00\x0b" + encoded[1:]  # the same array, its length in three bytes
    wrong = [
        b"",
        b"\xc1",
        encoded[:-1],
        encoded + b"\0",
        b"\x91" * 2000,
        bytes(MAX_MANIFEST_BYTES + 1),
        longer_form,
    ]
    for data in wrong:
        with pytest.raises(ProtocolError):
            Manifest.decode_untrusted(data, hashlib.sha256(data).digest())
    with pytest.raises(ProtocolError, match="hash"):
        Manifest.decode_untrusted(encoded, bytes(32))


# ---- cached beside the file's identity --------------------------------------------------------------------------


def forbid_hashing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> Manifest:
        raise AssertionError("hashed again")

    monkeypatch.setattr(hashing, "build_manifest", fail)


def test_second_start_does_not_hash(
    mixed: ModelIndex, manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_or_build_manifest(mixed, tmp_path) == manifest
    forbid_hashing(monkeypatch)
    assert load_or_build_manifest(mixed, tmp_path) == manifest


def test_changed_file_is_hashed_again(mixed_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    content = bytearray(mixed_path.read_bytes())
    path.write_bytes(content)
    with ModelIndex.open(path) as index:
        before = load_or_build_manifest(index, tmp_path / "cache")
    content[-200] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))
    with ModelIndex.open(path) as index:
        assert load_or_build_manifest(index, tmp_path / "cache").model_id != before.model_id


def test_damaged_cache_is_built_anew(mixed: ModelIndex, manifest: Manifest, tmp_path: Path) -> None:
    load_or_build_manifest(mixed, tmp_path)
    (cached,) = (tmp_path / "manifests").iterdir()
    for damaged in (b"", cached.read_bytes()[:-1], b"\0" * 100):
        cached.write_bytes(damaged)
        assert load_or_build_manifest(mixed, tmp_path) == manifest


def test_unusable_cache_folder_is_named_before_hashing(
    mixed: ModelIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mesh-LLM 1042: a read-only cache folder broke the start."""
    forbid_hashing(monkeypatch)
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"file/cache.*--home DIR"):
        load_or_build_manifest(mixed, tmp_path / "file" / "cache")


def test_model_file_that_vanished_is_named(mixed_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(mixed_path.read_bytes())
    with ModelIndex.open(path) as index:
        path.unlink()
        with pytest.raises(ModelFileError, match=str(path)):
            load_or_build_manifest(index, tmp_path)


def test_model_that_other_nodes_would_refuse_is_refused_here(
    mixed: ModelIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmnode.weights.manifest.MAX_MANIFEST_BYTES", 1000)
    with pytest.raises(UnsupportedModelError, match="other nodes"):
        build_manifest(mixed)
