"""Rows and pairs as bytes: exact, and nothing of a peer's is used unchecked."""

from __future__ import annotations

import resource

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from swarmnode.errors import BadReplyError, ProtocolError, RequestRefusedError, UsageError
from swarmnode.wire import tensors
from swarmnode.wire.messages import Experts, Rows
from swarmnode.wire.tensors import (
    F32,
    I32,
    decode_rows_untrusted,
    encode_experts_body,
    encode_rows,
    encode_rows_body,
    encode_rows_or_f32,
    experts_body_bytes,
    fits_f16,
    parse_experts_body_untrusted,
    parse_rows_body_untrusted,
    view_rows_untrusted,
    widened,
)

MODEL = bytes(32)
N_EMBD, N_EXPERT = 8, 16


def rows(n_rows: int, n_embd: int = N_EMBD) -> F32:
    return np.random.default_rng(1).standard_normal((n_rows, n_embd), np.float32)


def ids(*values: int) -> I32:
    return np.array(values, np.int32)


def body_of(*arrays: np.ndarray) -> bytes:
    return b"".join(array.tobytes() for array in arrays)


def message(n_rows: int, n_pairs: int, form: str = "experts", encoding: str = "f32") -> Experts:
    return Experts(MODEL, 0, form, encoding, n_rows, n_pairs)


# --- rows -----------------------------------------------------------------------------------------------------------


