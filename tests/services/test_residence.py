"""How a worker moves in: what a peer does wrong ends that peer's session, what this machine lacks ends the command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import trio

from swarmnode.compute import slot_pool
from swarmnode.compute.bank import ExpertBank
from swarmnode.compute.devices import Device
from swarmnode.compute.layout import ExpertTensor, LayerLayout
from swarmnode.errors import BudgetError, DeviceError, StoreError
from swarmnode.net.address import PeerAddress
from swarmnode.services import bank_tester
from swarmnode.services.bank_tester import widest_batch, widest_graph
from swarmnode.services.residence import Residence, ResidenceBuilder
from swarmnode.services.runners import Inline
from swarmnode.testing.memory_net import MemoryNetwork
from swarmnode.testing.tiny_gguf import write_tiny_gguf
from swarmnode.weights.ggml_types import GGML_TYPES
from swarmnode.weights.hashing import build_manifest
from swarmnode.weights.index import ModelIndex
from swarmnode.weights.manifest import LayerManifest, Manifest
from swarmnode.weights.slices import ExpertRange
from swarmnode.wire import messages
from swarmnode.wire.messages import Message
from tests.services.conftest import EXPERT_BYTES, MODEL
from tests.services.source import CONFIG, KEY, Source, dial_worker, joined, start_source

BUDGET = 8 * EXPERT_BYTES


def stored_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.gguf"))


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.gguf"))


# ---- what is on disk


async def test_ranges_are_committed_in_pieces(source: Source, device: Device, tmp_path: Path) -> None:
    """commit_experts is 2 here: a crash loses little."""
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        address = await start_source(nursery, network, source, 1)
        async with joined(network, [address], tmp_path, device, 6 * EXPERT_BYTES) as worker:
            await worker.until_serving(source)
            assert len(files(tmp_path)) == 3
        nursery.cancel_scope.cancel()
    assert source.n_announced == 6
    assert worker.fetched[-1].done_bytes == worker.fetched[-1].total_bytes == 6 * EXPERT_BYTES


async def test_a_restart_keeps_slices_and_tells_them_merged(
    source: Source, device: Device, tmp_path: Path
) -> None:
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        address = await start_source(nursery, network, source, 1)
        async with joined(network, [address], tmp_path, device, BUDGET) as worker:
            await worker.until_serving(source)
        before = source.announced[-1].holdings
        n_slices = source.asked[messages.SliceGet]
        source.announced.clear()
        async with joined(network, [address], tmp_path, device, BUDGET) as worker:
            await worker.until_serving(source)
            await trio.sleep(60)
        nursery.cancel_scope.cancel()
    assert source.asked[messages.SliceGet] == n_slices
    assert source.announced[-1].holdings == before
    assert len(before) <= 2, "merged"
    assert worker.settled[0].n_experts == 8
    assert worker.fetched == []


@pytest.mark.parametrize("budget", [3, 1])
async def test_a_smaller_budget_deletes_what_no_longer_fits(
    budget: int, source: Source, device: Device, tmp_path: Path
) -> None:
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        address = await start_source(nursery, network, source, 1)
        for n_experts in (8, budget):
            async with joined(network, [address], tmp_path, device, n_experts * EXPERT_BYTES) as worker:
                await worker.until_serving(source)
        nursery.cancel_scope.cancel()
    assert source.n_announced == budget
    stored = stored_bytes(tmp_path)
    assert budget * EXPERT_BYTES <= stored < (budget + 1) * EXPERT_BYTES


# ---- peers that do not answer


@pytest.mark.parametrize("request_type", [messages.ModelsGet, messages.ManifestGet, messages.Announce])
async def test_a_backbone_that_only_answers_pings_is_left_for_another(
    request_type: type[Message], source: Source, index: ModelIndex, device: Device, tmp_path: Path
) -> None:
    """Its connection is alive; the other backbone is served within the deadline of one request."""
    source.silent.add(request_type)
    other = Source(index, source.manifest)
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        first = await start_source(nursery, network, source, 1)
        started_s = trio.current_time()
        async with joined(network, [first], tmp_path, device, BUDGET) as worker:
            await worker.until_waiting()
            assert f"did not answer {request_type.__name__}" in worker.waits[0]
            assert trio.current_time() - started_s < 60
        second = await start_source(nursery, network, other, 2)
        started_s = trio.current_time()
        async with joined(network, [first, second], tmp_path, device, BUDGET) as worker:
            await worker.until_serving(other)
            assert trio.current_time() - started_s < 60
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("fault", ["silent", "refusing"])
async def test_slices_that_a_backbone_does_not_give_come_from_another(
    fault: str, source: Source, index: ModelIndex, device: Device, tmp_path: Path
) -> None:
    """Rows are computed for both all the same."""
    (source.silent if fault == "silent" else source.refusing).add(messages.SliceGet)
    other = Source(index, source.manifest)
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        first = await start_source(nursery, network, source, 1)
        second = await start_source(nursery, network, other, 2)
        async with joined(network, [first, second], tmp_path, device, BUDGET) as worker:
            await worker.until_serving(source, 120)
            await worker.until_serving(other, 1)
        nursery.cancel_scope.cancel()
    assert source.n_announced == other.n_announced == 8
    assert other.asked[messages.SliceGet] >= BUDGET // CONFIG.store.block_bytes


async def test_a_session_that_waits_takes_over_when_the_first_one_breaks(
    source: Source, index: ModelIndex, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = ResidenceBuilder.build
    n_builds = 0

    async def slow(self: ResidenceBuilder, manifest: Manifest) -> Residence:
        nonlocal n_builds
        n_builds += 1
        if n_builds == 1:
            await trio.sleep_forever()
        return await build(self, manifest)

    monkeypatch.setattr(ResidenceBuilder, "build", slow)
    other = Source(index, source.manifest)
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        first = await start_source(nursery, network, source, 1)
        async with joined(network, [first], tmp_path, device, BUDGET, listen=("worker", 5)) as worker:
            await worker.until(lambda: n_builds == 1)
            await dial_worker(nursery, network, PeerAddress(KEY.node_id, "worker", 5), other)
            await trio.sleep(5)
            assert other.asked[messages.ManifestGet] == 1
            assert n_builds == 1, "one moves in at a time"
            network.break_all("source1")
            started_s = trio.current_time()
            await worker.until(lambda: n_builds == 2)
            assert trio.current_time() - started_s < 1
            await worker.until_serving(other)
        nursery.cancel_scope.cancel()


async def test_the_end_of_one_session_leaves_the_others_alone(
    source: Source, index: ModelIndex, device: Device, tmp_path: Path
) -> None:
    """And loses nothing: when the backbone is met again it is told the same at once."""
    other = Source(index, source.manifest)
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        first = await start_source(nursery, network, source, 1)
        second = await start_source(nursery, network, other, 2)
        async with joined(network, [first, second], tmp_path, device, BUDGET) as worker:
            await worker.until_serving(source)
            await worker.until_serving(other)
            n_slices = sum(node.asked[messages.SliceGet] for node in (source, other))
            last = other.peers[-1]
            n_told = len(source.announced)
            network.break_all("source1")
            await worker.until(lambda: len(source.announced) > n_told, 5)
            await worker.until_serving(source, 1)
            await trio.sleep(60)
            assert other.peers[-1] is last
            assert last.ended is None
        nursery.cancel_scope.cancel()
    assert sum(node.asked[messages.SliceGet] for node in (source, other)) == n_slices


# ---- models that are none for this machine


def with_layers(manifest: Manifest, ggml_type: int, n_ff: int = 256, n_embd: int = 256) -> Manifest:
    """The manifest with experts of another type or shape; nobody has such bytes."""
    kind = GGML_TYPES[ggml_type]

    def tensor(name: str, ne0: int, ne1: int) -> ExpertTensor:
        return ExpertTensor(name, ggml_type, ne0, ne1, ne0 // kind.block_values * kind.block_bytes * ne1)

    layers = {}
    for number, layer in manifest.layers.items():
        tensors = (
            tensor("ffn_gate_exps", n_embd, n_ff),
            tensor("ffn_up_exps", n_embd, n_ff),
            tensor("ffn_down_exps", n_ff, n_embd),
        )
        layers[number] = LayerManifest(
            LayerLayout(number, n_embd, n_ff, layer.layout.n_expert, tensors), layer.hashes
        )
    return replace(manifest, layers=layers, n_embd=n_embd)


async def test_a_type_that_cannot_be_checked_is_refused_before_anything_is_fetched(
    source: Source, index: ModelIndex, device: Device, tmp_path: Path
) -> None:
    """ggml multiplies by Q1_0, but the reference cannot decode it."""
    good = Source(index, source.manifest)
    source.manifest = with_layers(source.manifest, 41)
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        first = await start_source(nursery, network, source, 1)
        second = await start_source(nursery, network, good, 2)
        async with joined(network, [first], tmp_path, device, BUDGET) as worker:
            await worker.until_waiting(3)
            assert "cannot be served here" in worker.waits[0]
            assert worker.waits[0] == worker.waits[2]
            assert source.asked[messages.ManifestGet] == 1, "it is remembered"
            assert source.asked[messages.SliceGet] == 0
        async with joined(network, [first, second], tmp_path, device, BUDGET) as worker:
            await worker.until_serving(good)
        nursery.cancel_scope.cancel()


@contextmanager
def broken_model(folder: Path) -> Iterator[tuple[ModelIndex, Manifest]]:
    """The model with scales that are NaN in all of its experts."""
    path = write_tiny_gguf(folder / "broken.gguf", MODEL)
    with ModelIndex.open(path) as index:
        places = [index.tensors[f"blk.{layer}.ffn_up_exps.weight"] for layer in index.expert_layers]
    content = np.fromfile(path, np.uint8)
    for place in places:
        blocks = content[place.offset : place.offset + place.n_bytes].reshape(-1, 34)
        blocks[:, :2] = np.array([np.nan], np.float16).view(np.uint8)
    content.tofile(path)
    with ModelIndex.open(path) as index:
        yield index, build_manifest(index)


async def test_weights_that_fail_the_self_test_are_the_peers_fault_and_do_not_stay(
    source: Source, device: Device, tmp_path: Path
) -> None:
    network = MemoryNetwork()
    with broken_model(tmp_path) as (index, manifest):
        broken = Source(index, manifest)
        async with trio.open_nursery() as nursery:
            first = await start_source(nursery, network, broken, 1)
            async with joined(network, [first], tmp_path / "home", device, BUDGET) as worker:
                await worker.until_waiting(3)
                assert "none for this machine" in worker.waits[0]
                assert "is right with other weights" in worker.waits[1]
                assert worker.waits[2] == worker.waits[1]
                assert broken.asked[messages.ManifestGet] == 1, "not fetched again and again"
                assert files(tmp_path / "home") == []
                second = await start_source(nursery, network, source, 2)
            async with joined(network, [first, second], tmp_path / "home", device, BUDGET) as worker:
                await worker.until_serving(source)
            nursery.cancel_scope.cancel()


async def test_a_device_that_computes_wrong_ends_the_command(
    source: Source, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(self: ExpertBank, layer: int, rows: np.ndarray, *pairs: np.ndarray) -> np.ndarray:
        return np.ones((pairs[0].size, rows.shape[1]), np.float32)

    monkeypatch.setattr(ExpertBank, "experts", wrong)
    await ends_the_command(source, device, tmp_path, DeviceError, "computes wrong results")


# ---- what is about this machine


async def ends_the_command(
    source: Source,
    device: Device,
    folder: Path,
    error: type[Exception],
    match: str,
    budget_bytes: int = BUDGET,
    accepted: bool = False,
) -> None:
    network = MemoryNetwork()
    with pytest.RaisesGroup(
        pytest.RaisesExc(error, match=match), flatten_subgroups=True, allow_unwrapped=True
    ):
        async with trio.open_nursery() as nursery:
            address = await start_source(nursery, network, source, 1)
            known = [] if accepted else [address]
            listen = ("worker", 5) if accepted else None
            async with joined(network, known, folder, device, budget_bytes, listen=listen):
                if accepted:
                    address = PeerAddress(KEY.node_id, "worker", 5)
                    await dial_worker(nursery, network, address, source)
                await trio.sleep(100)


@pytest.mark.parametrize("accepted", [False, True], ids=["dialled", "accepted"])
async def test_a_cache_folder_that_cannot_be_used_ends_the_command(
    accepted: bool, source: Source, device: Device, tmp_path: Path
) -> None:
    (tmp_path / "cache").touch()
    await ends_the_command(source, device, tmp_path, StoreError, "--home DIR", accepted=accepted)


async def test_a_budget_over_the_memory_ends_the_command(
    source: Source, device: Device, tmp_path: Path
) -> None:
    await ends_the_command(source, device, tmp_path, BudgetError, "smaller --budget", 2**50)


async def test_a_budget_under_one_expert_ends_the_command_of_the_only_backbone(
    source: Source, device: Device, tmp_path: Path
) -> None:
    await ends_the_command(source, device, tmp_path, BudgetError, "larger --budget", EXPERT_BYTES - 1)


async def test_a_model_too_large_is_passed_over_where_there_are_others(
    source: Source, index: ModelIndex, device: Device, tmp_path: Path
) -> None:
    good = Source(index, source.manifest)
    source.manifest = with_layers(source.manifest, 0, n_ff=1024)
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        first = await start_source(nursery, network, source, 1)
        async with joined(network, [first], tmp_path, device, 4 * EXPERT_BYTES, others=True) as worker:
            await worker.until_waiting(2)
            assert "larger --budget" in worker.waits[1]
            second = await start_source(nursery, network, good, 2)
        addresses = [first, second]
        async with joined(network, addresses, tmp_path, device, 4 * EXPERT_BYTES, others=True) as worker:
            await worker.until_serving(good)
        nursery.cancel_scope.cancel()


# ---- memory


async def test_memory_is_freed_at_the_end_whatever_is_going_on(
    source: Source, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs and weights are closed while the device is open, also when the worker is stopped while it fetches."""
    closed: list[tuple[int, bool]] = []
    close = ExpertBank.close

    def watched(self: ExpertBank) -> None:
        if self.used_bytes:
            closed.append((self.used_bytes, self.device.closed))
        close(self)
        assert self.used_bytes == 0

    monkeypatch.setattr(ExpertBank, "close", watched)
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        address = await start_source(nursery, network, source, 1)
        async with joined(network, [address], tmp_path, device, BUDGET) as worker:
            await worker.until_serving(source)
        assert closed == [(BUDGET, False)]
        source.silent.add(messages.SliceGet)
        source.asked.clear()
        async with joined(network, [address], tmp_path / "other", device, BUDGET) as worker:
            await worker.until(lambda: source.asked[messages.SliceGet] > 0)
            residence = worker.parts.service.residence
            assert residence is not None
        assert residence.bank.used_bytes == 0
        nursery.cancel_scope.cancel()


