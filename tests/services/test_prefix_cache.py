"""From where a prompt goes on, in which slot, and which checkpoints stay within the budget."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from swarmnode.config import EngineConfig
from swarmnode.models.base import Checkpoint
from swarmnode.services.prefix_cache import Piece, PrefixCache, common_prefix, plan_prefill

SIZE = 400
CONFIG = EngineConfig(
    checkpoint_bytes=3 * SIZE, min_checkpoint_tokens=4, checkpoint_tokens=40, checkpoints_a_prompt=4
)
END = 7
TEXT = list(range(1000, 2000))


def cache_of(n_slots: int = 2, config: EngineConfig = CONFIG) -> PrefixCache:
    return PrefixCache(n_slots, config)


def keep(cache: PrefixCache, slot: int, position: int) -> Checkpoint:
    checkpoint = Checkpoint(slot, position, (np.zeros(SIZE // 4, np.float32),))
    assert cache.reserve(slot, SIZE)
    cache.add(slot, checkpoint)
    cache.release(SIZE)
    return checkpoint


def run(cache: PrefixCache, slot: int, tokens: Sequence[int], *helpers: str) -> None:
    cache.begin(slot)
    cache.append(slot, tokens, helpers)


def test_the_beginning_that_two_sequences_share() -> None:
    assert common_prefix([], [1]) == 0
    assert common_prefix([1, 2, 3], (1, 2)) == 2
    assert common_prefix([1, 2, 3], [1, 2, 4, 3]) == 2
    longer = list(range(5000))
    assert common_prefix(longer, longer) == 5000
    for differs in (0, 1023, 1024, 4999):
        assert common_prefix(longer, [*longer[:differs], -1, *longer[differs + 1 :]]) == differs


# -- from where


def test_an_unused_slot_has_nothing() -> None:
    cache = cache_of()
    assert cache.usable(0, TEXT) == 0
    assert cache.rewind(0, 0) is None


def test_a_prompt_goes_on_where_the_slot_stands() -> None:
    cache = cache_of()
    run(cache, 0, TEXT[:50])
    assert cache.usable(0, TEXT[:60]) == 50
    assert cache.stands_at(0, 50)
    assert cache.rewind(0, 50) is None
    run(cache, 0, TEXT[50:60])
    assert cache.usable(0, TEXT[:61]) == 60


def test_the_last_token_is_always_run() -> None:
    cache = cache_of()
    run(cache, 0, TEXT[:20])
    keep(cache, 0, 20)
    assert cache.usable(0, TEXT[:20]) == 0
    assert cache.usable(0, TEXT[:21]) == 20


def test_another_way_begins_at_the_last_checkpoint_before_it() -> None:
    cache = cache_of()
    run(cache, 0, TEXT[:20])
    first = keep(cache, 0, 20)
    run(cache, 0, TEXT[20:30])
    keep(cache, 0, 30)
    run(cache, 0, TEXT[30:40])
    other = [*TEXT[:25], 1, 2, 3]
    assert cache.usable(0, other) == 20
    assert cache.rewind(0, 20) is first
    run(cache, 0, other[20:])
    assert cache.usable(0, TEXT) == 20, "what lay behind is gone"
    assert cache.usable(0, [*other, 4]) == 28


def test_a_torn_slot_goes_on_at_a_checkpoint_only() -> None:
    cache = cache_of()
    run(cache, 0, TEXT[:20])
    keep(cache, 0, 20)
    run(cache, 0, TEXT[20:30])
    cache.begin(0)
    assert cache.usable(0, TEXT) == 20
    assert not cache.stands_at(0, 30)
    assert cache.rewind(0, 20) is not None
    cache.append(0, ())
    assert cache.stands_at(0, 20)


def test_what_is_forgotten_is_not_used() -> None:
    cache = cache_of()
    for slot in (0, 1):
        run(cache, slot, TEXT[:20])
        keep(cache, slot, 20)
    cache.forget(0)
    assert [cache.usable(slot, TEXT) for slot in (0, 1)] == [0, 20]


def test_what_stands_on_a_liars_rows_is_not_used() -> None:
    cache = cache_of(3)
    for slot, helper in ((0, "liar"), (1, "honest"), (2, "liar")):
        run(cache, slot, TEXT[:20], "honest")
        keep(cache, slot, 20)
        run(cache, slot, TEXT[20:30], helper)
    cache.doubt("liar")
    assert [cache.usable(slot, TEXT) for slot in range(3)] == [20, 30, 20], "what came before is good"
    assert cache.rewind(0, 20) is not None
    run(cache, 0, TEXT[20:40], "honest")
    cache.doubt("liar")
    assert cache.usable(0, TEXT) == 40, "nothing of it is left"
    cache.rewind(2, 0)
    run(cache, 2, TEXT[:10])
    assert cache.usable(2, TEXT) == 10


def test_a_pass_under_way_may_be_a_liars_work() -> None:
    cache = cache_of()
    run(cache, 0, TEXT[:20])
    keep(cache, 0, 20)
    cache.begin(0)
    cache.doubt("liar")
    cache.append(0, TEXT[20:30], ["liar"])
    assert cache.usable(0, TEXT) == 20


def test_a_pass_under_way_to_which_the_liar_did_not_help_is_good() -> None:
    """Anybody may fail a first probe: that must not cost those who talk meanwhile what their slots hold."""
    cache = cache_of()
    run(cache, 0, TEXT[:20], "honest")
    cache.begin(0)
    cache.doubt("stranger")
    cache.append(0, TEXT[20:40], ["honest"])
    assert cache.usable(0, [*TEXT[:40], 1]) == 40
    assert cache.reserve(0, SIZE)


def test_what_was_doubted_in_a_pass_that_failed_is_no_matter_of_the_next() -> None:
    """A worker is believed again some day."""
    cache = cache_of()
    run(cache, 0, TEXT[:20], "honest")
    keep(cache, 0, 20)
    cache.begin(0)
    cache.doubt("forgiven")
    assert cache.rewind(0, 20) is not None
    run(cache, 0, TEXT[20:40], "forgiven")
    assert cache.usable(0, [*TEXT[:40], 1]) == 40


def test_a_doubtful_slot_makes_no_checkpoints_that_drive_out_good_ones() -> None:
    cache = cache_of(config=EngineConfig(checkpoint_bytes=SIZE))
    run(cache, 0, TEXT[:20])
    keep(cache, 0, 20)
    run(cache, 1, TEXT[:20], "liar")
    cache.doubt("liar")
    run(cache, 1, TEXT[20:40])  # it goes on
    assert not cache.reserve(1, SIZE)
    assert cache.usable(0, [*TEXT[:20], 1]) == 20


def test_a_checkpoint_that_became_doubtful_while_it_was_made_is_not_kept() -> None:
    cache = cache_of()
    run(cache, 0, TEXT[:20], "liar")
    assert cache.reserve(0, SIZE)
    cache.doubt("liar")
    cache.add(0, Checkpoint(0, 20, (np.zeros(SIZE // 4, np.float32),)))
    cache.release(SIZE)
    assert (cache.usable(0, TEXT), cache.n_bytes) == (0, 0)


# -- in which slot


def test_the_slot_with_the_longest_prefix_is_taken() -> None:
    cache = cache_of(3)
    for slot, n in ((0, 10), (1, 30), (2, 20)):
        run(cache, slot, TEXT[:n])
    assert cache.choose(TEXT, {0, 1, 2}) == 1
    assert cache.choose(TEXT, {0, 2}) == 2


def test_else_the_one_not_used_for_the_longest_time() -> None:
    cache = cache_of(3)
    assert [cache.choose([i, i], {0, 1, 2}) for i in range(5)] == [0, 1, 2, 0, 1]
    assert cache.choose([9, 9], {0, 1}) == 0


def test_a_shared_beginning_does_not_take_another_conversations_slot() -> None:
    cache = cache_of()
    system = TEXT[:30]
    slot = cache.choose(system, {0, 1})
    run(cache, slot, system)
    keep(cache, slot, 30)
    run(cache, slot, TEXT[30:100])
    assert cache.choose([*system, 1, 2, 3], {0, 1}) == 1 - slot
    assert cache.choose([*TEXT[:100], 1, 2, 3], {0, 1}) == slot
    assert cache.choose([*system, 1, 2, 3], {slot}) == slot, "the only free one, and its beginning is used"
    assert cache.usable(slot, [*system, 1, 2, 3]) == 30


def test_the_same_question_again_takes_its_slot_however_long_the_answer_was() -> None:
    cache = cache_of()
    slot = cache.choose(TEXT[:33], {0, 1})
    run(cache, slot, TEXT[:30])
    keep(cache, slot, 30)
    run(cache, slot, TEXT[30:500])
    assert cache.choose(TEXT[:33], {0, 1}) == slot
    assert cache.usable(slot, TEXT[:33]) == 30


# -- the budget


def test_checkpoints_stay_within_the_budget() -> None:
    cache = cache_of()
    for position in range(10, 110, 10):
        run(cache, 0, TEXT[position - 10 : position])
        keep(cache, 0, position)
        assert cache.n_bytes <= CONFIG.checkpoint_bytes
    assert cache.usable(0, [*TEXT[:100], 1]) == 100, "the newest one is there"


def test_what_saves_least_goes_first() -> None:
    cache = cache_of()
    for position, before in ((50, 0), (55, 50), (90, 55), (130, 90)):
        run(cache, 0, TEXT[before:position])
        keep(cache, 0, position)
    kept = [n for n in range(131) if cache.usable(0, [*TEXT[:n], 1, 1]) == n]
    assert kept == [0, 50, 90, 130]


def test_what_is_not_used_goes_in_time() -> None:
    cache = cache_of()
    run(cache, 0, TEXT[:200])
    keep(cache, 0, 200)
    run(cache, 0, [1])
    run(cache, 1, TEXT[:5])
    for position in range(5, 200, 10):
        run(cache, 1, TEXT[position : position + 10])
        keep(cache, 1, position + 10)
    assert cache.usable(0, TEXT[:300]) == 0
    assert cache.usable(1, TEXT[:300]) == 205


def test_room_that_is_reserved_is_not_given_twice() -> None:
    cache = cache_of()
    assert all(cache.reserve(0, SIZE) for _ in range(3))
    assert not cache.reserve(0, SIZE)
    cache.release(SIZE)
    assert cache.reserve(1, SIZE)
    assert not cache_of(config=EngineConfig(checkpoint_bytes=SIZE - 1)).reserve(0, SIZE)


def test_a_checkpoint_that_would_save_little_is_not_wanted() -> None:
    cache = cache_of()
    run(cache, 0, TEXT[:3])
    assert not cache.wants(0)
    run(cache, 0, TEXT[3:4])
    assert cache.wants(0)
    keep(cache, 0, 4)
    assert not cache.wants(0)


# -- the pieces of a prompt


def plan(tokens: Sequence[int], start: int = 0) -> list[tuple[int, bool]]:
    return [(piece.end, piece.keeps) for piece in plan_prefill(tokens, start, {END}, 16, CONFIG)]


def test_a_prompt_without_turns_runs_in_chunks_and_is_kept_before_its_last_token() -> None:
    assert plan(TEXT[:20]) == [(16, False), (19, True), (20, False)]
    assert plan(TEXT[:17]) == [(16, True), (17, False)]
    assert plan(TEXT[:4]) == [(4, False)]
    assert plan(TEXT[:20], 10) == [(19, True), (20, False)]
    assert plan_prefill(TEXT[:1], 0, (), 512, EngineConfig()) == [Piece(1, False)]


def test_first_and_last_turn_end_are_kept() -> None:
    tokens = TEXT[:100]
    tokens[9] = tokens[49] = tokens[89] = END
    pieces = [
        (10, True),
        (26, False),
        (42, False),
        (58, True),
        (74, False),
        (90, True),
        (99, True),
        (100, False),
    ]
    assert plan(tokens) == pieces
    assert plan(tokens, 58) == pieces[4:]


def test_only_the_first_turn_end_of_all_is_where_a_system_prompt_ends() -> None:
    tokens = TEXT[:100]
    tokens[9] = tokens[49] = tokens[89] = END
    assert (50, True) not in plan(tokens, 40)


def test_turn_ends_close_behind_another_checkpoint_are_not_kept() -> None:
    tokens = TEXT[:20]
    tokens[2] = tokens[10] = tokens[13] = END
    assert plan(tokens) == [(14, True), (19, True), (20, False)]
    assert plan(tokens[:17]) == [(14, True), (17, False)]
    assert plan(tokens, 12) == [(19, True), (20, False)]
    tokens[19] = END
    assert plan(tokens, 12) == [(19, True), (20, False)]


def test_a_long_prompt_is_kept_now_and_then() -> None:
    kept = [end for end, keeps in plan(TEXT[:150]) if keeps]
    assert kept == [48, 96, 144, 149]
    kept = [end for end, keeps in plan(TEXT[:1000]) if keeps]
    assert kept == [256, 512, 768, 999], "no more than a few, however long it is"


@pytest.mark.parametrize("seed", range(20))
def test_pieces_cover_the_prompt(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = [int(token) for token in rng.integers(0, 30, rng.integers(1, 300))]
    start = int(rng.integers(0, len(tokens)))
    ends = [start, *(end for end, _ in plan(tokens, start))]
    steps = np.diff(ends)
    assert ends[-1] == len(tokens)
    assert ((steps > 0) & (steps <= 16)).all()
    kept = np.diff([start, *(end for end, keeps in plan(tokens, start) if keeps)])
    assert (kept >= CONFIG.min_checkpoint_tokens).all()
