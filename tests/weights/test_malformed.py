"""Broken GGUFs: one clear error each, naming the file, in bounded time and memory; the process lives."""

from __future__ import annotations

import os
import struct
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarmnode.errors import ModelFileError, UnsupportedModelError
from swarmnode.weights.gguf_values import ValueType
from swarmnode.weights.index import ModelIndex
from swarmnode.weights.inspect import describe
from tests.weights.raw_gguf import (
    N_EMBD,
    N_EXPERT,
    N_FF,
    N_VOCAB,
    RawGguf,
    RawTensor,
    array,
    good_model,
    scalar,
    string,
    text,
    u32,
    u64,
)

Broken = bytes | RawGguf
MAX_MEMORY_BYTES = 8 << 20
MAX_CALLS = 5_000
"""Of functions, Python's and C's, until a file is refused: seconds would be the machine's."""
UP = "blk.1.ffn_up_exps.weight"


def with_tensor(name: str, **changes: object) -> RawGguf:
    model = good_model()
    model.tensors = [replace(t, **changes) if t.name == name else t for t in model.tensors]  # type: ignore[arg-type]
    return model


def with_key(key: str, value: bytes) -> RawGguf:
    model = good_model()
    model.keys[key] = value
    return model


def with_count(key: str, value: int, kind: ValueType = ValueType.UINT32) -> RawGguf:
    return with_key(f"qwen35moe.{key}", scalar(kind, value))


def without_key(key: str) -> RawGguf:
    model = good_model()
    del model.keys[key]
    return model


def with_tensors(*added: RawTensor) -> RawGguf:
    model = good_model()
    model.tensors += added
    return model


def with_extra_key(raw: bytes) -> RawGguf:
    return replace(good_model(), extra_keys=raw, n_extra_keys=1)


def fused(rows: int) -> RawGguf:
    model = good_model().without("blk.1.ffn_gate_exps.weight", UP)
    model.tensors.append(RawTensor("blk.1.ffn_gate_up_exps.weight", (N_EMBD, rows, N_EXPERT)))
    return model


GOOD = good_model()
HEADER = GOOD.header()
Q4_K = 12