class Zeros:
    """A store in which every slab is zeros."""

    def __init__(self, manifest: Manifest) -> None:
        self._layers = manifest.layers

    def read_slab(self, layer: int, expert: int, kind: str) -> bytes:
        return bytes(next(t.n_bytes for t in self._layers[layer].layout.tensors if t.kind == kind))


def residence_of(manifest: Manifest, device: Device, budget_bytes: int) -> Residence:
    """A residence that is not asked for rows."""
    bank = ExpertBank(device, budget_bytes=budget_bytes)
    store, server = cast(Any, Zeros(manifest)), cast(Any, None)
    tester = cast(Any, SimpleNamespace(loaded=lambda layer, expert: None))
    return Residence(manifest, store, bank, server, budget_bytes, Inline(), Inline(), tester)


@pytest.fixture
def in_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots as on a GPU, where free ones take memory."""
    monkeypatch.setattr(slot_pool, "can_reserve", lambda: False)


async def test_ranges_that_are_loaded_at_once_do_not_count_on_the_same_slots(
    source: Source, device: Device, in_segments: None
) -> None:
    residence = residence_of(source.manifest, device, 20 * EXPERT_BYTES)
    await residence.load(ExpertRange(0, 0, 8))
    async with trio.open_nursery() as nursery:
        for first in (0, 4):
            nursery.start_soon(residence.load, ExpertRange(1, first, 4))
    assert residence.n_experts == 16
    assert residence.held_bytes == residence.bank.used_bytes == 16 * EXPERT_BYTES
    residence.bank.close()


async def test_free_slots_of_another_shape_make_way(
    source: Source, device: Device, in_segments: None
) -> None:
    layers = dict(with_layers(source.manifest, 0).layers)
    layers[1] = with_layers(source.manifest, 0, n_ff=512).layers[1]
    large_bytes = layers[1].layout.expert_bytes
    residence = residence_of(replace(source.manifest, layers=layers), device, 4 * large_bytes)
    for first in range(0, 8, 2):
        await residence.load(ExpertRange(0, first, 2))
    for gone in range(0, 8, 2):  # half of each segment
        residence.bank.remove(0, gone)
    await residence.load(ExpertRange(1, 0, 2))
    assert residence.held_bytes == residence.bank.used_bytes == 4 * large_bytes
    residence.bank.close()


def test_wide_models_get_narrow_batches(source: Source, device: Device) -> None:
    assert widest_batch(source.manifest, CONFIG) == CONFIG.compute.max_rows
    assert widest_graph(source.manifest, device, CONFIG) == CONFIG.compute.worker_cpu_rows
    wide = with_layers(source.manifest, 0, n_ff=32, n_embd=1 << 16)
    work_bytes = widest_batch(wide, CONFIG) * (2 * (1 << 16) + 3 * 32) * 4
    assert 0.9 < work_bytes / CONFIG.serve.max_work_bytes <= 1


def test_every_type_the_reference_knows_passes(source: Source, device: Device) -> None:
    for number, kind in GGML_TYPES.items():
        if kind.is_weight and kind.name != "Q1_0":
            bank_tester.check_computable(with_layers(source.manifest, number), device, CONFIG)
