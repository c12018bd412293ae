"""Opening tiny models with their experts computed on the spot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from swarmnode.compute.bank import ExpertBank
from swarmnode.compute.devices import Device, open_device
from swarmnode.config import ModelsConfig, Repack
from swarmnode.models.base import ExpertCall, F32Array, Model, run_pass
from swarmnode.models.registry import open_model
from swarmnode.testing.tiny_gguf import TinyModel, write_tiny_gguf
from swarmnode.weights.index import ModelIndex

SMALL = TinyModel(
    n_embd=64, n_layer=4, n_expert=8, n_expert_used=3, n_ff=32, n_ff_shared=32, head_dim=32, state_size=32
)
"""Small enough for the float64 oracle: three recurrent layers and one with full attention."""


@dataclass
class LocalModel:
    """A model whose experts are all here."""

    index: ModelIndex
    device: Device
    model: Model
    bank: ExpertBank
    experts: Callable[[ExpertCall], F32Array]

    def run(self, tokens: Sequence[int], slot: int = 0, *, all_logits: bool = False) -> F32Array:
        """Append tokens to a slot; logits of the last token or of all."""
        return run_pass(self.model.forward(slot, tokens, all_logits=all_logits), self.experts)

    def greedy(self, prompt: Sequence[int], n: int, slot: int = 0) -> list[int]:
        """The n most probable tokens after a prompt."""
        tokens: list[int] = []
        logits = self.run(prompt, slot)
        while True:
            tokens.append(int(np.argmax(logits[-1])))
            if len(tokens) == n:
                return tokens
            logits = self.run(tokens[-1:], slot)


@contextmanager
def open_local(
    path: Path,
    *,
    n_ctx: int = 512,
    n_slots: int = 1,
    n_ubatch: int = 512,
    own_memory: bool = False,
    device_name: str = "CPU",
    n_threads: int = 1,
    repack: Repack = "auto",
    mtp: bool = True,
) -> Iterator[LocalModel]:
    """Open a GGUF with all experts bound; `own_memory`: treat the CPU as a device that shares none."""
    with ModelIndex.open(path) as index:
        device = open_device(device_name, n_threads)
        device.is_host = device.is_host and not own_memory
        bank = ExpertBank(device)
        for layer, layout in index.expert_layers.items():
            stacked = {kind: index.data(f"blk.{layer}.{kind}.weight") for kind in layout.kinds}
            bank.bind(layout, range(layout.n_expert), stacked)
        config = ModelsConfig(n_ubatch=n_ubatch, repack=repack, mtp=mtp)
        model = open_model(index, device, n_ctx, n_slots, config)
        try:
            yield LocalModel(
                index,
                device,
                model,
                bank,
                lambda call: bank.moe(call.layer, call.rows, call.ids, call.weights),
            )
        finally:
            model.close()
            bank.close()
            device.close()


@contextmanager
def open_tiny(
    folder: Path,
    tiny: TinyModel = SMALL,
    *,
    n_ctx: int = 512,
    n_slots: int = 1,
    n_ubatch: int = 512,
    own_memory: bool = False,
    mtp: bool = True,
) -> Iterator[LocalModel]:
    """Write a tiny random model and open it."""
    path = write_tiny_gguf(folder / "tiny.gguf", tiny)
    with open_local(
        path, n_ctx=n_ctx, n_slots=n_slots, n_ubatch=n_ubatch, own_memory=own_memory, mtp=mtp
    ) as local:
        yield local


def random_tokens(n: int, n_vocab: int, seed: int = 0) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, n_vocab, n)]
