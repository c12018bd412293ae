"""Slots, chunks, the cut at the experts, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarmnode.errors import ContextFullError, DeviceError, ModelFileError, UnsupportedModelError, UsageError
from swarmnode.models.base import ExpertCall, F32Array, run_pass
from swarmnode.models.registry import open_model, state_of_slot
from swarmnode.models.state import SlotBytes
from swarmnode.testing.tiny_gguf import TinyModel, write_tiny_gguf
from swarmnode.weights.index import ModelIndex

from .kit import SMALL, LocalModel, open_local, open_tiny, random_tokens

TOKENS = random_tokens(20, SMALL.n_vocab)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("backbone")


@pytest.fixture
def local(folder: Path) -> Iterator[LocalModel]:
    with open_tiny(folder, n_slots=2) as opened:
        yield opened


def close_to(ours: F32Array, theirs: F32Array) -> bool:
    return bool(np.abs(ours - theirs).max() < 2e-3 * np.abs(theirs).max())


# -- sequences


def test_sizes_are_the_files(local: LocalModel) -> None:
    model = local.model
    assert (model.n_layer, model.n_embd, model.n_vocab) == (SMALL.n_layer, SMALL.n_embd, SMALL.n_vocab)
    assert (model.n_expert, model.n_expert_used) == (SMALL.n_expert, SMALL.n_expert_used)
    assert (model.n_ctx, model.n_slots) == (512, 2)


def test_state_bytes_are_allocated_at_opening(local: LocalModel) -> None:
    channels = (2 * SMALL.n_k_heads + SMALL.n_v_heads) * SMALL.state_size
    recurrent = 4 * (3 * channels + SMALL.n_v_heads * SMALL.state_size**2)
    kv = 2 * 2 * 512 * SMALL.n_head_kv * SMALL.head_dim
    between_layers = 2 * 4 * 512 * SMALL.n_embd
    columns = 5 * SMALL.n_embd + channels + 2 * SMALL.n_v_heads * SMALL.state_size + SMALL.n_vocab
    company = local.model.state_bytes - 2 * (3 * recurrent + kv + between_layers)
    assert 4 * columns < company / 2 < 8 * columns
    for n_ctx in (512, 257):  # caches grow in steps of 256 cells
        assert state_of_slot(local.index, n_ctx) == SlotBytes(kv, 3 * recurrent)
    assert state_of_slot(local.index, 256) == SlotBytes(kv // 2, 3 * recurrent)
    before = local.model.state_bytes
    local.run(TOKENS)
    assert local.model.state_bytes == before


def test_one_by_one_equals_all_at_once(local: LocalModel) -> None:
    at_once = local.run(TOKENS, all_logits=True)
    assert at_once.shape == (20, SMALL.n_vocab)
    one_by_one = np.concatenate([local.run([token], 1) for token in TOKENS])
    assert close_to(one_by_one, at_once)


def test_the_last_logits_are_the_last_of_all(local: LocalModel) -> None:
    every, last = local.run(TOKENS, all_logits=True), local.run(TOKENS, 1)
    assert last.shape == (1, SMALL.n_vocab)
    assert close_to(last, every[-1:])


def test_chunks_give_what_one_batch_gives(folder: Path, local: LocalModel) -> None:
    whole = local.run(TOKENS, all_logits=True)
    with open_tiny(folder, n_ubatch=6) as chunked:
        assert close_to(chunked.run(TOKENS, all_logits=True), whole)
        assert chunked.model.n_past(0) == 20
        chunked.model.reset(0)
        assert close_to(chunked.run(TOKENS), whole[-1:])


def test_a_sequence_crosses_the_padding_of_the_kv_cache(local: LocalModel) -> None:
    tokens = random_tokens(260, SMALL.n_vocab)
    local.run(tokens[:254])
    decoded = np.concatenate([local.run([token]) for token in tokens[254:]])
    assert close_to(decoded, local.run(tokens, 1, all_logits=True)[254:])


def test_a_full_context_works_to_the_last_token_and_then_is_refused(folder: Path) -> None:
    with open_tiny(folder, n_ctx=21) as local:
        local.run(TOKENS)
        local.run([1])
        with pytest.raises(ContextFullError, match=r"21 \+ 1 token: .* 21"):
            local.run([1])
        assert local.model.n_past(0) == 21
        local.model.reset(0)
        with pytest.raises(ContextFullError):
            local.run([1] * 22)


def test_reset_forgets_everything(local: LocalModel) -> None:
    first = local.run(TOKENS)
    local.run([5])
    local.model.reset(0)
    assert local.model.n_past(0) == 0
    np.testing.assert_array_equal(local.run(TOKENS), first)


def test_slots_do_not_see_each_other_even_interleaved(local: LocalModel) -> None:
    alone = [local.run(TOKENS[:7]), local.run(TOKENS[7:8])]
    local.model.reset(0)
    for tokens, expected in zip((TOKENS[:7], TOKENS[7:8]), alone, strict=True):
        steps = [local.model.forward(slot, tokens) for slot in (0, 1)]
        calls = [next(step) for step in steps]
        for _ in range(SMALL.n_layer - 1):
            calls = [step.send(local.experts(call)) for step, call in zip(steps, calls, strict=True)]
        for step, call in zip(steps, calls, strict=True):
            with pytest.raises(StopIteration) as end:
                step.send(local.experts(call))
            np.testing.assert_array_equal(end.value.value, expected)


def test_a_device_with_memory_of_its_own_gives_the_same(folder: Path, local: LocalModel) -> None:
    with open_tiny(folder, own_memory=True) as accelerated:
        for tokens in (TOKENS[:12], TOKENS[12:13], TOKENS[13:]):
            expected = local.run(tokens, all_logits=True)
            np.testing.assert_array_equal(accelerated.run(tokens, all_logits=True), expected)


# -- the cut


def test_calls_come_layer_by_layer_with_rows_ids_and_weights(local: LocalModel) -> None:
    steps = local.model.forward(0, TOKENS)
    call = next(steps)
    for layer in range(SMALL.n_layer):
        n = 1 if layer == SMALL.n_layer - 1 else 20
        assert call.layer == layer
        assert call.rows.dtype == np.float32
        assert call.rows.shape == (n, SMALL.n_embd)
        assert call.ids.dtype == np.int32
        assert call.ids.shape == (n, SMALL.n_expert_used)
        assert call.weights.dtype == np.float32
        assert call.weights.shape == (n, SMALL.n_expert_used)
        np.testing.assert_allclose(call.weights.sum(1), 1, rtol=1e-5)
        assert all(len(set(ids)) == SMALL.n_expert_used for ids in call.ids.tolist())
        if layer < SMALL.n_layer - 1:
            call = steps.send(local.experts(call))


def test_the_arrays_of_a_call_are_never_written_again(local: LocalModel) -> None:
    kept = []
    for tokens in ([1], [2]):
        steps = local.model.forward(0, tokens)
        call = next(steps)
        kept.append((call.rows, call.rows.copy()))
        for _ in range(SMALL.n_layer - 1):
            call = steps.send(local.experts(call))
        with pytest.raises(StopIteration):
            steps.send(local.experts(call))
    for rows, copy in kept:
        np.testing.assert_array_equal(rows, copy)


def test_what_is_sent_in_reaches_the_logits(local: LocalModel) -> None:
    honest = local.run(TOKENS)
    steps = local.model.forward(1, TOKENS)
    call = next(steps)
    for _ in range(SMALL.n_layer - 1):
        call = steps.send(np.zeros_like(call.rows))
    with pytest.raises(StopIteration) as end:
        steps.send(np.zeros_like(call.rows))
    assert not close_to(end.value.value, honest)


@pytest.mark.parametrize(
    "values",
    [
        None,
        np.zeros((1, SMALL.n_embd)),
        np.zeros((2, SMALL.n_embd), np.float32),
        np.zeros(SMALL.n_embd, "f4"),
    ],
)
def test_routed_output_of_another_shape_is_refused(local: LocalModel, values: Any) -> None:
    steps = local.model.forward(0, [1])
    next(steps)
    with pytest.raises(UsageError, match=r"float32\[1, 64\]"):
        steps.send(values)


def test_an_unfinished_pass_locks_the_slot_until_reset(local: LocalModel) -> None:
    expected = local.run([1])
    local.model.reset(0)
    steps, other = local.model.forward(0, [1]), local.model.forward(0, [1])
    next(steps)
    for refused in (lambda: local.run([1]), lambda: next(other)):
        with pytest.raises(UsageError, match="unfinished"):
            refused()
    steps.close()
    with pytest.raises(UsageError, match="unfinished"):
        local.run([1])
    local.model.reset(0)
    np.testing.assert_array_equal(local.run([1]), expected)


# -- arguments


@pytest.mark.parametrize(
    ("slot", "tokens", "reason"),
    [
        (0, [], "no tokens"),
        (0, [1, -1], "token id -1"),
        (0, [SMALL.n_vocab], f"token id {SMALL.n_vocab}"),
        (2, [1], "slot 2"),
        (-1, [1], "slot -1"),
    ],
)
def test_bad_arguments_are_refused_at_once(
    local: LocalModel, slot: int, tokens: list[int], reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        local.model.forward(slot, tokens)
    assert local.model.n_past(0) == 0


@pytest.mark.parametrize(
    ("n_ctx", "n_slots", "reason"),
    [(0, 1, "context"), (1, 1, "context"), (4097, 1, "4096"), (64, 0, "slots"), (64, 1025, "slots")],
)
def test_bad_sizes_are_refused(local: LocalModel, n_ctx: int, n_slots: int, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        open_model(local.index, local.device, n_ctx, n_slots)


# -- files

METADATA_FAULTS: list[tuple[str, Any, type[Exception]]] = [
    ("attention.head_count", 0, ModelFileError),
    ("attention.head_count", 3, ModelFileError),
    ("attention.head_count", "4", ModelFileError),
    ("attention.head_count", np.array([4]), ModelFileError),
    ("attention.head_count_kv", np.array([0, 0, 0, 0]), ModelFileError),
    ("attention.head_count_kv", 1, ModelFileError),
    ("attention.key_length", 64, UnsupportedModelError),
    ("attention.value_length", 16, UnsupportedModelError),
    ("attention.layer_norm_rms_epsilon", float("nan"), ModelFileError),
    ("attention.layer_norm_rms_epsilon", None, ModelFileError),
    ("attention.scale", -1.0, ModelFileError),
    ("rope.dimension_count", 7, ModelFileError),
    ("rope.dimension_count", 64, ModelFileError),
    ("rope.dimension_sections", None, ModelFileError),
    ("rope.dimension_sections", np.array([1, 1]), ModelFileError),
    ("rope.dimension_sections", np.array([0, 0, 0, 4]), ModelFileError),
    ("rope.dimension_sections", np.array([-1, 1, 1, 0]), ModelFileError),
    ("rope.dimension_sections", np.array([64, 64, 64, 0]), ModelFileError),
    ("rope.dimension_sections", np.array([2, 2, 1, 0]), ModelFileError),
    ("rope.dimension_sections", np.array([1, 1, 1, 0, 0]), ModelFileError),
    ("rope.dimension_sections", np.array([float("nan")] * 4), ModelFileError),
    ("rope.dimension_sections", np.array([True] * 4), ModelFileError),
    ("rope.dimension_sections", ("a", "b", "c"), ModelFileError),
    ("rope.freq_base", 0.0, ModelFileError),
    ("rope.freq_base", 1e-45, ModelFileError),
    ("rope.freq_base", 10_000, ModelFileError),
    ("rope.scaling.type", np.array([0, 0]), ModelFileError),
    ("rope.scaling.type", ("none", "none"), ModelFileError),
    ("expert_weights_norm", np.array([0, 0]), ModelFileError),
    ("expert_weights_norm", 1, ModelFileError),
    ("attention.sliding_window", np.array([0, 0]), ModelFileError),
    ("attention.head_count", np.array([float("nan")] * 4), ModelFileError),
    ("attention.head_count", np.array([float("inf")] * 4), ModelFileError),
    ("attention.head_count", ("x",) * 4, ModelFileError),
    ("attention.head_count", np.array([1 << 16] * 4), UnsupportedModelError),
    ("attention.key_length", 7, ModelFileError),
    ("attention.key_length", True, ModelFileError),
    ("attention.layer_norm_rms_epsilon", 1e-45, ModelFileError),
    ("attention.layer_norm_rms_epsilon", -1e-6, ModelFileError),
    ("rope.scaling.type", "yarn", UnsupportedModelError),
    ("context_length", 0, ModelFileError),
    ("ssm.conv_kernel", 1, ModelFileError),
    ("ssm.state_size", 16, UnsupportedModelError),
    ("ssm.group_count", 3, ModelFileError),
    ("ssm.time_step_rank", 1 << 20, ModelFileError),
    ("ssm.inner_size", 256, UnsupportedModelError),
    ("full_attention_interval", 0, ModelFileError),
    ("full_attention_interval", 2, UnsupportedModelError),
    ("attention.recurrent_layers", np.array([True]), ModelFileError),
    ("attention.recurrent_layers", 3, ModelFileError),
    ("attention.recurrent_layers", np.array([float("nan")] * 4), ModelFileError),
    ("ssm.state_size", 1 << 14, ModelFileError),
    ("expert_shared_feed_forward_length", 64, ModelFileError),
    ("expert_gating_func", 2, UnsupportedModelError),
]

BLAMED = {
    "attention.key_length": "value_length",
    "ssm.state_size": "ssm.inner_size",
    "ssm.group_count": "group_count",
}
"""Of two keys that contradict each other, the other one, which the message names."""


def changed_index(local: LocalModel, key: str, value: Any) -> ModelIndex:
    """The same file with one metadata value replaced, or removed by None."""
    index = ModelIndex.open(local.index.paths[0])
    metadata = {**index.metadata, f"qwen35moe.{key}": value}
    index.metadata = {name: item for name, item in metadata.items() if item is not None}
    return index


@pytest.mark.parametrize(("key", "value", "error"), METADATA_FAULTS)
def test_metadata_that_does_not_fit_is_named(
    local: LocalModel, key: str, value: Any, error: type[Exception]
) -> None:
    with (
        changed_index(local, key, value) as index,
        pytest.raises((ModelFileError, UnsupportedModelError)) as got,
    ):
        open_model(index, local.device, 64, 1)
    assert got.type is error
    assert any(name in str(got.value) for name in (key, BLAMED.get(key, key), "tensor 'blk."))


def test_states_that_the_machine_cannot_hold_are_refused_before_they_are_promised(local: LocalModel) -> None:
    device = replace(local.device.info, memory_total_bytes=1_000_000)
    local.device.info, info = device, local.device.info
    try:
        with pytest.raises(DeviceError, match="bytes of memory, but CPU has 1000000"):
            open_model(local.index, local.device, 4096, 2)
    finally:
        local.device.info = info


# -- numbers that are not finite


def damaged(folder: Path, name: str, value: float, tiny: TinyModel = SMALL) -> Path:
    """A file with one value of an F32 tensor replaced."""
    path = write_tiny_gguf(folder / "damaged.gguf", tiny)
    with ModelIndex.open(path) as index:
        offset = index.tensors[name].offset
    data = bytearray(path.read_bytes())
    data[offset + 8 : offset + 12] = np.float32(value).tobytes()
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    "name",
    [
        "output_norm.weight",
        "blk.0.attn_norm.weight",
        "blk.0.ssm_a",
        "blk.1.ssm_dt.bias",
        "blk.1.ffn_gate_inp.weight",
        "blk.2.ssm_conv1d.weight",
        "blk.3.attn_q_norm.weight",
        "blk.3.attn_q.weight",
    ],
)
@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_a_damaged_float_tensor_is_named_at_load(tmp_path: Path, name: str, value: float) -> None:
    path = damaged(tmp_path, name, value)
    with pytest.raises(ModelFileError, match=f"tensor '{name}' is damaged: value 2"), open_local(path):
        pass


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_half_floats_are_looked_through_too(tmp_path: Path, kind: str) -> None:
    path = damaged(tmp_path, "blk.3.attn_k.weight", float("nan"), replace(SMALL, dense_type=kind))
    with pytest.raises(ModelFileError, match=r"'blk\.3\.attn_k\.weight' is damaged"), open_local(path):
        pass


@pytest.mark.parametrize("n_tokens", [1, 20])
@pytest.mark.parametrize("layer", range(SMALL.n_layer))
def test_a_damaged_expert_ends_the_pass(local: LocalModel, layer: int, n_tokens: int) -> None:
    """The logits of a quantised model would be zeros, from which a token can be drawn."""

    def experts(call: ExpertCall) -> F32Array:
        rows = local.experts(call)
        if call.layer == layer:
            rows[-1, 5] = np.nan
        return rows

    where = min(layer + 1, SMALL.n_layer - 1)
    with pytest.raises(DeviceError, match=f"not finite in layer {where}: "):
        run_pass(local.model.forward(0, TOKENS[:n_tokens]), experts)
    with pytest.raises(UsageError, match="reset"):
        local.run(TOKENS)


def test_a_slot_forgets_numbers_that_are_not_finite(local: LocalModel) -> None:
    """64 tokens and more take ggml's tiled attention, which adds 0 * NaN for cells that the mask hides."""

    def experts(call: ExpertCall) -> F32Array:
        return np.full_like(call.rows, np.nan) if call.layer == 2 else local.experts(call)

    tokens = random_tokens(80, SMALL.n_vocab)
    with pytest.raises(DeviceError, match="layer 3"):
        run_pass(local.model.forward(0, tokens), experts)
    local.model.reset(0)
    np.testing.assert_array_equal(local.run(tokens[:66]), local.run(tokens[:66], 1))