@given(hnp.arrays(np.float32, (3, 5), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_f32_is_exact_and_not_copied(values: F32) -> None:
    data = encode_rows(values, "f32")
    assert np.shares_memory(np.frombuffer(data, np.uint8), values)
    assert np.array_equal(decode_rows_untrusted(data, 3, 5, "f32"), values)


@given(hnp.arrays(np.float32, (3, 5), elements=st.floats(-65_504, 65_504, width=32)))
def test_f16_keeps_eleven_bits(values: F32) -> None:
    found = decode_rows_untrusted(encode_rows(values, "f16"), 3, 5, "f16")
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, values, rtol=2**-11, atol=2**-25)


def test_rows_as_bytes() -> None:
    values = np.array([[1.0, -2.0]], np.float32)
    assert bytes(encode_rows(values, "f32")).hex() == "0000803f000000c0"
    assert bytes(encode_rows(values, "f16")).hex() == "003c00c0"


@pytest.mark.parametrize("value", [65_505.0, -65_505.0, 65_520.0, 1e30, np.inf, -np.inf, np.nan])
def test_what_f16_cannot_hold_is_never_sent_as_f16(value: float) -> None:
    values = rows(2)
    values[1, 3] = value
    assert not fits_f16(values)
    assert encode_rows_or_f32(values, "f16")[0] == "f32"
    with pytest.raises(UsageError, match="does not fit f16"):
        encode_rows(values, "f16")
    with pytest.raises(RequestRefusedError) as refusal:
        encode_rows_body(values, "f16")
    assert refusal.value.code == "overflow"


def test_the_largest_f16_is_sent() -> None:
    values = np.array([[65_504.0, -65_504.0]], np.float32)
    assert encode_rows_or_f32(values, "f16")[0] == "f16"
    assert np.array_equal(decode_rows_untrusted(encode_rows(values, "f16"), 1, 2, "f16"), values)
    assert fits_f16(np.empty((0, 2), np.float32))
    assert encode_rows_or_f32(values, "f32")[0] == "f32"


def test_rows_that_are_not_contiguous() -> None:
    values = rows(4, 16)[::2, ::2]
    for encoding in ("f32", "f16"):
        data = encode_rows(values, encoding)
        np.testing.assert_allclose(
            decode_rows_untrusted(data, 2, 8, encoding), values, rtol=2**-11, atol=1e-6
        )


def test_only_f32_rows_in_a_known_encoding() -> None:
    for values, encoding in ((rows(1).astype(np.float64), "f32"), (rows(1)[0], "f32"), (rows(1), "q4")):
        with pytest.raises(UsageError):
            encode_rows(values, encoding)  # type: ignore[arg-type]


def test_rows_at_an_odd_address_come_out_aligned() -> None:
    data = memoryview(b"x" + body_of(rows(2)))[1:]
    found = decode_rows_untrusted(data, 2, N_EMBD, "f32")
    assert found.flags.aligned
    assert found.flags.c_contiguous
    assert np.array_equal(found, rows(2))


@pytest.mark.parametrize("n_rows", [-1, 0, 1, 3, 2**31, 2**62])
@pytest.mark.parametrize("n_embd", [-8, 0, 7, 9, 65_537, 2**62])
def test_lengths_must_be_the_product(n_rows: int, n_embd: int) -> None:
    with pytest.raises(ProtocolError) as error:
        decode_rows_untrusted(bytes(2 * 8 * 4), n_rows, n_embd, "f32")
    assert error.value.code == "bad_tensor"


@pytest.mark.parametrize("encoding", ["f32", "f16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite(encoding: str, value: float) -> None:
    values = rows(2).astype({"f32": np.float32, "f16": np.float16}[encoding])
    values[1, 7] = value
    with pytest.raises(ProtocolError, match="not finite"):
        decode_rows_untrusted(values.tobytes(), 2, N_EMBD, encoding)
    found = decode_rows_untrusted(values.tobytes(), 2, N_EMBD, encoding, finite=False)
    assert not np.isfinite(found[1, 7])


def test_an_unknown_encoding() -> None:
    with pytest.raises(ProtocolError):
        decode_rows_untrusted(bytes(64), 2, N_EMBD, "q4")


# --- requests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["f32", "f16"])
@pytest.mark.parametrize("form", ["experts", "partial"])
@pytest.mark.parametrize("n_rows", [1, 3, 64])
def test_a_request_is_read_back(encoding: str, form: str, n_rows: int) -> None:
    values = rows(n_rows)
    pair_row = np.repeat(np.arange(n_rows, dtype=np.int32), 3)
    pair_expert = np.tile(ids(15, 0, 7), n_rows)
    weights = np.linspace(0, 1, 3 * n_rows, dtype=np.float32) if form == "partial" else None
    body = b"".join(encode_experts_body(values, pair_row, pair_expert, weights, encoding))
    header = message(n_rows, 3 * n_rows, form, encoding)
    assert len(body) == experts_body_bytes(header, N_EMBD)
    header.check_body_untrusted(len(body))
    found = parse_experts_body_untrusted(header, body, N_EMBD, N_EXPERT)
    np.testing.assert_allclose(widened(found[0]), values, rtol=2**-11, atol=1e-6)
    assert np.array_equal(found[1], pair_row)
    assert np.array_equal(found[2], pair_expert)
    assert (found[3] is None) == (weights is None)
    if weights is not None:
        assert found[3] is not None
        assert np.array_equal(found[3], weights)
    for array in found:
        assert array is None or (array.flags.aligned and array.flags.c_contiguous)
    assert [str(array.dtype) for array in found[1:3]] == ["int32", "int32"]
    assert found[0].dtype == {"f32": np.float32, "f16": np.float16}[encoding], "nothing is converted in vain"


@pytest.mark.parametrize("encoding", ["f32", "f16"])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 63, 64, 129])
def test_a_number_that_is_not_finite_is_found_anywhere(place: int, bad: float, encoding: str) -> None:
    dtype = {"f32": "<f4", "f16": "<f2"}[encoding]
    values = np.full((130, N_EMBD), -65_504.0, dtype)
    assert view_rows_untrusted(values.tobytes(), 130, N_EMBD, encoding).tobytes() == values.tobytes()
    values[place, -1] = bad
    with pytest.raises(ProtocolError, match="not finite"):
        view_rows_untrusted(values.tobytes(), 130, N_EMBD, encoding)
    assert view_rows_untrusted(values.tobytes(), 130, N_EMBD, encoding, finite=False).shape == values.shape


def refused(header: Experts, body: bytes, n_embd: int = N_EMBD, n_expert: int = N_EXPERT) -> str:
    with pytest.raises(RequestRefusedError) as error:
        parse_experts_body_untrusted(header, body, n_embd, n_expert)
    assert error.value.code == "bad_tensor"
    return error.value.reason


def pairs_body(pair_row: list[int], pair_expert: list[int], values: F32 | None = None) -> bytes:
    values = rows(2) if values is None else values
    return body_of(values, np.array(pair_row, "<u4"), np.array(pair_expert, "<u2"))


@pytest.mark.parametrize("row", [2, 10**6, 2**31 - 1, 2**31, 2**32 - 1])
def test_a_row_that_is_not_there(row: int) -> None:
    assert refused(message(2, 1), pairs_body([row], [0])) == f"row {row} of 2"


@pytest.mark.parametrize("expert", [16, 255, 65_535])
def test_an_expert_that_is_not_in_the_model(expert: int) -> None:
    assert refused(message(2, 1), pairs_body([0], [expert])) == f"expert {expert} of 16"


def test_an_expert_named_twice_for_a_row() -> None:
    assert refused(message(2, 3), pairs_body([1, 0, 1], [5, 5, 5])) == "expert 5 twice for row 1"
    parse_experts_body_untrusted(message(2, 3), pairs_body([1, 0, 1], [5, 5, 6]), N_EMBD, N_EXPERT)
    partial = message(2, 2, "partial")
    body = pairs_body([1, 1], [5, 5]) + body_of(np.ones(2, np.float32))
    assert refused(partial, body) == "expert 5 twice for row 1"


def said(body: bytes, n_pairs: int) -> str:
    """What is said to a request of two rows, empty if nothing."""
    try:
        parse_experts_body_untrusted(message(2, n_pairs, "partial"), body, N_EMBD, N_EXPERT)
    except RequestRefusedError as refusal:
        return refusal.reason
    return ""


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2), st.integers(0, N_EXPERT), st.sampled_from([1.0, -0.0, np.nan, np.inf, -np.inf])
        ),
        min_size=1,
        max_size=6,
    )
)
def test_few_pairs_are_told_the_same_as_many(pairs: list[tuple[int, int, float]]) -> None:
    """There are two ways to look at them: which one is a question of speed."""
    pair_rows, experts, weights = zip(*pairs, strict=True)
    body = pairs_body(list(pair_rows), list(experts)) + body_of(np.array(weights, np.float32))
    few = said(body, len(pairs))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "_FEW_NUMBERS", 0)
        assert said(body, len(pairs)) == few


