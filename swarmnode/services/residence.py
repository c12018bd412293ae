"""The experts one worker holds: on disk, in memory, tested. Survives the connections it is announced on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import trio

from swarmnode.compute.bank import ExpertBank
from swarmnode.compute.devices import Device
from swarmnode.compute.layout import LayerLayout
from swarmnode.compute.self_test import SelfTestReport
from swarmnode.config import Config
from swarmnode.errors import BudgetError, UnsuitableModelError
from swarmnode.services.bank_tester import (
    BankTester,
    blaming,
    check_computable,
    title,
    widest_batch,
    widest_graph,
)
from swarmnode.services.expert_server import ExpertServer
from swarmnode.services.reports import JoinEvent
from swarmnode.services.runners import Runner
from swarmnode.weights.manifest import Manifest
from swarmnode.weights.slices import ExpertRange, overlapping
from swarmnode.weights.store import SliceStore

log = logging.getLogger(__name__)

Report = Callable[[JoinEvent], None]


@dataclass(frozen=True)
class Residence:
    """One model's experts within a byte budget: which ones is decided by services/market."""

    manifest: Manifest
    store: SliceStore
    bank: ExpertBank
    server: ExpertServer
    budget_bytes: int
    compute: Runner
    threads: Runner
    _tester: BankTester
    _filling: trio.Lock = field(default_factory=trio.Lock)
    """Held by who counts on the free slots that it reserved, or gives free slots back."""

    @property
    def title(self) -> str:
        """The model's name, for people."""
        return title(self.manifest)

    @property
    def max_rows(self) -> int:
        """Most (row, expert) pairs in one request; graphs are no wider than what passed the self-test."""
        return self.server.max_pairs

    @property
    def self_test(self) -> SelfTestReport:
        """All results so far."""
        return self._tester.report

    @property
    def n_experts(self) -> int:
        """Experts in memory."""
        return sum(len(experts) for experts in self.bank.holdings.values())

    @property
    def held_bytes(self) -> int:
        """Of the experts in memory; `bank.used_bytes` is with the slots that are free between them."""
        layers = self.manifest.layers
        return sum(layers[n].layout.expert_bytes * len(held) for n, held in self.bank.holdings.items())

    async def kept(self) -> tuple[ExpertRange, ...]:
        """The ranges that an earlier run left on disk and that fit the budget, in order; the others are deleted."""
        return await self.threads.run(self._fitting)

    async def load(self, item: ExpertRange) -> None:
        """From disk into memory, and through the self-test (of the first expert of each kind).

        Raises what is about this machine: BudgetError, DeviceError, StoreError; and UnsuitableModelError for weights
        that come out wrong here though the device is right with others: those are not left on disk either. Nothing of
        the range is in memory then.
        """
        layout = self.manifest.layers[item.layer].layout
        loaded: list[int] = []
        try:
            async with self._filling:
                with blaming(self.manifest):
                    await self._reserve(layout, item.count)
                    for expert in item.experts:
                        await self._add(layout, expert)
                        loaded.append(expert)
                        await self.compute.run(partial(self._tester.loaded, item.layer, expert))
        except BaseException as error:
            with trio.CancelScope(shield=True):
                await self.compute.run(partial(self._remove, item.layer, loaded))
                if isinstance(error, UnsuitableModelError):
                    await self.forget(item)
            raise

    async def unload(self, item: ExpertRange) -> None:
        """Free the memory and the disk of a range, as far as it is there."""
        held = self.bank.holdings.get(item.layer, frozenset())
        experts = [expert for expert in item.experts if expert in held]
        await self.compute.run(partial(self._remove, item.layer, experts))
        await self.forget(item)

    async def compact(self, max_bytes: int) -> int:
        """Give free slots back until the memory is within `max_bytes`: the bytes of those beyond it that cannot be,
        because the budget has no room to copy what is between them.

        Rows are computed meanwhile; every step copies one expert.
        """
        async with self._filling:
            await self._compact(max_bytes)
            return await self.compute.run(partial(self._spare_bytes, max_bytes))

    async def forget(self, item: ExpertRange) -> None:
        """Delete what is on disk of a range."""
        await self.threads.run(partial(self._forget, item))

    async def forget_all(self) -> None:
        """Delete everything that is on disk of this model."""
        await self.threads.run(self._forget_all)

    async def aclose(self) -> None:
        """Free the memory, while the device is still there, and give up the lock on the slices. Not cancellable."""
        try:
            with trio.CancelScope(shield=True):
                await self.compute.run(self.bank.close)
        finally:
            self.store.close()

    def _fitting(self) -> tuple[ExpertRange, ...]:
        """The budget is the disk's too."""
        kept: list[ExpertRange] = []
        left_bytes = self.budget_bytes
        for item in self.store.held():
            n_bytes = self.manifest.range_bytes(item)
            if n_bytes <= left_bytes:
                kept.append(item)
                left_bytes -= n_bytes
            else:
                self.store.remove(item)
        self.store.prune(left_bytes)
        return tuple(kept)

    def _forget(self, item: ExpertRange) -> None:
        """Files go as wholes: one that an earlier run wrote may hold more than the range, and goes with the last."""
        for held in self.store.held():
            in_memory = self.bank.holdings.get(held.layer, frozenset())
            if overlapping([held, item]) is not None and in_memory.isdisjoint(held.experts):
                self.store.remove(held)
        self.store.discard(item)

    def _forget_all(self) -> None:
        for held in self.store.held():
            self.store.remove(held)
        self.store.incoming.keep_only(())

    async def _reserve(self, layout: LayerLayout, n_experts: int) -> None:
        try:
            await self.compute.run(partial(self.bank.reserve, layout, n_experts))
        except BudgetError:  # unless free slots of other shapes are in the way
            await self._compact(0)
            await self.compute.run(partial(self.bank.reserve, layout, n_experts))

    async def _compact(self, max_bytes: int) -> None:
        while await self.compute.run(partial(self.bank.compact, max_bytes)):
            pass

    def _spare_bytes(self, max_bytes: int) -> int:
        return max(0, min(self.bank.used_bytes - max_bytes, self.bank.free_bytes))

    async def _add(self, layout: LayerLayout, expert: int) -> None:
        """From disk into the bank; the copy on the way is gone on return."""
        slabs = await self.threads.run(partial(_read_slabs, self.store, layout, expert))
        await self.compute.run(partial(self.bank.add, layout, expert, slabs))

    def _remove(self, layer: int, experts: list[int]) -> None:
        for expert in experts:
            self.bank.remove(layer, expert)