MALFORMED: dict[str, tuple[Broken, str]] = {
    # the preamble
    "empty": (b"", "empty"),
    "only_magic": (b"GGUF", "version"),
    "bad_magic": (replace(GOOD, magic=b"GGML"), "GGUF"),
    "not_a_model": (b"PK\x03\x04" * 100, "GGUF"),
    "tensor_count_2_63": (replace(GOOD, n_tensors=1 << 63), "tensors"),
    "tensor_count_lies": (replace(GOOD, n_tensors=len(GOOD.tensors) + 1), "ends|name|bytes"),
    "key_count_2_63": (replace(GOOD, n_keys=1 << 63), "keys"),
    "key_count_lies": (replace(GOOD, n_keys=len(GOOD.keys) + 1), "key|type|bytes"),
    # metadata
    "key_twice": (with_extra_key(text("general.name") + string("again")), "twice"),
    "key_empty": (with_extra_key(text("") + string("x")), "empty"),
    "key_not_utf8": (with_extra_key(text(b"general.\xff\xfe") + string("x")), "UTF-8"),
    "key_length_past_end": (HEADER[:24] + u64(60_000) + b"x", "ends after 1"),
    "key_length_2_64": (with_extra_key(u64(2**64 - 1) + b"x"), "long"),
    "value_type_unknown": (with_key("a.b", u32(13)), "value type 13"),
    "string_not_utf8": (with_key("a.b", string(b"\xc3\x28")), "UTF-8"),
    "string_length_past_end": (with_key("a.b", u32(8) + u64(1 << 23) + b"x"), "ends"),
    "string_length_2_64": (with_key("a.b", u32(8) + u64(2**64 - 1)), "long"),
    "array_length_2_63": (with_key("a.b", array(ValueType.UINT64, 1 << 63, b"")), "ends"),
    "array_length_past_end": (with_key("a.b", array(ValueType.UINT8, 1 << 30, b"x")), "ends"),
    "array_strings_2_63": (with_key("a.b", array(ValueType.STRING, 1 << 63, b"")), "strings"),
    "array_string_past_end": (
        with_key("a.b", array(ValueType.STRING, 2, text("a") + u64(1 << 40))),
        "past the end",
    ),
    "array_string_2_64": (
        with_key("a.b", array(ValueType.STRING, 2, u64(2**64 - 1) + text("a"))),
        "past the end",
    ),
    "array_of_arrays": (with_key("a.b", array(ValueType.ARRAY, 1, u32(9) + u64(1) * 50)), "array of arrays"),
    "array_item_type_unknown": (with_key("a.b", array(77, 1, b"x")), "value type 77"),
    "bool_is_two": (with_key("a.b", u32(ValueType.BOOL) + b"\x02"), "bool"),
    "alignment_0": (with_key("general.alignment", scalar(ValueType.UINT32, 0)), "power of two"),
    "alignment_48": (with_key("general.alignment", scalar(ValueType.UINT32, 48)), "power of two"),
    "alignment_u64": (with_key("general.alignment", scalar(ValueType.UINT64, 32)), "UINT64"),
    "alignment_text": (with_key("general.alignment", string("32")), "STRING"),
    # the tensor list
    "tensor_twice": (with_tensors(RawTensor(UP, (N_EMBD,))), "twice"),
    "tensor_name_empty": (with_tensors(RawTensor("", (N_EMBD,))), "empty"),
    "tensor_name_long": (with_tensors(RawTensor("x" * 64, (N_EMBD,))), "64 bytes"),
    "tensor_name_zero_byte": (with_tensors(RawTensor("a\0b", (N_EMBD,))), "zero byte"),
    "tensor_name_not_utf8": (with_tensors(RawTensor(b"\xff\xff", (N_EMBD,))), "UTF-8"),
    "tensor_dims_0": (with_tensors(RawTensor("t", ())), "dimensions"),
    "tensor_dims_5": (with_tensors(RawTensor("t", (1, 1, 1, 1, 1))), "dimensions"),
    "tensor_dims_2_32": (with_tensors(RawTensor("t", (1,), n_dims=2**32 - 1)), "dimensions"),
    "tensor_dim_zero": (with_tensors(RawTensor("t", (N_EMBD, 0))), "positive"),
    "tensor_dim_negative": (with_tensors(RawTensor("t", (2**64 - 32, 1))), "positive"),
    "tensor_dims_overflow": (with_tensors(RawTensor("t", (1 << 32, 1 << 32, 1 << 32))), "truncated"),
    "tensor_rows_no_multiple": (with_tensors(RawTensor("t", (N_EMBD, 2), Q4_K)), "blocks of 256"),
    "tensor_offset_unaligned": (with_tensors(RawTensor("t", (N_EMBD,), offset=4)), "no multiple of 32"),
    "tensor_offset_wild": (with_tensors(RawTensor("t", (N_EMBD,), offset=1 << 62)), "truncated"),
    "tensor_offset_2_64": (with_tensors(RawTensor("t", (N_EMBD,), offset=2**64 - 32)), "truncated"),
    "tensors_overlap": (with_tensors(RawTensor("t", (N_EMBD,), offset=32)), "overlap"),
    "tensors_same_place": (with_tensors(RawTensor("t", (N_EMBD, 8), offset=0)), "overlap"),
    "data_missing": (HEADER, "truncated"),
    "data_short": (GOOD.build()[:-1], "truncated"),
    # what the metadata promises
    "architecture_missing": (without_key("general.architecture"), "general.architecture"),
    "architecture_number": (
        with_key("general.architecture", scalar(ValueType.UINT32, 1)),
        "general.architecture",
    ),
    "architecture_empty": (with_key("general.architecture", string("")), "general.architecture"),
    "n_embd_missing": (without_key("qwen35moe.embedding_length"), "embedding_length"),
    "n_embd_text": (with_key("qwen35moe.embedding_length", string("32")), "embedding_length"),
    "n_embd_0": (with_count("embedding_length", 0), "embedding_length"),
    "n_embd_other": (with_count("embedding_length", 64), "token_embd"),
    "n_layer_negative": (with_count("block_count", -1, ValueType.INT32), "block_count"),
    "n_layer_2_32": (with_count("block_count", 2**32 - 1), "block_count"),
    "n_layer_more": (with_count("block_count", 3), "layer 2 has no tensors"),
    "n_layer_fewer": (with_count("block_count", 1), "tensors of layer 1"),
    "layer_number_wild": (
        with_tensors(RawTensor("blk.99999999.x.weight", (N_EMBD,))),
        "tensors of layer 99999999",
    ),
    "mtp_is_everything": (with_count("nextn_predict_layers", 2), "nextn_predict_layers"),
    "n_expert_more": (with_count("expert_count", 8), "ffn_gate_inp|experts"),
    "n_expert_2_32": (with_count("expert_count", 2**32 - 1), "expert_count"),
    "n_expert_bool": (with_count("expert_count", True, ValueType.BOOL), "expert_count"),
    "n_expert_used_more": (with_count("expert_used_count", 5), "expert_used_count"),
    "n_expert_used_0": (with_count("expert_used_count", 0), "expert_used_count"),
    "n_ff_other": (with_count("expert_feed_forward_length", 32), "expert_feed_forward_length"),
    "n_ff_short_list": (
        with_key("qwen35moe.expert_feed_forward_length", array(ValueType.UINT32, 1, u32(N_FF))),
        "expert_feed_forward_length",
    ),
    "n_ff_list_of_nan": (
        with_key(
            "qwen35moe.expert_feed_forward_length",
            array(ValueType.FLOAT32, 2, struct.pack("<2f", N_FF, float("nan"))),
        ),
        "expert_feed_forward_length",
    ),
    "embedding_missing": (GOOD.without("token_embd.weight"), "token_embd"),
    "vocabulary_other": (
        with_key("tokenizer.ggml.tokens", array(ValueType.STRING, 1, text("a"))),
        f"1 token, but token_embd.weight has {N_VOCAB} rows.*convert the model again",
    ),
    "vocabulary_larger": (
        with_key(
            "tokenizer.ggml.tokens",
            array(ValueType.STRING, N_VOCAB + 1, b"".join(text(f"t{i}") for i in range(N_VOCAB + 1))),
        ),
        f"{N_VOCAB + 1} tokens, but token_embd.weight has {N_VOCAB} rows.*convert the model again",
    ),
    "vocabulary_text": (with_key("tokenizer.ggml.tokens", string("a" * N_VOCAB)), "no list.*token_embd"),
    "vocabulary_number": (with_key("tokenizer.ggml.tokens", scalar(ValueType.UINT32, 8)), "token_embd"),
    # experts
    "router_missing": (GOOD.without("blk.1.ffn_gate_inp.weight"), "layer 1"),
    "router_shape": (with_tensor("blk.1.ffn_gate_inp.weight", ne=(N_EMBD, 2 * N_EXPERT)), "layer 1"),
    "expert_count_of_tensor": (with_tensor(UP, ne=(N_EMBD, N_FF, N_EXPERT - 1)), "stacks 3 experts"),
    "expert_tensor_2d": (with_tensor(UP, ne=(N_EMBD, N_FF * N_EXPERT)), "dimensions"),
    "expert_tensor_4d": (with_tensor(UP, ne=(N_EMBD, N_FF, N_EXPERT, 2)), "dimensions"),
    "expert_tensor_i32": (with_tensor(UP, ggml_type=26), "I32"),
    "up_missing": (GOOD.without(UP), "layer 1"),
    "down_missing": (GOOD.without("blk.1.ffn_down_exps.weight"), "layer 1"),
    "up_shape": (with_tensor(UP, ne=(N_EMBD, N_FF + 1, N_EXPERT)), "ffn_up_exps"),
    "gate_width": (
        with_tensor("blk.1.ffn_gate_exps.weight", ne=(2 * N_EMBD, N_FF, N_EXPERT)),
        "ffn_gate_exps",
    ),
    "down_shape": (
        with_tensor("blk.1.ffn_down_exps.weight", ne=(N_FF, 2 * N_EMBD, N_EXPERT)),
        "ffn_down_exps",
    ),
    "fused_shape": (fused(N_FF), "ffn_gate_up_exps"),
    "fused_and_separate": (
        with_tensors(RawTensor("blk.1.ffn_gate_up_exps.weight", (N_EMBD, 2 * N_FF, N_EXPERT))),
        "layer 1",
    ),
    "no_layer_has_experts": (
        replace(GOOD, tensors=[t for t in GOOD.tensors if "ffn" not in str(t.name)]),
        "no layer has any",
    ),
}

