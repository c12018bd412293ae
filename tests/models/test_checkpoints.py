"""Going back to a checkpoint of a slot: bit-equal to never having gone on, and refused where it would not be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from swarmnode.errors import DeviceError, UsageError
from swarmnode.models.base import F32Array

from .kit import SMALL, LocalModel, open_tiny, random_tokens

A, B, C = (random_tokens(n, SMALL.n_vocab, seed) for seed, n in enumerate((40, 30, 25)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(params=[False, True], ids=["host", "own memory"])
def local(request: pytest.FixtureRequest, folder: Path) -> Iterator[LocalModel]:
    with open_tiny(folder, n_slots=2, n_ubatch=16, own_memory=request.param) as opened:
        yield opened


def answer(local: LocalModel, slot: int) -> F32Array:
    """Logits of C and of three single tokens behind it."""
    rows = [local.run(C, slot, all_logits=True)]
    rows += [local.run([token], slot) for token in A[:3]]
    return np.concatenate(rows)


def test_going_back_is_bit_equal_to_never_having_gone_on(local: LocalModel) -> None:
    local.run(A)
    checkpoint = local.model.checkpoint(0)
    local.run(B)
    local.greedy([1], 5)
    local.model.restore(0, checkpoint)
    assert local.model.n_past(0) == checkpoint.n_past == len(A)
    local.run(A, 1)
    fresh = answer(local, 1)
    np.testing.assert_array_equal(answer(local, 0), fresh)
    local.model.restore(0, checkpoint)
    np.testing.assert_array_equal(answer(local, 0), fresh, "a checkpoint may be used again")


def test_it_crosses_the_padding_of_the_kv_cache(local: LocalModel) -> None:
    """The longer way left KV entries in cells that the shorter one's attention does not reach at first."""
    local.run(A)
    checkpoint = local.model.checkpoint(0)
    local.run(random_tokens(300, SMALL.n_vocab, 5))
    local.model.restore(0, checkpoint)
    tail = random_tokens(250, SMALL.n_vocab, 6)
    local.run(A, 1)
    np.testing.assert_array_equal(local.run(tail, 0, all_logits=True), local.run(tail, 1, all_logits=True))


def test_an_unfinished_pass_can_be_taken_back(local: LocalModel) -> None:
    local.run(A)
    checkpoint = local.model.checkpoint(0)
    steps = local.model.forward(0, B)
    call = next(steps)
    for _ in range(SMALL.n_layer + 1):  # into the second chunk
        call = steps.send(local.experts(call))
    with pytest.raises(UsageError, match="unfinished"):
        local.model.checkpoint(0)
    local.model.restore(0, checkpoint)
    steps.close()
    local.run(A, 1)
    np.testing.assert_array_equal(answer(local, 0), answer(local, 1))


def test_its_bytes_are_those_of_the_recurrent_states(local: LocalModel) -> None:
    channels = (2 * SMALL.n_k_heads + SMALL.n_v_heads) * SMALL.state_size
    n_bytes = 3 * 4 * (3 * channels + SMALL.n_v_heads * SMALL.state_size**2)
    assert local.model.checkpoint(0).n_bytes == local.model.checkpoint_bytes == n_bytes


# -- what is refused


def test_a_checkpoint_of_another_slot_or_model_is_refused(local: LocalModel, folder: Path) -> None:
    local.run(A)
    local.run(A, 1)
    with pytest.raises(UsageError, match="slot 1 cannot go back to token 40"):
        local.model.restore(1, local.model.checkpoint(0))
    with open_tiny(folder) as other:
        other.run(A)
        with pytest.raises(UsageError):
            local.model.restore(0, other.model.checkpoint(0))
    assert local.model.n_past(0) == len(A)


def test_a_slot_that_went_another_way_cannot_go_back_to_the_longer_one(local: LocalModel) -> None:
    local.run(A)
    short = local.model.checkpoint(0)
    local.run(B)
    long = local.model.checkpoint(0)
    local.model.restore(0, short)
    local.model.restore(0, long)  # nothing was written since
    local.model.restore(0, short)
    local.run([1])
    with pytest.raises(UsageError, match="does not hold the tokens"):
        local.model.restore(0, long)
    local.run(C + B)  # longer again, but other tokens
    with pytest.raises(UsageError):
        local.model.restore(0, long)
    local.model.restore(0, short)


def test_a_reset_makes_checkpoints_void(local: LocalModel) -> None:
    local.run(A)
    checkpoint = local.model.checkpoint(0)
    local.model.reset(0)
    local.run(A)
    with pytest.raises(UsageError):
        local.model.restore(0, checkpoint)


def test_numbers_that_are_not_finite_make_checkpoints_void(local: LocalModel) -> None:
    local.run(A)
    checkpoint = local.model.checkpoint(0)
    steps = local.model.forward(0, B)
    call = next(steps)
    with pytest.raises(DeviceError, match="not finite"):
        steps.send(np.full_like(call.rows, np.nan))
    with pytest.raises(UsageError):
        local.model.restore(0, checkpoint)


@pytest.mark.parametrize("slot", [-1, 2])
def test_a_slot_that_does_not_exist_is_refused(local: LocalModel, slot: int) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        local.model.checkpoint(slot)
    with pytest.raises(UsageError, match="does not exist"):
        local.model.restore(slot, local.model.checkpoint(0))
