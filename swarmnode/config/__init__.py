"""Every number that tunes swarmnode, with its unit, formula and reason.

Frozen dataclasses, one for each room; a service gets the one it needs. Defaults are for a home connection.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swarmnode.config.api import ApiConfig, NodeApiConfig
from swarmnode.config.compute import ComputeConfig, ModelsConfig, Repack
from swarmnode.config.contact import AddressBookConfig, BootstrapConfig, ContactConfig, LanConfig
from swarmnode.config.dashboard import DashboardConfig
from swarmnode.config.engine import Drafts, EngineConfig, Speculate
from swarmnode.config.experts import DispatchConfig, ServeConfig
from swarmnode.config.folders import Folders
from swarmnode.config.gossip import GossipConfig
from swarmnode.config.market import MarketConfig
from swarmnode.config.restraint import RestraintConfig
from swarmnode.config.store import StoreConfig
from swarmnode.config.units import KIB, MIB
from swarmnode.config.wire import WireConfig

__all__ = [
    "KIB",
    "MIB",
    "AddressBookConfig",
    "ApiConfig",
    "BootstrapConfig",
    "ComputeConfig",
    "Config",
    "ContactConfig",
    "DashboardConfig",
    "DispatchConfig",
    "Drafts",
    "EngineConfig",
    "Folders",
    "GossipConfig",
    "LanConfig",
    "MarketConfig",
    "ModelsConfig",
    "NodeApiConfig",
    "Repack",
    "RestraintConfig",
    "ServeConfig",
    "Speculate",
    "StoreConfig",
    "WireConfig",
]


@dataclass(frozen=True)
class Config:
    """All of them, as the node passes it to its services."""

    wire: WireConfig = field(default_factory=WireConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)
    models: ModelsConfig = field(default_factory=ModelsConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    contact: ContactConfig = field(default_factory=ContactConfig)
    bootstrap: BootstrapConfig = field(default_factory=BootstrapConfig)
    lan: LanConfig = field(default_factory=LanConfig)
    address_book: AddressBookConfig = field(default_factory=AddressBookConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    gossip: GossipConfig = field(default_factory=GossipConfig)
    api: ApiConfig = field(default_factory=ApiConfig)
    node_api: NodeApiConfig = field(default_factory=NodeApiConfig)
    market: MarketConfig = field(default_factory=MarketConfig)
    dashboard: DashboardConfig = field(default_factory=DashboardConfig)
    restraint: RestraintConfig = field(default_factory=RestraintConfig)
