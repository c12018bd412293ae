"""A worker's part in the market: decides from gossip which experts to hold, fetches, tests, gives up.

The decisions are gossip.volunteering's; here they are carried out. Whatever changes is told through `on_change`: first
what is claimed, then what is served, and what is given up is told before its memory is freed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from functools import partial

import trio

from swarmnode.config import Config
from swarmnode.errors import BudgetError, LocalError, RemoteError, StoreError, UnsuitableModelError
from swarmnode.gossip.coverage import Coverage, MarketView
from swarmnode.gossip.decisions import Drop, Fetch
from swarmnode.gossip.records import DEMAND, ModelHoldings, NodeRecord
from swarmnode.gossip.shape import MarketShape
from swarmnode.gossip.sites import site_of
from swarmnode.gossip.table import Change
from swarmnode.gossip.volunteering import Volunteer
from swarmnode.gossip.votes import DemandVotes
from swarmnode.identity import NodeId
from swarmnode.services.fetch import SliceFetcher, Sources
from swarmnode.services.gossip import GossipService
from swarmnode.services.reports import Fetched, JoinEvent, Planned, Settled, Tested
from swarmnode.services.residence import Residence
from swarmnode.weights.slices import ExpertRange, holdings_of, merge_pairs, overlapping
from swarmnode.wire.constants import MAX_PAIRS

log = logging.getLogger(__name__)


class Market:
    """One worker, one model. `run` until cancelled or until something fails that is not a peer's fault."""

    def __init__(
        self,
        node_id: NodeId,
        residence: Residence,
        gossip: GossipService,
        lost: Callable[[], frozenset[NodeId]],
        sources: Sources,
        config: Config,
        epoch: int,
        report: Callable[[JoinEvent], None],
    ) -> None:
        """`epoch`: the record's incarnation. `lost`: who is gone though its record stands. `sources`: who may hold a
        range now."""
        self._node_id = node_id
        self._residence = residence
        self._gossip = gossip
        self._lost = lost
        self._suspects: set[NodeId] = set()
        self._config = config
        self._report = report
        self._model = residence.manifest.model_id
        self._shape = MarketShape.of(residence.manifest)
        self._volunteer = Volunteer(node_id.raw, self._shape, residence.budget_bytes, config.market, epoch)
        self._fetched_bytes = 0
        self._due_bytes = 0
        self._fetcher = SliceFetcher(
            sources, residence.manifest, residence.store, residence.threads, config.store, self._arrived
        )
        own = gossip.table.get(node_id)
        site = "nowhere" if own is None else site_of(own.state.addresses, own.state.relays)
        self._coverage = Coverage(self._model, self._shape, node_id, config.market, site)
        self._view = MarketView(self._coverage)
        self._votes = DemandVotes(gossip.table, self._model, self._shape, config.market, node_id.raw)
        self._demand_changed = False
        self._moved = trio.Event()
        """Set when a download has ended or room was made: the next decision may come earlier."""
        self._room_lock = trio.Lock()
        self._n_tested = 0
        self._was_settled = False
        self._rests_until_s = -math.inf
        """Nothing more is decided before this: our own disk or memory refused, and would refuse other ranges, too."""
        self._limit_bytes = residence.budget_bytes
        self._room_bytes: int | None = None
        """What experts may take while free slots between them cannot be given back, and memory is over the limit."""
        self._is_compacting = False
        self._is_paused = False
        self.on_change: Callable[[], None] = lambda: None
        """Told when `holdings` or `serving` are others than before."""
        self._unsubscribe = gossip.subscribe(self._heard)

    @property
    def serving(self) -> tuple[ExpertRange, ...]:
        """What is served, in the fewest ranges."""
        return self._volunteer.serving

    @property
    def offered(self) -> tuple[ExpertRange, ...]:
        """What others may ask rows of: what is served, or nothing while paused."""
        return () if self._is_paused else self._volunteer.serving

    @property
    def fetched_bytes(self) -> int:
        """Downloaded since the start."""
        return self._fetched_bytes

    @property
    def budget_bytes(self) -> int:
        """What may be held now."""
        return self._limit_bytes

    def limit(self, budget_bytes: int) -> None:
        """Take at most so much memory from now on; what is given up is told before its memory is freed."""
        if budget_bytes != self._limit_bytes:
            self._limit_bytes = budget_bytes
            self._moved.set()

    def pause(self, is_paused: bool) -> None:
        """While paused nothing is offered or taken; what is held stays in memory, and downloads that run end."""
        if is_paused != self._is_paused:
            self._is_paused = is_paused
            self._volunteer.withdraw_claims()
            self._moved.set()
            self.on_change()

    @property
    def is_settled(self) -> bool:
        """Nothing is on its way, and nothing more fits, or there is no more."""
        n_serving = sum(item.count for item in self._volunteer.serving)
        return not self._volunteer.is_filling and (self._volunteer.full or n_serving == self._shape.n_total)

    @property
    def holdings(self) -> ModelHoldings:
        """For our record."""
        return ModelHoldings(
            model=self._model,
            n_layer=self._shape.n_layer,
            n_expert=self._shape.n_expert,
            serving=self.offered,
            fetching=() if self._is_paused else self._volunteer.fetching,
            max_rows=0 if self._is_paused else min(self._residence.max_rows, MAX_PAIRS),
            seeds=False,
        )

    async def run(self) -> None:
        """Take up what is on disk, then volunteer.

        Raises LocalError (this machine cannot serve: DeviceError; StoreError or BudgetError while nothing is served
        yet) or UnsuitableModelError (the weights come out wrong here).
        """
        try:
            async with trio.open_nursery() as nursery:
                await self._take_up(nursery)
                await trio.sleep(self._config.market.first_news_s)
                while True:
                    self._moved = trio.Event()
                    self._decide(nursery)
                    self._say_if_settled()
                    with trio.move_on_at(self._wake_s()):
                        await self._moved.wait()
        finally:
            self._unsubscribe()

    def _wake_s(self) -> float:
        if self._is_paused:
            return math.inf  # until something moves
        return max(self._volunteer.next_s, self._rests_until_s, trio.current_time() + 0.01)

    # -- news

    def _heard(self, change: Change) -> None:
        now_s = trio.current_time()
        if self._gossip.table.demand(change.node_id) is not None:
            self._demand_changed = True  # its site may be another
        if change.kind == DEMAND:
            self._demand_changed = True
        elif isinstance(change.record, NodeRecord):
            if change.node_id == self._node_id:
                self._volunteer.published(now_s)
                self._moved.set()  # claims settle from now on
                self._coverage.move_to(site_of(change.record.state.addresses, change.record.state.relays))
            self._coverage.update(change.node_id, change.record.state, now_s, change.record.ttl_s)
        else:
            self._coverage.remove(change.node_id)

    def _count_demand(self) -> None:
        """Backbones said something; it may be the same as before, or about another model."""
        self._demand_changed = False
        if self._votes.renew():
            self._view.set_demand(self._votes.demand)

    # -- decisions, carried out

    async def _take_up(self, nursery: trio.Nursery) -> None:
        """What an earlier run left: whole ranges are loaded, half fetched ones fetched to their end."""
        kept = await self._residence.kept()
        for item in self._volunteer.adopt(kept, trio.current_time()):
            if await self._settle(item, self._residence.load(item)):
                self.on_change()
        incoming = self._residence.store.incoming
        begun = await self._residence.threads.run(incoming.ranges)
        pieces = [piece for item in begun for piece in item.pieces(self._config.market.run_experts)]
        free = [piece for piece in pieces if overlapping([piece, *self._volunteer.serving]) is None]
        resumed = self._volunteer.adopt(free, trio.current_time())
        await self._residence.threads.run(partial(incoming.keep_only, resumed))
        for item in resumed:
            nursery.start_soon(self._fetch, item)
        if kept or resumed:
            self._planned(len(resumed))
            self.on_change()

    def _decide(self, nursery: trio.Nursery) -> None:
        now_s = trio.current_time()
        if self._demand_changed:
            self._count_demand()
        self._suspect()
        self._coverage.advance(now_s)
        decisions = self._volunteer.limit(self._view, self._allowed_bytes(nursery))
        if not self._is_paused and now_s >= self._rests_until_s:
            decisions += self._volunteer.decide(self._view, now_s)
        if not decisions:
            return
        log.debug("decided: %s", decisions)
        self.on_change()
        own = self._gossip.table.get(self._node_id)
        if own is not None and self.holdings in own.state.models:
            self._volunteer.published(now_s)  # what is withdrawn and claimed again makes no new record
        for decision in decisions:
            if isinstance(decision, Drop):
                nursery.start_soon(self._drop, decision.item)
            elif isinstance(decision, Fetch):
                nursery.start_soon(self._fetch, decision.item)
        self._planned(sum(isinstance(decision, Fetch) for decision in decisions))

    def _allowed_bytes(self, nursery: trio.Nursery) -> int:
        """What experts may take. Where memory is over the limit, for the slots of those that went are free, but there
        still, it is compacted; and if that is not possible, more of them go.
        """
        if self._residence.bank.used_bytes <= self._limit_bytes:
            self._room_bytes = None
        elif not self._is_compacting:
            self._is_compacting = True
            nursery.start_soon(self._compact)
        return self._limit_bytes if self._room_bytes is None else min(self._limit_bytes, self._room_bytes)

    async def _compact(self) -> None:
        limit_bytes = self._limit_bytes
        spare_bytes = await self._residence.compact(limit_bytes)
        self._is_compacting = False
        held_bytes = self._shape.range_bytes(self._volunteer.serving)
        if (
            spare_bytes and held_bytes == self._volunteer.occupied_bytes
        ):  # else it is looked at again when that ends
            self._room_bytes = max(0, held_bytes - spare_bytes)
            self._moved.set()
        elif self._residence.bank.used_bytes <= self._limit_bytes or limit_bytes != self._limit_bytes:
            self._moved.set()

    def _suspect(self) -> None:
        """Who gave wrong bytes says wrong things of what it holds, too; and who is gone says nothing any more, long
        before its record ends.
        """
        liars = {node for node, standing in self._fetcher.standings.items() if standing.n_wrong > 0}
        suspects = liars | self._lost()
        for node_id in self._suspects ^ suspects:
            self._coverage.suspect(node_id, node_id in suspects)
        self._suspects = suspects

    async def _fetch(self, item: ExpertRange) -> None:
        self._due_bytes += self._shape.range_bytes([item])

        async def fetch_and_load() -> None:
            loaded: list[ExpertRange] = []
            try:
                await self._make_room()
                for piece in item.pieces(self._config.store.commit_experts):
                    await self._fetcher.fetch(piece)
                    await self._residence.load(piece)
                    loaded.append(piece)
            except (LocalError, RemoteError):  # when cancelled, it stays on disk for the next start
                for piece in loaded:
                    await self._residence.unload(piece)
                raise

        if await self._settle(item, fetch_and_load()):
            self.on_change()

    async def _make_room(self) -> None:
        """What failed downloads left on disk stays while the budget has room for it beside all that is held."""
        incoming, threads = self._residence.store.incoming, self._residence.threads
        async with self._room_lock:
            due = holdings_of(self._volunteer.loading)
            left_bytes = self._volunteer.budget_bytes - self._volunteer.occupied_bytes
            kept = [(layer, expert) for layer, experts in due.items() for expert in experts]
            for found in await threads.run(incoming.ranges):
                for expert in found.experts:
                    expert_bytes = self._shape.expert_bytes[found.layer]
                    if expert not in due.get(found.layer, ()) and expert_bytes <= left_bytes:
                        left_bytes -= expert_bytes
                        kept.append((found.layer, expert))
            await threads.run(partial(incoming.keep_only, merge_pairs(kept)))

    async def _drop(self, item: ExpertRange) -> None:
        """The word is out already; those who ask all the same have `withdraw_s` to hear of it."""
        await trio.sleep(self._config.market.withdraw_s)
        await self._residence.unload(item)
        self._volunteer.freed(item)
        self._moved.set()

    async def _settle(self, item: ExpertRange, work: Awaitable[None]) -> bool:
        """Await `work`, which brings a range into memory; whether it is served then."""
        try:
            await work
        except (UnsuitableModelError, LocalError) as error:
            if not isinstance(error, StoreError | BudgetError) or not self._volunteer.serving:
                raise
            self._rests_until_s = trio.current_time() + self._config.market.retry_s
            self._failed(item, str(error))
            return False
        except RemoteError as error:
            self._failed(item, str(error))
            return False
        self._volunteer.served(item)
        self._moved.set()
        self._say_if_settled()
        n_tested = len(self._residence.self_test.results)
        if n_tested != self._n_tested:
            self._n_tested = n_tested
            self._report(Tested(self._residence.self_test))
        return True

    def _failed(self, item: ExpertRange, reason: str) -> None:
        log.warning("%s is not served: %s", item, reason)
        self._volunteer.failed(item, trio.current_time())
        self._moved.set()
        self.on_change()

    # -- what people see

    def _planned(self, n_fetches: int) -> None:
        if n_fetches:
            serving, loading = self._volunteer.serving, self._volunteer.loading
            self._report(
                Planned(
                    self._residence.title,
                    sum(item.count for item in serving),
                    sum(item.count for item in loading),
                    self._shape.range_bytes([*serving, *loading]),
                    self._shape.range_bytes(loading),
                )
            )

    def _say_if_settled(self) -> None:
        was_settled, self._was_settled = self._was_settled, self.is_settled
        if self._was_settled and not was_settled:
            residence = self._residence
            self._report(
                Settled(
                    residence.title,
                    residence.n_experts,
                    residence.held_bytes,
                    self._limit_bytes,
                    residence.manifest.least_expert_bytes,
                )
            )

    def _arrived(self, n_bytes: int) -> None:
        self._fetched_bytes += n_bytes
        self._report(Fetched(self._fetched_bytes, max(self._due_bytes, self._fetched_bytes)))
