"""Files that a node keeps: whatever stands in their place, nobody waits for it or reads it without end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest

from swarmnode.compute import library_store
from swarmnode.config import AddressBookConfig, BootstrapConfig
from swarmnode.errors import StoreError
from swarmnode.identity import NodeKey
from swarmnode.net import remote_list
from swarmnode.node import listening
from swarmnode.services import incarnation
from swarmnode.services.address_book import load_book
from swarmnode.services.node_token import load_or_create_token
from swarmnode.state_file import read_private, read_small, replace_small
from swarmnode.weights import hashing

posix = pytest.mark.skipif(os.name != "posix", reason="Windows has neither pipes nor devices among its files")


def pipe(path: Path) -> None:
    os.mkfifo(path, 0o600)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir(mode=0o700)


@pytest.fixture
def alarmed() -> Iterator[None]:
    """A test that waits fails after some seconds; main thread only, as pytest's is."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def no_peers(path: Path) -> object:
    return load_book(path, AddressBookConfig()).to_dial()


def refused_key(path: Path) -> object:
    with pytest.raises(StoreError, match=r"cannot read the node key .*not a regular file"):
        NodeKey.load_or_create(path)
    return None


def refused_token(path: Path) -> object:
    with pytest.raises(StoreError, match=r"cannot read the token .*not a regular file"):
        load_or_create_token(path)
    return None


def no_copy(path: Path) -> object:
    """A list whose last good copy is to be used because it cannot be fetched."""
    name = remote_list._copy_path("dns:x", path.parent)
    name.parent.mkdir()
    path.rename(name)

    def fails(source: str, config: BootstrapConfig) -> str:
        raise OSError("offline")

    (found,) = remote_list.fetch_lists(("dns:x",), path.parent, BootstrapConfig(), fails)
    return found.peers


@posix
@pytest.mark.usefixtures("alarmed")
@pytest.mark.parametrize("make", [pipe, device, folder])
@pytest.mark.parametrize(
    ("read", "found"),
    [
        (listening._read, None),
        (incarnation._stored, 0),
        (library_store._read, None),
        (hashing._load, None),
        (no_peers, ()),
        (no_copy, ()),
        (refused_key, None),
        (refused_token, None),
    ],
)
def test_what_is_no_file_is_not_waited_for(
    tmp_path: Path, make: Callable[[Path], None], read: Callable[[Path], object], found: object
) -> None:
    path = tmp_path / "kept"
    make(path)
    assert read(path) == found


@posix
@pytest.mark.usefixtures("alarmed")
@pytest.mark.parametrize("make", [pipe, device])
def test_it_is_replaced_and_not_written_to(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "kept"
    make(path)
    listening._write(path, 4790)
    assert listening._read(path) == 4790
    assert path.is_file()
    assert not path.is_symlink()
    path.unlink()
    make(path)
    assert incarnation.next_incarnation(path, 7.0) == 7000
    assert incarnation.next_incarnation(path, 0.0) == 7001
    assert list(tmp_path.iterdir()) == [path]


def test_no_more_is_read_than_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    replace_small(path, b"12345")
    assert read_small(path, 5) == b"12345"
    with pytest.raises(OSError, match="over 4 bytes"):
        read_small(path, 4)


@posix
def test_it_says_who_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "kept"
    replace_small(path, b"12345", sync=False)
    assert read_private(path, 5) == (b"12345", True)
    path.chmod(0o640)
    assert read_private(path, 4) == (b"1234", False)


def test_a_write_that_fails_leaves_the_old_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kept"
    replace_small(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_small(path, b"new")
    assert list(tmp_path.iterdir()) == [path]
    assert read_small(path, 9) == b"old"
