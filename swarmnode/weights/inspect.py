"""What a model file holds, as `swarmnode inspect` shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from swarmnode.weights.ggml_types import type_name
from swarmnode.weights.index import ModelIndex


@dataclass(frozen=True)
class Description:
    """`parts`: the files. `expert_bytes`: layer -> bytes of one of its experts; dense layers are absent.
    `quantisation`: kind of tensor (`ffn_down_exps`, `token_embd` ...) -> type name -> number of tensors, MTP block
    included. `dense_bytes`: all that the backbone computes itself, `mtp_bytes`: of the MTP block, its
    experts included.
    """

    name: str
    architecture: str
    parts: tuple[Path, ...]
    n_bytes: int
    n_layer: int
    n_embd: int
    n_expert: int
    n_expert_used: int
    n_vocab: int
    n_ctx_train: int
    expert_bytes: Mapping[int, int]
    routed_bytes: int
    dense_bytes: int
    mtp_bytes: int
    quantisation: Mapping[str, Mapping[str, int]]

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Layers without routed experts: nothing is offered for them."""
        return tuple(layer for layer in range(self.n_layer) if layer not in self.expert_bytes)


def describe(index: ModelIndex) -> Description:
    """Describe an opened model; reads no tensor. ModelFileError if it has no context length."""
    routed = sum(layout.expert_bytes * layout.n_expert for layout in index.expert_layers.values())
    dense = sum(index.tensors[name].n_bytes for name in index.dense_tensors)
    name = index.metadata.get("general.name")
    return Description(
        name=name if isinstance(name, str) and name else index.architecture,
        architecture=index.architecture,
        parts=index.paths,
        n_bytes=index.n_bytes,
        n_layer=index.n_layer,
        n_embd=index.n_embd,
        n_expert=index.n_expert,
        n_expert_used=index.n_expert_used,
        n_vocab=index.tensors["token_embd.weight"].ne[1],
        n_ctx_train=index.integer("context_length", 1, 2**31 - 1),
        expert_bytes=MappingProxyType({n: layout.expert_bytes for n, layout in index.expert_layers.items()}),
        routed_bytes=routed,
        dense_bytes=dense,
        mtp_bytes=sum(tensor.n_bytes for tensor in index.tensors.values()) - routed - dense,
        quantisation=_quantisation(index),
    )


def _quantisation(index: ModelIndex) -> Mapping[str, Mapping[str, int]]:
    counts: dict[str, Counter[str]] = {}
    for tensor in index.tensors.values():
        counts.setdefault(_kind(tensor.name), Counter())[type_name(tensor.ggml_type)] += 1
    return MappingProxyType({kind: dict(sorted(types.items())) for kind, types in sorted(counts.items())})


def _kind(name: str) -> str:
    """`blk.3.ffn_down_exps.weight` -> `ffn_down_exps`."""
    words = name.removesuffix(".weight").split(".")
    return ".".join(words[2:] if words[0] == "blk" and len(words) > 2 else words)
