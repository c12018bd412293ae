"""Requests computed together: to each the same bytes as alone, and its own errors only."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from swarmnode.compute.bank import ExpertBank
from swarmnode.compute.devices import Device
from swarmnode.errors import DeviceError, RequestRefusedError, UsageError
from swarmnode.services.expert_work import ExpertBatches, ExpertWork, Reply
from swarmnode.wire.encodings import ROW_ENCODINGS
from swarmnode.wire.tensors import F32, I32, encode_rows, view_rows_untrusted
from tests.compute.layers import RandomLayer, random_layer

N_EMBD, HELD = 256, (0, 1, 2, 5, 6)
FORMS = [(form, encoding) for form in ("experts", "partial") for encoding in ("f32", "f16", "q8")]


@pytest.fixture(scope="module")
def layer() -> RandomLayer:
    return random_layer()


@pytest.fixture
def bank(device: Device, layer: RandomLayer) -> Iterator[ExpertBank]:
    """As a worker's: experts of one layer in slots, 64 pairs at once."""
    opened = ExpertBank(device, max_rows=64)
    for expert in HELD:
        opened.add(layer.layout, expert, layer.slabs(expert))
    yield opened
    opened.close()


def work(seed: int, n_rows: int, form: str = "partial", encoding: str = "f16") -> ExpertWork:
    """Each row through three experts, in any order."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((n_rows, N_EMBD), np.float32)
    sent = view_rows_untrusted(encode_rows(rows, encoding), n_rows, N_EMBD, encoding)
    pair_row = np.repeat(np.arange(n_rows, dtype=np.int32), 3)
    pair_expert = np.concatenate([rng.choice(HELD, 3, replace=False) for _ in range(n_rows)])
    order = rng.permutation(pair_row.size)
    weights = rng.standard_normal(pair_row.size, np.float32) if form == "partial" else None
    reply = ROW_ENCODINGS[encoding].reply
    return ExpertWork(0, sent, pair_row[order], pair_expert[order].astype(np.int32), weights, reply)


def reply_bytes(outcome: Reply | Exception) -> tuple[int, bytes]:
    assert not isinstance(outcome, Exception), outcome
    return outcome[0], b"".join(outcome[1])


class Calls:
    """Pairs of each call of the bank; the first `failing` calls fail."""

    def __init__(self, bank: ExpertBank, monkeypatch: pytest.MonkeyPatch, failing: int = 0) -> None:
        self.pairs: list[int] = []
        experts, partial = bank.experts, bank.partial

        def watched(layer: int, rows: F32, pair_row: I32, pair_expert: I32) -> F32:
            self.pairs.append(pair_row.size)
            if len(self.pairs) <= failing:
                raise DeviceError("no memory for a graph so wide")
            return experts(layer, rows, pair_row, pair_expert)

        def watched_partial(layer: int, rows: F32, pair_row: I32, pair_expert: I32, weight: F32) -> F32:
            self.pairs.append(pair_row.size)
            return partial(layer, rows, pair_row, pair_expert, weight)

        monkeypatch.setattr(bank, "experts", watched)
        monkeypatch.setattr(bank, "partial", watched_partial)


def test_every_mix_of_forms_and_encodings_gives_the_bytes_of_each_alone(
    bank: ExpertBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One to six rows each: sums of few pairs and of many are added up by different code."""
    batches = ExpertBatches(bank)
    rng = np.random.default_rng(11)
    for turn in range(10):
        asked = [work(10 * turn + n, 1 + (turn + n) % 6, *FORMS[n]) for n in rng.permutation(6)]
        while sum(one.width for one in asked) > batches.max_width:
            asked.pop()
        assert len(asked) > 1
        alone = [reply_bytes(one.run(bank)) for one in asked]
        with monkeypatch.context() as patches:
            calls = Calls(bank, patches)
            together = batches.run(asked)
        assert calls.pairs == [sum(one.n_pairs for one in asked)]
        assert [reply_bytes(outcome) for outcome in together] == alone


