"""Small models for swarms in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmnode.testing.tiny_gguf import TinyModel, write_tiny_gguf

MODEL = TinyModel(n_layer=4, n_expert=8, n_expert_used=2)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers of eight F32 experts, 786,432 bytes each."""
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", MODEL)


EXPERT_BYTES = 3 * 256 * 256 * 4
ALL_BYTES = 4 * 8 * EXPERT_BYTES
