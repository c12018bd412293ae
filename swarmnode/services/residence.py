"""The experts one worker holds: on disk, in memory, tested. Survives the connections it is announced on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from swarmnode.compute.bank import ExpertBank
from swarmnode.compute.devices import Device
from swarmnode.compute.layout import ExpertTensor, LayerLayout
from swarmnode.compute.self_test import SelfTestReport, apply_report, check_expert
from swarmnode.config import Config
from swarmnode.errors import BadReplyError, BudgetError
from swarmnode.net.peer import Peer
from swarmnode.services.expert_server import ExpertServer
from swarmnode.services.fetch import SliceFetcher
from swarmnode.services.reports import Fetched, JoinEvent, Planned, Tested
from swarmnode.services.runners import Runner
from swarmnode.weights.manifest import Manifest
from swarmnode.weights.slices import ExpertRange, holdings_of, ranges_of
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

    @property
    def max_rows(self) -> int:
        """The widest batch that passed the self-test."""
        return self.bank.max_rows

    @property
    def ranges(self) -> tuple[ExpertRange, ...]:
        """What is held, as announced."""
        return ranges_of(self.bank.holdings)

    def close(self) -> None:
        """Give up the lock on the slices and the memory."""
        self.store.close()


@dataclass(frozen=True)
class ResidenceBuilder:
    """Everything needed to move in: budget, device, folders."""

    budget_bytes: int
    cache_folder: Path
    device: Device
    compute: Runner
    threads: Runner
    config: Config
    report: Report

    async def build(self, peer: Peer, manifest: Manifest) -> Residence:
        """Ask `peer` what is scarce, fetch it, load it, test it.

        Raises BudgetError when not one expert fits, StoreError, DeviceError when the self-test fails, and RemoteError
        when the peer fails; what was fetched stays on disk for the next try.
        """
        memory_bytes = self.device.info.memory_total_bytes
        if 0 < memory_bytes < self.budget_bytes:
            raise BudgetError(
                f"the budget is {self.budget_bytes} bytes, {self.device.info.name} has {memory_bytes}; "
                "give a smaller --budget"
            )
        smallest = min(layer.layout.expert_bytes for layer in manifest.layers.values())
        if self.budget_bytes < smallest:
            raise BudgetError(
                f"one expert of {manifest.name} takes {smallest} bytes, the budget is {self.budget_bytes}; "
                "give a larger --budget"
            )
        store = await self.threads.run(partial(SliceStore, self.cache_folder, manifest))
        try:
            return await self._move_in(peer, manifest, store)
        except BaseException:
            store.close()
            raise

    async def _move_in(self, peer: Peer, manifest: Manifest, store: SliceStore) -> Residence:
        kept = await self.threads.run(partial(self._fitting, manifest, store))
        offered = await self._volunteer(peer, manifest, kept)
        fetch_bytes = _bytes_of(manifest, offered)
        total_bytes = fetch_bytes + _bytes_of(manifest, kept)
        self.report(
            Planned(
                manifest.name,
                sum(item.count for item in kept),
                sum(item.count for item in offered),
                total_bytes,
                fetch_bytes,
            )
        )
        done_bytes = 0

        def arrived(n_bytes: int) -> None:
            nonlocal done_bytes
            done_bytes += n_bytes
            self.report(Fetched(done_bytes, fetch_bytes))

        fetcher = SliceFetcher(peer, manifest, store, self.threads, self.config.store, arrived)
        bank = await self.compute.run(partial(self._make_bank, manifest, [*kept, *offered]))
        tester = BankTester(bank, self.config.compute.self_test_widths)
        for item in kept:
            await self._load(manifest, store, tester, item)
        for item in offered:
            await fetcher.fetch(item)
            await self._load(manifest, store, tester, item)
        report = tester.report
        self.report(Tested(report))
        server = ExpertServer(
            manifest.model_id, manifest.n_embd, manifest.n_expert, bank, self.compute, self.config.serve
        )
        return Residence(manifest, store, bank, server, report)

    def _make_bank(self, manifest: Manifest, ranges: Sequence[ExpertRange]) -> ExpertBank:
        """An empty bank with one block of memory for all experts of a shape, so that one graph serves them all."""
        bank = ExpertBank(self.device, budget_bytes=self.budget_bytes, config=self.config.compute)
        counts: dict[tuple[ExpertTensor, ...], tuple[LayerLayout, int]] = {}
        for item in ranges:
            layout = manifest.layers[item.layer].layout
            count = counts.get(layout.tensors, (layout, 0))[1]
            counts[layout.tensors] = (layout, count + item.count)
        for layout, count in counts.values():
            bank.reserve(layout, count)
        return bank

    async def _volunteer(
        self, peer: Peer, manifest: Manifest, kept: Sequence[ExpertRange]
    ) -> list[ExpertRange]:
        """The ranges the peer offers, checked: in the model, not held yet, within the budget."""
        held = tuple((item.layer, item.first, item.count) for item in kept)
        message = messages.Volunteer(model=manifest.model_id, budget_bytes=self.budget_bytes, held=held)
        reply, _ = await peer.request(message)
        if not isinstance(reply, messages.Ranges) or reply.model != manifest.model_id:
            raise BadReplyError(f"asked for ranges of {manifest.name}, got {reply}")
        offered = [ExpertRange(*item) for item in reply.ranges]
        for item in offered:
            if item.layer not in manifest.layers or item.first + item.count > manifest.n_expert:
                raise BadReplyError(f"was offered {item}, which is not in {manifest.name}")
        taken = holdings_of(kept)
        if any(expert in taken.get(item.layer, ()) for item in offered for expert in item.experts):
            raise BadReplyError("was offered experts that are held already")
        if _bytes_of(manifest, [*kept, *offered]) > self.budget_bytes:
            raise BadReplyError("was offered more than the budget")
        if not kept and not offered:
            raise BadReplyError("was offered nothing")
        return offered

    def _fitting(self, manifest: Manifest, store: SliceStore) -> list[ExpertRange]:
        """The ranges on disk that fit the budget, in order; others are deleted, for the budget is the disk's too."""
        kept: list[ExpertRange] = []
        left_bytes = self.budget_bytes
        for item in store.held():
            n_bytes = _bytes_of(manifest, [item])
            if n_bytes <= left_bytes:
                kept.append(item)
                left_bytes -= n_bytes
            else:
                store.remove(item)
        return kept

    async def _load(
        self, manifest: Manifest, store: SliceStore, tester: BankTester, item: ExpertRange
    ) -> None:
        layout = manifest.layers[item.layer].layout
        for expert in item.experts:
            slabs = await self.threads.run(partial(_read_slabs, store, layout, expert))
            await self.compute.run(partial(tester.bank.add, layout, expert, slabs))
            await self.compute.run(partial(tester.loaded, item.layer, expert))


