"""Building a model's manifest: hashes every tensor once, on all cores, and remembers the result beside the
file's identity.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeAlias

from swarmnode.errors import ModelFileError, ProtocolError, UnsupportedModelError
from swarmnode.state_file import read_small
from swarmnode.weights.disk import make_folder, replacing
from swarmnode.weights.index import ModelIndex
from swarmnode.weights.manifest import HASH_BYTES, MAX_MANIFEST_BYTES, LayerManifest, Manifest, kept_metadata

Progress: TypeAlias = Callable[[int, int], None]
"""Called on the calling thread with (bytes hashed, bytes in all)."""

_Job: TypeAlias = Callable[[], memoryview]

_CACHE_FORMAT = "1"


def build_manifest(
    index: ModelIndex, progress: Progress | None = None, n_threads: int | None = None
) -> Manifest:
    """Hash the whole model, every byte once. Blocks; `n_threads` defaults to the cores
    there are.

    What `progress` raises ends the work and is raised again. UnsupportedModelError if a cap of the manifest
    is broken.
    """
    slab_jobs = [
        (partial(index.slab, layer, expert, tensor.kind), tensor.n_bytes)
        for layer, layout in index.expert_layers.items()
        for tensor in layout.tensors
        for expert in range(layout.n_expert)
    ]
    dense_names = sorted(index.dense_tensors)
    dense_jobs = [(partial(index.data, name), index.tensors[name].n_bytes) for name in dense_names]
    digests = _hash_all([*slab_jobs, *dense_jobs], progress or _ignore, n_threads or _usable_cores())
    layers = {
        number: LayerManifest(
            layout, {t.kind: b"".join(next(digests) for _ in range(layout.n_expert)) for t in layout.tensors}
        )
        for number, layout in index.expert_layers.items()
    }
    name = index.metadata.get("general.name")
    built = Manifest(
        architecture=index.architecture,
        name=name if isinstance(name, str) and name else index.architecture,
        n_embd=index.n_embd,
        n_layer=index.n_layer,
        n_expert=index.n_expert,
        n_expert_used=index.n_expert_used,
        metadata=kept_metadata(index.architecture, index.metadata_values),
        layers=layers,
        dense_sha256=_dense_sha256(index, dense_names, digests),
    )
    try:
        return Manifest.decode_untrusted(built.encode(), built.model_id)
    except ProtocolError as error:
        raise UnsupportedModelError(
            f"{index.paths[0]}: other nodes would refuse its manifest: {error}"
        ) from error


def load_or_build_manifest(index: ModelIndex, cache_dir: Path, progress: Progress | None = None) -> Manifest:
    """The manifest from the cache folder, if the file's parts have the paths, sizes, times and inodes they
    had when it was built; otherwise built and stored there.

    Raises StoreError, before hashing anything, if the folder cannot be written; ModelFileError if a part is
    gone.
    """
    path = cache_dir / "manifests" / f"{_identity(index)}.manifest"
    cached = _load(path)
    if cached is not None:
        return cached
    make_folder(path.parent)
    manifest = build_manifest(index, progress)
    with replacing(path) as partial_path:
        partial_path.write_bytes(manifest.model_id + manifest.encode())
    return manifest


def verified_manifest(
    index: ModelIndex, cache_dir: Path, progress: Progress | None = None
) -> tuple[Manifest, bool]:
    """The manifest of the bytes that are there now, and whether it was known; every byte is read and hashed.

    Raises ModelFileError if bytes have changed since the manifest in the cache folder was built, and as
    `load_or_build_manifest`.
    """
    path = cache_dir / "manifests" / f"{_identity(index)}.manifest"
    known = _load(path)
    if known is None:
        return load_or_build_manifest(index, cache_dir, progress), False
    manifest = build_manifest(index, progress)
    if manifest.model_id != known.model_id:
        raise ModelFileError(
            f"{index.paths[0]}: its bytes are not those that were hashed before, though size and time are: "
            "a failing disk, most likely; get the file again"
        )
    return manifest, True


def forget_manifest(index: ModelIndex, cache_dir: Path) -> None:
    """Delete what is kept of this file in the cache folder, if anything is."""
    (cache_dir / "manifests" / f"{_identity(index)}.manifest").unlink(missing_ok=True)


def _hash_all(jobs: list[tuple[_Job, int]], progress: Progress, n_threads: int) -> Iterator[bytes]:
    """The digests in the order of the jobs, once all are there."""
    total = sum(n_bytes for _, n_bytes in jobs)
    digests: list[bytes] = []
    done = 0
    executor = ThreadPoolExecutor(n_threads, thread_name_prefix="hash")
    try:
        for digest, (_, n_bytes) in zip(executor.map(_sha256, (job for job, _ in jobs)), jobs, strict=True):
            digests.append(digest)
            done += n_bytes
            progress(done, total)
    finally:
        executor.shutdown(cancel_futures=True)
    return iter(digests)


def _sha256(job: _Job) -> bytes:
    return hashlib.sha256(job()).digest()  # hashlib lets other threads run meanwhile


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _ignore(done: int, total: int) -> None:
    pass


def _dense_sha256(index: ModelIndex, names: list[str], digests: Iterator[bytes]) -> bytes:
    """Hash over (name, type, shape, hash) of the tensors, by name: independent of their order in the file."""
    combined = hashlib.sha256()
    for name in names:
        tensor = index.tensors[name]
        combined.update(repr((name, tensor.ggml_type, tensor.ne)).encode() + next(digests))
    return combined.digest()


def _identity(index: ModelIndex) -> str:
    facts = [_CACHE_FORMAT]
    for path in index.paths:
        try:
            status = path.stat()
        except OSError as error:
            raise ModelFileError(f"{path}: gone since it was opened: {error.strerror}") from error
        facts.append(repr((str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ino)))
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def _load(path: Path) -> Manifest | None:
    try:
        data = read_small(path, HASH_BYTES + MAX_MANIFEST_BYTES)
    except OSError:
        return None
    try:
        return Manifest.decode_untrusted(data[HASH_BYTES:], data[:HASH_BYTES])
    except ProtocolError:
        return None  # damaged, or of an older version: built anew
