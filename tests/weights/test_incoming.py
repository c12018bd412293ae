"""Blocks on disk that are not a slab yet: over restarts, damage and full disks."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from swarmnode.errors import StoreError
from swarmnode.weights.incoming import Incoming, SlabKey
from swarmnode.weights.index import ModelIndex
from swarmnode.weights.manifest import Manifest
from swarmnode.weights.slices import ExpertRange

KEY: SlabKey = (0, 1, "ffn_up_exps")
BLOCK = 4096


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "slot" / "incoming"


@pytest.fixture
def incoming(folder: Path, manifest: Manifest) -> Incoming:
    folder.parent.mkdir()
    return Incoming(folder, manifest)


def put(incoming: Incoming, index: ModelIndex, offsets: range, key: SlabKey = KEY) -> None:
    slab = index.slab(*key)
    for offset in offsets:
        incoming.put(key, BLOCK, offset, slab[offset : offset + BLOCK])


def all_offsets(index: ModelIndex, key: SlabKey = KEY) -> range:
    return range(0, len(index.slab(*key)), BLOCK)


def test_blocks_in_any_order_over_restarts_make_a_slab(
    incoming: Incoming, mixed: ModelIndex, manifest: Manifest, folder: Path
) -> None:
    offsets = all_offsets(mixed)
    assert incoming.missing(KEY, BLOCK) == tuple(offsets)
    assert not incoming.seal(KEY, BLOCK)
    for turn in (offsets[1::2], offsets[0:2], offsets[0::2]):
        put(incoming, mixed, turn)
        assert not set(incoming.missing(KEY, BLOCK)) & set(turn)
        incoming = Incoming(folder, manifest)
        assert incoming.ranges() == (ExpertRange(0, 1, 1),)
    assert incoming.missing(KEY, BLOCK) == ()
    assert not incoming.has(KEY)
    assert incoming.seal(KEY, BLOCK)
    for opened in (incoming, Incoming(folder, manifest)):
        assert opened.has(KEY)
        assert opened.slab(*KEY) == mixed.slab(*KEY)
    incoming.drop(KEY)
    assert not incoming.has(KEY)
    assert list(folder.iterdir()) == []


def test_blocks_of_another_size_start_anew(incoming: Incoming, mixed: ModelIndex) -> None:
    put(incoming, mixed, all_offsets(mixed))
    assert len(incoming.missing(KEY, 2 * BLOCK)) == len(range(0, len(mixed.slab(*KEY)), 2 * BLOCK))


def test_a_wrong_block_is_found_and_replaced(incoming: Incoming, mixed: ModelIndex) -> None:
    offsets = all_offsets(mixed)
    put(incoming, mixed, offsets)
    incoming.put(KEY, BLOCK, BLOCK, bytes(BLOCK))
    assert not incoming.seal(KEY, BLOCK)
    wrong = incoming.digests(KEY, BLOCK)
    incoming.unmark(KEY, BLOCK, [BLOCK])
    assert incoming.missing(KEY, BLOCK) == (BLOCK,)
    put(incoming, mixed, offsets[1:2])
    assert incoming.seal(KEY, BLOCK)
    right = incoming.digests(KEY, BLOCK)
    assert [i for i, pair in enumerate(zip(wrong, right, strict=True)) if pair[0] != pair[1]] == [1]


def test_what_a_power_cut_may_leave_is_not_believed(
    incoming: Incoming, mixed: ModelIndex, manifest: Manifest, folder: Path
) -> None:
    """Marks without bytes, a slab with holes, a file cut short: as if nothing had come, or found by the hash."""
    put(incoming, mixed, all_offsets(mixed))
    (path,) = folder.iterdir()
    content = path.read_bytes()
    path.write_bytes(bytes(BLOCK) + content[BLOCK:])
    incoming = Incoming(folder, manifest)
    assert incoming.missing(KEY, BLOCK) == ()
    assert not incoming.seal(KEY, BLOCK)
    path.write_bytes(content[:BLOCK])
    assert incoming.missing(KEY, BLOCK) == tuple(all_offsets(mixed))
    path.rename(path.with_name("0-1-ffn_up_exps.slab"))
    assert not incoming.has(KEY)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "name",
    [
        "9-1-ffn_up_exps.slab",
        "0-6-ffn_up_exps.slab",
        "0-1-ffn_gate_up_exps.slab",
        "0-1-ffn_up_exps.0.part",
        "0-1-ffn_up_exps",
        "x",
        "0-1-ffn_up_exps.4096.part.slab",
    ],
)
def test_files_of_no_slab_are_deleted_at_start(
    name: str, incoming: Incoming, mixed: ModelIndex, manifest: Manifest, folder: Path
) -> None:
    put(incoming, mixed, range(0, BLOCK, BLOCK))
    (folder / name).write_bytes(b"junk")
    assert Incoming(folder, manifest).ranges() == (ExpertRange(0, 1, 1),)
    assert [path.name for path in folder.iterdir()] == ["0-1-ffn_up_exps.4096.part"]


def test_files_longer_than_their_slab_are_deleted_at_start(
    incoming: Incoming, mixed: ModelIndex, manifest: Manifest, folder: Path
) -> None:
    (folder / "0-1-ffn_up_exps.4096.part").write_bytes(bytes(2 * len(mixed.slab(*KEY))))
    assert Incoming(folder, manifest).ranges() == ()


def test_only_wanted_ranges_stay(incoming: Incoming, mixed: ModelIndex) -> None:
    keys: list[SlabKey] = [(0, 1, "ffn_up_exps"), (0, 2, "ffn_up_exps"), (2, 1, "ffn_down_exps")]
    for key in keys:
        put(incoming, mixed, range(0, BLOCK, BLOCK), key)
    assert incoming.ranges() == (ExpertRange(0, 1, 2), ExpertRange(2, 1, 1))
    incoming.add(KEY, mixed.slab(*KEY))
    assert incoming.has(KEY)
    incoming.keep_only([ExpertRange(0, 2, 4), ExpertRange(1, 0, 6)])
    assert incoming.ranges() == (ExpertRange(0, 2, 1),)
    assert not incoming.has(KEY)


def test_a_block_that_the_disk_refuses_is_missing(incoming: Incoming, mixed: ModelIndex) -> None:
    """A refusal by the kernel in the middle of a block, in place of a full disk."""
    offsets = all_offsets(mixed)
    put(incoming, mixed, offsets[:2])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * BLOCK - 100, hard))
    try:
        with pytest.raises(StoreError, match=r"File too large.*--home DIR"):
            put(incoming, mixed, offsets[2:3])
        with pytest.raises(StoreError, match="File too large"):
            put(incoming, mixed, offsets[3:4])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert incoming.missing(KEY, BLOCK) == tuple(offsets[2:])
    put(incoming, mixed, offsets[2:])
    assert incoming.seal(KEY, BLOCK)
