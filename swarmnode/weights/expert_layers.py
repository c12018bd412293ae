"""Which layers of a GGUF have routed experts, and how each expert lies in its stacked tensors.

Pure: looks at names, shapes and types. Everything ggml needs to be true of an expert tensor is checked here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn, Protocol

from swarmnode.compute.layout import (
    DOWN,
    FUSED_KINDS,
    GATE,
    GATE_UP,
    SEPARATE_KINDS,
    UP,
    ExpertTensor,
    LayerLayout,
    layout_problem,
)
from swarmnode.errors import ModelFileError, UnsupportedModelError
from swarmnode.weights.ggml_types import is_weight_type, type_name

_EXPERT_KINDS = (GATE, UP, DOWN, GATE_UP)
_PER_EXPERT_NAME = re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.\d+\.weight")
_EXPERT_EXTRA_NAME = re.compile(r"blk\.(\d+)\.ffn_\w+_exps\.(?!weight$).*")


class StoredTensor(Protocol):
    """What is looked at of a tensor."""

    @property
    def name(self) -> str: ...
    @property
    def ggml_type(self) -> int: ...
    @property
    def ne(self) -> tuple[int, ...]: ...
    @property
    def n_bytes(self) -> int: ...


def tensor_name(layer: int, kind: str) -> str:
    """GGUF name of a stacked expert tensor."""
    return f"blk.{layer}.{kind}.weight"


def is_expert_tensor(name: str) -> bool:
    """True for a stacked tensor of routed experts, of any layer."""
    block, _, rest = name.partition(".")[2].partition(".")
    return block.isdigit() and rest.removesuffix(".weight") in _EXPERT_KINDS and rest.endswith(".weight")


def find_expert_layers(
    path: Path, tensors: Mapping[str, StoredTensor], *, n_layer: int, n_expert: int, n_embd: int
) -> dict[int, LayerLayout]:
    """Layouts of the layers below `n_layer` that have routed experts, by layer; dense layers are absent.

    Raises ModelFileError if tensors contradict the metadata or each other, UnsupportedModelError for experts
    this version cannot compute (per-expert tensors of old Mixtral files, biases, scales); both name `path`.
    """
    _refuse_unsupported(path, tensors, n_layer)
    layers = {}
    for layer in range(n_layer):
        kinds = tuple(kind for kind in _EXPERT_KINDS if tensor_name(layer, kind) in tensors)
        router = tensors.get(f"blk.{layer}.ffn_gate_inp.weight")
        if not kinds and router is None:
            continue
        if router is None or router.ne != (n_embd, n_expert):
            shape = "missing" if router is None else f"{router.ne}, not {(n_embd, n_expert)}"
            raise ModelFileError(f"{path}: layer {layer} has experts, but its ffn_gate_inp.weight is {shape}")
        layers[layer] = _layout(path, layer, kinds, tensors, n_expert, n_embd)
    if not layers:
        raise ModelFileError(f"{path}: the metadata promises {n_expert} experts, but no layer has any")
    return layers


def find_block_experts(
    path: Path, tensors: Mapping[str, StoredTensor], *, block: int, n_expert: int, n_embd: int
) -> LayerLayout:
    """Layout of the routed experts of one block, which has to have some: the MTP block behind the last layer.

    Raises ModelFileError, UnsupportedModelError as `find_expert_layers`.
    """
    for name in tensors:
        extra = _EXPERT_EXTRA_NAME.fullmatch(name)
        if extra and int(extra[1]) == block:
            _refuse_extra(path, name)
    kinds = tuple(kind for kind in _EXPERT_KINDS if tensor_name(block, kind) in tensors)
    return _layout(path, block, kinds, tensors, n_expert, n_embd)


def _refuse_unsupported(path: Path, tensors: Mapping[str, StoredTensor], n_layer: int) -> None:
    for name in tensors:
        if _PER_EXPERT_NAME.fullmatch(name):
            raise UnsupportedModelError(
                f"{path}: tensor {name!r}: one tensor for each expert, a layout of before 2024; "
                "convert the model anew"
            )
        extra = _EXPERT_EXTRA_NAME.fullmatch(name)
        if extra and int(extra[1]) < n_layer:
            _refuse_extra(path, name)


def _refuse_extra(path: Path, name: str) -> NoReturn:
    raise UnsupportedModelError(f"{path}: tensor {name!r}: experts with biases or scales cannot be computed")


def _layout(
    path: Path,
    layer: int,
    kinds: tuple[str, ...],
    tensors: Mapping[str, StoredTensor],
    n_expert: int,
    n_embd: int,
) -> LayerLayout:
    order = FUSED_KINDS if GATE_UP in kinds else SEPARATE_KINDS
    if set(kinds) != set(order):
        raise ModelFileError(f"{path}: layer {layer} has expert tensors {list(kinds)}, not {list(order)}")
    slabs = tuple(_slab(path, kind, tensors[tensor_name(layer, kind)], n_expert) for kind in order)
    layout = LayerLayout(layer, n_embd, slabs[-1].ne0, n_expert, slabs)
    problem = layout_problem(layout)
    if problem is not None:
        raise ModelFileError(f"{path}: {problem}")
    return layout


def _slab(path: Path, kind: str, tensor: StoredTensor, n_expert: int) -> ExpertTensor:
    def refuse(reason: str) -> NoReturn:
        raise ModelFileError(f"{path}: tensor {tensor.name!r} {reason}")

    if len(tensor.ne) != 3:
        refuse(f"has {len(tensor.ne)} dimensions; stacked experts have 3")
    if tensor.ne[2] != n_expert:
        refuse(f"stacks {tensor.ne[2]} experts, but the metadata says {n_expert}")
    if not is_weight_type(tensor.ggml_type):
        refuse(f"is of type {type_name(tensor.ggml_type)}, which ggml cannot multiply by")
    ne0, ne1, _ = tensor.ne
    return ExpertTensor(kind, tensor.ggml_type, ne0, ne1, tensor.n_bytes // n_expert)