UNSUPPORTED: dict[str, tuple[Broken, str]] = {
    "version_1": (replace(GOOD, version=1), "version 1"),
    "version_99": (replace(GOOD, version=99), "version 99"),
    "big_endian": (replace(GOOD, version=3 << 24), "big-endian"),
    "alignment_8": (with_key("general.alignment", scalar(ValueType.UINT32, 8)), "alignment"),
    "type_unknown": (with_tensor(UP, ggml_type=99), "type 99"),
    "type_removed": (with_tensor(UP, ggml_type=31), "type 31"),
    "type_only_inside_ggml": (with_tensor(UP, ggml_type=15), "type 15"),
    "type_2_32": (with_tensor(UP, ggml_type=2**32 - 1), "type"),
    "no_experts": (with_count("expert_count", 0), "routed experts"),
    "dense_model": (without_key("qwen35moe.expert_count"), "routed experts"),
    "mixtral_of_2023": (
        with_tensors(*(RawTensor(f"blk.0.ffn_gate.{i}.weight", (N_EMBD, N_FF)) for i in range(N_EXPERT))),
        "one tensor for each expert",
    ),
    "expert_biases": (with_tensors(RawTensor("blk.0.ffn_up_exps.bias", (N_FF, N_EXPERT))), "biases"),
    "expert_scales": (with_tensors(RawTensor("blk.0.ffn_up_exps.scale", (N_EXPERT,))), "scales"),
}


