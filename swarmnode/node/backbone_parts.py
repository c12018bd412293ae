"""A backbone's parts, put together before anything runs: its options, the loaded model, the services on it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import trio

from swarmnode.compute.bank import ExpertBank
from swarmnode.compute.devices import Device
from swarmnode.config import Config, ModelsConfig
from swarmnode.errors import UsageError
from swarmnode.gossip.shape import MarketShape
from swarmnode.models.base import Model
from swarmnode.models.registry import open_model
from swarmnode.models.tokenizer import Tokenizer
from swarmnode.node.common import NodeOptions
from swarmnode.node.sending import prepare_policy, prepare_residents
from swarmnode.services.demand import DemandWatch
from swarmnode.services.engine import Engine
from swarmnode.services.members import Members
from swarmnode.services.prober import Prober
from swarmnode.services.remote_experts import RemoteExperts, WireForm
from swarmnode.services.resident_experts import ResidentExperts
from swarmnode.services.runners import ComputeGate, Runner
from swarmnode.services.seeder import Seeder
from swarmnode.services.swarm_state import SwarmState
from swarmnode.services.throughput import Throughput
from swarmnode.weights.expert_layers import tensor_name
from swarmnode.weights.index import ModelIndex
from swarmnode.weights.manifest import Manifest


@dataclass(frozen=True)
class BackboneOptions(NodeOptions):
    """And a backbone."""

    model: str | None = None
    """A GGUF, a name the catalogue knows, or None for the bundled model."""
    api: tuple[str, int] = ("127.0.0.1", 8790)
    form: WireForm = field(default_factory=WireForm)
    n_ctx: int = 4096
    n_slots: int = 2


@dataclass(frozen=True)
class Backbone:
    """A backbone's services, wired to each other."""

    manifest: Manifest
    members: Members
    prober: Prober
    seeder: Seeder
    engine: Engine
    state: SwarmState
    demand: DemandWatch
    throughput: Throughput
    residents: ResidentExperts | None = None
    """None: nothing depends on what is in memory."""


def assemble_backbone(
    options: BackboneOptions,
    index: ModelIndex,
    manifest: Manifest,
    model: Model,
    bank: ExpertBank,
    compute: Runner,
    threads: Runner,
) -> Backbone:
    """Wire the services of a loaded model; nothing runs yet."""
    config = options.config
    members = Members(model.n_expert, config.dispatch, trio.current_time)
    prober = Prober(manifest.model_id, model.n_embd, bank, compute, members, config.dispatch)
    residents = prepare_residents(config.dispatch, index, model, threads)
    policy = prepare_policy(config.dispatch, residents, model, config.engine.max_steps)
    remote = RemoteExperts(
        manifest.model_id, bank, compute, members, config.dispatch, options.form, policy=policy
    )
    prober.on_answer = remote.probed
    demand = DemandWatch(MarketShape.of(manifest), config.market, trio.current_time)
    engine = Engine(
        model,
        Tokenizer(index.metadata),
        bank,
        compute,
        members,
        remote,
        n_slots=options.n_slots,
        chunk_tokens=config.models.n_ubatch,
        config=config.engine,
        demand=demand,
        residents=residents,
        threads=threads,
    )
    seeder = Seeder(index, manifest, members, threads, prober.watch, config.dispatch, trio.current_time)
    state = SwarmState(manifest, members, options.form, config.dispatch)
    throughput = Throughput(members, lambda: engine.n_tokens, trio.current_time, config.dashboard)
    return Backbone(manifest, members, prober, seeder, engine, state, demand, throughput, residents)


def routed_bytes(manifest: Manifest) -> int:
    """Bytes of all routed experts."""
    return manifest.n_expert * sum(layer.layout.expert_bytes for layer in manifest.layers.values())


def load_model(options: BackboneOptions, index: ModelIndex, device: Device) -> tuple[Model, ExpertBank]:
    """The dense path and a bank of every routed expert, bound from the mapped file. Blocks; on the compute thread.

    UsageError for options that do not fit the model or each other.
    """
    config = options.config
    _check_drafts(config)
    model = open_model(index, device, options.n_ctx, options.n_slots, _with_mtp(config, index))
    bank = ExpertBank(device, max_rows=config.compute.backbone_max_rows, config=config.compute)
    for number, layout in index.expert_layers.items():
        stacked = {kind: index.data(tensor_name(number, kind)) for kind in layout.kinds}
        bank.bind(layout, range(layout.n_expert), stacked)
    return model, bank


def _check_drafts(config: Config) -> None:
    """Before the model is loaded: in the middle of an answer it would end that, and all others in its step."""
    drafted, most = config.engine.draft_tokens, config.models.max_tentative_tokens
    if not 1 <= drafted < most:  # a step also runs the token before the guesses
        raise UsageError(
            f"draft_tokens = {drafted} must be 1 or more, and less than max_tentative_tokens = {most}, which is what a "
            "pass can take back"
        )


def _with_mtp(config: Config, index: ModelIndex) -> ModelsConfig:
    """An MTP block is loaded if anybody may ask it. UsageError if one is asked for that is not there."""
    if config.engine.drafts == "mtp" and not index.n_mtp:
        raise UsageError(
            f"{index.paths[0]} has no MTP block to guess with: leave --speculate mtp out, or take a file that has one"
        )
    is_wanted = config.engine.speculate != "never" and config.engine.drafts != "ngram"
    return replace(config.models, mtp=config.models.mtp and is_wanted)


@asynccontextmanager
async def loaded(
    options: BackboneOptions, index: ModelIndex, device: Device, gate: ComputeGate
) -> AsyncIterator[tuple[Model, ExpertBank]]:
    """`load_model` on the compute thread, and everything freed at the end."""
    model, bank = await gate.run(partial(load_model, options, index, device))
    try:
        yield model, bank
    finally:
        with trio.CancelScope(shield=True):
            await gate.run(bank.close)
            await gate.run(model.close)
