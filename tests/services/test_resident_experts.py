"""The resident set: what a prompt chose is read before it counts, and a mapped file's pages may go and come back."""

from __future__ import annotations

import mmap
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import trio
import trio.testing

from swarmnode.config import DispatchConfig
from swarmnode.schedule.residents import Residents
from swarmnode.services.resident_experts import MappedPages, ResidentExperts
from swarmnode.services.runners import Inline
from swarmnode.weights.index import ModelIndex

ALL = [(layer, expert) for layer in range(2) for expert in range(8)]


class Book:
    """Pages that only note what was asked for, and what counted then."""

    def __init__(self, residents: Residents) -> None:
        self.residents = residents
        self.brought: list[tuple[tuple[int, int], ...]] = []
        self.dropped: list[tuple[tuple[int, int], ...]] = []

    def bring(self, experts: Sequence[tuple[int, int]]) -> None:
        assert not any(self.residents.masks[layer][expert] for layer, expert in experts), "not in memory yet"
        self.brought.append(tuple(experts))

    def drop(self, experts: Sequence[tuple[int, int]]) -> None:
        assert not any(self.residents.masks[layer][expert] for layer, expert in experts), "not any more"
        self.dropped.append(tuple(experts))


def chosen(*experts: int) -> list[tuple[int, np.ndarray[tuple[int, int], np.dtype[np.int32]]]]:
    return [(0, np.array([experts], np.int32))]


@asynccontextmanager
async def running(keeper: ResidentExperts) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        await nursery.start(keeper.run)
        yield
        nursery.cancel_scope.cancel()


async def test_a_prompt_places_anew_and_answers_only_now_and_then() -> None:
    residents = Residents({0: 10, 1: 10}, 8, 20)
    book = Book(residents)
    config = DispatchConfig(replace_passes=3)
    keeper = ResidentExperts(residents, book, Inline(), config)
    async with running(keeper):
        for _ in range(2):
            keeper.count(chosen(1, 2), [], ends_prompt=False)
        await trio.testing.wait_all_tasks_blocked()
        assert not book.brought
        keeper.count(chosen(1, 2), [], ends_prompt=True)
        await trio.testing.wait_all_tasks_blocked()
        assert book.brought == [((0, 1), (0, 2))]
        assert residents.n_cold(0, np.array([1, 2, 3], np.int32)) == 1
        for _ in range(3):
            keeper.count(chosen(5, 5, 5, 6, 6, 6), [], ends_prompt=False)
        await trio.testing.wait_all_tasks_blocked()
        assert book.brought[1:] == [((0, 5), (0, 6))]
        assert book.dropped == [((0, 1), (0, 2))]


async def test_without_a_budget_there_is_nothing_to_bring() -> None:
    residents = Residents({0: 10, 1: 10}, 8, None)
    book = Book(residents)
    keeper = ResidentExperts(residents, book, Inline(), DispatchConfig())
    async with running(keeper):
        keeper.count(chosen(1, 2, 3), chosen(1, 2), ends_prompt=True)
        await trio.testing.wait_all_tasks_blocked()
        assert not book.brought
        assert residents.n_cold(0, np.array([1, 2, 3], np.int32)) == 1, (
            "what others computed is not here for that"
        )


def test_pages_that_went_come_back_the_same(index: ModelIndex) -> None:
    pages = MappedPages(index)
    before = {expert: bytes(index.slab(0, expert, "ffn_up_exps")) for expert in range(8)}
    pages.bring(ALL)
    pages.drop(ALL)
    pages.bring(ALL[:3])
    assert {expert: bytes(index.slab(0, expert, "ffn_up_exps")) for expert in range(8)} == before


def test_advice_keeps_to_whole_pages_of_the_expert(index: ModelIndex) -> None:
    """The last expert ends with the file or before another tensor: no page of others is named."""
    for layer, expert in ALL:
        index.advise(layer, expert, mmap.MADV_WILLNEED)