@contextmanager
def counted_calls() -> Iterator[list[None]]:
    """A list with an entry for each call of a function within."""
    calls: list[None] = []

    def count(frame: object, event: str, argument: object) -> None:
        if event in ("call", "c_call"):
            calls.append(None)

    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def check_refused(path: Path, error: type[Exception], words: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(error, match=words) as caught, counted_calls() as calls:
            ModelIndex.open(path)
        assert len(calls) < MAX_CALLS
        assert tracemalloc.get_traced_memory()[1] < MAX_MEMORY_BYTES
    finally:
        tracemalloc.stop()
    assert type(caught.value) is error
    assert str(path) in str(caught.value)


def written(folder: Path, content: Broken) -> Path:
    path = folder / "broken.gguf"
    path.write_bytes(content if isinstance(content, bytes) else content.build())
    return path


def test_the_file_they_are_made_from_is_good(tmp_path: Path) -> None:
    with ModelIndex.open(written(tmp_path, GOOD)) as index:
        assert index.expert_layers[1].expert_bytes == 3 * N_EMBD * N_FF * 4
    with ModelIndex.open(written(tmp_path, fused(2 * N_FF))) as index:
        assert index.expert_layers[1].fused
        assert not index.expert_layers[0].fused


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_file_is_refused(case: str, tmp_path: Path) -> None:
    content, words = MALFORMED[case]
    check_refused(written(tmp_path, content), ModelFileError, words)


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_model_that_cannot_be_run_is_refused(case: str, tmp_path: Path) -> None:
    content, words = UNSUPPORTED[case]
    check_refused(written(tmp_path, content), UnsupportedModelError, words)


def test_truncated_anywhere_in_the_header(tmp_path: Path) -> None:
    for length in range(0, len(HEADER), 5):
        with pytest.raises(ModelFileError, match=str(tmp_path)):
            ModelIndex.open(written(tmp_path, HEADER[:length]))


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    position=st.integers(0, len(HEADER) - 8),
    junk=st.one_of(st.binary(min_size=1, max_size=8), st.just(b"\xff" * 8)),
)
def test_any_bytes_overwritten_are_refused_or_harmless(tmp_path: Path, position: int, junk: bytes) -> None:
    content = bytearray(GOOD.build())
    content[position : position + len(junk)] = junk
    try:
        index = ModelIndex.open(written(tmp_path, bytes(content)))
    except (ModelFileError, UnsupportedModelError) as error:
        if str(tmp_path) not in str(error):
            raise
        return
    with index:
        for layer, layout in index.expert_layers.items():
            for tensor in layout.tensors:
                for expert in range(layout.n_expert):
                    assert len(bytes(index.slab(layer, expert, tensor.kind))) == tensor.n_bytes
        if "qwen35moe.context_length" in index.metadata:
            try:
                describe(index)
            except ModelFileError as error:
                if "context_length" not in str(error):
                    raise


