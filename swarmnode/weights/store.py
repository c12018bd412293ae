"""A worker's slices on disk: `<cache>/slices/<model id>/<slot>/`, one shard file for each range that is held.

What arrives waits in `incoming/` (weights/incoming.py), over a restart as well, until its range is committed; only
then, written whole and synced, is it held. A process locks the slot it uses and takes the first free one, so that
several workers may share a cache folder: each has slices of its own, and a restarted one finds those of a predecessor
(docs/decisions/0007-slice-store.md).
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from swarmnode.errors import BadReplyError, ModelFileError, StoreError, UnsupportedModelError
from swarmnode.weights.disk import PARTIAL_SUFFIX, make_folder, store_error
from swarmnode.weights.file_lock import try_lock
from swarmnode.weights.incoming import Incoming
from swarmnode.weights.manifest import BytesLike, Manifest
from swarmnode.weights.shard import ShardFile, shard_name, write_shard
from swarmnode.weights.slices import ExpertRange

log = logging.getLogger(__name__)

MAX_SLOTS = 64
"""Processes with slices of one model in one cache folder."""


class SliceStore:
    """The slices of one model that this process holds. Methods block and may be called from several threads."""

    def __init__(self, cache_dir: Path, manifest: Manifest) -> None:
        """Lock a slot, delete what a crash left half done and every file whose bytes are not the manifest's.

        Raises StoreError, naming the folder and `--home DIR`, if it cannot be written or all slots are
        taken.
        """
        self._manifest = manifest
        self._mutex = threading.Lock()
        self._shards: dict[ExpertRange, ShardFile] = {}
        self._all_models = cache_dir / "slices"
        self.folder, self._lock = _lock_slot(self._all_models / manifest.model_id.hex()[:32])
        try:
            self.incoming = Incoming(self.folder / "incoming", manifest)
            self._rescan()
        except OSError as error:
            self.close()
            raise store_error(self.folder, error) from error

    @property
    def used_bytes(self) -> int:
        """Bytes of the files of all held ranges."""
        with self._mutex:
            return sum(shard.n_bytes for shard in self._shards.values())

    def held(self) -> tuple[ExpertRange, ...]:
        """The ranges committed and not removed, in order."""
        with self._mutex:
            return tuple(sorted(self._shards))

    def add_slab(self, layer: int, expert: int, kind: str, data: BytesLike) -> None:
        """Keep one slab until its range is committed; given twice, the later counts.

        Raises BadReplyError if it is not that slab by the manifest's hash, StoreError if the disk refuses.
        """
        if not self._manifest.check_slab(layer, expert, kind, data):
            raise BadReplyError(f"layer {layer}, expert {expert}, {kind}: not the bytes of the manifest")
        self.incoming.add((layer, expert, kind), data)

    def commit(self, item: ExpertRange) -> None:
        """Make a range held: on return it is on disk, synced, and survives a crash.

        Held ranges that overlap it are removed: what is held never overlaps. Raises StoreError if a slab of it was not
        added, the model has no such range, or the disk refuses; UnsupportedModelError if the manifest is such that a
        shard of this model cannot be read back. Nothing has changed then.
        """
        path = self.folder / shard_name(item)
        try:
            self.incoming.check(item)
            write_shard(path, self.incoming, self._manifest, (item,), check=False)
        except ModelFileError as error:
            raise StoreError(f"{self.folder}: {item} cannot be committed: {error}") from error
        shard = self._read_back(path)
        with self._mutex:
            self._shards.pop(item, None)  # the same range again: its file was replaced
            overlapped = [held for held in self._shards if _overlap(held, item)]
            self._shards[item] = shard
        for held in overlapped:
            self.remove(held)
        self.discard(item)

    def prune(self, limit_bytes: int) -> None:
        """Delete slots that no process uses until they take at most `limit_bytes`, this store's own not counted.

        Other models' go first, then this model's; the least recently opened first. What cannot be deleted is left and
        logged. A slot that is locked is never touched.
        """
        slots = [slot for slot in self._all_models.glob("*/slot-*") if slot != self.folder]
        slots.sort(key=lambda slot: (slot.parent == self.folder.parent, _opened_ns(slot)), reverse=True)
        for slot in slots:  # from the one worth most
            try:
                limit_bytes -= _prune_slot(slot, limit_bytes)
            except OSError as error:
                log.warning("%s: slices that nobody uses stay: %s", slot, error)

    def discard(self, item: ExpertRange) -> None:
        """Forget what came of a range that is not committed."""
        for expert in item.experts:
            for kind in self._manifest.layers[item.layer].layout.kinds:
                self.incoming.drop((item.layer, expert, kind))

    def read_slab(self, layer: int, expert: int, kind: str) -> bytes:
        """A copy of one held expert's bytes that leaves no file pages in memory. KeyError if it is not held."""
        with self._mutex:
            shard = self._shard_of(layer, expert)
        return shard.read_slab(layer, expert, kind)

    def read_block(self, layer: int, expert: int, kind: str, offset: int, length: int) -> bytes:
        """A copy of some of a held slab's bytes, as `read_slab`. KeyError if the expert is not held."""
        with self._mutex:
            shard = self._shard_of(layer, expert)
        return shard.read_block(layer, expert, kind, offset, length)

    def remove(self, item: ExpertRange) -> None:
        """Stop holding a range that was committed as such, and free its bytes. KeyError if it is not held."""
        with self._mutex:
            shard = self._shards.pop(item)
        shard.close()
        try:
            shard.path.unlink()
        except OSError as error:
            raise store_error(self.folder, error) from error

    def close(self) -> None:
        """Unlock the slot; what is held stays on disk."""
        with self._mutex:
            for shard in self._shards.values():
                shard.close()
            self._shards.clear()
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _shard_of(self, layer: int, expert: int) -> ShardFile:
        for item, shard in self._shards.items():
            if item.layer == layer and expert in item.experts:
                return shard
        raise KeyError(f"layer {layer}, expert {expert} is not held")

    def _read_back(self, path: Path) -> ShardFile:
        try:
            return ShardFile(path)
        except (ModelFileError, UnsupportedModelError) as error:
            with suppress(OSError):
                path.unlink()
            raise UnsupportedModelError(f"a shard of this model cannot be read back: {error}") from error

    def _rescan(self) -> None:
        for path in sorted(self.folder.iterdir()):
            if path.suffix == PARTIAL_SUFFIX:
                path.unlink()
            elif path.suffix == ".gguf":
                self._take_in(path)

    def _take_in(self, path: Path) -> None:
        found = self._sound_shard(path)
        if found is None:
            log.warning("%s is damaged or not of this model: deleted", path)
            path.unlink()
        else:
            self._shards[found[0]] = found[1]

    def _sound_shard(self, path: Path) -> tuple[ExpertRange, ShardFile] | None:
        """A file of this folder and the range it holds, or None if anything about it is wrong."""
        try:
            shard = ShardFile(path)
        except (ModelFileError, UnsupportedModelError):
            return None
        if len(shard.experts) != 1:
            return None
        layer, experts = next(iter(shard.experts.items()))
        item = ExpertRange(layer, experts[0], len(experts))
        in_place = experts == tuple(item.experts) and path.name == shard_name(item)
        free = not any(_overlap(held, item) for held in self._shards)
        return (item, shard) if in_place and free and shard.verify(self._manifest) else None