class BankTester:
    """Tests the first expert of every combination of tensor types as soon as it is loaded.

    So a device that computes wrong is found before the rest is downloaded, and the test's work memory (50 MB at the
    real sizes) is not needed on top of a full budget.
    """

    def __init__(self, bank: ExpertBank, widths: Sequence[int]) -> None:
        self.bank = bank
        self._widths = widths
        self._tested: dict[tuple[int, ...], SelfTestReport] = {}

    @property
    def report(self) -> SelfTestReport:
        """All results so far."""
        results = tuple(result for report in self._tested.values() for result in report.results)
        return SelfTestReport(self.bank.device.info.name, results)

    def loaded(self, layer: int, expert: int) -> None:
        """Test this expert if none of its types was, and cut the bank's batches to what is good.

        DeviceError when not even single rows come out right. Runs on the compute thread.
        """
        types = tuple(tensor.ggml_type for tensor in self.bank.layout(layer).tensors)
        if types not in self._tested:
            self._tested[types] = check_expert(self.bank, layer, expert, self._widths)
            apply_report(self.bank, self._tested[types])


def _read_slabs(store: SliceStore, layout: LayerLayout, expert: int) -> dict[str, bytes]:
    return {kind: store.read_slab(layout.layer, expert, kind) for kind in layout.kinds}


def _bytes_of(manifest: Manifest, ranges: Sequence[ExpertRange]) -> int:
    return sum(manifest.layers[item.layer].layout.expert_bytes * item.count for item in ranges)