def test_folder_fifo_and_missing_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.gguf")
    (tmp_path / "folder.gguf").mkdir()
    for name in ("fifo.gguf", "folder.gguf", "none.gguf"):
        with pytest.raises(ModelFileError, match=name):
            ModelIndex.open(tmp_path / name)


# ---- split models ---------------------------------------------------------------------------------------------


def split_keys(number: int, count: int, n_tensors: int) -> dict[str, bytes]:
    return {
        "split.no": scalar(ValueType.UINT16, number),
        "split.count": scalar(ValueType.UINT16, count),
        "split.tensors.count": scalar(ValueType.INT32, n_tensors),
    }


def split_model() -> list[RawGguf]:
    """Three parts; the first without tensors."""
    model = good_model()
    n_tensors = len(model.tensors)
    groups = [[], model.tensors[:5], model.tensors[5:]]
    parts = [RawGguf(split_keys(i, 3, n_tensors), list(group)) for i, group in enumerate(groups)]
    parts[0].keys |= model.keys
    return parts


def write_parts(folder: Path, parts: list[RawGguf]) -> list[Path]:
    return [part.write(folder / f"raw-{i:05d}-of-{len(parts):05d}.gguf") for i, part in enumerate(parts, 1)]


def set_key(part: int, key: str, kind: ValueType, value: int) -> Callable[[list[RawGguf]], None]:
    def change(parts: list[RawGguf]) -> None:
        parts[part].keys[key] = scalar(kind, value)

    return change


def drop_key(part: int, key: str) -> Callable[[list[RawGguf]], None]:
    def change(parts: list[RawGguf]) -> None:
        del parts[part].keys[key]

    return change


def drop_last_tensor(parts: list[RawGguf]) -> None:
    parts[2].tensors.pop()


def repeat_a_tensor(parts: list[RawGguf]) -> None:
    parts[2].tensors[-1] = parts[1].tensors[0]


def become_another_model(parts: list[RawGguf]) -> None:
    parts[1].keys["general.architecture"] = string("olmoe")


BROKEN_SPLITS: dict[str, tuple[Callable[[list[RawGguf]], None], str]] = {
    "count_lies": (set_key(0, "split.count", ValueType.UINT16, 2), "split.count"),
    "count_of_a_later_part_lies": (
        set_key(1, "split.count", ValueType.UINT16, 5),
        "00002-of-00003.*split.count",
    ),
    "count_absurd": (set_key(0, "split.count", ValueType.UINT16, 65535), "split.count"),
    "count_negative": (set_key(0, "split.count", ValueType.INT32, -3), "split.count"),
    "count_missing_later": (drop_key(2, "split.count"), "00003-of-00003.*split.count"),
    "number_lies": (set_key(2, "split.no", ValueType.UINT16, 1), "00003-of-00003.*split.no"),
    "number_missing": (drop_key(1, "split.no"), "00002-of-00003.*split.no"),
    "tensor_count_lies": (set_key(0, "split.tensors.count", ValueType.INT32, 99), "promises 99 tensors"),
    "a_tensor_is_missing": (drop_last_tensor, "promises"),
    "tensor_in_two_parts": (repeat_a_tensor, "00003-of-00003.*another part"),
    "another_model": (become_another_model, "00002-of-00003.*'olmoe'"),
}


