"""A real second backend: ggml's Vulkan, beside the CPU. `make test-vulkan`; docs/testing.md says what it needs.

On Mesa's software driver kernels compile on first use: seconds for narrow ones, minutes for wide ones.
"""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from swarmnode.cli import main
from swarmnode.compute.devices import Device
from swarmnode.compute.self_test import check_expert
from swarmnode.weights.catalog import bundled_model
from swarmnode.weights.index import ModelIndex

from .kit import fill_bank, table, vulkan_name

pytestmark = pytest.mark.vulkan

NARROW = (1, 2, 3, 4, 5, 6, 7, 8)
"""ggml has mat-vec kernels up to here."""
WIDE = (9, 16)
WIDEST = (64, 256, 512)
"""Of two more kernels: 20 minutes to compile on a busy machine."""


def test_doctor_names_the_device() -> None:
    result = CliRunner().invoke(main, ["doctor", "--device", vulkan_name(), "--max-rows", "8"])
    assert f"device {vulkan_name()}:" in result.output
    assert f"{vulkan_name()}: Q4_K+Q6_K experts against float64" in result.output
    assert "fail" not in result.output
    assert result.exit_code == 0


@pytest.mark.parametrize(
    ("widths", "least"),
    [(NARROW, 0.9999), (WIDE, 0.9995), pytest.param(WIDEST, 0.9995, marks=pytest.mark.slow)],
    ids=["narrow", "wide", "widest"],
)
def test_experts_against_float64(
    vulkan: Device, widths: tuple[int, ...], least: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """An expert of the bundled model's layer 0; activations are floats here, so the narrow kernels are exact."""
    assert not vulkan.is_host
    with ModelIndex.open(bundled_model()) as index:
        bank = fill_bank(vulkan, index)
        report = check_expert(bank, 0, 3, widths)
        bank.close()
    with capsys.disabled():
        print(table(report))
    assert {result.weights for result in report.results} == {"Q4_K+Q6_K"}
    assert report.widest_good == widths[-1]
    assert min(result.min_cosine for result in report.results) >= least