@dataclass(frozen=True)
class ResidenceBuilder:
    """Everything needed to move in: budget, device, folders.

    `others`: other backbones may be met, so a model of which not one expert fits the budget is passed over
    (UnsuitableModelError); otherwise it ends the command (BudgetError), for somebody has to choose another budget.
    """

    budget_bytes: int
    cache_folder: Path
    device: Device
    compute: Runner
    threads: Runner
    config: Config
    report: Report
    others: bool = False

    async def build(self, manifest: Manifest) -> Residence:
        """Room for experts of this model; nothing is in memory yet.

        Raises what is about this machine: BudgetError (more than its memory, or see `others`), StoreError,
        DeviceError; and UnsuitableModelError when the model is none for this machine.
        """
        self._check_budget(manifest)
        with blaming(manifest):
            await self.compute.run(partial(check_computable, manifest, self.device, self.config))
        store = await self.threads.run(partial(SliceStore, self.cache_folder, manifest))
        try:
            with blaming(manifest):
                bank = await self.compute.run(partial(self._make_bank, manifest))
        except BaseException:
            store.close()
            raise
        server = ExpertServer(
            manifest.model_id,
            manifest.n_embd,
            manifest.n_expert,
            bank,
            self.compute,
            self.config.serve,
            widest_batch(manifest, self.config) if self.device.is_host else bank.max_rows,
        )
        tester = BankTester(bank, self.config.compute.self_test_widths)
        return Residence(manifest, store, bank, server, self.budget_bytes, self.compute, self.threads, tester)

    def _check_budget(self, manifest: Manifest) -> None:
        memory_bytes = self.device.info.memory_total_bytes
        if 0 < memory_bytes < self.budget_bytes:
            raise BudgetError(
                f"the budget is {self.budget_bytes / 1e6:.1f} MB, "
                f"{self.device.info.name} has {memory_bytes / 1e6:.1f} MB; "
                "give a smaller --budget"
            )
        smallest = manifest.least_expert_bytes
        if self.budget_bytes < smallest:
            raise self._too_small(
                f"one expert of {title(manifest)} takes {smallest / 1e6:.2f} MB, the budget is "
                f"{self.budget_bytes / 1e6:.2f} MB; "
                "give a larger --budget"
            )

    def _too_small(self, reason: str) -> BudgetError | UnsuitableModelError:
        return UnsuitableModelError(reason) if self.others else BudgetError(reason)

    def _make_bank(self, manifest: Manifest) -> ExpertBank:
        compute = self.config.compute
        return ExpertBank(
            self.device,
            budget_bytes=self.budget_bytes,
            max_rows=widest_graph(manifest, self.device, self.config),
            config=replace(compute, graph_cache_bytes=compute.worker_graph_cache_bytes),
        )


def _read_slabs(store: SliceStore, layout: LayerLayout, expert: int) -> dict[str, bytes]:
    return {kind: store.read_slab(layout.layer, expert, kind) for kind in layout.kinds}
