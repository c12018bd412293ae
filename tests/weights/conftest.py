"""Models the tests of this room share, written once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmnode.testing.tiny_gguf import TinyModel, write_tiny_gguf
from swarmnode.weights.hashing import build_manifest
from swarmnode.weights.index import ModelIndex
from swarmnode.weights.manifest import Manifest

MIXED = TinyModel(n_layer=4, n_expert=6, up_type="Q4_K", down_types=("Q6_K", "Q4_K"), dense_type="Q8_0")
"""Two sizes of experts in one file, as llama-quantize writes them."""


@pytest.fixture(scope="session")
def mixed_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("mixed") / "mixed.gguf", MIXED)


@pytest.fixture(scope="session")
def mixed(mixed_path: Path) -> Iterator[ModelIndex]:
    with ModelIndex.open(mixed_path) as index:
        yield index


@pytest.fixture(scope="session")
def manifest(mixed: ModelIndex) -> Manifest:
    return build_manifest(mixed)