def _overlap(a: ExpertRange, b: ExpertRange) -> bool:
    return a.layer == b.layer and a.first < b.stop and b.first < a.stop


def _lock_slot(folder: Path) -> tuple[Path, int]:
    """The first slot nobody uses, and the descriptor whose lock ends with this process."""
    for number in range(MAX_SLOTS):
        slot = folder / f"slot-{number}"
        make_folder(slot)
        try:
            descriptor = _try_slot(slot)
        except OSError as error:
            raise store_error(slot, error) from error
        if descriptor is not None:
            return slot, descriptor
    raise StoreError(
        f"{folder}: {MAX_SLOTS} other processes use this cache folder; choose another: --home DIR"
    )


def _try_slot(slot: Path) -> int | None:
    """The descriptor that locks the slot, or None if another process has it or has just deleted it. OSError."""
    path = slot / "lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except FileNotFoundError:
        return None
    try:
        # A file that was deleted before it was locked locks nothing: the next process makes another.
        if try_lock(descriptor) and os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    except FileNotFoundError:
        pass
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _opened_ns(slot: Path) -> int:
    """When a process last took the slot or changed what it holds."""
    try:
        return slot.stat().st_mtime_ns
    except OSError:
        return 0


def _prune_slot(slot: Path, limit_bytes: int) -> int:
    """Bytes of a slot that no process uses (0 if one does); it is deleted if they are more than the limit."""
    descriptor = _try_slot(slot)
    if descriptor is None:
        return 0
    try:
        n_bytes = _bytes_in(slot)
        if n_bytes > limit_bytes:
            _delete_slot(slot)
        return n_bytes
    finally:
        os.close(descriptor)


def _bytes_in(slot: Path) -> int:
    return sum(path.stat().st_size for path in slot.rglob("*") if path.is_file())


def _delete_slot(slot: Path) -> None:
    """Delete a slot that this process has locked; the lock's file last. Folders that are in use stay."""
    for path in slot.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink()
    with suppress(OSError):  # Windows keeps an open file; an empty slot does no harm
        (slot / "lock").unlink()
        slot.rmdir()
        slot.parent.rmdir()
