"""The number a node's records begin with: never the same twice, whatever becomes of its file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from swarmnode.errors import StoreError
from swarmnode.gossip.records import MAX_INCARNATION
from swarmnode.services.incarnation import next_incarnation, store_incarnation

WALL_S = 1_700_000_000.5
BY_CLOCK = 1_700_000_000_500


def test_the_first_one_is_by_the_clock_and_each_further_one_is_higher(tmp_path: Path) -> None:
    path = tmp_path / "data" / "incarnation"
    taken = [next_incarnation(path, WALL_S) for _ in range(5)]
    assert taken == [BY_CLOCK + i for i in range(5)]
    assert next_incarnation(path, WALL_S + 10) == BY_CLOCK + 10_000


@pytest.mark.parametrize("wall_s", [0.0, -5.0, WALL_S - 1e6])
def test_a_clock_that_went_back_repeats_nothing(tmp_path: Path, wall_s: float) -> None:
    path = tmp_path / "incarnation"
    assert next_incarnation(path, WALL_S) == BY_CLOCK
    assert next_incarnation(path, wall_s) == BY_CLOCK + 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"-5",
        b"1.5",
        b"many",
        b"\xff\xfe\x00",
        b"\xc2\xb2",
        b"9" * 31,
        b"1 2",
        str(MAX_INCARNATION).encode(),
        b"9" * 10_000_000,
    ],
    ids=lambda content: repr(content[:12]),
)
def test_a_file_that_makes_no_sense_counts_as_lost(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "incarnation"
    path.write_bytes(content)
    assert next_incarnation(path, WALL_S) == BY_CLOCK
    assert next_incarnation(path, WALL_S) == BY_CLOCK + 1


def test_a_lost_file_counts_by_the_clock(tmp_path: Path) -> None:
    path = tmp_path / "incarnation"
    next_incarnation(path, WALL_S)
    path.unlink()
    assert next_incarnation(path, WALL_S + 1) > BY_CLOCK


@pytest.mark.parametrize("stored", [MAX_INCARNATION - 1, MAX_INCARNATION // 2 + 5])
def test_it_never_passes_the_highest(tmp_path: Path, stored: int) -> None:
    path = tmp_path / "incarnation"
    store_incarnation(path, stored)
    assert next_incarnation(path, 1e30) == stored + 1 <= MAX_INCARNATION


def test_it_is_on_disk_before_it_is_used(tmp_path: Path) -> None:
    path = tmp_path / "incarnation"
    taken = next_incarnation(path, WALL_S)
    assert path.read_text() == f"{taken}\n"


def test_what_cannot_be_written_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "data").touch()
    with pytest.raises(StoreError, match="--home DIR"):
        next_incarnation(tmp_path / "data" / "incarnation", WALL_S)


def test_a_write_that_fails_leaves_the_old_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "incarnation"
    store_incarnation(path, 7)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="No space left"):
        store_incarnation(path, 8)
    assert path.read_text() == "7\n"
