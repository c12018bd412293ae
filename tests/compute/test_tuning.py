"""How many threads are taken, on invented times; and that the real trial runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.compute import tuning
from swarmnode.compute.devices import Device, open_device
from swarmnode.compute.governor import ThreadGovernor
from swarmnode.compute.thread import release_compute_thread
from swarmnode.errors import UsageError


@pytest.fixture
def four() -> Iterator[Device]:
    release_compute_thread()
    device = open_device("CPU", n_threads=4)
    yield device
    device.close()
    release_compute_thread()


def speeds(device: Device, seconds: dict[int, float]) -> Callable[[], float]:
    """A clock on which a graph takes as long as is said for the device's number of threads at that time."""
    readings = 0
    total_s = 0.0

    def now() -> float:
        nonlocal readings, total_s
        readings += 1
        if readings % 2 == 0:  # read before and after each graph
            total_s += seconds[device.n_threads]
        return total_s

    return now


def test_all_and_fractions_are_tried() -> None:
    assert tuning.candidates(1) == [1]
    assert tuning.candidates(2) == [2, 1]
    assert tuning.candidates(8) == [8, 6, 4, 2, 1]
    assert tuning.candidates(64) == [64, 48, 32, 16, 8, 2, 1]


@given(st.dictionaries(st.integers(1, 64), st.floats(1e-6, 1.0), min_size=1))
def test_what_is_chosen_is_hardly_slower_than_the_fastest(times_s: dict[int, float]) -> None:
    chosen = tuning.choose(times_s)
    assert times_s[chosen] <= min(times_s.values()) / 0.95


def test_fewer_threads_have_to_be_clearly_faster() -> None:
    assert tuning.choose({8: 1.0, 4: 0.97, 2: 2.0}) == 8
    assert tuning.choose({8: 1.0, 4: 0.6, 2: 0.59, 1: 1.1}) == 4


def test_the_number_that_is_fastest_is_taken_and_kept(
    four: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {4: 0.009, 3: 0.008, 2: 0.003, 1: 0.004}
    measure = tuning.measure
    monkeypatch.setattr(ThreadGovernor, "contended", False)
    monkeypatch.setattr(tuning, "measure", lambda device: measure(device, speeds(device, seconds)))
    found = tuning.tune_threads(four, tmp_path / "tuning")
    assert found is not None
    assert found.n_threads == four.n_threads == 2
    assert found.times_s == pytest.approx(seconds)

    def never(device: Device) -> tuning.Threads:
        raise AssertionError("measured again")

    monkeypatch.setattr(tuning, "measure", never)
    four.limit_threads(4)
    again = tuning.tune_threads(four, tmp_path / "tuning")
    assert again is not None
    assert again.n_threads == four.n_threads == 2


def test_nothing_is_learned_while_others_have_the_cores(
    four: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ThreadGovernor, "contended", True)
    assert tuning.tune_threads(four, tmp_path / "tuning") is None
    assert four.n_threads == 4
    assert not (tmp_path / "tuning").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[" * 4000,
        b"{}",
        b'{"times_s": []}',
        b'{"times_s": {"1": "x"}}',
        b'{"times_s": {"4": 1, "3": 1, "2": 1}}',
        b'{"times_s": {"4": 1, "3": 1, "2": 1, "1": 0}}',
        b'{"times_s": {"4": 1, "3": 1, "2": NaN, "1": 1}}',
        b'{"times_s": {"400": 1, "3": 1, "2": 1, "1": 1}}',
        b"\xff" * 5000,
    ],
)
def test_what_makes_no_sense_is_measured_anew(
    four: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    good = tuning.Threads(2, {4: 1.0, 3: 1.0, 2: 0.5, 1: 1.0})
    monkeypatch.setattr(tuning, "measure", lambda device: good)
    tuning.tune_threads(four, tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(content)
    four.limit_threads(4)
    assert tuning.tune_threads(four, tmp_path) == good
    assert len(json.loads(path.read_bytes())["times_s"]) == 4


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(
    four: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tuning, "measure", lambda device: tuning.Threads(2, {4: 1.0, 3: 1.0, 2: 0.5, 1: 1.0}))
    (tmp_path / "tuning").write_text("a file")
    assert tuning.tune_threads(four, tmp_path / "tuning") is not None
    assert "cannot be written" in caplog.text


def test_the_trial_runs_on_this_machine() -> None:
    release_compute_thread()
    device = open_device("CPU", n_threads=2)
    found = tuning.measure(device)
    assert found is None or set(found.times_s) == {2, 1}  # None: other tests have the cores
    assert device.n_threads == 2
    device.close()
    release_compute_thread()


def test_one_thread_leaves_nothing_to_choose(tmp_path: Path) -> None:
    release_compute_thread()
    device = open_device("CPU", n_threads=1)
    assert tuning.tune_threads(device, tmp_path) is None
    assert not list(tmp_path.iterdir())
    device.close()
    release_compute_thread()


def test_the_pool_bounds_the_limit(four: Device) -> None:
    for wrong in (0, -1, 5):
        with pytest.raises(UsageError, match="1 to 4"):
            four.limit_threads(wrong)
    assert four.n_threads == 4
