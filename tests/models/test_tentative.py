"""Tokens that may be taken back: whatever is accepted, what follows is as if only that had been run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from swarmnode.errors import ContextFullError, DeviceError, UsageError
from swarmnode.models.base import ExpertCall, F32Array, Part, run_pass
from tests.models.test_batch import VARIANTS, Twins, open_twins

from .kit import SMALL, random_tokens

VOCAB = SMALL.n_vocab


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tentative")


@pytest.fixture(params=[False, True], ids=["host", "own memory"])
def twins(request: pytest.FixtureRequest, folder: Path) -> Iterator[Twins]:
    with open_twins(folder, own_memory=request.param) as opened:
        yield opened


def try_out(twins: Twins, *parts: Part) -> None:
    """Run the parts together, some of them tentative; the twin runs those that are not."""
    logits = run_pass(twins.batched.model.forward_batch(parts), twins.batched.experts)
    for part, ours in zip(parts, logits, strict=True):
        if not part.tentative:
            theirs = twins.alone.run(part.tokens, part.slot, all_logits=True)
            np.testing.assert_array_equal(ours, theirs[len(part.tokens) - part.n_out :])


def settle(twins: Twins, slot: int, tokens: Sequence[int], n_keep: int) -> None:
    """Accept some; the twin runs only those."""
    twins.batched.model.accept(slot, n_keep)
    if n_keep:
        twins.alone.run(tokens[:n_keep], slot)
    assert twins.batched.model.n_past(slot) == twins.alone.model.n_past(slot)


def draft(slot: int, tokens: Sequence[int]) -> Part:
    return Part(slot, tokens, len(tokens), tentative=True)


# -- bit-equality


@pytest.mark.parametrize("n_keep", range(6))
def test_what_follows_is_as_if_only_the_accepted_tokens_had_been_run(twins: Twins, n_keep: int) -> None:
    tokens = random_tokens(5, VOCAB, n_keep)
    twins.step((0, random_tokens(20, VOCAB), 1))
    try_out(twins, draft(0, tokens))
    settle(twins, 0, tokens, n_keep)
    for _ in range(3):
        twins.step((0, [7], 1))
    twins.step((0, [1, 2, 3], 3), (1, [4], 1))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_and_kind_of_weight(folder: Path, variant: str) -> None:
    with open_twins(folder, VARIANTS[variant]) as twins:
        for n_keep in range(4):
            tokens = random_tokens(3, VOCAB, n_keep)
            twins.step((n_keep, [9, 8, 7], 1))
            try_out(twins, draft(n_keep, tokens))
            settle(twins, n_keep, tokens, n_keep)
            twins.step((n_keep, [5], 1))
            twins.step((n_keep, [5, 6], 2))


def test_the_logits_are_those_of_tokens_one_by_one(twins: Twins) -> None:
    tokens = random_tokens(6, VOCAB)
    parts = [Part(0, tokens, 6, tentative=True), Part(1, [4], 1)]
    logits = run_pass(twins.batched.model.forward_batch(parts), twins.batched.experts)[0]
    expected = np.concatenate([twins.alone.run([token]) for token in tokens])
    np.testing.assert_array_equal(logits, expected)


def test_rounds_of_any_lengths_with_others_beside_them(twins: Twins) -> None:
    rng = np.random.default_rng(3)
    for slot in range(4):
        twins.step((slot, random_tokens(3 + slot, VOCAB, slot), 1))
    for number in range(25):
        slots = [int(slot) for slot in rng.permutation(4)[: rng.integers(1, 5)]]
        parts = []
        for slot in slots:
            n = int(rng.integers(1, 8))
            tokens = random_tokens(n, VOCAB, 100 * number + slot)
            kind = int(rng.integers(3))
            parts.append(draft(slot, tokens) if kind else Part(slot, tokens[: kind + 1], 1))
        try_out(twins, *parts)
        for part in parts:
            if part.tentative:
                settle(twins, part.slot, part.tokens, int(rng.integers(len(part.tokens) + 1)))
    twins.step(*[(slot, [1], 1) for slot in range(4)])


@pytest.mark.parametrize("n_past", [250, 508])
def test_it_crosses_the_padding_of_the_kv_cache(folder: Path, n_past: int) -> None:
    with open_twins(folder) as twins:
        for model in (twins.batched, twins.alone):
            model.run(random_tokens(n_past - 8, VOCAB))
        for n_keep in (0, 3, 1):
            tokens = random_tokens(6 if n_past < 300 else 4, VOCAB, n_keep)
            try_out(twins, draft(0, tokens))
            settle(twins, 0, tokens, n_keep)
            twins.step((0, [3], 1))


def test_a_pass_of_others_may_go_between(twins: Twins) -> None:
    tokens = random_tokens(4, VOCAB)
    twins.step((0, [1, 2, 3], 1), (1, [5], 1))
    steps = twins.batched.model.forward_batch([draft(0, tokens)])
    call = next(steps)
    twins.step((1, [6], 1), (2, [7], 1))
    for _ in range(SMALL.n_layer - 1):
        call = steps.send(twins.batched.experts(call))
    with pytest.raises(StopIteration):
        steps.send(twins.batched.experts(call))
    twins.step((1, [8, 9], 1), (2, [7], 1))
    settle(twins, 0, tokens, 2)
    twins.step((0, [6], 1), (1, [6], 1))


# -- checkpoints


def test_checkpoints_before_and_after(twins: Twins) -> None:
    models = (twins.batched.model, twins.alone.model)
    twins.step((0, random_tokens(10, VOCAB), 1))
    before = [model.checkpoint(0) for model in models]
    tokens = random_tokens(5, VOCAB, 1)
    try_out(twins, draft(0, tokens))
    settle(twins, 0, tokens, 3)
    after = [model.checkpoint(0) for model in models]
    np.testing.assert_array_equal(after[0].states[0], after[1].states[0])
    for kept in (after, before):
        twins.step((0, [4], 1))
        for model, checkpoint in zip(models, kept, strict=True):
            model.restore(0, checkpoint)
    twins.step((0, [5], 1))


def test_restore_takes_back_what_waits(twins: Twins) -> None:
    models = (twins.batched.model, twins.alone.model)
    twins.step((0, [1, 2, 3], 1))
    kept = [model.checkpoint(0) for model in models]
    try_out(twins, draft(0, [4, 5, 6]))
    for model, checkpoint in zip(models, kept, strict=True):
        model.restore(0, checkpoint)
    twins.step((0, [4], 1))
    try_out(twins, draft(0, [4, 5, 6]))
    for model in models:
        model.reset(0)
    twins.step((0, [4], 1))


# -- what is refused


def test_nothing_runs_before_it_is_settled(twins: Twins) -> None:
    twins.step((0, [1], 1))
    try_out(twins, draft(0, [4, 5]))
    model = twins.batched.model
    assert model.n_past(0) == 1
    with pytest.raises(UsageError, match="not accepted"):
        model.forward(0, [1])
    with pytest.raises(UsageError, match="not accepted"):
        model.forward_batch([Part(0, [1], 1), Part(1, [1], 1)])
    with pytest.raises(UsageError, match="not accepted"):
        model.checkpoint(0)
    for n_tokens in (-1, 3):
        with pytest.raises(UsageError, match="0 to 2"):
            model.accept(0, n_tokens)
    settle(twins, 0, [4, 5], 1)
    with pytest.raises(UsageError, match="no tokens that could"):
        model.accept(0, 1)
    twins.step((0, [1], 1))


def test_an_unfinished_pass_cannot_be_accepted(twins: Twins) -> None:
    steps = twins.batched.model.forward_batch([draft(0, [4, 5])])
    next(steps)
    with pytest.raises(UsageError, match="no tokens that could"):
        twins.batched.model.accept(0, 1)
    steps.close()
    twins.batched.model.reset(0)
    twins.step((0, [1], 1))


def test_too_many_tokens_are_refused(twins: Twins) -> None:
    model = twins.batched.model
    with pytest.raises(UsageError, match="33 tentative tokens are more than 32"):
        model.forward_batch([draft(0, [1] * 33)])
    twins.batched.run([1] * 500)
    with pytest.raises(ContextFullError):
        model.forward_batch([draft(0, [1] * 13)])
    with pytest.raises(UsageError, match="does not exist"):
        model.accept(8, 0)


def test_damage_ends_it_as_any_pass(twins: Twins) -> None:
    def experts(call: ExpertCall) -> F32Array:
        return np.full_like(call.rows, np.nan)

    steps = twins.batched.model.forward_batch([draft(0, [4, 5])])
    with pytest.raises(DeviceError, match="not finite"):
        run_pass(steps, experts)
    with pytest.raises(UsageError, match="no tokens that could"):
        twins.batched.model.accept(0, 1)
    twins.batched.model.reset(0)
    twins.step((0, [1], 1))


def test_layers_without_a_call_are_cut_all_the_same(folder: Path) -> None:
    tiny = replace(SMALL, n_layer=4)
    with open_twins(folder, tiny) as twins:
        bank = twins.batched.bank
        steps = twins.batched.model.forward_batch(
            [draft(0, [4])], stacked=lambda layer: bank.stacked(layer, tiny.n_expert_used)
        )
        run_pass(steps, twins.batched.experts)
        settle(twins, 0, [4], 0)
        twins.step((0, [5], 1))
