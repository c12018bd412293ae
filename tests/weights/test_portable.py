"""What Windows lacks is not used: flags of `os.open`, folders as files, syncing what is open for reading only."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from swarmnode.errors import StoreError
from swarmnode.testing.tiny_gguf import TinyModel, write_tiny_gguf
from swarmnode.weights import disk
from swarmnode.weights.hashing import build_manifest
from swarmnode.weights.index import ModelIndex
from swarmnode.weights.slices import ExpertRange
from swarmnode.weights.store import SliceStore

MODEL = TinyModel(n_layer=1, n_expert=4, n_expert_used=2)


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """`os` as Windows has it, as far as the slice store could notice."""
    real_open, real_sync = os.open, os.fsync

    def open_file(path: Any, flags: int, *mode: Any, **options: Any) -> int:
        if os.path.isdir(path):
            raise PermissionError(13, "Permission denied", str(path))
        return real_open(path, flags, *mode, **options)

    def sync(descriptor: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(9, "Bad file descriptor")
        real_sync(descriptor)

    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.delattr(os, "O_CLOEXEC")
    monkeypatch.setattr(disk, "CAN_SYNC_FOLDERS", False)


@pytest.mark.usefixtures("windows")
def test_slices_are_kept_without_what_windows_lacks(tmp_path: Path) -> None:
    with ModelIndex.open(write_tiny_gguf(tmp_path / "tiny.gguf", MODEL)) as index:
        manifest = build_manifest(index)
        item = ExpertRange(0, 1, 2)
        with SliceStore(tmp_path / "cache", manifest) as store:
            for expert in item.experts:
                for kind in manifest.layers[0].layout.kinds:
                    store.add_slab(0, expert, kind, index.slab(0, expert, kind))
            store.commit(item)
        with SliceStore(tmp_path / "cache", manifest) as store:
            assert store.held() == (item,)
            assert store.read_slab(0, 1, "ffn_up_exps") == index.slab(0, 1, "ffn_up_exps")


def test_folders_are_synced_where_they_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    real_sync = os.fsync

    def sync(descriptor: int) -> None:
        synced.append(os.path.isdir(f"/proc/self/fd/{descriptor}"))
        real_sync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    with disk.replacing(tmp_path / "file") as partial:
        partial.write_bytes(b"x")
    assert synced == [False, True]
    with pytest.raises(StoreError), disk.replacing(tmp_path / "file"):
        raise OSError(28, "No space left on device")
    assert (tmp_path / "file").read_bytes() == b"x"
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
