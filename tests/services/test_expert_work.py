"""Requests wider than the bank's graphs: the same bytes as from one graph, in both forms and all encodings.

And q8 rows: what they are worth depends on the type of the experts' first matrices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from swarmnode.compute import ggml
from swarmnode.compute.bank import ExpertBank
from swarmnode.compute.devices import Device
from swarmnode.errors import RequestRefusedError
from swarmnode.services.expert_work import ExpertWork
from swarmnode.wire.encodings import ROW_ENCODINGS
from swarmnode.wire.tensors import F32, WireRows, encode_rows, view_rows_untrusted
from tests.compute.layers import random_layer

N_ROWS, N_PAIRS = 100, 200


@pytest.fixture
def bank(device: Device) -> Iterator[ExpertBank]:
    opened = random_layer().bound(device)
    yield opened
    opened.close()


def work(form: str, encoding: str) -> ExpertWork:
    """Row 7 has no pair; others have up to several, of experts in any order."""
    rng = np.random.default_rng(3)
    chosen = rng.permutation(np.delete(np.arange(N_ROWS * 8), slice(7 * 8, 8 * 8)))[:N_PAIRS]
    weights = rng.standard_normal(N_PAIRS, np.float32) if form == "partial" else None
    rows = rng.standard_normal((N_ROWS, 256), np.float32)
    pair_row, pair_expert = (chosen // 8).astype(np.int32), (chosen % 8).astype(np.int32)
    reply = ROW_ENCODINGS[encoding].reply
    return ExpertWork(0, as_sent(rows, encoding), pair_row, pair_expert, weights, reply)


def as_sent(rows: F32, encoding: str) -> WireRows:
    n_rows, n_embd = rows.shape
    return view_rows_untrusted(encode_rows(rows, encoding), n_rows, n_embd, encoding)


@pytest.mark.parametrize("encoding", ["f32", "f16", "q8"])
@pytest.mark.parametrize("form", ["experts", "partial"])
def test_pieces_give_the_same_bytes(form: str, encoding: str, bank: ExpertBank) -> None:
    asked = work(form, encoding)
    n_rows, body = asked.run(bank)
    assert n_rows == (N_PAIRS if form == "experts" else N_ROWS)
    for width in (N_PAIRS - 1, 64, 7, 1):
        bank.limit_rows(width)
        n_again, again = asked.run(bank)
        assert n_again == n_rows
        assert b"".join(again) == b"".join(body), width


def test_a_result_that_does_not_fit_is_refused_in_pieces_too(bank: ExpertBank) -> None:
    asked = work("partial", "f16")
    assert asked.pair_weight is not None
    huge = replace(asked, pair_weight=asked.pair_weight * np.float32(1e9))
    for width in (512, 16):
        bank.limit_rows(width)
        with pytest.raises(RequestRefusedError) as caught:
            huge.run(bank)
        assert caught.value.code == "overflow"


def errors_of_q8(device: Device, types: tuple[int, int], spread: float) -> F32:
    """|difference| / |row| of 64 computed rows, sent as q8, to those of f32 rows; f32 [64]."""
    rng = np.random.default_rng(5)
    rows = rng.standard_normal((64, 768), np.float32)
    rows *= np.exp(np.float32(spread) * rng.standard_normal(rows.shape, np.float32))
    pair_row = np.arange(64, dtype=np.int32)
    bank = random_layer(types, n_embd=768).bound(device)
    found = []
    for encoding in ("f32", "q8"):
        work = ExpertWork(0, as_sent(rows, encoding), pair_row, pair_row % 8, None, "f32")
        found.append(np.frombuffer(b"".join(work.run(bank)[1]), np.float32).reshape(64, -1))
    bank.close()
    exact, got = found
    errors: F32 = np.linalg.norm(got - exact, axis=1) / np.linalg.norm(exact, axis=1)
    return errors


K_QUANTS = [(ggml.Q4_K, ggml.Q6_K), (ggml.Q5_K, ggml.Q5_K), (ggml.Q6_K, ggml.Q4_K), (ggml.Q4_K, ggml.F32)]


@pytest.mark.parametrize("types", K_QUANTS)
@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_k_quants_compute_the_same_bits_from_q8_rows(
    device: Device, types: tuple[int, int], spread: float
) -> None:
    assert errors_of_q8(device, types, spread).max() == 0.0


@pytest.mark.parametrize("types", [(ggml.F32, ggml.F32), (ggml.F16, ggml.F16), (ggml.Q8_0, ggml.Q8_0)])
def test_other_types_differ_by_the_rounding_of_the_rows(device: Device, types: tuple[int, int]) -> None:
    """Under what probes and audits allow (`max_row_error` 0.1), with outliers in the rows too."""
    assert 0.003 < errors_of_q8(device, types, 0.0).max() < 0.03
    assert errors_of_q8(device, types, 1.0).max() < 0.06
