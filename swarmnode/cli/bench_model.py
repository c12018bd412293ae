"""The sections of `swarmnode bench` that need a loaded model, and with it the extra `backbone`."""

from __future__ import annotations

from pathlib import Path

from swarmnode.cli.bench_figures import Figures, Plan
from swarmnode.cli.bench_local import measure_decode, measure_prefill, open_bench
from swarmnode.cli.bench_swarm import NETWORK, measure_swarm, open_swarm
from swarmnode.cli.common import complain, default_secret
from swarmnode.compute.devices import Device
from swarmnode.config import Folders
from swarmnode.counts import counted
from swarmnode.net.delay_proxy import LOOPBACK
from swarmnode.node.backbone_parts import BackboneOptions, loaded
from swarmnode.services.runners import ComputeGate
from swarmnode.weights.index import ModelIndex


async def measure_model(
    plan: Plan, folder: Path, index: ModelIndex, gate: ComputeGate, device: Device, figures: Figures
) -> None:
    """Load the model and measure what the plan says."""
    folders = Folders.under(folder / "backbone")
    options = BackboneOptions(
        folders,
        NETWORK,
        secret=default_secret(folders),  # of the environment, which the workers see as well
        listen=(LOOPBACK, 0),
        device=plan.device,
        config=plan.config,
        n_ctx=plan.prompt_tokens + plan.decode_tokens,
        n_slots=1 if {"decode", "swarm"}.isdisjoint(plan.sections) else max(plan.sequences),
    )
    complain("loading the model ...")
    async with (
        loaded(options, index, device, gate) as (model, bank),
        open_bench(index, model, bank, gate, plan) as bench,
    ):
        if "prefill" in plan.sections:
            complain("measuring prefill ...")
            figures.prefill = await measure_prefill(bench, plan.rounds)
        if "decode" in plan.sections:
            complain("measuring decode ...")
            figures.decode = await measure_decode(bench, plan.sequences, plan.rounds)
        if "swarm" in plan.sections:
            complain(f"starting {counted(plan.n_workers, 'worker')} ...")
            async with open_swarm(bench, options, device.info, folder) as swarm:
                await swarm.join(plan)
                complain("measuring decode over the workers ...")
                figures.swarm = await measure_swarm(bench, swarm, plan)
