"""The MTP block: against the oracle, in step with its slot whatever happens to that, and gone where it is not there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest

from swarmnode.errors import UsageError
from swarmnode.models.backbone import Backbone
from swarmnode.models.base import F32Array, Part, run_pass
from swarmnode.models.registry import state_of_slot
from swarmnode.testing.tiny_gguf import TinyModel

from .kit import SMALL, LocalModel, open_tiny, random_tokens
from .oracle_mtp import MtpOracle

TINY = replace(SMALL, mtp_block=True)
VOCAB = TINY.n_vocab
TOLERANCE = 3e-4
"""Largest difference in logits relative to the largest; f16 in two KV caches."""

VARIANTS: dict[str, TinyModel] = {
    "plain": TINY,
    "own head": replace(TINY, mtp_own_head=True),
    "own head, tied": replace(TINY, mtp_own_head=True, tied_embeddings=True),
    "tied embeddings": replace(TINY, tied_embeddings=True),
    "fused": replace(TINY, fused_qkv=True, fused_gate_up=True),
    "recurrent_layers key": replace(TINY, recurrent_layers_key=True, full_attention_interval=2),
    "split": replace(TINY, n_parts=3, empty_first_part=True),
    "recurrent only": replace(TINY, full_attention_interval=9, n_layer=2),
    "one head of each": replace(TINY, n_head=1, n_head_kv=1, n_k_heads=1, n_v_heads=1),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mtp")


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For another model: a file that is mapped must not be written over by a shorter one."""
    return tmp_path_factory.mktemp("other")


def guesses(local: LocalModel, slot: int, token: int, n: int) -> list[int]:
    return list(islice(local.model.draft(slot, token), n))


@contextmanager
def watched(local: LocalModel) -> Iterator[list[F32Array]]:
    """Collects the logits of each guess."""
    assert isinstance(local.model, Backbone)
    assert local.model._mtp is not None
    block, seen = local.model._mtp._block, []
    step = block.step

    def told(*args: Any) -> tuple[F32Array, F32Array] | None:
        made = step(*args)
        if made is not None:
            seen.append(made[0])
        return made

    with patch.object(block, "step", told):
        yield seen


def cache(local: LocalModel, slot: int) -> dict[str, npt.NDArray[Any]]:
    """What the block's KV cache holds for the slot's tokens: all cells that are due."""
    model = local.model
    assert isinstance(model, Backbone)
    assert model._mtp is not None
    model._mtp._fill(slot)
    kept = model._mtp._kept[slot]
    assert kept.n_filled == max(0, model.n_past(slot) - 1)
    hidden = kept.hidden[0] if kept.hidden else np.zeros(0)
    names = {kind: f"slot.{slot}.blk.{model.n_layer}.{kind}" for kind in "kv"}
    cells = {kind: model._states.tensors.read(name)[: kept.n_filled] for kind, name in names.items()}
    return {**cells, "hidden": hidden}


def assert_same(ours: LocalModel, theirs: LocalModel, slot: int = 0) -> None:
    """Bit by bit: the block's cells and what waits for its next one."""
    assert ours.model.n_past(slot) == theirs.model.n_past(slot)
    a, b = cache(ours, slot), cache(theirs, slot)
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], name)


