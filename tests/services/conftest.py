"""A CPU device and a small model for the services' tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmnode.compute.devices import Device, open_device
from swarmnode.compute.thread import release_compute_thread
from swarmnode.testing.tiny_gguf import TinyModel, write_tiny_gguf
from swarmnode.weights.hashing import build_manifest
from swarmnode.weights.index import ModelIndex
from tests.services.source import Source

MODEL = TinyModel(n_layer=2, n_expert=8, up_type="Q8_0", down_types=("Q8_0",))
EXPERT_BYTES = 3 * 256 * 256 // 32 * 34


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    release_compute_thread()
    opened = open_device("CPU", n_threads=1)
    yield opened
    opened.close()
    release_compute_thread()


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of eight Q8_0 experts of EXPERT_BYTES each."""
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", MODEL)


@pytest.fixture(scope="session")
def index(model_path: Path) -> Iterator[ModelIndex]:
    with ModelIndex.open(model_path) as opened:
        yield opened


@pytest.fixture
def source(index: ModelIndex) -> Source:
    return Source(index, build_manifest(index))