def test_split_model_with_an_empty_first_part_opens_by_any_part(tmp_path: Path) -> None:
    for path in write_parts(tmp_path, split_model()):
        with ModelIndex.open(path) as index:
            assert list(index.expert_layers) == [0, 1]
            assert [part.name[4:9] for part in index.paths] == ["00001", "00002", "00003"]


@pytest.mark.parametrize("case", BROKEN_SPLITS)
def test_parts_that_do_not_belong_together_are_refused(case: str, tmp_path: Path) -> None:
    change, words = BROKEN_SPLITS[case]
    parts = split_model()
    change(parts)
    check_split_refused(write_parts(tmp_path, parts)[0], words)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_missing_part_is_named(missing: int, tmp_path: Path) -> None:
    paths = write_parts(tmp_path, split_model())
    paths[missing].unlink()
    check_split_refused(paths[(missing + 1) % 3], paths[missing].name)


def test_renamed_part_says_why_the_others_cannot_be_found(tmp_path: Path) -> None:
    path = write_parts(tmp_path, split_model())[1]
    check_split_refused(path.rename(tmp_path / "mine.gguf"), "part 2 of 3.*-00002-of-00003")


def test_broken_part_is_named(tmp_path: Path) -> None:
    paths = write_parts(tmp_path, split_model())
    paths[2].write_bytes(paths[2].read_bytes()[:-100])
    check_split_refused(paths[0], "00003-of-00003.*truncated")


def test_whole_model_may_have_the_name_of_a_part(tmp_path: Path) -> None:
    path = good_model().write(tmp_path / "derived-00001-of-00013.gguf")
    with ModelIndex.open(path) as index:
        assert index.paths == (path,)


def check_split_refused(path: Path, words: str) -> None:
    with pytest.raises(ModelFileError, match=words) as caught:
        ModelIndex.open(path)
    assert str(path.parent) in str(caught.value)


def test_real_vocabulary_opens_fast_and_lazily(tmp_path: Path) -> None:
    """A 122B model's header: 248,320 tokens, 247,587 merges, 77 GB of tensors (a sparse file)."""
    n_vocab, n_merges = 248_320, 247_587
    model = good_model()
    tokens = b"".join(text(f"token{i}") for i in range(n_vocab))
    merges = b"".join(text(f"a{i} b{i}") for i in range(n_merges))
    model.keys["tokenizer.ggml.tokens"] = array(ValueType.STRING, n_vocab, tokens)
    model.keys["tokenizer.ggml.merges"] = array(ValueType.STRING, n_merges, merges)
    model.keys["tokenizer.ggml.token_type"] = array(ValueType.INT32, n_vocab, struct.pack("<i", 1) * n_vocab)
    model.tensors[0] = RawTensor("token_embd.weight", (N_EMBD, n_vocab))
    model.tensors.append(RawTensor("big.weight", (1 << 20, 18_000)))
    path = tmp_path / "real.gguf"
    path.write_bytes(model.build())
    with path.open("r+b") as file:
        file.truncate(80 << 30)
    with counted_calls() as calls:
        ModelIndex.open(path).close()
    assert len(calls) < 1.1 * (n_vocab + n_merges)  # its length is read of each string, and nothing else
    with ModelIndex.open(path) as index:
        assert index.metadata["tokenizer.ggml.tokens"][n_vocab - 1] == f"token{n_vocab - 1}"
        assert len(index.metadata["tokenizer.ggml.merges"]) == n_merges
