"""MTP blocks that are not what they should be: a clear error, and the model still runs without its block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarmnode.compute.devices import open_device
from swarmnode.config import ModelsConfig
from swarmnode.errors import LocalError, ModelFileError, UnsupportedModelError
from swarmnode.models.base import Model
from swarmnode.models.registry import open_model
from swarmnode.testing.tiny_gguf import write_tiny_gguf
from swarmnode.weights.index import ModelIndex, TensorRef

from .kit import SMALL

TINY = replace(SMALL, mtp_block=True, n_layer=2)
BLOCK = "blk.2."
NEXTN = BLOCK + "nextn."
Tensors = Mapping[str, TensorRef]


@contextmanager
def opened(path: Path, change: Callable[[ModelIndex], None] | None = None) -> Iterator[ModelIndex]:
    with ModelIndex.open(path) as index:
        if change is not None:
            change(index)
        yield index


def load(index: ModelIndex, *, mtp: bool = True) -> None:
    device = open_device("CPU", 1)
    try:
        model: Model = open_model(index, device, 64, 1, ModelsConfig(mtp=mtp))
        assert model.has_mtp is mtp
        model.close()
    finally:
        device.close()


def without(name: str) -> Callable[[ModelIndex], None]:
    def change(index: ModelIndex) -> None:
        index.tensors = {key: ref for key, ref in index.tensors.items() if key != name}

    return change


def shaped(name: str, *ne: int) -> Callable[[ModelIndex], None]:
    """The tensor says so; its bytes stay."""

    def change(index: ModelIndex) -> None:
        index.tensors = {**index.tensors, name: replace(index.tensors[name], ne=ne)}

    return change


def named(old: str, new: str) -> Callable[[ModelIndex], None]:
    def change(index: ModelIndex) -> None:
        tensors = dict(index.tensors)
        tensors[new] = replace(tensors.pop(old), name=new)
        index.tensors = tensors

    return change


def saying(key: str, value: Any) -> Callable[[ModelIndex], None]:
    def change(index: ModelIndex) -> None:
        index.metadata = {**index.metadata, f"qwen35moe.{key}": value}

    return change


FAULTS: dict[str, tuple[Callable[[ModelIndex], None], type[LocalError], str]] = {
    "no eh_proj": (without(NEXTN + "eh_proj.weight"), ModelFileError, "nextn.eh_proj.weight' is missing"),
    "no enorm": (without(NEXTN + "enorm.weight"), ModelFileError, "nextn.enorm.weight' is missing"),
    "no hnorm": (without(NEXTN + "hnorm.weight"), ModelFileError, "nextn.hnorm.weight' is missing"),
    "no attention": (without(BLOCK + "attn_q.weight"), ModelFileError, "blk.2.attn_q.weight' is missing"),
    "no gate": (without(BLOCK + "ffn_gate_inp.weight"), ModelFileError, "ffn_gate_inp.weight' is missing"),
    "no experts": (without(BLOCK + "ffn_down_exps.weight"), ModelFileError, "layer 2 has expert tensors"),
    "eh_proj the other way": (
        shaped(NEXTN + "eh_proj.weight", 64, 128),
        ModelFileError,
        "eh_proj.* is .64, 128",
    ),
    "eh_proj of one half": (shaped(NEXTN + "eh_proj.weight", 64, 64), ModelFileError, "means .128, 64"),
    "enorm of both": (shaped(NEXTN + "enorm.weight", 128), ModelFileError, "nextn.enorm"),
    "head norm": (shaped(NEXTN + "shared_head_norm.weight", 63), ModelFileError, "shared_head_norm"),
    "fewer experts": (
        shaped(BLOCK + "ffn_down_exps.weight", 32, 64, 7),
        ModelFileError,
        "stacks 7 experts, but the metadata says 8",
    ),
    "experts of other widths": (shaped(BLOCK + "ffn_up_exps.weight", 64, 31, 8), ModelFileError, "layer 2"),
    "a tensor nobody knows": (
        named(NEXTN + "shared_head_norm.weight", NEXTN + "hc_head_fn.weight"),
        UnsupportedModelError,
        "nextn.hc_head_fn.weight' is not part of",
    ),
    "a recurrent block": (
        saying("attention.recurrent_layers", np.array([True, True, True])),
        UnsupportedModelError,
        "recurrent_layers has a recurrent MTP block",
    ),
    "no word on the block": (
        saying("attention.recurrent_layers", np.array([True, True])),
        ModelFileError,
        "has 2 entries for 3 layers",
    ),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("files") / "tiny.gguf", TINY)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_block_is_an_error_and_may_be_left_out(path: Path, fault: str) -> None:
    change, kind, words = FAULTS[fault]
    with opened(path, change) as index:
        with pytest.raises(kind, match=words) as caught:
            load(index)
        assert str(path) in str(caught.value)
        load(index, mtp=False)


def test_two_blocks_are_not_computed(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", replace(TINY, n_layer=4, full_attention_interval=2))

    def two_blocks(index: ModelIndex) -> None:
        index.n_layer, index.n_mtp = 3, 2
        index.expert_layers = {layer: index.expert_layers[layer] for layer in range(3)}

    problem = r"nextn_predict_layers is 2.*--speculate ngram"
    with opened(path, two_blocks) as index, pytest.raises(UnsupportedModelError, match=problem):
        load(index)


@pytest.mark.parametrize("value", [0, 1, 2, 3, 4, 2**31])
def test_any_number_of_blocks_is_an_error_or_runs(tmp_path: Path, value: int) -> None:
    """Written into the file: layers that are called blocks, and the other way round."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", replace(TINY, n_mtp_claimed=value))
    if value == 1:
        with opened(path) as index:
            load(index)
        return
    with pytest.raises(LocalError, match=r"nextn|blk\.2"), opened(path) as index:
        load(index)


def test_values_that_are_not_finite_are_found(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", TINY)
    with ModelIndex.open(path) as index:
        ref = index.tensors[NEXTN + "hnorm.weight"]
    with path.open("r+b") as file:
        file.seek(ref.offset + 8)
        file.write(np.array([np.inf], "<f4").tobytes())
    with opened(path) as index:
        with pytest.raises(ModelFileError, match=r"nextn\.hnorm\.weight' is damaged: value 2"):
            load(index)
        load(index, mtp=False)
