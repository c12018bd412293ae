"""Requests wider than the bank's graphs: the same bytes as from one graph, in both forms and encodings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from swarmnode.compute.bank import ExpertBank
from swarmnode.compute.devices import Device
from swarmnode.errors import RequestRefusedError
from swarmnode.services.expert_work import ExpertWork
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
    sent = rows.astype(np.float16) if encoding == "f16" else rows
    return ExpertWork(0, sent, pair_row, pair_expert, weights, encoding)


@pytest.mark.parametrize("encoding", ["f32", "f16"])
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