# -- against the oracle


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("own_memory", [False, True], ids=["host", "own memory"])
def test_guesses_are_the_oracles(variant: str, own_memory: bool, tmp_path: Path) -> None:
    tokens = random_tokens(12, VOCAB)
    with open_tiny(tmp_path, VARIANTS[variant], own_memory=own_memory) as local, watched(local) as logits:
        for part in (tokens[:7], tokens[7:9], tokens[9:10], tokens[10:]):
            local.run(part)
        ours = guesses(local, 0, 5, 4)
        theirs, expected = MtpOracle(local.index).guess_all(tokens, 5, 4)
    for mine, truth in zip(logits, expected, strict=True):
        assert np.abs(mine - truth).max() < TOLERANCE * np.abs(truth).max()
    assert ours == theirs


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("hidden_first", True),
        ("before_norm", True),
        ("rope_base", 1e1),
        ("moe_factor", 0.9),
        ("shared_factor", 0.9),
        ("n_used", 2),
    ],
)
def test_the_tolerance_would_show_a_fault(attribute: str, value: float, tmp_path: Path) -> None:
    tokens = random_tokens(12, VOCAB)
    with open_tiny(tmp_path, TINY) as local, watched(local) as logits:
        local.run(tokens)
        guesses(local, 0, 5, 1)
        oracle = MtpOracle(local.index)
        setattr(oracle, attribute, value)
        faulty = oracle.guess_all(tokens, 5, 1)[1][0]
    assert np.abs(logits[0] - faulty).max() > 5 * TOLERANCE * np.abs(faulty).max()


# -- the model's own answers


def test_logits_are_those_of_the_model_without_the_block(folder: Path, other_folder: Path) -> None:
    parts: list[list[tuple[int, list[int], int]]] = [
        [(0, random_tokens(40, VOCAB), 1)],
        [(0, random_tokens(40, VOCAB), 0)],
        [(0, [3], 1), (1, [4], 0), (2, [5], 1)],
        [(1, [1, 2, 3], 0), (2, [9], 0)],
        [(1, [4], 0)],
        [(0, [1, 2, 3], 3), (1, [5], 1), (2, [6, 7], 1)],
    ]
    plain = replace(TINY, mtp_block=False)
    with (
        open_tiny(folder, TINY, n_slots=3, n_ubatch=16) as with_block,
        open_tiny(other_folder, plain, n_slots=3, n_ubatch=16) as without,
    ):
        assert (with_block.model.has_mtp, without.model.has_mtp) == (True, False)
        for step in parts:
            ours, theirs = (
                run_pass(each.model.forward_batch([Part(*part) for part in step]), each.experts)
                for each in (with_block, without)
            )
            for (slot, _, n_out), a, b in zip(step, ours, theirs, strict=True):
                assert len(a) == n_out
                np.testing.assert_array_equal(a, b)
                guesses(with_block, slot, 7, 2)


# -- in step with the slot


@pytest.mark.parametrize("own_memory", [False, True], ids=["host", "own memory"])
def test_its_cells_do_not_depend_on_how_the_text_was_cut(folder: Path, own_memory: bool) -> None:
    tokens = random_tokens(70, VOCAB)
    with (
        open_tiny(folder, TINY, n_slots=2, n_ubatch=16, own_memory=own_memory) as pieces,
        open_tiny(folder, TINY, n_slots=2, own_memory=own_memory) as whole,
    ):
        whole.run(tokens)
        start = 0
        for n in (1, 40, 1, 1, 2, 20, 5):
            piece = tokens[start : start + n]
            if n > 15:
                pieces.run(piece)
            else:
                run_pass(pieces.model.forward_batch([Part(0, piece, 0), Part(1, [3], 1)]), pieces.experts)
            start += n
            if n == 2:
                guesses(pieces, 0, 9, 5)
        assert start == len(tokens)
        assert_same(pieces, whole)
        assert guesses(pieces, 0, 4, 6) == guesses(whole, 0, 4, 6)


@pytest.mark.parametrize("n_keep", range(6))
def test_what_is_taken_back_leaves_nothing(folder: Path, n_keep: int) -> None:
    tokens, text = random_tokens(5, VOCAB, n_keep), random_tokens(20, VOCAB)
    with open_tiny(folder, TINY, n_slots=2) as ours, open_tiny(folder, TINY) as theirs:
        ours.run(text)
        theirs.run(text)
        guesses(ours, 0, tokens[0], 7)
        parts = [Part(0, tokens, 5, tentative=True), Part(1, [5], 1)]
        run_pass(ours.model.forward_batch(parts), ours.experts)
        ours.model.accept(0, n_keep)
        if n_keep:
            theirs.run(tokens[:n_keep])
        assert_same(ours, theirs)
        np.testing.assert_array_equal(ours.run([7]), theirs.run([7]))
        assert_same(ours, theirs)
        assert guesses(ours, 0, 3, 5) == guesses(theirs, 0, 3, 5)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K", "F16", "BF16"])
