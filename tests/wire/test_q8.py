"""8-bit rows: ggml's own quants come through them, what does not fit goes wider, and a peer's are bounded."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from swarmnode.errors import ProtocolError, RequestRefusedError, UsageError
from swarmnode.wire import q8
from swarmnode.wire.encodings import ROW_ENCODINGS, row_bytes, row_width_untrusted, spoken_encoding
from swarmnode.wire.messages import Experts
from swarmnode.wire.tensors import (
    F32,
    decode_rows_untrusted,
    encode_experts_body,
    encode_rows,
    encode_rows_or_f32,
    parse_experts_body_untrusted,
    view_rows_untrusted,
    widened,
)

MODEL = bytes(32)
N_EMBD = 512


def rows(n_rows: int, n_embd: int = N_EMBD) -> F32:
    return np.random.default_rng(1).standard_normal((n_rows, n_embd), np.float32)


def blocks(n_rows: int = 2) -> q8.Blocks:
    found = q8.quantise(rows(n_rows))
    assert found is not None
    return found


def as_ggml(numbers: F32) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """d and quants of one block as quantize_row_q8_K_ref (ggml-quants.c) makes them, step by step in f32."""
    largest = numbers[int(np.abs(numbers).argmax())]  # the first one of that magnitude
    if largest == 0:
        return np.float32(0), np.zeros(numbers.size, np.int64)  # type: ignore[return-value]
    scale = np.float32(-127) / largest
    quants = np.minimum(np.rint(scale * numbers).astype(np.int64), 127)
    return np.float32(1) / scale, quants


IN_RANGE = st.one_of(
    st.just(0.0), st.floats(-65_504, 65_504, width=32), st.sampled_from([1.0, -1.0, 0.5, 65_504.0])
)


@given(hnp.arrays(np.float32, (1, 256), elements=IN_RANGE, fill=st.sampled_from([0.0, 0.25, -0.99999])))
def test_the_kernel_finds_the_same_quants_again(values: F32) -> None:
    """All signs may be the other way (two numbers of the largest magnitude): the products are the same bits."""
    made = q8.quantise(values)
    if made is None:  # nothing but tiny numbers
        assert 0 < np.abs(values).max() < q8.MIN_LARGEST
        return
    d, quants = as_ggml(values[0])
    again_d, again = as_ggml(q8.dequantise(made)[0])
    sign = -1 if again_d == -d else 1
    assert again_d == sign * d
    assert np.array_equal(again, sign * quants)
    assert np.array_equal(np.abs(made["quants"][0, 0]), np.abs(quants))


def test_rows_as_bytes() -> None:
    values = np.zeros((1, 512), np.float32)
    values[0, :3] = 0.5, -1.0, 0.25
    data = bytes(encode_rows(values, "q8"))
    assert len(data) == row_bytes("q8", 512) == 520
    assert data[:7].hex() == "000080bf" + "c0" + "7f" + "e0", "-1 in f32, then -64, 127 and -32"
    assert not any(data[7:])
    found = decode_rows_untrusted(data, 1, 512, "q8")
    assert found[0, 1] == -1.0
    np.testing.assert_allclose(found, values, atol=0.5 / 127)


@pytest.mark.parametrize("n_rows", [1, 15, 16, 17, 40])
def test_rows_are_read_back_within_half_a_step(n_rows: int) -> None:
    values = rows(n_rows, 1024)
    found = decode_rows_untrusted(encode_rows(values, "q8"), n_rows, 1024, "q8")
    step = np.abs(values.reshape(n_rows, 4, 256)).max(axis=2, keepdims=True) / 127
    difference = np.abs(found - values).reshape(n_rows, 4, 256)
    assert (difference <= 0.5001 * step).all()
    assert found.flags.c_contiguous
    strided = np.repeat(values, 2, axis=1)[:, ::2]
    assert bytes(encode_rows(strided, "q8")) == bytes(encode_rows(values, "q8"))


def test_the_length_of_a_row() -> None:
    assert row_bytes("q8", 3072) == 3120
    assert [row_bytes(encoding, 3072) for encoding in ("f32", "f16")] == [12_288, 6144]
    assert ROW_ENCODINGS["q8"].reply == "f16"


def test_a_peer_gets_what_it_reads() -> None:
    assert spoken_encoding("q8", ("f32", "f16", "q8")) == "q8"
    assert spoken_encoding("q8", ("f32", "f16")) == "f16"
    assert spoken_encoding("q8", ("f32",)) == spoken_encoding("f16", ("q8", "f32")) == "f32"


@pytest.mark.parametrize("value", [65_505.0, -1e30, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("place", [0, 39])
def test_what_q8_cannot_hold_is_sent_as_f32(value: float, place: int) -> None:
    values = rows(40)
    values[place, 300] = value
    encoding, data = encode_rows_or_f32(values, "q8")
    assert encoding == "f32"
    assert bytes(data) == values.tobytes()
    with pytest.raises(UsageError, match="does not fit q8"):
        encode_rows(values, "q8")


@pytest.mark.parametrize("n_embd", [255, 384, 2880])
def test_other_widths_are_sent_as_f16(n_embd: int) -> None:
    """Half the bytes of f32; f32 all the same for a peer that does not read f16, or numbers that are too large."""
    values = rows(2, n_embd)
    assert encode_rows_or_f32(values, "q8") == encode_rows_or_f32(values, "f16")
    assert encode_rows_or_f32(values, "q8")[0] == "f16"
    assert encode_rows_or_f32(values, "q8", ("f32", "q8"))[0] == "f32"
    values[1, 7] = 65_505
    assert encode_rows_or_f32(values, "q8")[0] == "f32"


def test_tiny_blocks_are_sent_as_f32() -> None:
    assert encode_rows_or_f32(rows(2) * np.float32(1e-30), "q8")[0] == "f32"
    assert encode_rows_or_f32(np.zeros((2, 512), np.float32), "q8")[0] == "q8"
    assert encode_rows_or_f32(rows(2) * np.float32(1e-20), "q8")[0] == "q8"


# --- what peers send ------------------------------------------------------------------------------------------------


def wrong(made: q8.Blocks) -> None:
    with pytest.raises(ProtocolError, match="out of bounds") as error:
        view_rows_untrusted(made.tobytes(), len(made), N_EMBD, "q8")
    assert error.value.code == "bad_tensor"
    assert view_rows_untrusted(made.tobytes(), len(made), N_EMBD, "q8", finite=False).shape == made.shape


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf, 65_505.0, -1e38, 1e-30, -1e-45])
@pytest.mark.parametrize("place", [0, 63, 64, 129])
def test_a_largest_number_out_of_bounds(value: float, place: int) -> None:
    made = blocks(130)
    made["largest"][place, 1] = value
    wrong(made)


@pytest.mark.parametrize("place", [0, 64, 129])
def test_a_quant_of_minus_128(place: int) -> None:
    made = blocks(130)
    made["quants"][place, 1, 255] = -128
    wrong(made)


@pytest.mark.parametrize("largest", [0.0, -0.0, 65_504.0, -65_504.0, 2.0**-96])
def test_bounds_are_good(largest: float) -> None:
    made = blocks()
    made["largest"] = largest
    made["quants"][0, 0, :2] = 127, -127
    found = decode_rows_untrusted(made.tobytes(), 2, N_EMBD, "q8")
    assert np.isfinite(found).all()
    assert np.abs(found).max() == abs(largest)


@pytest.mark.parametrize(("n_rows", "n_embd"), [(1, 512), (3, 512), (2, 256), (2, 511), (2, 513), (0, 512)])
def test_a_length_of_other_rows(n_rows: int, n_embd: int) -> None:
    with pytest.raises(ProtocolError) as error:
        decode_rows_untrusted(blocks().tobytes(), n_rows, n_embd, "q8")
    assert error.value.code == "bad_tensor"


def test_the_wire_knows_widths_of_whole_blocks() -> None:
    assert row_width_untrusted(2 * 520, 2, "q8") == 512
    assert row_width_untrusted(256 * 260, 1, "q8") == 65_536
    for n_bytes, n_rows in ((0, 1), (259, 1), (261, 1), (520, 3), (257 * 260, 1), (-6, 1)):
        with pytest.raises(ProtocolError) as error:
            row_width_untrusted(n_bytes, n_rows, "q8")
        assert error.value.code == "bad_body"


def test_a_request_is_read_back_and_asks_for_f16() -> None:
    values, ids = rows(3), np.arange(3, dtype=np.int32)
    body = b"".join(encode_experts_body(values, ids, ids, None, "q8"))
    header = Experts(MODEL, 0, "experts", "q8", 3, 3)
    header.check_body_untrusted(len(body))
    assert header.reply_encoding == "f16"
    assert header.reply_bytes(len(body)) == 3 * N_EMBD * 2
    found = parse_experts_body_untrusted(header, body, N_EMBD, 16)
    assert found[0].dtype == q8.BLOCK, "nothing is converted in vain"
    assert np.array_equal(widened(found[0]), q8.dequantise(blocks(3)))


def test_a_small_request_must_not_ask_for_gigabytes() -> None:
    header = Experts(MODEL, 0, "experts", "q8", 1, 65_536)
    with pytest.raises(ProtocolError) as error:
        header.check_body_untrusted(row_bytes("q8", 3072) + header.pair_bytes)
    assert error.value.code == "too_large"
    experts = np.arange(header.n_pairs, dtype=np.int32)
    body = b"".join(encode_experts_body(rows(1, 3072), np.zeros_like(experts), experts, None, "q8"))
    with pytest.raises(RequestRefusedError) as refusal:
        parse_experts_body_untrusted(header, body, 3072, len(experts))
    assert refusal.value.code == "too_large", "nothing else is wrong with it"


@given(st.binary(max_size=300), st.integers(1, 3), st.integers(1, 4), st.sampled_from(["experts", "partial"]))
def test_any_body_is_a_request_or_one_error(body: bytes, n_rows: int, n_pairs: int, form: str) -> None:
    header = Experts(MODEL, 0, form, "q8", n_rows, n_pairs)
    n_bytes = n_rows * 260 + header.pair_bytes
    try:
        found = parse_experts_body_untrusted(header, (body * n_bytes)[:n_bytes], 256, 16)
    except RequestRefusedError:
        return
    assert np.abs(widened(found[0])).max() <= q8.MAX_LARGEST
