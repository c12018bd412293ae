"""A backbone with workers answers exactly as it does alone, whatever happens to the workers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from swarmnode.config import Config, DispatchConfig, Folders
from swarmnode.errors import BudgetError, NotFiniteError, RequestRefusedError, UsageError
from swarmnode.models.base import ExpertCall
from swarmnode.models.sampling import Sampler
from swarmnode.net.peer import Asked, Body, Handler, Peer
from swarmnode.node.backbone import run_backbone
from swarmnode.node.backbone_parts import BackboneOptions
from swarmnode.schedule.dispatch import Share
from swarmnode.services.account import Account, AccountedRows, StepAccount
from swarmnode.services.forward import RemoteLayer
from swarmnode.services.members import Standing
from swarmnode.services.pending_layer import PendingLayer
from swarmnode.services.remote_experts import EXACT, WireForm
from swarmnode.testing.swarm import MeddledHandlers, open_swarm, silent
from swarmnode.testing.tiny_gguf import write_tiny_gguf
from swarmnode.weights.slices import ExpertRange
from swarmnode.wire.messages import Experts, Message, Rows
from tests.plans import plan_layer
from tests.swarm.conftest import ALL_BYTES, EXPERT_BYTES, MODEL

PROMPT = [5, 80, 33, 7, 120, 64, 11, 200]


async def test_exact_form_is_bit_equal_and_remote(tiny_model: Path, tmp_path: Path) -> None:
    async with open_swarm(tiny_model, tmp_path) as swarm:
        alone, _ = await swarm.logits(PROMPT)
        for _ in range(3):
            await swarm.join(ALL_BYTES // 3)
        helped, account = await swarm.logits(PROMPT)
    assert np.array_equal(alone, helped)
    assert account.remote > 0.8 * account.pairs
    assert account.fallback == 0
    assert len(account.workers) == 3


@pytest.mark.parametrize("encoding", ["f32", "f16", "q8"])
async def test_partial_form_is_close(tiny_model: Path, tmp_path: Path, encoding: str) -> None:
    async with open_swarm(tiny_model, tmp_path, form=WireForm("partial", encoding)) as swarm:
        alone, _ = await swarm.logits(PROMPT)
        for _ in range(3):
            await swarm.join(ALL_BYTES // 3)
        helped, account = await swarm.logits(PROMPT)
    cosines = np.sum(alone * helped, 1) / (np.linalg.norm(alone, axis=1) * np.linalg.norm(helped, axis=1))
    assert cosines.min() >= 0.999
    if encoding != "f32":
        assert not np.array_equal(alone, helped), "rounding was expected: was anything remote?"
    assert account.remote > 0.8 * account.pairs


async def test_half_coverage_same_tokens_and_rows_remote(tiny_model: Path, tmp_path: Path) -> None:
    """cases.md 32: a test that passes because nothing was remote is no test."""
    async with open_swarm(tiny_model, tmp_path) as swarm:
        alone, _ = await swarm.generate(PROMPT, 12)
        await swarm.join(ALL_BYTES // 2)
        helped, account = await swarm.generate(PROMPT, 12)
    assert helped == alone
    assert 0 < account.remote < account.pairs


async def test_workers_hold_their_budget_and_do_not_overlap(tiny_model: Path, tmp_path: Path) -> None:
    async with open_swarm(tiny_model, tmp_path) as swarm:
        workers = [await swarm.join(5 * EXPERT_BYTES + 1) for _ in range(4)]
        held = list(swarm.serving().values())
        used = [worker.service.residence for worker in workers]
    assert [len(pairs) for pairs in held] == [5, 5, 5, 5]
    assert len(frozenset().union(*held)) == 20, "four workers took different experts"
    for residence in used:
        assert residence is not None
        assert residence.bank.used_bytes <= 5 * EXPERT_BYTES + 1


async def test_a_smaller_budget_deletes_what_no_longer_fits(tiny_model: Path, tmp_path: Path) -> None:
    async with open_swarm(tiny_model, tmp_path) as swarm:
        worker = await swarm.join(8 * EXPERT_BYTES)
        worker.kill()
        await swarm.until(lambda: not swarm.serving())
        again = await swarm.join(4 * EXPERT_BYTES, name=worker.name, key=worker.key)
        assert len(swarm.serving()[again.key.node_id]) == 4
        stored = sum(path.stat().st_size for path in (tmp_path / worker.name).rglob("*.gguf"))
        assert stored < 5 * EXPERT_BYTES


async def test_a_budget_too_small_for_one_expert_ends_the_worker(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with open_swarm(tiny_model, tmp_path) as swarm:
            await swarm.join(EXPERT_BYTES - 1)
    assert caught.group_contains(BudgetError, match="larger --budget")


async def test_joining_at_once_does_not_overlap(tiny_model: Path, tmp_path: Path) -> None:
    """cases.md 28: what was offered to one is not offered to the next while it downloads."""
    async with open_swarm(tiny_model, tmp_path, latency_s=0.15) as swarm:
        for _ in range(4):
            await swarm.join(4 * EXPERT_BYTES, wait=False)
        await swarm.until(lambda: len(swarm.serving()) == 4)
        held = list(swarm.serving().values())
    assert len(frozenset().union(*held)) == 16


async def test_shares_are_sent_before_the_own_one_is_computed(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever order trio starts tasks in: it is a coin flip for each batch."""
    events: list[str] = []
    begin = Peer.begin
    add_local = PendingLayer.add_local

    def noting_begin(peer: Peer, message: Message, *arguments: Any, **options: Any) -> Asked | None:
        if isinstance(message, Experts):
            events.append("sent")
        return begin(peer, message, *arguments, **options)

    def noting_add_local(pending: PendingLayer, share: Share) -> None:
        events.append("computed")
        add_local(pending, share)

    async with open_swarm(tiny_model, tmp_path) as swarm:
        await swarm.join(ALL_BYTES)
        # Which half the market would give it is chance; of whole layers there is nothing to compute here.
        (worker,) = swarm.backbone.members.workers
        halves = tuple(ExpertRange(layer, 0, 4) for layer in range(4))
        swarm.backbone.members.announce(worker.peer, halves, worker.max_rows, worker.device)
        monkeypatch.setattr(Peer, "begin", noting_begin)
        monkeypatch.setattr(PendingLayer, "add_local", noting_add_local)
        await swarm.generate(PROMPT, 12)
        assert worker.ranges == halves
    assert events.count("computed") > 8
    assert all(events[i - 1] == "sent" for i, event in enumerate(events) if event == "computed")