def test_per_layer_head_counts_that_agree_are_taken(local: LocalModel) -> None:
    expected = local.run(TOKENS)
    with changed_index(local, "attention.head_count_kv", np.array([0, 0, 0, 2])) as index:
        model = open_model(index, local.device, 64, 1)
        np.testing.assert_array_equal(replace(local, model=model).run(TOKENS), expected)
        model.close()


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("blk.0.ssm_a", None, ModelFileError),
        ("blk.3.attn_k.weight", None, ModelFileError),
        ("output_norm.weight", {"ne": (32,)}, ModelFileError),
        ("blk.1.ssm_out.weight", {"ne": (64, 64)}, ModelFileError),
        ("blk.2.ffn_down_shexp.weight", {"ggml_type": 24}, UnsupportedModelError),
        ("blk.2.attn_norm.weight", {"ggml_type": 1}, UnsupportedModelError),
        ("blk.0.ssm_conv1d.weight", {"ggml_type": 1}, UnsupportedModelError),
        ("rope_freqs.weight", {}, UnsupportedModelError),
        ("blk.0.attn_q.bias", {}, UnsupportedModelError),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    local: LocalModel, name: str, change: dict[str, Any] | None, error: type[Exception]
) -> None:
    with ModelIndex.open(local.index.paths[0]) as index:
        tensors = dict(index.tensors)
        if change is None:
            del tensors[name]
        else:
            tensors[name] = replace(tensors.get(name, tensors["output_norm.weight"]), name=name, **change)
        index.tensors = tensors
        with pytest.raises(error, match=name.replace(".", r"\.")):
            open_model(index, local.device, 64, 1)


