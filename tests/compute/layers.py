"""Random layers of experts, as layouts and stacked bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swarmnode.compute import ggml
from swarmnode.compute.bank import ExpertBank
from swarmnode.compute.devices import Device
from swarmnode.compute.layout import FUSED_KINDS, SEPARATE_KINDS, ExpertTensor, LayerLayout, expected_shapes

TYPES = [(ggml.F32, ggml.F32), (ggml.Q8_0, ggml.Q8_0), (ggml.Q4_0, ggml.Q4_0), (ggml.Q4_K, ggml.Q6_K)]


@dataclass(frozen=True)
class RandomLayer:
    layout: LayerLayout
    stacked: dict[str, bytes]

    def slabs(self, expert: int) -> dict[str, bytes]:
        return {
            tensor.kind: self.stacked[tensor.kind][expert * tensor.n_bytes : (expert + 1) * tensor.n_bytes]
            for tensor in self.layout.tensors
        }

    def bound(self, device: Device, max_rows: int | None = None) -> ExpertBank:
        bank = ExpertBank(device, max_rows=max_rows)
        bank.bind(self.layout, range(self.layout.n_expert), self.stacked)
        return bank


def random_layer(
    types: tuple[int, int] = (ggml.F32, ggml.F32),
    *,
    n_embd: int = 256,
    n_ff: int = 256,
    n_expert: int = 8,
    layer: int = 0,
    fused: bool = False,
    seed: int = 7,
) -> RandomLayer:
    rng = np.random.default_rng([seed, layer])
    kinds = FUSED_KINDS if fused else SEPARATE_KINDS
    stacked: dict[str, bytes] = {}
    tensors: list[ExpertTensor] = []
    for kind in kinds:
        ne0, ne1 = expected_shapes(n_embd, n_ff)[kind]
        ggml_type = types[kind == kinds[-1]]
        values = rng.standard_normal((n_expert, ne1, ne0), np.float32) / np.float32(ne0**0.5)
        stacked[kind] = ggml.quantize(ggml_type, values)
        tensors.append(ExpertTensor(kind, ggml_type, ne0, ne1, len(stacked[kind]) // n_expert))
    return RandomLayer(LayerLayout(layer, n_embd, n_ff, n_expert, tuple(tensors)), stacked)


@dataclass(frozen=True)
class Routing:
    rows: npt.NDArray[np.float32]
    ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]

    @property
    def pair_row(self) -> npt.NDArray[np.int32]:
        return np.repeat(np.arange(self.ids.shape[0], dtype=np.int32), self.ids.shape[1])

    @property
    def pair_expert(self) -> npt.NDArray[np.int32]:
        return self.ids.reshape(-1)

    @property
    def pair_weight(self) -> npt.NDArray[np.float32]:
        return self.weights.reshape(-1)


def random_routing(layout: LayerLayout, n_rows: int, n_used: int = 3, seed: int = 3) -> Routing:
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(layout.n_expert)[:n_used] for _ in range(n_rows)]).astype(np.int32)
    weights = rng.random((n_rows, n_used), np.float32)
    return Routing(
        rng.standard_normal((n_rows, layout.n_embd), np.float32),
        ids,
        weights / weights.sum(axis=1, keepdims=True),
    )