@pytest.mark.parametrize("weight", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite(weight: float) -> None:
    body = pairs_body([0], [0]) + body_of(np.array([weight], np.float32))
    assert refused(message(2, 1, "partial"), body) == "a weight that is not finite"


def test_a_row_that_is_not_finite() -> None:
    values = rows(2)
    values[0, 0] = np.nan
    assert refused(message(2, 1), pairs_body([0], [0], values)) == "a number that is not finite"


@pytest.mark.parametrize("n_bytes", [0, 1, 6, 63, 69, 71, 1000])
def test_a_body_of_another_length(n_bytes: int) -> None:
    assert "instead of 70" in refused(message(2, 1), bytes(n_bytes))


def test_another_width_than_the_model_has() -> None:
    """What the wire alone cannot know: the lengths fit together, but for another n_embd."""
    header, body = message(2, 1), pairs_body([0], [0], rows(2, 12))
    header.check_body_untrusted(len(body))
    assert "for n_embd 8" in refused(header, body)


def test_a_reply_over_the_cap_is_refused_before_it_is_computed() -> None:
    header = message(1, 65_536)
    body = bytes(experts_body_bytes(header, 3072))
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RequestRefusedError) as error:
        parse_experts_body_untrusted(header, body, 3072, 256)
    assert error.value.code == "too_large"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 16 * 1024


@given(st.binary(max_size=200), st.integers(1, 4), st.integers(1, 6), st.sampled_from(["experts", "partial"]))
def test_any_body_is_a_request_or_one_error(body: bytes, n_rows: int, n_pairs: int, form: str) -> None:
    header = message(n_rows, n_pairs, form, "f16")
    n_bytes = experts_body_bytes(header, N_EMBD)
    body = (body * n_bytes)[:n_bytes]
    try:
        found = parse_experts_body_untrusted(header, body, N_EMBD, N_EXPERT)
    except RequestRefusedError:
        return
    assert found[1].max() < n_rows
    assert found[2].max() < N_EXPERT
    assert np.isfinite(found[0]).all()


def test_our_own_wrong_requests_are_told_to_us() -> None:
    values, good = rows(2), ids(0)
    wrong = [
        (ids(2), good, None),
        (ids(-1), good, None),
        (good, ids(-1), None),
        (good, ids(65_536), None),
        (good, ids(0, 1), None),
        (ids(), ids(), None),
        (good, good, np.ones(2, np.float32)),
        (good, good, np.ones(1, np.float64)),
    ]
    for pair_row, pair_expert, weights in wrong:
        with pytest.raises(UsageError):
            encode_experts_body(values, pair_row, pair_expert, weights, "f32")  # type: ignore[arg-type]


# --- replies --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["f32", "f16"])
def test_a_reply_is_read_back(encoding: str) -> None:
    (body,) = encode_rows_body(rows(3), encoding)
    found = parse_rows_body_untrusted(Rows(encoding, 3, 9), body, 3, N_EMBD)
    np.testing.assert_allclose(found, rows(3), rtol=2**-11, atol=1e-6)


@pytest.mark.parametrize(
    ("told", "n_rows", "n_embd"), [(3, 2, 8), (3, 4, 8), (3, 3, 7), (3, 3, 9), (4, 3, 8)]
)
def test_a_reply_of_another_shape(told: int, n_rows: int, n_embd: int) -> None:
    (body,) = encode_rows_body(rows(3), "f32")
    with pytest.raises(BadReplyError):
        parse_rows_body_untrusted(Rows("f32", told, 0), body, n_rows, n_embd)


def test_a_reply_that_is_not_finite() -> None:
    values = rows(3)
    values[2, 2] = np.inf
    with pytest.raises(BadReplyError, match="not finite"):
        parse_rows_body_untrusted(Rows("f32", 3, 0), values.tobytes(), 3, N_EMBD)
