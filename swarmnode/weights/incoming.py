"""Slabs on their way to a store, kept block by block, so that a fetch goes on where a kill ended it.

`incoming/LAYER-EXPERT-KIND.BLOCK_BYTES.part` holds the slab's bytes at their places and, behind them, one mark for each
block: written after the block's bytes, so a process that dies in between has lost that block and nothing else. Nothing
is synced: what a power cut leaves of bytes and marks is checked by the slab's hash like everything else. A slab whose
blocks are all here, and whose hash is right, is renamed to `LAYER-EXPERT-KIND.slab` until its range is committed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from swarmnode.errors import ModelFileError
from swarmnode.weights.disk import store_error
from swarmnode.weights.manifest import BytesLike, Manifest
from swarmnode.weights.slices import ExpertRange, holdings_of, merge_pairs

log = logging.getLogger(__name__)

SlabKey: TypeAlias = tuple[int, int, str]
"""(layer, expert, kind)."""

_NAME = re.compile(r"(\d{1,5})-(\d{1,6})-([a-z_]{1,32})\.(?:slab|(\d{1,9})\.part)")
_HASH_BYTES = 256 * 1024
_HERE = b"\1"


class Incoming:
    """One store's folder of slabs that are not held yet. Methods block and may be called from several threads.

    Blocks of one slab may be put side by side; `seal`, `drop` and `unmark` are for whoever puts them.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Make the folder, delete whatever in it is no slab of this model. Raises OSError."""
        self._folder = folder
        self._manifest = manifest
        self._sealed: set[SlabKey] = set()
        """Those whose hash this process has seen to be right."""
        self._mutex = threading.Lock()
        folder.mkdir(exist_ok=True)
        for path in folder.iterdir():
            if self._key_of(path) is None:
                path.unlink()

    def ranges(self) -> tuple[ExpertRange, ...]:
        """The experts of which something is here, merged: fetching these is cheaper than fetching others."""
        keys = (self._key_of(path) for path in self._folder.iterdir())
        return merge_pairs((key[0], key[1]) for key in keys if key is not None)

    def keep_only(self, ranges: Iterable[ExpertRange]) -> None:
        """Delete what belongs to other experts: nobody will fetch the rest of it, and the disk has a budget."""
        wanted = holdings_of(ranges)
        for path in self._folder.iterdir():
            key = self._key_of(path)
            if key is None:
                self._delete(path)
            elif key[1] not in wanted.get(key[0], ()):
                self.drop(key)

    def has(self, key: SlabKey) -> bool:
        """Whether the slab is whole, and its hash right."""
        path = self._slab_path(key)
        if not path.exists():
            return False
        with self._mutex:
            if key in self._sealed:
                return True
        if self._is_right(path, key):  # of an earlier process
            self._mark_sealed(key)
            return True
        self._delete(path)
        return False

    def check(self, item: ExpertRange) -> None:
        """ModelFileError unless every slab of the range is whole and its hash was seen to be right."""
        if not self._manifest.holds(item):
            return  # whoever wants to write it says so
        for expert in item.experts:
            for kind in self._manifest.layers[item.layer].layout.kinds:
                if not self.has((item.layer, expert, kind)):
                    raise ModelFileError(f"layer {item.layer}, expert {expert}, {kind} was not added")

    def missing(self, key: SlabKey, block_bytes: int) -> tuple[int, ...]:
        """Offsets of the blocks of `block_bytes` that are not here. All here is not yet right: `seal` says that."""
        n_bytes = self._n_bytes(key)
        try:
            with self._part_path(key, block_bytes).open("rb") as file:
                file.seek(n_bytes)
                marks = file.read(-(-n_bytes // block_bytes))
        except FileNotFoundError:
            marks = b""
        except OSError as error:
            raise store_error(self._folder.parent, error) from error
        offsets = range(0, n_bytes, block_bytes)
        return tuple(offset for i, offset in enumerate(offsets) if marks[i : i + 1] != _HERE)

    def put(self, key: SlabKey, block_bytes: int, offset: int, data: BytesLike) -> None:
        """Keep the block at `offset`. StoreError if the disk refuses; the block is then missing."""
        self._write(key, block_bytes, [(offset, data), (self._n_bytes(key) + offset // block_bytes, _HERE)])

    def unmark(self, key: SlabKey, block_bytes: int, offsets: Iterable[int]) -> None:
        """These blocks are missing again. StoreError as `put`."""
        n_bytes = self._n_bytes(key)
        self._write(key, block_bytes, [(n_bytes + offset // block_bytes, b"\0") for offset in offsets])

    def seal(self, key: SlabKey, block_bytes: int) -> bool:
        """Whether the blocks that are here make the slab of the manifest; if so it waits for `commit`.

        If not, they stay for `digests`; `drop` or `unmark` follows. StoreError if the disk refuses.
        """
        path = self._part_path(key, block_bytes)
        if not self._is_right(path, key):
            return False
        try:
            os.replace(path, self._slab_path(key))
        except OSError as error:
            raise store_error(self._folder.parent, error) from error
        self._mark_sealed(key)
        return True

    def digests(self, key: SlabKey, block_bytes: int) -> tuple[bytes, ...]:
        """A hash of each block, sealed or not: what differs between two copies of a slab. StoreError."""
        path = self._slab_path(key) if self.has(key) else self._part_path(key, block_bytes)
        n_bytes = self._n_bytes(key)
        try:
            with path.open("rb") as file:
                blocks = (
                    file.read(min(block_bytes, n_bytes - offset)) for offset in range(0, n_bytes, block_bytes)
                )
                return tuple(hashlib.blake2b(block, digest_size=16).digest() for block in blocks)
        except OSError as error:
            raise store_error(self._folder.parent, error) from error

    def add(self, key: SlabKey, data: BytesLike) -> None:
        """Keep a whole slab that was checked. StoreError if the disk refuses; nothing of it is then here."""
        path = self._slab_path(key)
        try:
            path.write_bytes(data)
        except OSError as error:
            self._delete(path)
            raise store_error(self._folder.parent, error) from error
        self._mark_sealed(key)

    def drop(self, key: SlabKey) -> None:
        """Forget everything of a slab."""
        with self._mutex:
            self._sealed.discard(key)
        for path in self._folder.glob(f"{_stem(key)}.*"):
            self._delete(path)

    def slab(self, layer: int, expert: int, kind: str) -> memoryview:
        """For `write_shard`: the bytes of a slab that is whole. ModelFileError if it is not here."""
        key = (layer, expert, kind)
        try:
            with self._slab_path(key).open("rb") as file:
                return memoryview(file.read(self._n_bytes(key)))
        except FileNotFoundError as error:
            raise ModelFileError(f"layer {layer}, expert {expert}, {kind} was not added") from error

    def _write(self, key: SlabKey, block_bytes: int, pieces: Sequence[tuple[int, BytesLike]]) -> None:
        try:
            with open(self._part_path(key, block_bytes), "r+b", opener=_creating) as file:
                for offset, data in pieces:
                    file.seek(offset)  # what was written before leaves first
                    file.write(data)
        except OSError as error:
            raise store_error(self._folder.parent, error) from error

    def _is_right(self, path: Path, key: SlabKey) -> bool:
        """Hash the slab's bytes in a file, a piece at a time. StoreError."""
        left_bytes = self._n_bytes(key)
        digest = hashlib.sha256()
        try:
            with path.open("rb", buffering=0) as file:
                while left_bytes and (piece := file.read(min(left_bytes, _HASH_BYTES))):
                    digest.update(piece)
                    left_bytes -= len(piece)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise store_error(self._folder.parent, error) from error
        layer, expert, kind = key
        return not left_bytes and digest.digest() == self._manifest.layers[layer].sha256(expert, kind)

    def _mark_sealed(self, key: SlabKey) -> None:
        with self._mutex:
            self._sealed.add(key)

    def _n_bytes(self, key: SlabKey) -> int:
        return self._manifest.layers[key[0]].layout.tensor(key[2]).n_bytes

    def _slab_path(self, key: SlabKey) -> Path:
        return self._folder / f"{_stem(key)}.slab"

    def _part_path(self, key: SlabKey, block_bytes: int) -> Path:
        return self._folder / f"{_stem(key)}.{block_bytes}.part"

    def _key_of(self, path: Path) -> SlabKey | None:
        """The slab that a file of this folder belongs to, None if it is none of this model's, too long or gone."""
        match = _NAME.fullmatch(path.name)
        layer = None if match is None else self._manifest.layers.get(int(match[1]))
        if match is None or layer is None or int(match[2]) >= self._manifest.n_expert:
            return None
        if match[3] not in layer.layout.kinds or match[4] == "0":
            return None
        n_bytes = layer.layout.tensor(match[3]).n_bytes
        most_bytes = n_bytes + (n_bytes if match[4] is None else -(-n_bytes // int(match[4])))
        try:
            is_sound = path.stat().st_size <= most_bytes
        except FileNotFoundError:  # gone meanwhile
            return None
        return (int(match[1]), int(match[2]), match[3]) if is_sound else None

    def _delete(self, path: Path) -> None:
        with suppress(OSError):
            path.unlink(missing_ok=True)
            return
        log.warning("%s: a slab that is no longer needed stays", path)  # costs space, nothing else


def _stem(key: SlabKey) -> str:
    return f"{key[0]}-{key[1]}-{key[2]}"


def _creating(path: str, flags: int) -> int:
    """Open for writing anywhere in the file, which need not exist."""
    return os.open(path, flags | os.O_CREAT, 0o600)
