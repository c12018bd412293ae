"""The self-test: passes the real device at every width, catches one that degrades (case 24)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from swarmnode.compute import ggml
from swarmnode.compute.bank import ExpertBank
from swarmnode.compute.combine import Ids, Rows
from swarmnode.compute.devices import Device
from swarmnode.compute.expert_graph import ExpertShape
from swarmnode.compute.self_test import apply_report, check_device, check_expert, random_expert
from swarmnode.compute.slots import Segment
from swarmnode.config import ComputeConfig
from swarmnode.errors import DeviceError, UsageError
from tests.compute.layers import TYPES, random_layer

WIDTHS = (1, 8, 9, 16, 64, 256, 512)


class DegradingBank(ExpertBank):
    """A device whose kernels above `good_width` columns are worse: cosine about 0.9987."""

    good_width = 8

    def _run_piece(self, shape: ExpertShape, segment: Segment, rows: Rows, pair_row: Ids, slots: Ids) -> Rows:
        y = super()._run_piece(shape, segment, rows, pair_row, slots)
        if slots.size <= self.good_width:
            return y
        noise = np.random.default_rng(0).standard_normal(y.shape, np.float32)
        degraded: npt.NDArray[np.float32] = y + np.float32(0.05) * np.float32(y.std()) * noise
        return degraded


@pytest.mark.parametrize("types", [*TYPES, (ggml.Q5_K, ggml.Q5_K), (ggml.F16, ggml.BF16)])
def test_the_cpu_is_good_at_every_width(device: Device, types: tuple[int, int]) -> None:
    layer = random_layer(types, n_expert=2)
    bank = layer.bound(device)
    report = check_expert(bank, 0, 1)
    assert report.passed
    assert report.widest_good == 512
    assert tuple(sorted({result.width for result in report.results})) == WIDTHS
    assert ComputeConfig().self_test_widths == WIDTHS
    apply_report(bank, report)
    assert bank.max_rows == 512
    for result in report.results:
        print(result)
        assert result.min_cosine >= result.threshold
        if types == (ggml.F32, ggml.F32):
            assert result.min_cosine >= 0.999999
        if types == (ggml.Q4_K, ggml.Q6_K):
            assert result.min_cosine >= (0.9995 if result.reference == "float64" else 0.99999)
    bank.close()


def test_a_device_that_degrades_above_8_columns_gets_batches_of_8(device: Device) -> None:
    layer = random_layer()
    bank = DegradingBank(device)
    bank.bind(layer.layout, range(8), layer.stacked)
    report = check_expert(bank, 0, 0)
    assert not report.passed
    assert report.widest_good == 8
    apply_report(bank, report)
    assert bank.max_rows == 8
    good = layer.bound(device)
    rows = np.random.default_rng(1).standard_normal((64, 256), np.float32)
    pairs, chosen = np.arange(64, dtype=np.int32), np.full(64, 3, np.int32)
    assert bank.experts(0, rows, pairs, chosen).tobytes() == good.experts(0, rows, pairs, chosen).tobytes()
    weights = np.ones(64, np.float32)
    expected = good.partial(0, rows, pairs, chosen, weights)
    assert bank.partial(0, rows, pairs, chosen, weights).tobytes() == expected.tobytes()
    ids, p = np.tile(np.arange(8, dtype=np.int32), (64, 1)), np.ones((64, 8), np.float32)
    assert bank.moe(0, rows, ids, p).tobytes() == good.moe(0, rows, ids, p).tobytes()
    bank.close()
    good.close()


def test_a_device_that_is_never_right_is_refused(device: Device) -> None:
    layer = random_layer()
    bank = DegradingBank(device)
    bank.good_width = 0
    bank.bind(layer.layout, range(8), layer.stacked)
    report = check_expert(bank, 0, 0)
    assert report.widest_good == 0
    with pytest.raises(DeviceError, match="wrong results"):
        apply_report(bank, report)
    bank.close()


@pytest.mark.parametrize("answer", [np.nan, np.inf, 0.0])
def test_a_device_that_answers_nonsense_is_refused(device: Device, answer: float) -> None:
    class NonsenseBank(ExpertBank):
        def _run_piece(
            self, shape: ExpertShape, segment: Segment, rows: Rows, pair_row: Ids, slots: Ids
        ) -> Rows:
            return np.full_like(rows[pair_row], answer)

    layer = random_layer(n_expert=1)
    bank = NonsenseBank(device)
    bank.bind(layer.layout, [0], layer.stacked)
    assert check_expert(bank, 0, 0, widths=(1, 8)).widest_good == 0
    bank.close()


def test_wrong_weights_on_the_device_are_seen(device: Device) -> None:
    """The oracle reads the weights back; another expert's outputs do not match them."""

    class CrossedBank(ExpertBank):
        def slab(self, layer: int, expert: int, kind: str) -> bytearray:
            return super().slab(layer, expert ^ 1, kind)

    layer = random_layer((ggml.Q4_K, ggml.Q6_K))
    bank = CrossedBank(device)
    bank.bind(layer.layout, range(8), layer.stacked)
    assert check_expert(bank, 0, 0, widths=(1, 8)).widest_good == 0
    bank.close()


def test_columns_that_are_mixed_up_are_seen(device: Device) -> None:
    """Wide batches repeat rows, but never at the distance of two tiles of a kernel."""

    class CrossedTilesBank(ExpertBank):
        def _run_piece(
            self, shape: ExpertShape, segment: Segment, rows: Rows, pair_row: Ids, slots: Ids
        ) -> Rows:
            y = super()._run_piece(shape, segment, rows, pair_row, slots)
            crossed: Rows = np.r_[y[: self.tile], y[: -self.tile]]
            return crossed

        tile = 64

    layer = random_layer(n_expert=1)
    for tile in (64, 128, 256):
        bank = CrossedTilesBank(device)
        bank.tile = tile
        bank.bind(layer.layout, [0], layer.stacked)
        assert check_expert(bank, 0, 0, widths=(tile, 512)).widest_good == tile
        bank.close()


def test_device_check_before_loading(device: Device) -> None:
    report = check_device(device)
    assert report.passed
    assert {result.weights for result in report.results} == {"F32", "Q4_K+Q6_K"}
    assert check_device(device, max_rows=8).widest_good == 8


def test_widths_up_to_max_rows_are_tested_and_only_tested_ones_are_used(device: Device) -> None:
    layer = random_layer(n_expert=1)
    bank = layer.bound(device, max_rows=12)
    assert sorted({result.width for result in check_expert(bank, 0, 0).results}) == [1, 8, 9, 12]
    narrow = check_expert(bank, 0, 0, widths=(1, 8))
    apply_report(bank, narrow)
    assert bank.max_rows == 8
    for widths in ((), (0, 8)):
        with pytest.raises(UsageError, match="widths"):
            check_expert(bank, 0, 0, widths=widths)
    bank.close()


def test_a_fused_expert_of_the_real_size(device: Device) -> None:
    layout, slabs = random_expert(3072, 1024, ggml.Q4_K, ggml.Q6_K, fused=True)
    bank = ExpertBank(device, budget_bytes=layout.expert_bytes)
    bank.add(layout, 0, slabs)
    report = check_expert(bank, 0, 0, widths=(1, 8, 9))
    assert report.passed
    assert report.widest_good == 9
    bank.close()
