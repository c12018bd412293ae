"""Which model `--model` means, and what a file holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmnode.errors import ModelFileError, UsageError
from swarmnode.testing.tiny_gguf import TinyModel, write_tiny_gguf
from swarmnode.weights.catalog import known_models, known_shards, resolve_model
from swarmnode.weights.gguf_file import has_key
from swarmnode.weights.hashing import build_manifest
from swarmnode.weights.index import ModelIndex
from swarmnode.weights.inspect import describe
from swarmnode.weights.shard import write_shard
from swarmnode.weights.shard_layout import is_shard
from swarmnode.weights.slices import ExpertRange


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    names = [
        "Qwen3.5-122B-A10B-UD-Q4_K_XL-00002-of-00002.gguf",
        "Qwen3.5-122B-A10B-UD-Q4_K_XL-00001-of-00002.gguf",
        "olmoe-Q8_0.gguf",
        "olmoe-Q4_0.gguf",
        "mmproj-F16.gguf",
        "notes.txt",
    ]
    (tmp_path / "models" / "UD-Q4_K_XL").mkdir(parents=True)
    for name in names:
        parent = tmp_path / "models" / ("UD-Q4_K_XL" if "UD-" in name else "")
        (parent / name).write_bytes(b"12345")
    return tmp_path / "models"


def test_known_models_by_name(folder: Path) -> None:
    models = known_models([folder, folder / "none"])
    assert [(model.name, model.path.name, model.n_bytes) for model in models] == [
        ("olmoe-Q4_0", "olmoe-Q4_0.gguf", 5),
        ("olmoe-Q8_0", "olmoe-Q8_0.gguf", 5),
        ("Qwen3.5-122B-A10B-UD-Q4_K_XL", "Qwen3.5-122B-A10B-UD-Q4_K_XL-00001-of-00002.gguf", 10),
    ]


@pytest.mark.parametrize("name", ["qwen3.5-122b", "QWEN", "Qwen3.5-122B-A10B-UD-Q4_K_XL"])
def test_name_or_its_beginning_is_enough(name: str, folder: Path) -> None:
    assert resolve_model(name, [folder]).name.endswith("-00001-of-00002.gguf")


def test_a_home_that_nobody_has_is_an_unknown_name(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"~nosuchuser/x\.gguf is no file and no known model"):
        resolve_model("~nosuchuser/x.gguf", [folder])


def test_paths_to_files_parts_and_folders(folder: Path) -> None:
    part = folder / "UD-Q4_K_XL" / "Qwen3.5-122B-A10B-UD-Q4_K_XL-00002-of-00002.gguf"
    assert resolve_model(part) == part
    assert resolve_model(str(folder / "olmoe-Q4_0.gguf")) == folder / "olmoe-Q4_0.gguf"
    assert resolve_model(folder / "UD-Q4_K_XL").name.endswith("-00001-of-00002.gguf")


@pytest.mark.parametrize(
    ("name", "words"), [("gemma", "no known model"), ("olmoe", "fits 2 models"), ("/none/x.gguf", "no file")]
)
def test_unknown_and_ambiguous_names_list_what_is_known(name: str, words: str, folder: Path) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        resolve_model(name, [folder])
    assert "olmoe-Q4_0" in str(caught.value)
    assert str(folder / "olmoe-Q8_0.gguf") in str(caught.value)


def test_without_a_name_it_is_the_bundled_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmnode.weights.catalog.resources.files", lambda package: tmp_path)
    with pytest.raises(UsageError, match=r"--model FILE\.gguf"):
        resolve_model(None)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "small.gguf").touch()
    assert resolve_model(None) == tmp_path / "data" / "small.gguf"


def test_the_bundled_model_has_a_name_unless_a_folder_has_it(folder: Path) -> None:
    bundled = resolve_model(None)
    assert resolve_model(bundled.stem, [folder]) == bundled
    assert resolve_model(bundled.stem.upper()) == bundled
    with pytest.raises(UsageError, match=bundled.stem):
        resolve_model("gemma", [folder])
    own = folder / bundled.name
    own.touch()
    assert resolve_model(bundled.stem, [folder]) == own


def test_below_the_current_folder_nothing_is_looked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside two clones of this repository the bundled model's name once fitted two models."""
    bundled = resolve_model(None)
    for clone in ("one", "two"):
        (folder / clone / "data").mkdir(parents=True)
        (folder / clone / "data" / bundled.name).touch()
    monkeypatch.chdir(folder)
    assert [model.name for model in known_models([Path()])] == ["olmoe-Q4_0", "olmoe-Q8_0"]
    assert resolve_model(bundled.stem, [Path()]) == bundled


