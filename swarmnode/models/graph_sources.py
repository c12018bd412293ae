"""What every graph of a model is made from."""

from __future__ import annotations

from dataclasses import dataclass

from swarmnode.compute.devices import Device
from swarmnode.compute.tensors import WeightSet
from swarmnode.models.architecture import Architecture
from swarmnode.models.hparams import Hparams
from swarmnode.models.state import SlotStates


@dataclass(frozen=True)
class GraphSources:
    """One loaded model, as the builders of its graphs see it."""

    device: Device
    architecture: Architecture
    hparams: Hparams
    weights: WeightSet
    states: SlotStates
