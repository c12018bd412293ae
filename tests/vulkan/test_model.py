"""Whole forward passes with Vulkan: under the experts only, and under the dense path too."""

from __future__ import annotations

import numpy as np
import pytest

from swarmnode.compute import oracle
from swarmnode.compute.devices import Device
from swarmnode.compute.thread import release_compute_thread
from swarmnode.models.base import ExpertCall, F32Array, run_pass
from swarmnode.models.tokenizer import Tokenizer
from swarmnode.weights.catalog import bundled_model
from swarmnode.weights.index import ModelIndex
from tests.models.kit import open_local
from tests.models.oracle_forward import ForwardOracle
from tests.process.test_workers import TEXT

from .kit import clear_prompts, fill_bank, vulkan_name

pytestmark = pytest.mark.vulkan


def float64_experts(index: ModelIndex, call: ExpertCall) -> F32Array:
    """The routed experts of a layer by the oracle, f32 [T, n_embd]."""
    layout = index.expert_layers[call.layer]
    total = np.zeros(call.rows.shape)
    for expert in np.unique(call.ids).tolist():
        slabs = {kind: index.slab(call.layer, expert, kind) for kind in layout.kinds}
        row, k = np.nonzero(call.ids == expert)
        y = oracle.expert_ffn(call.rows[row], *oracle.expert_matrices(layout, slabs))
        np.add.at(total, row, y * call.weights[row, k][:, None])
    return total.astype(np.float32)


def test_experts_on_vulkan_give_the_logits_of_float64(
    vulkan: Device, capsys: pytest.CaptureFixture[str]
) -> None:
    """Dense path on the CPU. A CPU's own experts give 0.9997, and 0.997 where the gate's choice is close."""
    with open_local(bundled_model()) as local:
        tokens = Tokenizer(local.index.metadata).encode(TEXT)
        bank = fill_bank(vulkan, local.index)
        bank.limit_rows(8)

        def on_vulkan(call: ExpertCall) -> F32Array:
            n_used = call.ids.shape[1]
            pair_row = np.repeat(np.arange(len(call.rows), dtype=np.int32), n_used)
            return bank.partial(
                call.layer, call.rows, pair_row, call.ids.reshape(-1), call.weights.reshape(-1)
            )

        found: list[F32Array] = []
        for experts in (on_vulkan, lambda call: float64_experts(local.index, call)):
            local.model.reset(0)
            found.append(run_pass(local.model.forward(0, tokens, all_logits=True), experts))
        bank.close()
    cosines = oracle.row_cosines(*found)
    with capsys.disabled():
        print(f"\nlogits with experts on {vulkan_name()} against float64: least cosine {cosines.min():.7f}")
    assert cosines.min() >= 0.9999


def test_a_backbone_on_vulkan_says_what_the_cpu_says(capsys: pytest.CaptureFixture[str]) -> None:
    """The dense path on the device, ops that it lacks on the CPU; token by token, for the sake of narrow kernels.

    Logits are held against float64, because the CPU's own are further away (0.99 where the gate's choice is close).
    """
    prompt, n_clear = max(clear_prompts(max_tokens=8), key=lambda found: found[1])
    found: list[F32Array] = []
    said: list[list[int]] = []
    for name in ("CPU", vulkan_name()):
        release_compute_thread()
        with open_local(bundled_model(), device_name=name) as local:
            found.append(np.concatenate([local.run([token]) for token in prompt]))
            first = int(found[-1][-1].argmax())
            said.append([first, *local.greedy([first], n_clear - 1)])
            truth = ForwardOracle(local.index).run(prompt)
    release_compute_thread()
    on_cpu, on_vulkan = (oracle.row_cosines(logits, truth).min() for logits in found)
    with capsys.disabled():
        print(
            f"\nlogits against float64: least cosine {on_cpu:.6f} on the CPU, {on_vulkan:.6f} on {vulkan_name()}"
        )
    assert n_clear >= 4
    assert said[0] == said[1]
    assert on_vulkan >= 0.9995