def test_a_row_without_a_pair_is_the_same_zero(bank: ExpertBank) -> None:
    whole = work(1, 3)
    kept = whole.pair_row != 1
    assert whole.pair_weight is not None
    gap = replace(
        whole,
        pair_row=whole.pair_row[kept],
        pair_expert=whole.pair_expert[kept],
        pair_weight=whole.pair_weight[kept],
    )
    assert gap.width == 6
    assert replace(gap, pair_row=gap.pair_row[:1], pair_expert=gap.pair_expert[:1]).width == 3, "its rows"
    outcomes = ExpertBatches(bank).run([work(2, 2), gap])
    assert reply_bytes(outcomes[1]) == reply_bytes(gap.run(bank))


def test_an_overflow_is_refused_to_the_one_that_asked_for_it(bank: ExpertBank) -> None:
    first, last = work(1, 1), work(3, 2, "experts")
    middle = work(2, 1)
    assert middle.pair_weight is not None
    huge = replace(middle, pair_weight=middle.pair_weight * np.float32(1e9))
    outcomes = ExpertBatches(bank).run([first, huge, last])
    assert isinstance(outcomes[1], RequestRefusedError)
    assert outcomes[1].code == "overflow"
    assert reply_bytes(outcomes[0]) == reply_bytes(first.run(bank))
    assert reply_bytes(outcomes[2]) == reply_bytes(last.run(bank))


def test_an_expert_that_was_dropped_meanwhile_fails_those_that_need_it(bank: ExpertBank) -> None:
    asked = [work(seed, 1) for seed in range(3)]
    asked[1] = replace(asked[1], pair_expert=np.array([0, 1, 2], np.int32))
    others = [replace(one, pair_expert=np.array([0, 5, 6], np.int32)) for one in (asked[0], asked[2])]
    asked = [others[0], asked[1], others[1]]
    alone = [reply_bytes(one.run(bank)) for one in others]
    bank.remove(0, 2)
    outcomes = ExpertBatches(bank).run(asked)
    assert isinstance(outcomes[1], UsageError)
    assert [reply_bytes(outcomes[0]), reply_bytes(outcomes[2])] == alone


def test_a_graph_that_cannot_be_built_so_wide_is_no_loss(
    bank: ExpertBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [work(seed, 2) for seed in range(3)]
    alone = [reply_bytes(one.run(bank)) for one in asked]
    calls = Calls(bank, monkeypatch, failing=1)
    assert [reply_bytes(outcome) for outcome in ExpertBatches(bank).run(asked)] == alone
    assert calls.pairs == [18, 6, 6, 6]


def test_one_alone_takes_the_way_of_one(bank: ExpertBank, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = work(1, 30)
    assert wide.width == 90
    alone = reply_bytes(wide.run(bank))
    calls = Calls(bank, monkeypatch)
    assert reply_bytes(ExpertBatches(bank).run([wide])[0]) == alone
    assert calls.pairs == [64, 26]


def test_a_batch_follows_the_self_tests_width(bank: ExpertBank) -> None:
    bank.limit_rows(9)
    assert ExpertBatches(bank).max_width == 9


def test_the_memory_of_a_batch_is_bounded_by_its_width(bank: ExpertBank) -> None:
    """Rows, y and the replies of max_rows pairs. A reply that leaves slowly keeps its own rows only."""
    row_bytes = 4 * N_EMBD
    asked = [work(seed, 2, "experts", "f32") for seed in range(10)]
    batches = ExpertBatches(bank)
    batches.run(asked)  # builds the graph
    gc.collect()
    tracemalloc.start()
    try:
        outcomes = batches.run(asked)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        kept = outcomes[3]
        del outcomes
        gc.collect()
        kept_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(reply_bytes(kept)[1]) == 6 * row_bytes
    assert kept_bytes < 6 * row_bytes + 4096
    assert peak_bytes < 3 * batches.max_width * row_bytes, "rows, y and the replies"
