"""Finding the Vulkan device, banks of the bundled model's experts, and the self-test as a table."""

from __future__ import annotations

from swarmnode.compute.bank import ExpertBank
from swarmnode.compute.devices import Device, build_report, list_devices
from swarmnode.compute.self_test import SelfTestReport
from swarmnode.weights.index import ModelIndex
from tests.models.test_bundled import CLEAR_MARGIN, TRUTH


def vulkan_name() -> str:
    """ggml's name of the first Vulkan device; fails the test if there is none."""
    names = [info.name for info in list_devices() if info.name.startswith("Vulkan")]
    assert names, (
        f"this ggml (built for {build_report().backends}) finds no Vulkan device; run make test-vulkan"
    )
    return names[0]


def fill_bank(device: Device, index: ModelIndex) -> ExpertBank:
    """A bank with all experts of a model."""
    bank = ExpertBank(device)
    for layer, layout in index.expert_layers.items():
        stacked = {kind: index.data(f"blk.{layer}.{kind}.weight") for kind in layout.kinds}
        bank.bind(layout, range(layout.n_expert), stacked)
    return bank


def table(report: SelfTestReport) -> str:
    """A line for each width."""
    lines = [f"\n{report.device:<10} {'width':>5} {'min cosine':>11} {'max|d|':>8}  {'against':<8} least"]
    lines += [
        f"{result.weights:<10} {result.width:>5} {result.min_cosine:>11.7f} {result.max_abs_diff:>8.1e}  "
        f"{result.reference:<8} {result.threshold}"
        for result in report.results
    ]
    return "\n".join(lines)


def clear_prompts(max_tokens: int) -> list[tuple[list[int], int]]:
    """Prompts recorded for the bundled model, each with the number of greedy choices before the first close one.

    Devices that compute experts in floats and CPUs, which round activations to 8 bit, move logits by up to 0.4 where
    the gate's choice of an expert is close, and by 0.05 elsewhere: a close choice between two tokens falls either way.
    """
    found: list[tuple[list[int], int]] = []
    for record in TRUTH["greedy"]:
        clear = [margin >= CLEAR_MARGIN for margin in record["margins"][:max_tokens]]
        found.append((record["prompt_ids"], [*clear, False].index(False)))
    return [(prompt, n_clear) for prompt, n_clear in found if n_clear > 0]
