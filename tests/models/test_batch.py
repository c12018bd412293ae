"""A pass over several slots: every row bit-equal to its part alone, whoever else is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from swarmnode.compute.graph import Graph, GraphBuilder, Workspace
from swarmnode.errors import ContextFullError, DeviceError, UsageError
from swarmnode.models.backbone import Backbone
from swarmnode.models.base import ExpertCall, F32Array, Part, run_pass
from swarmnode.testing.tiny_gguf import TinyModel

from .kit import SMALL, LocalModel, open_tiny, random_tokens

N_SLOTS = 8


class Twins:
    """The same model twice: one runs batches, the other each part alone. They must agree bit by bit."""

    def __init__(self, batched: LocalModel, alone: LocalModel) -> None:
        self.batched = batched
        self.alone = alone
        self.calls: list[ExpertCall] = []

    def step(self, *parts: tuple[int, Sequence[int], int]) -> list[F32Array]:
        """Run the parts together and one by one, and compare."""
        logits = self.run(*parts)
        for (slot, tokens, n_out), ours in zip(parts, logits, strict=True):
            theirs = self.alone.run(tokens, slot, all_logits=n_out == len(tokens))
            assert ours.shape == (n_out, self.alone.model.n_vocab)
            assert ours.dtype == np.float32
            np.testing.assert_array_equal(ours, theirs[:n_out], f"slot {slot}")
            assert self.batched.model.n_past(slot) == self.alone.model.n_past(slot)
        return logits

    def run(self, *parts: tuple[int, Sequence[int], int]) -> list[F32Array]:
        """Run the parts together."""
        self.calls.clear()
        return run_pass(self.batched.model.forward_batch([Part(*part) for part in parts]), self._experts)

    def _experts(self, call: ExpertCall) -> F32Array:
        self.calls.append(call)
        return self.batched.experts(call)


@contextmanager
def open_twins(
    folder: Path, tiny: TinyModel = SMALL, *, own_memory: bool = False, n_ubatch: int = 64
) -> Iterator[Twins]:
    with (
        open_tiny(folder, tiny, n_slots=N_SLOTS, own_memory=own_memory, n_ubatch=n_ubatch) as batched,
        open_tiny(folder, tiny, n_slots=N_SLOTS, own_memory=own_memory) as alone,
    ):
        yield Twins(batched, alone)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batch")


@pytest.fixture
def twins(folder: Path) -> Iterator[Twins]:
    with open_twins(folder) as opened:
        yield opened


def random_steps(n_steps: int, seed: int, n_vocab: int) -> Iterator[list[tuple[int, list[int], int]]]:
    """Steps of 2 to N_SLOTS parts in any order: single tokens mostly, now and then a chunk."""
    rng = np.random.default_rng(seed)
    for _ in range(n_steps):
        slots = rng.permutation(N_SLOTS)[: rng.integers(2, N_SLOTS + 1)]
        parts = []
        for slot in slots.tolist():
            n = int(rng.integers(2, 9)) if rng.random() < 0.15 else 1
            tokens = [int(token) for token in rng.integers(0, n_vocab, n)]
            parts.append((slot, tokens, int(rng.choice([0, 1, 1, n]))))
        yield parts


# -- bit-equality


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_single_tokens_are_bit_equal_to_each_alone(twins: Twins, n: int) -> None:
    for step in range(4):
        twins.step(*[(slot, [10 * step + slot], 1) for slot in range(n)])


@pytest.mark.parametrize("own_memory", [False, True], ids=["host", "own memory"])
def test_who_is_there_may_change_from_step_to_step(folder: Path, own_memory: bool) -> None:
    with open_twins(folder, own_memory=own_memory) as twins:
        for parts in random_steps(25, 1, SMALL.n_vocab):
            twins.step(*parts)


VARIANTS = {
    "fused qkv": replace(SMALL, fused_qkv=True),
    "tied embeddings": replace(SMALL, tied_embeddings=True),
    "other heads": replace(
        SMALL, n_head=6, n_head_kv=3, head_dim=48, n_k_heads=3, n_v_heads=9, state_size=16
    ),
    "one head of each": replace(SMALL, n_head=1, n_head_kv=1, n_k_heads=1, n_v_heads=1),
    "attention only": replace(SMALL, full_attention_interval=1, n_layer=2),
    "recurrent only": replace(SMALL, full_attention_interval=9, n_layer=2),
}
VARIANTS |= {
    kind: replace(SMALL, n_embd=256, dense_type=kind, embd_type=kind, up_type=kind, n_ff_shared=256)
    for kind in ("Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q4_0", "F16", "BF16")
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_and_kind_of_weight_is_bit_equal(folder: Path, variant: str) -> None:
    with open_twins(folder, VARIANTS[variant]) as twins:
        for parts in random_steps(8, 2, SMALL.n_vocab):
            twins.step(*parts)


def test_a_prompt_in_chunks_goes_with_single_tokens(twins: Twins) -> None:
    prompt = random_tokens(150, SMALL.n_vocab)
    twins.step((5, prompt[:3], 1), (2, prompt[:4], 4))
    for start in range(0, 150, 50):
        chunk = prompt[start : start + 50]
        twins.step((5, [start], 1), (0, chunk, int(start == 100)), (2, [1], 1), (7, [start + 1], 1))
    twins.step((0, prompt[:60], 1))


def test_each_slot_looks_at_as_many_cells_as_alone(twins: Twins) -> None:
    for slot, n in ((0, 254), (1, 3), (2, 509), (3, 1)):
        for model in (twins.alone, twins.batched):
            model.run(random_tokens(n, SMALL.n_vocab, slot), slot)
    for token in range(3):
        twins.step(*[(slot, [token], 1) for slot in range(4)])


def test_passes_of_one_slot_may_go_between(twins: Twins) -> None:
    parts = [Part(slot, [slot], 1) for slot in range(3)]
    steps = twins.batched.model.forward_batch(parts)
    call = next(steps)
    for layer in range(SMALL.n_layer - 1):
        single = twins.batched.run([layer, 7], 5)
        np.testing.assert_array_equal(single, twins.alone.run([layer, 7], 5))
        call = steps.send(twins.batched.experts(call))
    with pytest.raises(StopIteration) as end:
        steps.send(twins.batched.experts(call))
    for part, ours in zip(parts, end.value.value, strict=True):
        np.testing.assert_array_equal(ours, twins.alone.run(part.tokens, part.slot))


@pytest.mark.parametrize("together", [False, True])
def test_going_back_between_steps(twins: Twins, together: bool) -> None:
    twins.step((0, [1, 2, 3], 1), (1, [4], 1))
    kept = [model.model.checkpoint(0) for model in (twins.batched, twins.alone)]
    twins.step((0, [5], 1), (1, [5], 1), (2, [6], 1))
    for model, checkpoint in zip((twins.batched, twins.alone), kept, strict=True):
        model.model.restore(0, checkpoint)
        model.model.reset(1)
    twins.step((2, [8], 1), (1, [7], 1), (0, [5, 6] if together else [5], 1))
    twins.step((0, [9], 1), (1, [9], 1))


# -- the calls, and the logits that are wanted


def test_one_call_a_layer_has_the_rows_of_all_parts_in_order(twins: Twins) -> None:
    parts: list[tuple[int, list[int], int]] = [(3, [1, 2, 3], 1), (1, [4], 1), (6, [5, 6], 2), (0, [7], 0)]
    twins.step(*parts)
    assert [call.layer for call in twins.calls] == list(range(SMALL.n_layer))
    assert [len(call.rows) for call in twins.calls] == [7, 7, 7, 4]
    calls = list(twins.calls)
    row = 0
    for slot, tokens, _ in parts:
        twins.batched.model.reset(slot)
        twins.run((slot, tokens, 1))
        for together, single in zip(calls[:-1], twins.calls, strict=False):
            rows = slice(row, row + len(tokens))
            np.testing.assert_array_equal(together.rows[rows], single.rows)
            np.testing.assert_array_equal(together.ids[rows], single.ids)
            np.testing.assert_array_equal(together.weights[rows], single.weights)
        row += len(tokens)


@pytest.mark.parametrize("n_parts", [1, 3])
def test_without_logits_the_last_experts_are_not_asked_for(twins: Twins, n_parts: int) -> None:
    logits = twins.step(*[(slot, [1, 2, slot], 0) for slot in range(n_parts)])
    assert [rows.shape for rows in logits] == n_parts * [(0, SMALL.n_vocab)]
    assert [call.layer for call in twins.calls] == list(range(SMALL.n_layer - 1))
    twins.step(*[(slot, [5], 1) for slot in range(3)])


def test_one_part_may_be_longer_than_a_batch(twins: Twins) -> None:
    tokens = random_tokens(100, SMALL.n_vocab)
    with open_tiny(twins.batched.index.paths[0].parent, n_slots=1, n_ubatch=64) as chunked:
        expected = chunked.run(tokens, all_logits=True)
    np.testing.assert_array_equal(twins.run((4, tokens, 100))[0], expected)


def test_layers_are_cut_though_their_experts_are_here(twins: Twins) -> None:
    parts = [Part(slot, [slot], 1) for slot in range(2)]
    bank = twins.batched.bank
    steps = twins.batched.model.forward_batch(
        parts,
        stacked=lambda layer: bank.stacked(layer, SMALL.n_expert_used),
        chosen=lambda layer, ids: pytest.fail("chosen"),
    )
    logits = run_pass(steps, twins.batched.experts)
    np.testing.assert_array_equal(logits[1], twins.alone.run([1], 1))


# -- what is refused


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([], "no parts"),
        ([(0, [1], 1), (1, [], 0)], "no tokens"),
        ([(0, [1], 1), (1, [SMALL.n_vocab], 1)], "token id"),
        ([(0, [1], 1), (N_SLOTS, [1], 1)], "slot 8 does not exist"),
        ([(0, [1], 1), (0, [1], 1)], "two parts"),
        ([(0, [1], 1), (1, [1, 2, 3], 2)], "logits of 2 of 3"),
        ([(0, [1], -1)], "logits of -1"),
        ([(0, [1] * 40, 1), (1, [1] * 25, 1)], "65 tokens of several slots are more than 64"),
    ],
)
def test_bad_parts_are_refused_and_change_nothing(
    twins: Twins, parts: list[tuple[int, list[int], int]], reason: str
) -> None:
    twins.step((0, [3], 1), (1, [4], 1))
    with pytest.raises(UsageError, match=reason):
        twins.batched.model.forward_batch([Part(*part) for part in parts])
    twins.step((0, [3], 1), (1, [4], 1))


def test_a_full_slot_is_refused_and_the_others_are_unchanged(twins: Twins) -> None:
    twins.step((0, [1], 1), (1, [2], 1))
    for model in (twins.batched, twins.alone):
        model.run([1] * 512, 2)
    with pytest.raises(ContextFullError):
        twins.run((0, [1], 1), (2, [1], 1), (1, [1], 1))
    twins.step((0, [1], 1), (1, [1], 1))


def test_a_callback_is_refused(twins: Twins) -> None:
    twins.batched.model.callback = lambda name, layer, values: None
    with pytest.raises(UsageError, match="callback"):
        twins.run((0, [1], 1), (1, [1], 1))
    twins.batched.model.callback = None
    twins.step((0, [1], 1), (1, [1], 1))


def test_an_unfinished_pass_locks_its_slots_only(twins: Twins) -> None:
    twins.step((0, [1], 1), (1, [1], 1), (2, [1], 1))
    steps = twins.batched.model.forward_batch([Part(0, [1], 1), Part(1, [2], 1)])
    next(steps)
    for parts in ([(0, [1], 1), (2, [1], 1)], [(1, [1], 1)]):
        with pytest.raises(UsageError, match="unfinished"):
            twins.run(*parts)
    steps.close()
    for slot in (0, 1):
        with pytest.raises(UsageError, match="unfinished"):
            twins.run((slot, [1], 1), (2, [1], 1))
    for model in (twins.batched.model, twins.alone.model):
        model.reset(0)
        model.reset(1)
    twins.step((1, [1], 1), (2, [1], 1), (0, [1, 2], 2))


@pytest.mark.parametrize("seed", range(4))
def test_passes_side_by_side(twins: Twins, seed: int) -> None:
    """Three passes of different slots take turns in any order, layer by layer."""
    rng = np.random.default_rng(seed)
    groups = [
        [(0, [1], 1), (1, [2], 1)],
        [(2, [3], 1), (3, [4, 5, 6], 3), (4, [7], 0)],
        [(5, [8], 1), (6, [9], 1)],
    ]
    for _ in range(2):
        found = side_by_side(twins.batched, groups, rng)
        for group, logits in zip(groups, found, strict=True):
            for (slot, tokens, n_out), rows in zip(group, logits, strict=True):
                alone = twins.alone.run(tokens, slot, all_logits=True)
                assert np.array_equal(rows, alone[len(tokens) - n_out :])


def side_by_side(
    local: LocalModel, groups: list[list[tuple[int, list[int], int]]], rng: np.random.Generator
) -> list[list[F32Array]]:
    """Logits of each group, whose passes go on in a random order."""
    passes = [local.model.forward_batch([Part(*part) for part in group]) for group in groups]
    calls = [next(steps) for steps in passes]
    done: dict[int, list[F32Array]] = {}
    while len(done) < len(groups):
        turn = int(rng.choice([number for number in range(len(groups)) if number not in done]))
        try:
            calls[turn] = passes[turn].send(local.experts(calls[turn]))
        except StopIteration as end:
            done[turn] = end.value
    return [done[number] for number in range(len(groups))]


def test_a_slot_that_moved_since_is_seen_when_the_pass_begins(twins: Twins) -> None:
    parts = [Part(0, [1], 1), Part(1, [2], 1)]
    steps, other = (twins.batched.model.forward_batch(parts) for _ in range(2))
    next(other)
    with pytest.raises(UsageError, match="unfinished"):
        next(steps)


@pytest.mark.parametrize(
    "values", [None, np.zeros((1, SMALL.n_embd), np.float32), np.zeros((2, SMALL.n_embd))]
)
def test_routed_output_of_another_shape_is_refused(twins: Twins, values: F32Array) -> None:
    steps = twins.batched.model.forward_batch([Part(0, [1], 1), Part(1, [2], 1)])
    next(steps)
    with pytest.raises(UsageError, match=r"float32\[2, 64\]"):
        steps.send(values)


# -- numbers that are not finite


@pytest.mark.parametrize("layer", range(SMALL.n_layer))
@pytest.mark.parametrize("n_tokens", [1, 5])
def test_damage_poisons_the_slot_that_it_is_in(twins: Twins, layer: int, n_tokens: int) -> None:
    twins.step((1, [1, 2], 1), (0, [3], 1), (2, [1], 1))
    kept = [model.model.checkpoint(slot) for slot in (0, 1) for model in (twins.batched, twins.alone)]

    def experts(call: ExpertCall) -> F32Array:
        rows = twins.batched.experts(call)
        if call.layer == layer:
            rows[-2, 5] = np.nan  # the last row of slot 1
        return rows

    tokens = random_tokens(n_tokens, SMALL.n_vocab)
    steps = twins.batched.model.forward_batch([Part(0, [1], 1), Part(1, tokens, 1), Part(2, [1], 1)])
    with pytest.raises(DeviceError, match=f"not finite in layer {min(layer + 1, SMALL.n_layer - 1)}: "):
        run_pass(steps, experts)
    with pytest.raises(UsageError, match="unfinished"):
        twins.run((0, [1], 1), (3, [1], 1))
    twins.batched.model.restore(0, kept[0])
    with pytest.raises(UsageError, match="cannot go back"):
        twins.batched.model.restore(1, kept[2])
    for slot in (1, 2):
        twins.batched.model.reset(slot)
        twins.alone.model.reset(slot)
    twins.step((1, tokens, 1), (0, [1], 1), (2, [4], 1))


def test_damage_shows_without_logits_too(twins: Twins) -> None:
    def experts(call: ExpertCall) -> F32Array:
        return (
            np.full_like(call.rows, np.nan)
            if call.layer == SMALL.n_layer - 2
            else twins.batched.experts(call)
        )

    steps = twins.batched.model.forward_batch([Part(0, [1], 0), Part(1, [1, 2], 0)])
    with pytest.raises(DeviceError, match="not finite in layer 3"):
        run_pass(steps, experts)


# -- memory


def backbone_of(local: LocalModel) -> Backbone:
    assert isinstance(local.model, Backbone)
    return local.model


def test_who_comes_and_goes_builds_no_graphs(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in (N_SLOTS, 3, 4):
        twins.step(*[(slot, [slot], 1) for slot in range(n)])
    n_layer = SMALL.n_layer
    built: list[GraphBuilder] = []
    build = GraphBuilder.build

    def counted(g: GraphBuilder, workspace: Workspace | None = None) -> Graph:
        built.append(g)
        return build(g, workspace)

    monkeypatch.setattr(GraphBuilder, "build", counted)
    for slots in ([5, 1, 2], [7, 6, 5, 0], [4, 3, 2], [2, 3, 4]):
        built.clear()
        twins.run(*[(slot, [1], 1) for slot in slots])
        assert built == []
    built.clear()
    twins.run(*[(slot, [1], 1) for slot in (0, 2, 4, 6, 7)])
    assert len(built) == 2 * n_layer + 2  # logits, and the bank's


def test_kept_graphs_are_bounded(folder: Path) -> None:
    n_layer = 8
    with open_twins(folder, replace(SMALL, n_layer=n_layer)) as twins:
        graphs = backbone_of(twins.batched)._batch_graphs
        assert graphs is not None
        for parts in random_steps(10, 3, SMALL.n_vocab):
            twins.run(*parts)
        for n in range(2, N_SLOTS + 1):
            twins.run(*[(slot, [1], 1) for slot in range(n)])
        n_dense, n_cores = 2 * n_layer * (N_SLOTS - 1), n_layer * N_SLOTS
        full = graphs.n_bytes
        assert full < n_dense * 40_000 + n_cores * 20_000 + 2_000_000
        for parts in random_steps(10, 4, SMALL.n_vocab):
            twins.run(*parts)
        for slot in range(2, N_SLOTS):
            twins.run((slot, [1], 1), (slot - 1, [1], 1))
        assert graphs.n_bytes <= full * 1.15  # narrow ones (1 row of the last layer) may have come
        monkey = sum(graph.n_bytes for _, graph in graphs._cores.values())
        assert monkey < n_cores * 20_000


def test_a_single_slot_has_no_buffers_for_company(folder: Path) -> None:
    with open_tiny(folder) as single, open_tiny(folder, n_slots=2) as pair:
        company = pair.model.state_bytes - 2 * single.model.state_bytes
        assert 2 * 4 * (5 * SMALL.n_embd + SMALL.n_vocab) < company < 30_000
        with pytest.raises(UsageError, match="slot 1 does not exist"):
            single.model.forward_batch([Part(0, [1], 1), Part(1, [1], 1)])
        logits = run_pass(single.model.forward_batch([Part(0, [1], 1)]), single.experts)
        np.testing.assert_array_equal(logits[0], pair.run([1]))
