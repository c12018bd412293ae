"""The worker's store: nothing half-written is ever visible, and trouble names the folder and the option."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from swarmnode.errors import BadReplyError, ModelFileError, StoreError, UnsupportedModelError
from swarmnode.weights import store as store_module
from swarmnode.weights.file_lock import try_lock
from swarmnode.weights.index import ModelIndex
from swarmnode.weights.manifest import Manifest
from swarmnode.weights.shard import shard_name
from swarmnode.weights.slices import ExpertRange
from swarmnode.weights.store import SliceStore

FIRST, SECOND = ExpertRange(0, 1, 2), ExpertRange(2, 0, 3)


@pytest.fixture
def store(manifest: Manifest, tmp_path: Path) -> Iterator[SliceStore]:
    with SliceStore(tmp_path, manifest) as opened:
        yield opened


def add(store: SliceStore, index: ModelIndex, item: ExpertRange) -> None:
    for expert in item.experts:
        for kind in index.expert_layers[item.layer].kinds:
            store.add_slab(item.layer, expert, kind, index.slab(item.layer, expert, kind))


def files(store: SliceStore) -> list[str]:
    return sorted(path.name for path in store.folder.rglob("*") if path.is_file() and path.name != "lock")


def test_committed_ranges_survive_a_restart(mixed: ModelIndex, manifest: Manifest, tmp_path: Path) -> None:
    with SliceStore(tmp_path, manifest) as store:
        assert store.held() == ()
        for item in (SECOND, FIRST):
            add(store, mixed, item)
            store.commit(item)
        assert store.held() == (FIRST, SECOND)
        used_bytes = store.used_bytes
        assert used_bytes >= sum(manifest.range_bytes(item) for item in (FIRST, SECOND))
    with SliceStore(tmp_path, manifest) as store:
        assert store.held() == (FIRST, SECOND)
        assert store.used_bytes == used_bytes
        for item in store.held():
            for expert in item.experts:
                for kind in mixed.expert_layers[item.layer].kinds:
                    assert store.read_slab(item.layer, expert, kind) == mixed.slab(item.layer, expert, kind)
        with pytest.raises(KeyError):
            store.read_slab(0, 0, "ffn_up_exps")


def test_nothing_is_visible_before_the_commit(store: SliceStore, mixed: ModelIndex) -> None:
    add(store, mixed, FIRST)
    assert store.held() == ()
    assert store.used_bytes == 0
    with pytest.raises(KeyError):
        store.read_slab(0, 1, "ffn_up_exps")


def test_commit_needs_every_slab(store: SliceStore, mixed: ModelIndex) -> None:
    add(store, mixed, ExpertRange(0, 1, 1))
    with pytest.raises(StoreError, match="expert 2, ffn_gate_exps was not added"):
        store.commit(FIRST)
    assert store.held() == ()
    assert not [name for name in files(store) if "experts" in name]


def test_short_flipped_and_foreign_slabs_are_refused(store: SliceStore, mixed: ModelIndex) -> None:
    slab = bytearray(mixed.slab(0, 1, "ffn_up_exps"))
    flipped = bytearray(slab)
    flipped[1000] ^= 1
    for wrong in (slab[:-400], flipped, b"", slab + b"\0"):
        with pytest.raises(BadReplyError):
            store.add_slab(0, 1, "ffn_up_exps", wrong)
    for layer, expert, kind in (
        (0, 2, "ffn_up_exps"),
        (9, 0, "ffn_up_exps"),
        (0, 99, "ffn_up_exps"),
        (0, 1, "../x"),
    ):
        with pytest.raises(BadReplyError):
            store.add_slab(layer, expert, kind, slab)
    assert files(store) == []


def test_partial_files_are_dropped_at_start_and_waiting_slabs_stay(
    mixed: ModelIndex, manifest: Manifest, tmp_path: Path
) -> None:
    with SliceStore(tmp_path, manifest) as store:
        add(store, mixed, FIRST)
        store.commit(FIRST)
        add(store, mixed, SECOND)
        (store.folder / ".layer-2.gguf.1.partial").write_bytes(b"half")
    with SliceStore(tmp_path, manifest) as store:
        assert store.held() == (FIRST,)
        assert store.incoming.ranges() == (SECOND,)
        assert not [name for name in files(store) if name.endswith(".partial")]
        store.commit(SECOND)
        assert files(store) == [shard_name(FIRST), shard_name(SECOND)]


@pytest.mark.parametrize(
    "damage", ["flipped", "truncated", "renamed", "junk", "another_model", "overlapping"]
)
def test_files_that_are_not_the_manifests_are_dropped_at_start(
    damage: str, mixed: ModelIndex, manifest: Manifest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with SliceStore(tmp_path, manifest) as store:
        for item in (FIRST, SECOND):
            add(store, mixed, item)
            store.commit(item)
        folder = store.folder
    path = folder / "layer-0-experts-1-to-2.gguf"
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[-1000] ^= 1
        path.write_bytes(content)
    elif damage == "truncated":
        path.write_bytes(content[:-1000])
    elif damage == "renamed":
        path.rename(folder / "layer-0-experts-0-to-1.gguf")
    elif damage == "junk":
        path.write_bytes(b"junk")
    elif damage == "another_model":
        path.write_bytes(content.replace(manifest.model_id.hex().encode(), b"0" * 64))
    else:
        path.unlink()
        other = SliceStore(tmp_path / "other", manifest)
        add(other, mixed, ExpertRange(2, 2, 2))
        other.commit(ExpertRange(2, 2, 2))
        other.close()
        name = "layer-2-experts-2-to-3.gguf"
        (other.folder / name).rename(folder / name)
    with SliceStore(tmp_path, manifest) as store:
        assert store.held() == (SECOND,)
        assert files(store) == ["layer-2-experts-0-to-2.gguf"]
    assert "deleted" in caplog.text


def test_removed_ranges_free_their_bytes_and_views_stay_valid(store: SliceStore, mixed: ModelIndex) -> None:
    add(store, mixed, FIRST)
    store.commit(FIRST)
    slab = store.read_slab(0, 1, "ffn_down_exps")
    store.remove(FIRST)
    assert slab == mixed.slab(0, 1, "ffn_down_exps")
    assert store.held() == ()
    assert files(store) == []
    with pytest.raises(KeyError):
        store.remove(FIRST)


def test_a_range_replaces_those_it_overlaps(store: SliceStore, mixed: ModelIndex) -> None:
    for item in (FIRST, SECOND, ExpertRange(0, 2, 3), ExpertRange(0, 2, 3)):
        add(store, mixed, item)
        store.commit(item)
    assert store.held() == (ExpertRange(0, 2, 3), SECOND)
    assert files(store) == ["layer-0-experts-2-to-4.gguf", "layer-2-experts-0-to-2.gguf"]
    assert store.read_slab(0, 4, "ffn_up_exps") == mixed.slab(0, 4, "ffn_up_exps")


def test_discarded_slabs_are_gone(store: SliceStore, mixed: ModelIndex) -> None:
    add(store, mixed, FIRST)
    store.discard(FIRST)
    store.discard(FIRST)
    assert files(store) == []


def test_ranges_outside_the_model_are_refused(store: SliceStore) -> None:
    with pytest.raises(StoreError, match="no such routed experts"):
        store.commit(ExpertRange(0, 5, 9))


def test_two_stores_in_one_folder_do_not_share_slices(
    mixed: ModelIndex, manifest: Manifest, tmp_path: Path
) -> None:
    with SliceStore(tmp_path, manifest) as first:
        add(first, mixed, FIRST)
        first.commit(FIRST)
        with SliceStore(tmp_path, manifest) as second:
            assert second.folder != first.folder
            assert second.held() == ()
            add(second, mixed, SECOND)
            second.commit(SECOND)
        assert first.held() == (FIRST,)


def test_all_slots_taken_is_a_clear_error(
    manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_SLOTS", 1)
    with SliceStore(tmp_path, manifest), pytest.raises(StoreError, match="--home DIR"):
        SliceStore(tmp_path, manifest)


def test_two_models_in_one_folder_do_not_meet(mixed: ModelIndex, manifest: Manifest, tmp_path: Path) -> None:
    other = replace(manifest, name="another quantisation")
    with SliceStore(tmp_path, manifest) as first, SliceStore(tmp_path, other) as second:
        add(first, mixed, FIRST)
        first.commit(FIRST)
        assert second.held() == ()
        assert second.folder.parent != first.folder.parent


def test_folder_that_cannot_be_used_is_named(manifest: Manifest, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"file/cache/slices.*--home DIR"):
        SliceStore(tmp_path / "file" / "cache", manifest)


def test_read_only_folder_is_named(
    manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, **arguments: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "touch", refuse)  # root may write to a folder of mode 0555
    with pytest.raises(StoreError, match=r"Read-only file system.*--home DIR"):
        SliceStore(tmp_path, manifest)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_failing_disk_at_commit_shows_nothing(
    number: int, call: str, store: SliceStore, mixed: ModelIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    add(store, mixed, FIRST)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(StoreError, match=r"--home DIR") as caught:
            store.commit(FIRST)
        assert str(store.folder) in str(caught.value)
    assert store.held() == ()
    assert not [name for name in files(store) if not name.endswith(".slab")]
    store.commit(FIRST)
    assert store.held() == (FIRST,)


def test_file_size_limit_while_writing_shows_nothing(store: SliceStore, mixed: ModelIndex) -> None:
    """A real refusal by the kernel in the middle of a file, in place of a full disk."""
    add(store, mixed, FIRST)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(StoreError, match="File too large"):
            store.commit(FIRST)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        with pytest.raises(StoreError, match="File too large"):
            add(store, mixed, SECOND)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.held() == ()
    assert [name for name in files(store) if name.startswith("2-")] == []
    assert not [name for name in files(store) if not name.endswith(".slab")]
    store.commit(FIRST)
    assert store.held() == (FIRST,)


# ---- slots that nobody uses


def other_model(manifest: Manifest, name: str) -> Manifest:
    return replace(manifest, name=name)


def fill(cache: Path, manifest: Manifest, index: ModelIndex, opened_s: int) -> Path:
    """A slot with one range that a process left at that time; its folder."""
    with SliceStore(cache, manifest) as store:
        add(store, index, FIRST)
        store.commit(FIRST)
        folder = store.folder
    os.utime(folder, (opened_s, opened_s))
    return folder


def test_slots_of_other_models_are_deleted_oldest_first(
    mixed: ModelIndex, manifest: Manifest, tmp_path: Path
) -> None:
    """Or the cache grows with every model that was ever joined."""
    names = ["third", "first", "second"]
    slots = [
        fill(tmp_path, other_model(manifest, name), mixed, opened_s)
        for name, opened_s in zip(names, (3000, 1000, 2000), strict=True)
    ]
    with SliceStore(tmp_path, manifest) as store:
        add(store, mixed, SECOND)
        store.commit(SECOND)
        n_bytes = sum(path.stat().st_size for path in slots[0].glob("*.gguf"))
        for limit_bytes, left in ((3 * n_bytes, 3), (3 * n_bytes - 1, 2), (n_bytes, 1), (n_bytes - 1, 0)):
            store.prune(limit_bytes)
            assert [slot.exists() for slot in (slots[0], slots[2], slots[1])] == [
                number < left for number in range(3)
            ]
        assert store.held() == (SECOND,)
        assert [path.name for path in (tmp_path / "slices").iterdir()] == [store.folder.parent.name]


def test_other_models_go_before_other_slots_of_this_one(
    mixed: ModelIndex, manifest: Manifest, tmp_path: Path
) -> None:
    with SliceStore(tmp_path, manifest) as first:
        with SliceStore(tmp_path, manifest) as second:
            add(second, mixed, SECOND)
            second.commit(SECOND)
        same = second.folder
        os.utime(same, (1000, 1000))
        other = fill(tmp_path, other_model(manifest, "other"), mixed, 2000)
        n_bytes = sum(path.stat().st_size for path in same.glob("*.gguf"))
        first.prune(n_bytes)
        assert (same.exists(), other.exists()) == (True, False)
        first.prune(n_bytes - 1)
        assert not same.exists()


def test_slots_in_use_are_never_touched(mixed: ModelIndex, manifest: Manifest, tmp_path: Path) -> None:
    with (
        SliceStore(tmp_path, manifest) as store,
        SliceStore(tmp_path, manifest) as same,
        SliceStore(tmp_path, other_model(manifest, "other")) as other,
    ):
        for used in (same, other):
            add(used, mixed, FIRST)
            used.commit(FIRST)
        store.prune(0)
        for used in (same, other):
            assert files(used) == ["layer-0-experts-1-to-2.gguf"]
            assert used.read_slab(0, 1, "ffn_up_exps") == mixed.slab(0, 1, "ffn_up_exps")


def test_a_slot_deleted_while_another_process_opens_it_is_not_shared(
    manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock of a deleted file locks nothing: whoever gets it takes another slot."""

    def deleted_before(descriptor: int) -> bool:
        monkeypatch.setattr(store_module, "try_lock", try_lock)
        (lock,) = tmp_path.rglob("lock")
        lock.unlink()
        return try_lock(descriptor)

    monkeypatch.setattr(store_module, "try_lock", deleted_before)
    with SliceStore(tmp_path, manifest) as store, SliceStore(tmp_path, manifest) as other:
        assert store.folder != other.folder
        assert (store.folder / "lock").exists()


def test_slots_that_cannot_be_deleted_do_no_harm(
    mixed: ModelIndex,
    manifest: Manifest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    slot = fill(tmp_path, other_model(manifest, "other"), mixed, 1000)
    (slot.parent / "slot-77").touch()

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with SliceStore(tmp_path, manifest) as store, monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        store.prune(0)
    assert slot.exists()
    assert "Read-only file system" in caplog.text
    with SliceStore(tmp_path, other_model(manifest, "other")) as again:
        assert again.held() == (FIRST,)


def test_a_shard_that_cannot_be_read_back_is_the_models_fault(
    store: SliceStore, mixed: ModelIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise ModelFileError(f"{path}: odd metadata")

    add(store, mixed, FIRST)
    monkeypatch.setattr(store_module, "ShardFile", refuse)
    with pytest.raises(UnsupportedModelError, match="odd metadata"):
        store.commit(FIRST)
    assert store.held() == ()
    assert not [name for name in files(store) if name.endswith(".gguf")]
