"""The experts one worker holds: on disk, in memory, tested. Survives the connections it is announced on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import trio

from swarmnode.compute.bank import ExpertBank
from swarmnode.compute.devices import Device
from swarmnode.compute.layout import ExpertTensor, LayerLayout
from swarmnode.compute.self_test import SelfTestReport
from swarmnode.config import Config
from swarmnode.errors import BadReplyError, BudgetError, UnsuitableModelError
from swarmnode.net.peer import Peer
from swarmnode.services.announcing import MAX_CAPACITY_BYTES, announceable, as_fields
from swarmnode.services.ask import ask
from swarmnode.services.bank_tester import (
    BankTester,
    blaming,
    check_computable,
    title,
    widest_batch,
    widest_graph,
)
from swarmnode.services.expert_server import ExpertServer
from swarmnode.services.fetch import SliceFetcher
from swarmnode.services.reports import Fetched, JoinEvent, Planned, Tested
from swarmnode.services.runners import Runner
from swarmnode.weights.manifest import Manifest
from swarmnode.weights.slices import ExpertRange, overlapping, ranges_of
from swarmnode.weights.store import SliceStore
from swarmnode.wire import messages

log = logging.getLogger(__name__)

Report = Callable[[JoinEvent], None]


@dataclass
class Residence:
    """One model's experts within a byte budget. Made once per worker, by the first backbone that answers."""

    manifest: Manifest
    store: SliceStore
    bank: ExpertBank
    server: ExpertServer
    self_test: SelfTestReport
    compute: Runner

    @property
    def title(self) -> str:
        """The model's name, for people."""
        return title(self.manifest)

    @property
    def max_rows(self) -> int:
        """Most (row, expert) pairs in one request; graphs are no wider than what passed the self-test."""
        return self.server.max_pairs

    @property
    def ranges(self) -> tuple[ExpertRange, ...]:
        """What is held."""
        return ranges_of(self.bank.holdings)

    async def aclose(self) -> None:
        """Free the memory, while the device is still there, and give up the lock on the slices. Not cancellable."""
        try:
            await _close_bank(self.bank, self.compute)
        finally:
            self.store.close()


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

    async def build(self, peer: Peer, manifest: Manifest) -> Residence:
        """Ask `peer` what is scarce, fetch it, load it, test it.

        Raises what is about this machine: BudgetError (more than its memory, or see `others`), StoreError,
        DeviceError; and RemoteError when the peer fails, UnsuitableModelError when its model is none for this machine.
        What was fetched stays on disk for the next try, unless it failed the self-test.
        """
        self._check_budget(manifest)
        with blaming(manifest):
            await self.compute.run(partial(check_computable, manifest, self.device, self.config))
        store = await self.threads.run(partial(SliceStore, self.cache_folder, manifest))
        try:
            with blaming(manifest):
                return await self._move_in(peer, manifest, store)
        except BaseException:
            store.close()
            raise

    def _check_budget(self, manifest: Manifest) -> None:
        memory_bytes = self.device.info.memory_total_bytes
        if 0 < memory_bytes < self.budget_bytes:
            raise BudgetError(
                f"the budget is {self.budget_bytes / 1e6:.1f} MB, "
                f"{self.device.info.name} has {memory_bytes / 1e6:.1f} MB; "
                "give a smaller --budget"
            )
        smallest = min(layer.layout.expert_bytes for layer in manifest.layers.values())
        if self.budget_bytes < smallest:
            raise self._too_small(
                f"one expert of {title(manifest)} takes {smallest / 1e6:.2f} MB, the budget is "
                f"{self.budget_bytes / 1e6:.2f} MB; "
                "give a larger --budget"
            )

    def _too_small(self, reason: str) -> BudgetError | UnsuitableModelError:
        return UnsuitableModelError(reason) if self.others else BudgetError(reason)

    async def _move_in(self, peer: Peer, manifest: Manifest, store: SliceStore) -> Residence:
        kept = await self.threads.run(partial(self._fitting, manifest, store))
        offered = await self._volunteer(peer, manifest, kept)
        fetch_bytes = _bytes_of(manifest, offered)
        total_bytes = fetch_bytes + _bytes_of(manifest, kept)
        await self.threads.run(partial(store.prune, self.budget_bytes - total_bytes))
        self.report(
            Planned(
                title(manifest),
                sum(item.count for item in kept),
                sum(item.count for item in offered),
                total_bytes,
                fetch_bytes,
            )
        )
        bank = await self.compute.run(partial(self._make_bank, manifest, [*kept, *offered]))
        try:
            report = await self._fill(bank, peer, manifest, store, kept, offered)
        except BaseException:
            await _close_bank(bank, self.compute)
            raise
        self.report(Tested(report))
        server = ExpertServer(
            manifest.model_id,
            manifest.n_embd,
            manifest.n_expert,
            bank,
            self.compute,
            self.config.serve,
            widest_batch(manifest, self.config) if self.device.is_host else bank.max_rows,
        )
        return Residence(manifest, store, bank, server, report, self.compute)

    async def _fill(
        self,
        bank: ExpertBank,
        peer: Peer,
        manifest: Manifest,
        store: SliceStore,
        kept: Sequence[ExpertRange],
        offered: Sequence[ExpertRange],
    ) -> SelfTestReport:
        """Load what is on disk, fetch and load the rest; every kind of expert is tested as it comes."""
        fetch_bytes = _bytes_of(manifest, offered)
        done_bytes = 0

        def arrived(n_bytes: int) -> None:
            nonlocal done_bytes
            done_bytes += n_bytes
            self.report(Fetched(done_bytes, fetch_bytes))

        fetcher = SliceFetcher(peer, manifest, store, self.threads, self.config.store, arrived)
        tester = BankTester(bank, self.config.compute.self_test_widths)
        for item in kept:
            await self._load(manifest, store, tester, item)
        for whole in offered:
            for item in whole.pieces(self.config.store.commit_experts):
                await fetcher.fetch(item)
                await self._load(manifest, store, tester, item)
        return tester.report

    def _make_bank(self, manifest: Manifest, ranges: Sequence[ExpertRange]) -> ExpertBank:
        """An empty bank with one block of memory for all experts of a shape, so that one graph serves them all."""
        compute = self.config.compute
        bank = ExpertBank(
            self.device,
            budget_bytes=self.budget_bytes,
            max_rows=widest_graph(manifest, self.device, self.config),
            config=replace(compute, graph_cache_bytes=compute.worker_graph_cache_bytes),
        )
        counts: dict[tuple[ExpertTensor, ...], tuple[LayerLayout, int]] = {}
        for item in ranges:
            layout = manifest.layers[item.layer].layout
            count = counts.get(layout.tensors, (layout, 0))[1]
            counts[layout.tensors] = (layout, count + item.count)
        try:
            for layout, count in counts.values():
                bank.reserve(layout, count)
        except BudgetError as error:  # the device needs more than the experts' bytes
            bank.close()
            raise self._too_small(f"{title(manifest)}: {error}; give another --budget") from error
        except BaseException:
            bank.close()
            raise
        return bank

    async def _volunteer(
        self, peer: Peer, manifest: Manifest, kept: Sequence[ExpertRange]
    ) -> tuple[ExpertRange, ...]:
        """The ranges the peer offers, checked: in the model, not held yet, none twice, within the budget."""
        message = messages.Volunteer(
            model=manifest.model_id,
            budget_bytes=min(self.budget_bytes, MAX_CAPACITY_BYTES),
            held=as_fields(announceable(kept)),
        )
        reply, _ = await ask(peer, message, messages.Ranges, self.config.store.request_timeout_s)
        if reply.model != manifest.model_id:
            raise BadReplyError("asked for ranges of one model, was offered those of another")
        offered = tuple(ExpertRange(*item) for item in reply.ranges)
        outside = next((item for item in offered if not manifest.holds(item)), None)
        if outside is not None:
            raise BadReplyError(f"was offered {outside}, which the model does not have")
        twice = overlapping([*kept, *offered])
        if twice is not None:
            raise BadReplyError(f"was offered {twice}, of which something is held or offered already")
        if _bytes_of(manifest, [*kept, *offered]) > self.budget_bytes:
            raise BadReplyError("was offered more than the budget")
        if not kept and not offered:
            raise BadReplyError("was offered nothing")
        return offered

    def _fitting(self, manifest: Manifest, store: SliceStore) -> list[ExpertRange]:
        """The ranges on disk that fit the budget and an announcement, in order.

        Others are deleted: the budget is the disk's too, and what is not announced is of no use.
        """
        kept: list[ExpertRange] = []
        left_bytes = self.budget_bytes
        announced = announceable(store.held())
        for item in store.held():
            n_bytes = _bytes_of(manifest, [item])
            if n_bytes <= left_bytes and any(_within(item, outer) for outer in announced):
                kept.append(item)
                left_bytes -= n_bytes
            else:
                store.remove(item)
        return kept

    async def _load(
        self, manifest: Manifest, store: SliceStore, tester: BankTester, item: ExpertRange
    ) -> None:
        """Into memory, and through the self-test. What the model is to blame for does not stay on disk either."""
        layout = manifest.layers[item.layer].layout
        try:
            with blaming(manifest):
                for expert in item.experts:
                    await self._add(store, tester.bank, layout, expert)
                    await self.compute.run(partial(tester.loaded, item.layer, expert))
        except UnsuitableModelError:
            await self.threads.run(partial(store.remove, item))
            raise

    async def _add(self, store: SliceStore, bank: ExpertBank, layout: LayerLayout, expert: int) -> None:
        """From disk into the bank; the copy on the way is gone on return."""
        slabs = await self.threads.run(partial(_read_slabs, store, layout, expert))
        await self.compute.run(partial(bank.add, layout, expert, slabs))


async def _close_bank(bank: ExpertBank, compute: Runner) -> None:
    with trio.CancelScope(shield=True):
        await compute.run(bank.close)


def _read_slabs(store: SliceStore, layout: LayerLayout, expert: int) -> dict[str, bytes]:
    return {kind: store.read_slab(layout.layer, expert, kind) for kind in layout.kinds}


def _within(item: ExpertRange, outer: ExpertRange) -> bool:
    return item.layer == outer.layer and outer.first <= item.first and item.stop <= outer.stop


def _bytes_of(manifest: Manifest, ranges: Sequence[ExpertRange]) -> int:
    return sum(manifest.range_bytes(item) for item in ranges)
