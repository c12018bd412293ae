"""How a worker moves in: what a peer does wrong ends that peer's session, what this machine lacks ends the command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import trio

from swarmnode.compute.bank import ExpertBank
from swarmnode.compute.devices import Device
from swarmnode.compute.layout import ExpertTensor, LayerLayout
from swarmnode.errors import BudgetError, DeviceError, StoreError
from swarmnode.identity import NodeKey
from swarmnode.net.address import PeerAddress
from swarmnode.services import bank_tester
from swarmnode.services.bank_tester import widest_batch, widest_graph
from swarmnode.testing.memory_net import MemoryNetwork
from swarmnode.testing.tiny_gguf import write_tiny_gguf
from swarmnode.weights.ggml_types import GGML_TYPES
from swarmnode.weights.hashing import build_manifest
from swarmnode.weights.index import ModelIndex
from swarmnode.weights.manifest import LayerManifest, Manifest
from swarmnode.wire import messages
from swarmnode.wire.messages import Message, Ranges3
from tests.services.conftest import EXPERT_BYTES, MODEL
from tests.services.source import CONFIG, Source, dial_worker, joined, start_source

BUDGET = 8 * EXPERT_BYTES


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.gguf"))


# ---- offers


BAD_OFFERS: dict[str, Ranges3] = {
    "the same range twice": ((0, 0, 2), (0, 0, 2)),
    "overlapping": ((0, 0, 3), (1, 0, 1), (0, 2, 2)),
    "one within another": ((0, 0, 4), (0, 1, 1)),
    "a layer that is not there": ((2, 0, 1),),
    "an expert that is not there": ((0, 7, 2),),
    "no end": ((0, 0, 65_535),) * 512,
    "more than the budget": ((0, 0, 8), (1, 0, 1)),
    "nothing": (),
}


@pytest.mark.parametrize("case", BAD_OFFERS)
async def test_a_bad_offer_ends_that_session_and_a_good_one_is_taken(
    case: str, source: Source, device: Device, tmp_path: Path
) -> None:
    good, source.offer = source.offer, BAD_OFFERS[case]
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        address = await start_source(nursery, network, source, 1)
        async with joined(network, [address], tmp_path, device, BUDGET) as worker:
            await worker.until_waiting()
            assert "offered" in worker.waits[0]
            assert source.asked[messages.SliceGet] == 0
            source.offer = good
            await worker.until_serving(source)
        nursery.cancel_scope.cancel()
    assert source.announced[0].holdings == good


async def test_long_ranges_are_taken_and_committed_in_pieces(
    source: Source, device: Device, tmp_path: Path
) -> None:
    """commit_experts is 2 here: a crash loses little."""
    source.offer = ((0, 1, 5), (1, 7, 1))
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        address = await start_source(nursery, network, source, 1)
        async with joined(network, [address], tmp_path, device, BUDGET) as worker:
            await worker.until_serving(source)
            assert files(tmp_path) == [
                "layer-0-experts-1-to-2.gguf",
                "layer-0-experts-3-to-4.gguf",
                "layer-0-experts-5-to-5.gguf",
                "layer-1-experts-7-to-7.gguf",
            ]
        nursery.cancel_scope.cancel()
    assert source.announced[0].holdings == source.offer
    assert worker.fetched[-1].done_bytes == worker.fetched[-1].total_bytes == 6 * EXPERT_BYTES


async def test_a_restart_keeps_slices_and_tells_them_merged(
    source: Source, device: Device, tmp_path: Path
) -> None:
    source.offer = ((0, 0, 5),)
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        address = await start_source(nursery, network, source, 1)
        async with joined(network, [address], tmp_path, device, 5 * EXPERT_BYTES) as worker:
            await worker.until_serving(source)
        n_slices = source.asked[messages.SliceGet]
        source.announced.clear()
        async with joined(network, [address], tmp_path, device, 5 * EXPERT_BYTES) as worker:
            await worker.until_serving(source)
        nursery.cancel_scope.cancel()
    assert source.asked[messages.SliceGet] == n_slices
    assert source.volunteers[-1].held == source.announced[0].holdings == ((0, 0, 5),)
    assert (worker.planned[0].kept_experts, worker.planned[0].new_experts) == (5, 0)


async def test_a_fetch_that_breaks_off_keeps_what_was_committed(
    source: Source, device: Device, tmp_path: Path
) -> None:
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        address = await start_source(nursery, network, source, 1)
        async with joined(network, [address], tmp_path, device, BUDGET) as worker:
            with trio.fail_after(60):
                while not files(tmp_path):
                    await trio.lowlevel.checkpoint()
            network.break_all("worker")
            await worker.until_serving(source)
        nursery.cancel_scope.cancel()
    assert source.volunteers[1].held == source.announced[0].holdings == ((0, 0, 2),)


# ---- peers that do not answer


@pytest.mark.parametrize(
    "request_type",
    [messages.ModelsGet, messages.ManifestGet, messages.Volunteer, messages.SliceGet, messages.Announce],
)
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


async def test_a_session_that_waits_takes_over_when_the_first_one_breaks(
    source: Source, index: ModelIndex, device: Device, tmp_path: Path
) -> None:
    source.silent.add(messages.SliceGet)
    other = Source(index, source.manifest)
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        first = await start_source(nursery, network, source, 1)
        second = await start_source(nursery, network, other, 2)
        async with joined(network, [first], tmp_path, device, BUDGET, listen=("worker", 5)) as worker:
            while not source.asked[messages.SliceGet]:  # noqa: ASYNC110 - nothing to wake us
                await trio.sleep(0.01)
            address = PeerAddress(NodeKey.from_seed(bytes([99]) * 32).node_id, "worker", 5)
            await dial_worker(nursery, network, address, other)
            await trio.sleep(5)
            assert other.asked[messages.ManifestGet] == 1
            assert other.asked[messages.Volunteer] == 0, "one moves in at a time"
            network.break_all("source1")
            started_s = trio.current_time()
            await worker.until_serving(other)
            assert trio.current_time() - started_s < 1
        nursery.cancel_scope.cancel()
    assert second.port == 1


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
            assert source.asked[messages.Volunteer] == 0
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
                assert "is right with other weights" in worker.waits[0]
                assert worker.waits[2] == worker.waits[0]
                assert broken.asked[messages.Volunteer] == 1, "not fetched again and again"
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
                    address = PeerAddress(NodeKey.from_seed(bytes([99]) * 32).node_id, "worker", 5)
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


async def test_memory_is_freed_when_moving_in_fails_and_at_the_end(
    source: Source, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs and weights are closed while the device is open, also when the worker is cancelled meanwhile."""
    closed: list[tuple[int, bool]] = []
    close = ExpertBank.close

    def watched(self: ExpertBank) -> None:
        if self.used_bytes:
            closed.append((self.used_bytes, self.device.closed))
        close(self)
        assert self.used_bytes == 0

    monkeypatch.setattr(ExpertBank, "close", watched)
    network = MemoryNetwork()
    source.silent.add(messages.SliceGet)
    async with trio.open_nursery() as nursery:
        address = await start_source(nursery, network, source, 1)
        async with joined(network, [address], tmp_path, device, BUDGET) as worker:
            await worker.until_waiting()
            assert closed == [(4 * EXPERT_BYTES, False)]
            source.silent.clear()
            await worker.until_serving(source)
        assert closed == [(4 * EXPERT_BYTES, False)] * 2
        source.silent.add(messages.SliceGet)
        async with joined(network, [address], tmp_path / "other", device, BUDGET) as worker:
            await trio.sleep(5)
        assert closed == [(4 * EXPERT_BYTES, False)] * 3
        nursery.cancel_scope.cancel()


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