async def test_a_worker_that_takes_a_pair_at_a_time_is_asked_few_times(
    tiny_model: Path, tmp_path: Path
) -> None:
    config = replace(Config(), dispatch=replace(DispatchConfig(), max_pieces=3))
    async with open_swarm(tiny_model, tmp_path, config=config) as swarm:
        alone, _ = await swarm.logits(PROMPT)
        await swarm.join(ALL_BYTES)
        (worker,) = swarm.backbone.members.workers
        swarm.backbone.members.announce(worker.peer, worker.ranges, 1, worker.device)
        helped, account = await swarm.logits(PROMPT)
    assert np.array_equal(alone, helped)
    assert account.workers[worker.node_id.short].requests == account.remote == 3 * MODEL.n_layer
    assert account.fallback == 0, "the rest was computed here from the start"


@pytest.mark.parametrize("at_token", [1, 2, 9])
async def test_a_killed_worker_changes_nothing(tiny_model: Path, tmp_path: Path, at_token: int) -> None:
    async with open_swarm(tiny_model, tmp_path) as swarm:
        alone, _ = await swarm.generate(PROMPT, 12)
        workers = [await swarm.join(ALL_BYTES // 2) for _ in range(2)]

        def kill(count: int) -> None:
            if count == at_token:
                workers[0].kill()

        helped, account = await swarm.generate(PROMPT, 12, kill)
        assert helped == alone
        assert account.remote > 0
        assert workers[0].key.node_id not in swarm.serving()


async def test_a_worker_that_comes_back_is_used_again(tiny_model: Path, tmp_path: Path) -> None:
    async with open_swarm(tiny_model, tmp_path) as swarm:
        worker = await swarm.join(4 * EXPERT_BYTES)
        first = swarm.serving()[worker.key.node_id]
        worker.kill()
        await swarm.until(lambda: not swarm.serving())
        again = await swarm.join(4 * EXPERT_BYTES, name=worker.name, key=worker.key)
        assert swarm.serving()[again.key.node_id] == first, "it kept its slices"
        _, account = await swarm.generate(PROMPT, 4)
    assert account.remote > 0


async def test_leaving_and_joining_at_once_counts_once(tiny_model: Path, tmp_path: Path) -> None:
    """cases.md 7."""
    async with open_swarm(tiny_model, tmp_path) as swarm:
        worker = await swarm.join(4 * EXPERT_BYTES)
        await worker.service.leave()
        worker.scope.cancel()
        await swarm.join(4 * EXPERT_BYTES, name=worker.name, key=worker.key)
        assert len(swarm.backbone.members.workers) == 1
        assert swarm.backbone.state.as_dict()["experts_covered"] == 4


async def test_a_silent_worker_costs_one_deadline(tiny_model: Path, tmp_path: Path) -> None:
    """cases.md 27: it keeps its connection, answers probes at first, then nothing."""
    deaf = False

    def meddle(handler: Handler) -> Handler:
        return silent if deaf else handler

    async with open_swarm(tiny_model, tmp_path) as swarm:
        alone, _ = await swarm.generate(PROMPT, 12)
        worker = await swarm.join(ALL_BYTES, handlers=MeddledHandlers(Experts, meddle))
        deaf = True
        started_s = trio.current_time()
        helped, account = await swarm.generate(PROMPT, 12)
        spent_s = trio.current_time() - started_s
        assert helped == alone
        longest_s = swarm.config.dispatch.share_deadline_s(2 * len(PROMPT), 3 * len(PROMPT) * 1024)
        assert swarm.config.dispatch.deadline_s <= spent_s <= longest_s
        assert account.workers[worker.key.node_id.short].requests == 1
        (member,) = swarm.backbone.members.workers
        assert member.standing is Standing.SUSPECT

        await trio.sleep(100)
        assert member.standing is Standing.SUSPECT, "an open connection is no answer"
        deaf = False
        await swarm.until(lambda: bool(swarm.serving()))
        helped, account = await swarm.generate(PROMPT, 4)
        assert account.remote == account.pairs


async def test_a_slow_worker_is_dropped_and_its_late_rows_do_no_harm(
    tiny_model: Path, tmp_path: Path
) -> None:
    slow = False

    def meddle(handler: Handler) -> Handler:
        async def late(peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
            if slow:
                await trio.sleep(2)
            return await handler(peer, message, body)

        return late

    async with open_swarm(tiny_model, tmp_path) as swarm:
        alone, _ = await swarm.generate(PROMPT, 12)
        await swarm.join(ALL_BYTES, handlers=MeddledHandlers(Experts, meddle))
        slow = True
        helped, account = await swarm.generate(PROMPT, 12)
    assert helped == alone
    assert account.fallback > 0


@pytest.mark.parametrize("lie", ["nan", "inf", "zero rows", "other width"])
async def test_a_broken_answer_is_replaced_and_the_worker_quarantined(
    tiny_model: Path, tmp_path: Path, lie: str
) -> None:
    lying = False

    def meddle(handler: Handler) -> Handler:
        async def liar(peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
            reply, parts = await handler(peer, message, body)
            assert isinstance(reply, Rows)
            if not lying:
                return reply, parts
            values = np.frombuffer(b"".join(bytes(part) for part in parts), np.float32).copy()
            if lie in ("nan", "inf"):
                values[len(values) // 2] = float(lie)
            elif lie == "zero rows":
                reply = replace(reply, n_rows=reply.n_rows + 1)
                values = np.concatenate([values, values[:256]])
            else:
                values = values[: len(values) // 2]
            return reply, (values.tobytes(),)

        return liar

    async with open_swarm(tiny_model, tmp_path) as swarm:
        alone, _ = await swarm.generate(PROMPT, 8)
        await swarm.join(ALL_BYTES, handlers=MeddledHandlers(Experts, meddle))
        lying = True
        helped, account = await swarm.generate(PROMPT, 8)
        (member,) = swarm.backbone.members.workers
        assert helped == alone
        assert account.fallback > 0
        assert member.standing is Standing.QUARANTINED
        assert member.tally.bad_replies == 1
        lying = False
        swarm.network.break_all("worker1")
        await swarm.until(lambda: member not in swarm.backbone.members.workers)
        await swarm.until(lambda: len(swarm.backbone.members.workers) == 1)
        (member,) = swarm.backbone.members.workers
        assert member.standing is Standing.QUARANTINED, "reconnecting does not help"
        await trio.sleep(swarm.config.dispatch.quarantine_s)
        await swarm.until(lambda: bool(swarm.serving()))  # probed again, without a new connection


async def test_a_worker_with_wrong_numbers_never_gets_a_row(tiny_model: Path, tmp_path: Path) -> None:
    """Its probe is compared with the local copy."""

    def meddle(handler: Handler) -> Handler:
        async def liar(peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
            reply, parts = await handler(peer, message, body)
            values = np.frombuffer(b"".join(bytes(part) for part in parts), np.float32)
            return reply, (values[::-1].tobytes(),)

        return liar

    async with open_swarm(tiny_model, tmp_path) as swarm:
        await swarm.join(ALL_BYTES, handlers=MeddledHandlers(Experts, meddle), wait=False)
        await swarm.until(
            lambda: any(w.standing is Standing.QUARANTINED for w in swarm.backbone.members.workers)
        )
        _, account = await swarm.generate(PROMPT, 4)
    assert account.workers == {}


@pytest.mark.parametrize("form", [EXACT, WireForm()], ids=str)
@pytest.mark.parametrize("lie", ["all rows rolled", "all but the last rolled", "all rows scaled"])
async def test_plausible_wrong_rows_are_found_by_recomputing(
    tiny_model: Path, tmp_path: Path, form: WireForm, lie: str
) -> None:
    """cases.md 14. One row of every answer is drawn, so it cannot be foreseen which."""
    lying = False

    def meddle(handler: Handler) -> Handler:
        async def liar(peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
            reply, parts = await handler(peer, message, body)
            assert isinstance(reply, Rows)
            kind = np.float32 if reply.encoding == "f32" else np.float16
            values = (
                np.frombuffer(b"".join(bytes(part) for part in parts), kind).reshape(reply.n_rows, -1).copy()
            )
            if lying:
                end = reply.n_rows - 1 if "but" in lie else reply.n_rows
                honest = values[:end].astype(np.float32)
                values[:end] = 1.5 * honest if "scaled" in lie else np.roll(honest, 1, axis=1)
            return reply, (values.tobytes(),)

        return liar

    config = replace(Config(), dispatch=replace(DispatchConfig(), audit_share=1.0))
    async with open_swarm(tiny_model, tmp_path, form=form, config=config) as swarm:
        alone, _ = await swarm.generate(PROMPT, 8)
        await swarm.join(ALL_BYTES, handlers=MeddledHandlers(Experts, meddle))
        honest, account = await swarm.generate(PROMPT, 8)
        assert honest == alone
        assert account.remote == account.pairs, "honest rows pass the audit"
        lying = True
        helped, account = await swarm.generate(PROMPT, 8)
        (member,) = swarm.backbone.members.workers
    assert member.standing is Standing.QUARANTINED
    assert "recomputing" in member.reason
    if "but" not in lie:
        assert helped == alone
        assert account.remote == 0


async def test_a_worker_that_is_busy_for_a_while_is_not_punished(tiny_model: Path, tmp_path: Path) -> None:
    """Neither for work nor for probes, until it has answered nothing for so long that nobody can say it works."""
    busy = False

    def meddle(handler: Handler) -> Handler:
        async def refusing(peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
            if busy:
                raise RequestRefusedError("busy", "too much to do", 200)
            return await handler(peer, message, body)

        return refusing

    async with open_swarm(tiny_model, tmp_path) as swarm:
        alone, _ = await swarm.generate(PROMPT, 6)
        await swarm.join(ALL_BYTES, handlers=MeddledHandlers(Experts, meddle))
        busy = True
        helped, account = await swarm.generate(PROMPT, 6)
        assert helped == alone
        assert 0 < account.fallback < account.pairs
        (member,) = swarm.backbone.members.workers
        assert member.past.in_vain == 1, "it is not asked again before it wants to be"
        await trio.sleep(10)
        assert member.tally.late == 0
        assert swarm.serving()
        await trio.sleep(swarm.config.dispatch.fresh_s)
        assert not swarm.serving()
        busy = False
        await swarm.until(lambda: bool(swarm.serving()))
        _, account = await swarm.generate(PROMPT, 6)
    assert account.remote == account.pairs


def is_probe(message: Message) -> bool:
    """As a liar sees it."""
    return isinstance(message, Experts) and (message.form, message.encoding, message.n_rows) == (
        "experts",
        "f32",
        1,
    )


@pytest.mark.parametrize("excuse", ["busy", "overflow"])
async def test_excuses_instead_of_work_stall_no_answer(tiny_model: Path, tmp_path: Path, excuse: str) -> None:
    """Right before the deadline, and with right answers to probes."""
    refusing = False

    def meddle(handler: Handler) -> Handler:
        async def answer(peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
            if refusing and not is_probe(message):
                await trio.sleep(0.45)
                raise RequestRefusedError(excuse, "later", 1)
            return await handler(peer, message, body)

        return answer

    async with open_swarm(tiny_model, tmp_path, form=WireForm()) as swarm:
        await swarm.join(ALL_BYTES, handlers=MeddledHandlers(Experts, meddle))
        await swarm.generate(PROMPT, 4)
        refusing = True
        started_s = trio.current_time()
        for _ in range(20):
            await swarm.generate(PROMPT, 40)
            await trio.sleep(5)
        assert trio.current_time() - started_s - 20 * 5 < 10 * 0.45, "three, then one after each pause"
        (member,) = swarm.backbone.members.workers
        assert member.standing is Standing.SUSPECT
        assert excuse in member.reason


async def test_a_silent_worker_sheds_nothing_by_leaving_and_coming_back(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Over the same connection, whenever it is found out; it answers probes."""
    mute = False
    asked_at_s: list[float] = []

    def meddle(handler: Handler) -> Handler:
        async def answer(peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
            if mute and not is_probe(message):
                asked_at_s.append(trio.current_time())
                await trio.sleep_forever()
            return await handler(peer, message, body)

        return answer

    async with open_swarm(tiny_model, tmp_path, form=WireForm()) as swarm:
        await swarm.join(ALL_BYTES, handlers=MeddledHandlers(Experts, meddle))
        members = swarm.backbone.members
        mute = True

        async def leave_and_come_back() -> None:
            while True:
                await trio.sleep(0.02)
                (member,) = members.workers
                if member.standing is Standing.SUSPECT:
                    members.leaving(member.peer)
                    again = members.announce(member.peer, member.ranges, member.max_rows, member.device)
                    swarm.backbone.prober.watch(again)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(leave_and_come_back)
            for _ in range(30):
                await swarm.generate(PROMPT, 4)
                await trio.sleep(1)
            nursery.cancel_scope.cancel()
    assert 1 < len(set(asked_at_s)) <= 6, "after pauses of 1, 2, 4, 8, 16 seconds"


@pytest.mark.parametrize(
    ("form", "number"),
    [(EXACT, 3e38), (EXACT, 100.0), (WireForm(), 65504.0), (WireForm(), 100.0)],
    ids=str,
)
async def test_huge_numbers_never_reach_the_model(
    tiny_model: Path, tmp_path: Path, form: WireForm, number: float
) -> None:
    """In one row, from the first request on, and with no audit drawn."""
    lying = False

    def meddle(handler: Handler) -> Handler:
        async def liar(peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
            reply, parts = await handler(peer, message, body)
            assert isinstance(reply, Rows)
            if not lying:
                return reply, parts
            kind = np.float32 if reply.encoding == "f32" else np.float16
            values = np.frombuffer(b"".join(bytes(part) for part in parts), kind).copy()
            values[-3] = number
            return reply, (values.tobytes(),)

        return liar

    config = replace(Config(), dispatch=replace(DispatchConfig(), audit_share=0.0))
    async with open_swarm(tiny_model, tmp_path, form=form, config=config) as swarm:
        alone, _ = await swarm.generate(PROMPT, 8)
        await swarm.join(ALL_BYTES, handlers=MeddledHandlers(Experts, meddle))
        honest, account = await swarm.generate(PROMPT, 8)
        assert account.remote == account.pairs
        lying = True
        helped, _ = await swarm.generate([*PROMPT, 9], 8)
        (member,) = swarm.backbone.members.workers
        assert member.standing is Standing.QUARANTINED
        assert "recomputing" in member.reason
    assert honest == alone
    async with open_swarm(tiny_model, tmp_path / "alone") as swarm:
        assert helped == (await swarm.generate([*PROMPT, 9], 8))[0]


async def test_who_lied_in_a_pass_that_fails_is_found_and_who_helped_is_named(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lying = False

    def meddle(handler: Handler) -> Handler:
        async def liar(peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
            reply, parts = await handler(peer, message, body)
            assert isinstance(message, Experts)
            if lying and message.layer == 3:
                values = np.frombuffer(b"".join(bytes(part) for part in parts), np.float32)
                return reply, ((1e30 * values).tobytes(),)
            return reply, parts

        return liar

    def fail(*_: object) -> int:
        raise NotFiniteError("the logits are not finite")

    async with open_swarm(tiny_model, tmp_path) as swarm:
        worker = await swarm.join(ALL_BYTES, handlers=MeddledHandlers(Experts, meddle))
        lying = True
        monkeypatch.setattr(Sampler, "sample", fail)
        with pytest.raises(NotFiniteError, match=f"not finite; or one of .* {worker.key.node_id.short}"):
            await swarm.generate(PROMPT, 4)
        (member,) = swarm.backbone.members.workers
        assert member.standing is Standing.QUARANTINED


@pytest.mark.parametrize(
    ("form", "encoding"),
    [(EXACT, "f16"), (WireForm(), "f32"), (WireForm("partial", "q8"), "f32")],
    ids=str,
)
async def test_rows_in_another_encoding_than_asked_for_are_none(
    tiny_model: Path, tmp_path: Path, form: WireForm, encoding: str
) -> None:
    """Or the exact form would not be exact."""
    lying = False

    def meddle(handler: Handler) -> Handler:
        async def other(peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
            reply, parts = await handler(peer, message, body)
            assert isinstance(reply, Rows)
            if not lying:
                return reply, parts
            kinds = {"f32": np.float32, "f16": np.float16}
            values = np.frombuffer(b"".join(bytes(part) for part in parts), kinds[reply.encoding])
            return replace(reply, encoding=encoding), (values.astype(kinds[encoding]).tobytes(),)

        return other

    async with open_swarm(tiny_model, tmp_path, form=form) as swarm:
        alone, _ = await swarm.logits(PROMPT)
        await swarm.join(ALL_BYTES, handlers=MeddledHandlers(Experts, meddle))
        lying = True
        helped, account = await swarm.logits(PROMPT)
        (member,) = swarm.backbone.members.workers
        assert member.standing is Standing.QUARANTINED
    assert account.remote == 0
    assert np.array_equal(alone, helped) or not form.exact


@pytest.mark.real_time  # the socket for its owner is bound on a thread
async def test_q8_with_a_model_whose_rows_are_no_whole_blocks_ends_the_start(tmp_path: Path) -> None:
    """Before the model is hashed and loaded: it would be f16, or f32, for all rows."""
    options = BackboneOptions(
        folders=Folders.under(tmp_path / "home"),
        network="test",
        listen=("127.0.0.1", 0),
        model=str(write_tiny_gguf(tmp_path / "model.gguf", replace(MODEL, n_embd=320))),
        api=("127.0.0.1", 0),
        form=WireForm(encoding="q8"),
    )
    events: list[object] = []
    with pytest.raises(ExceptionGroup) as caught:
        await run_backbone(options, events.append)
    assert caught.group_contains(UsageError, match="multiple of 256.* is 320: start without --q8")
    assert not events


@pytest.mark.parametrize("encoding", ["f32", "f16", "q8"])
async def test_rows_of_odd_widths_travel(tmp_path: Path, encoding: str) -> None:
    model = write_tiny_gguf(tmp_path / "model.gguf", replace(MODEL, n_embd=320))
    seen: set[str] = set()

    def meddle(handler: Handler) -> Handler:
        async def noting(peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
            assert isinstance(message, Experts)
            seen.add(message.encoding)
            return await handler(peer, message, body)

        return noting

    async with open_swarm(model, tmp_path, form=WireForm("partial", encoding)) as swarm:
        alone, _ = await swarm.logits(PROMPT)
        await swarm.join(2 * ALL_BYTES, handlers=MeddledHandlers(Experts, meddle))
        seen.clear()
        helped, account = await swarm.logits(PROMPT)
    assert account.remote == account.pairs
    np.testing.assert_allclose(helped, alone, atol=0.05)
    assert seen == {"f16" if encoding == "q8" else encoding}


@pytest.mark.parametrize("encoding", ["f16", "q8"])
async def test_rows_that_do_not_fit_travel_as_f32(tiny_model: Path, tmp_path: Path, encoding: str) -> None:
    seen: list[str] = []

    def meddle(handler: Handler) -> Handler:
        async def noting(peer: Peer, message: Message, body: memoryview) -> tuple[Message, Body]:
            assert isinstance(message, Experts)
            seen.append(message.encoding)
            return await handler(peer, message, body)

        return noting

    async with open_swarm(tiny_model, tmp_path, form=WireForm("partial", encoding)) as swarm:
        await swarm.join(ALL_BYTES, handlers=MeddledHandlers(Experts, meddle))
        engine = swarm.backbone.engine
        routing, workers = swarm.backbone.members.routing()
        seen.clear()
        for scale in (1.0, 1e6):
            rows = np.full((1, 256), scale, np.float32)
            call = ExpertCall(0, rows, np.array([[0, 1]], np.int32), np.full((1, 2), 0.5, np.float32))
            plan = plan_layer(routing, 0, call.ids)
            assert plan is not None
            account = Account()
            step = StepAccount([AccountedRows(account, 1, 1)])
            pending = await engine.passes.remote.layer(RemoteLayer(call, plan), workers, step)
            assert np.isfinite(pending.finish()).all()
            pending.settle()
            step.divide(1, 2)
            assert account.remote == 2
    assert seen == [encoding, "f32"]


async def test_many_conversations_at_once(tiny_model: Path, tmp_path: Path) -> None:
    """More than there are slots: each gets the answer it would get alone."""
    prompts = [[seed, 3, 5] for seed in range(1, 6)]
    async with open_swarm(tiny_model, tmp_path) as swarm:
        alone = [(await swarm.generate(prompt, 5))[0] for prompt in prompts]
        await swarm.join(ALL_BYTES // 2)
        together: dict[int, list[int]] = {}

        async def ask(number: int) -> None:
            together[number], _ = await swarm.generate(prompts[number], 5)

        async with trio.open_nursery() as nursery:
            for number in range(len(prompts)):
                nursery.start_soon(ask, number)
    assert [together[number] for number in range(len(prompts))] == alone


def cancel_at_third(scope: trio.CancelScope, count: int) -> None:
    if count == 3:
        scope.cancel()


async def test_a_cancelled_answer_frees_its_slot(tiny_model: Path, tmp_path: Path) -> None:
    async with open_swarm(tiny_model, tmp_path) as swarm:
        alone, _ = await swarm.generate(PROMPT, 6)
        await swarm.join(ALL_BYTES // 2)
        for _ in range(5):  # more often than there are slots
            with trio.CancelScope() as scope:
                await swarm.generate(PROMPT, 6, partial(cancel_at_third, scope))
            assert scope.cancelled_caught
        again, _ = await swarm.generate(PROMPT, 6)
    assert again == alone


async def test_a_partition_stalls_nothing(tiny_model: Path, tmp_path: Path) -> None:
    config = Config()
    async with open_swarm(tiny_model, tmp_path, config=config) as swarm:
        alone, _ = await swarm.generate(PROMPT, 8)
        await swarm.join(ALL_BYTES // 2)
        await swarm.join(ALL_BYTES // 2)
        swarm.network.partition({"backbone"}, {"worker1"})
        started_s = trio.current_time()
        helped, account = await swarm.generate(PROMPT, 8)
        assert helped == alone
        assert trio.current_time() - started_s <= config.dispatch.share_deadline_s(
            2 * len(PROMPT), 3 * len(PROMPT) * 1024
        )
        assert account.remote > 0, "the other worker went on"
        swarm.network.heal()
        await swarm.until(lambda: len(swarm.serving()) == 2, timeout_s=200)