def test_every_kind_of_weight(tmp_path: Path, kind: str) -> None:
    """Q4_0 may be repacked, in the layers and not in the block."""
    tiny = replace(
        TINY, n_embd=256, dense_type=kind, embd_type=kind, up_type=kind, n_ff_shared=256, mtp_own_head=True
    )
    with open_tiny(tmp_path, tiny, n_slots=2) as ours, open_tiny(tmp_path, tiny) as theirs:
        ours.run([1, 2, 3])
        drafted = [4, *guesses(ours, 0, 4, 4)]
        assert len(drafted) == 5
        run_pass(
            ours.model.forward_batch([Part(0, drafted, 5, tentative=True), Part(1, [5], 1)]), ours.experts
        )
        ours.model.accept(0, 3)
        theirs.run([1, 2, 3, *drafted[:3]])
        assert_same(ours, theirs)
        assert guesses(ours, 0, 3, 5) == guesses(theirs, 0, 3, 5)


def test_rounds_of_guessing_and_taking_back(folder: Path) -> None:
    rng = np.random.default_rng(1)
    with open_tiny(folder, TINY, n_ubatch=64) as ours, open_tiny(folder, TINY) as theirs:
        text = random_tokens(3, VOCAB)
        ours.run(text)
        for number in range(40):
            draft = [int(rng.integers(VOCAB)), *random_tokens(int(rng.integers(1, 8)), VOCAB, number)]
            draft[1:2] = guesses(ours, 0, draft[0], 1)
            run_pass(ours.model.forward_batch([Part(0, draft, len(draft), tentative=True)]), ours.experts)
            n_keep = int(rng.integers(len(draft) + 1))
            ours.model.accept(0, n_keep)
            text += draft[:n_keep]
        theirs.run(text)
        assert_same(ours, theirs)


def test_checkpoints_before_and_after(folder: Path) -> None:
    text = random_tokens(90, VOCAB)
    with open_tiny(folder, TINY, n_slots=2) as ours, open_tiny(folder, TINY, n_slots=2) as theirs:
        ours.run(text[:10])
        early = ours.model.checkpoint(0)
        assert early.n_bytes == ours.model.checkpoint_bytes
        ours.run(text[10:50])
        late = ours.model.checkpoint(0)
        guesses(ours, 0, 1, 3)
        ours.run(text[50:])
        for checkpoint in (late, late, early):
            ours.model.restore(0, checkpoint)
            theirs.model.reset(0)
            theirs.run(text[: checkpoint.n_past])
            assert_same(ours, theirs)
            assert guesses(ours, 0, 8, 4) == guesses(theirs, 0, 8, 4)
            ours.run([3, 4])
            theirs.run([3, 4])
            assert_same(ours, theirs)
        with pytest.raises(UsageError, match="cannot go back"):
            ours.model.restore(0, late)


def test_guessing_makes_later_checkpoints_void(folder: Path) -> None:
    """Guesses are written where the text behind the position was."""
    with open_tiny(folder, TINY) as local:
        local.run([1, 2, 3])
        early = local.model.checkpoint(0)
        local.run([4, 5, 6])
        late = local.model.checkpoint(0)
        local.model.restore(0, early)
        guesses(local, 0, 9, 3)
        with pytest.raises(UsageError, match="cannot go back"):
            local.model.restore(0, late)
        local.model.restore(0, early)


def test_a_slot_is_used_again(folder: Path) -> None:
    with open_tiny(folder, TINY) as ours, open_tiny(folder, TINY) as theirs:
        empty = ours.model.checkpoint(0)
        ours.run(random_tokens(300, VOCAB))
        assert guesses(ours, 0, 1, 3)
        ours.model.reset(0)
        assert guesses(ours, 0, 1, 3) == []
        ours.run([1])
        theirs.run([1])
        assert guesses(ours, 0, 2, 3) == guesses(theirs, 0, 2, 3)
        empty = ours.model.checkpoint(0) if empty is None else empty
        ours.run([2, 3])
        theirs.run([2, 3])
        assert_same(ours, theirs)


