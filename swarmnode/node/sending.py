"""What a backbone sends out: the policy its options name, and the resident set behind it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from swarmnode.config import DispatchConfig
from swarmnode.models.base import Model
from swarmnode.schedule.cost import CostModel
from swarmnode.schedule.residents import Residents
from swarmnode.schedule.sending import SendAlways, SendPolicy
from swarmnode.schedule.sending_auto import Dice, SendAuto
from swarmnode.services.resident_experts import MappedPages, Pages, ResidentExperts
from swarmnode.services.runners import Runner
from swarmnode.weights.index import ModelIndex


def prepare_residents(
    config: DispatchConfig, index: ModelIndex, model: Model, threads: Runner, pages: Pages | None = None
) -> ResidentExperts | None:
    """The experts in memory; None where nothing asks for them."""
    if config.send == "always" and config.local_budget_bytes is None:
        return None
    sizes = {number: layout.expert_bytes for number, layout in index.expert_layers.items()}
    residents = Residents(sizes, model.n_expert, config.local_budget_bytes)
    return ResidentExperts(residents, pages or MappedPages(index), threads, config)


def prepare_policy(
    config: DispatchConfig,
    residents: ResidentExperts | None,
    model: Model,
    max_steps: int,
    now: Callable[[], float] = time.perf_counter,
    rng: Dice | None = None,
) -> SendPolicy:
    """`max_steps`: passes that the engine has under way at once; `now` is read on the compute thread and on trio's."""
    if config.send == "always" or residents is None:
        return SendAlways(CostModel(config, 0, now), config)
    cost = CostModel(config, residents.residents.mean_expert_bytes, now)
    return SendAuto(
        cost,
        residents.residents,
        config,
        model.n_layer,
        model.n_expert_used,
        rng or random.Random(),
        max_steps,
    )