def test_a_vector_stored_as_a_matrix_of_one_row_is_taken(local: LocalModel) -> None:
    expected = local.run(TOKENS)
    with ModelIndex.open(local.index.paths[0]) as index:
        name = "blk.0.ffn_gate_inp_shexp.weight"
        index.tensors = {**index.tensors, name: replace(index.tensors[name], ne=(64, 1))}
        model = open_model(index, local.device, 64, 1)
        np.testing.assert_array_equal(replace(local, model=model).run(TOKENS), expected)
        model.close()


def test_another_architecture_is_refused_with_a_list(local: LocalModel) -> None:
    with ModelIndex.open(local.index.paths[0]) as index:
        index.architecture = "gpt-oss"
        with pytest.raises(UnsupportedModelError, match=r"'gpt-oss'.*supported: qwen35moe"):
            open_model(index, local.device, 64, 1)


def test_a_layer_without_experts_is_refused(folder: Path) -> None:
    with (
        pytest.raises(UnsupportedModelError, match="layer 1 has no routed experts"),
        open_tiny(folder, replace(SMALL, dense_layers=(1,))),
    ):
        pass


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q6_K", "F16", "BF16"])
def test_every_kind_of_weight_runs(folder: Path, kind: str) -> None:
    tiny = replace(
        SMALL, n_embd=256, n_layer=4, dense_type=kind, embd_type=kind, up_type=kind, n_ff_shared=256
    )
    with open_tiny(folder, tiny) as local:
        logits = local.run(TOKENS[:3], all_logits=True)
        assert np.isfinite(logits).all()
        local.model.reset(0)
        decoded = np.concatenate([local.run([token]) for token in TOKENS[:3]])
        assert np.abs(decoded - logits).max() < 0.1 * np.abs(logits).max()