def test_an_unfinished_pass_is_forgotten(folder: Path) -> None:
    with open_tiny(folder, TINY) as ours, open_tiny(folder, TINY) as theirs:
        ours.run([1, 2, 3])
        kept = ours.model.checkpoint(0)
        steps = ours.model.forward(0, [4, 5])
        next(steps)
        with pytest.raises(UsageError, match="unfinished"):
            ours.model.draft(0, 1)
        steps.close()
        ours.model.restore(0, kept)
        ours.run([6])
        theirs.run([1, 2, 3, 6])
        assert_same(ours, theirs)


# -- where it ends


def test_it_ends_with_the_context(folder: Path) -> None:
    with open_tiny(folder, TINY, n_ctx=256) as local:
        local.run(random_tokens(250, VOCAB))
        assert len(list(local.model.draft(0, 1))) == 7


def test_what_is_refused(folder: Path) -> None:
    with open_tiny(folder, TINY) as local:
        for slot, token, problem in ((1, 1, "does not exist"), (0, VOCAB, "outside"), (0, -1, "outside")):
            with pytest.raises(UsageError, match=problem):
                local.model.draft(slot, token)
        run_pass(local.model.forward_batch([Part(0, [1, 2], 2, tentative=True)]), local.experts)
        with pytest.raises(UsageError, match="not accepted"):
            local.model.draft(0, 1)
    with open_tiny(folder, SMALL) as local:
        assert not local.model.has_mtp
        with pytest.raises(UsageError, match="no MTP block"):
            local.model.draft(0, 1)


def test_numbers_that_are_not_finite_end_it_until_the_slot_is_emptied(folder: Path) -> None:
    with open_tiny(folder, TINY) as ours, open_tiny(folder, TINY) as theirs:
        assert isinstance(ours.model, Backbone)
        assert ours.model._mtp is not None
        ours.run([1, 2, 3])
        ours.model._mtp._kept[0].hidden[0][-1] = np.nan
        assert guesses(ours, 0, 4, 3) == []
        np.testing.assert_array_equal(ours.run([5]), run_twice(theirs, [1, 2, 3], [5]))
        assert guesses(ours, 0, 4, 3) == []
        ours.model.reset(0)
        theirs.model.reset(0)
        ours.run([1, 2, 3])
        theirs.run([1, 2, 3])
        assert guesses(ours, 0, 4, 3) == guesses(theirs, 0, 4, 3) != []


def run_twice(local: LocalModel, first: Sequence[int], second: Sequence[int]) -> F32Array:
    local.run(first)
    return local.run(second)


# -- memory


def test_its_memory_is_counted(folder: Path, other_folder: Path) -> None:
    with open_tiny(folder, TINY, n_slots=2) as ours, open_tiny(other_folder, SMALL, n_slots=2) as theirs:
        kv = 2 * 512 * TINY.n_head_kv * TINY.head_dim * 2
        batch = 2 * TINY.n_embd * 4
        assert ours.model.state_bytes - theirs.model.state_bytes == 2 * kv + batch
        assert state_of_slot(ours.index, 512).cache - state_of_slot(theirs.index, 512).cache == kv
        assert ours.model.checkpoint_bytes - theirs.model.checkpoint_bytes == 4 * TINY.n_embd


def test_it_is_not_loaded_unless_asked(folder: Path, other_folder: Path) -> None:
    with open_tiny(folder, TINY, mtp=False) as ours, open_tiny(other_folder, SMALL) as theirs:
        assert not ours.model.has_mtp
        assert ours.model.state_bytes == theirs.model.state_bytes
        assert ours.model.checkpoint_bytes == theirs.model.checkpoint_bytes
        with pytest.raises(UsageError, match="not loaded"):
            ours.model.draft(0, 1)