def test_a_whole_name_is_the_bundled_models_and_no_beginning_of_another(folder: Path) -> None:
    bundled = resolve_model(None)
    (folder / f"{bundled.stem}-large.gguf").touch()
    assert resolve_model(bundled.stem, [folder]) == bundled
    assert resolve_model(bundled.stem[:-1], [folder]).name == f"{bundled.stem}-large.gguf"


def test_a_link_to_a_file_by_the_same_name_is_no_second_model(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "olmoe-Q4_0.gguf").symlink_to(folder / "olmoe-Q4_0.gguf")
    assert resolve_model("olmoe-q4", [folder, tmp_path / "cache"]) == folder / "olmoe-Q4_0.gguf"


@pytest.fixture
def cut(tmp_path: Path) -> Path:
    """A folder with Tiny.gguf and Tiny-cut.gguf, a shard of it."""
    folder = tmp_path / "cut"
    folder.mkdir()
    model = write_tiny_gguf(folder / "Tiny.gguf", TinyModel(n_layer=2, n_expert=4, n_expert_used=2))
    with ModelIndex.open(model) as index:
        manifest = build_manifest(index)
        write_shard(folder / "Tiny-cut.gguf", index, manifest, [ExpertRange(0, 0, 2)])
    return folder


def test_no_name_stands_for_a_shard(cut: Path) -> None:
    """`--model tiny` once fitted two models, and `--model tiny-cut` ended in the index."""
    assert [model.name for model in known_models([cut])] == ["Tiny"]
    assert [shard.path for shard in known_shards([cut])] == [cut / "Tiny-cut.gguf"]
    for name in ("tiny", "ti", cut):
        assert resolve_model(name, [cut]) == cut / "Tiny.gguf"
    with pytest.raises(
        UsageError, match=r"Tiny-cut\.gguf is a shard, a part of one; `swarmnode inspect"
    ) as caught:
        resolve_model("tiny-c", [cut])
    assert str(caught.value).count("Tiny-cut") == 2
    assert (
        resolve_model(cut / "Tiny-cut.gguf") == cut / "Tiny-cut.gguf"
    )  # a path is what it is: `inspect` shows it


def test_a_folder_of_shards_has_no_model(cut: Path) -> None:
    (cut / "Tiny.gguf").unlink()
    with pytest.raises(UsageError, match="a shard, a part of one"):
        resolve_model(cut)


def test_a_shard_that_is_broken_behind_its_header_is_a_shard(cut: Path) -> None:
    path = cut / "Tiny-cut.gguf"
    path.write_bytes(path.read_bytes()[:-1])
    assert is_shard(path)
    path.write_bytes(b"GGUF")
    assert not is_shard(path)
    assert not is_shard(cut / "nothing.gguf")


def test_a_vocabulary_is_not_stepped_over_to_look_for_a_shard(tmp_path: Path) -> None:
    """Of a file of gigabytes only the first pages are read."""
    path = write_tiny_gguf(tmp_path / "m.gguf", TinyModel(n_layer=2, n_expert=4, n_expert_used=2))
    assert has_key(path, "tokenizer.ggml.tokens", 1 << 20)
    with pytest.raises(ModelFileError, match="ends after"):
        has_key(path, "tokenizer.ggml.tokens", 64)


def test_description_adds_up(tmp_path: Path) -> None:
    model = TinyModel(
        n_layer=4,
        n_expert=4,
        dense_layers=(0,),
        mtp_block=True,
        up_type="Q4_K",
        down_types=("Q4_K", "Q6_K"),
        n_parts=2,
    )
    with ModelIndex.open(write_tiny_gguf(tmp_path / "m.gguf", model)) as index:
        found = describe(index)
        total = sum(tensor.n_bytes for tensor in index.tensors.values())
    assert found.name == "Tiny Random"
    assert len(found.parts) == 2
    assert (found.n_layer, found.n_expert, found.n_expert_used, found.n_vocab) == (4, 4, 2, 288)
    assert found.n_ctx_train == 4096
    assert found.dense_layers == (0,)
    assert found.expert_bytes == {1: (288 + 210) * 256, 2: (288 + 144) * 256, 3: (288 + 210) * 256}
    assert found.routed_bytes + found.dense_bytes + found.mtp_bytes == total
    assert found.mtp_bytes > 4 * 3 * 144 * 256
    assert found.quantisation["ffn_down_exps"] == {"Q4_K": 2, "Q6_K": 2}
    assert found.quantisation["token_embd"] == {"F32": 1}
