"""Keys: shown once, kept as hashes, good until they are revoked."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from swarmnode.errors import StoreError, UsageError
from swarmnode.services import api_keys
from swarmnode.services.api_keys import PREFIX, ApiKey, KeyRing, new_key, read_keys, revoke_key
from swarmnode.weights.file_lock import wait_lock


def test_the_file_has_no_key(tmp_path: Path) -> None:
    path = tmp_path / "data" / "keys.json"
    assert read_keys(path) == []
    first, second = new_key(path, "laptop", 5), new_key(path, "phone", 6)
    assert first != second
    assert first.startswith(PREFIX)
    assert len(first) > 50
    text = path.read_text()
    assert first not in text
    assert first[len(PREFIX) + 4 :] not in text
    assert [(key.name, key.created_s) for key in read_keys(path)] == [("laptop", 5), ("phone", 6)]
    if os.name == "posix":
        assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("change", ["new", "revoke"])
def test_of_two_changes_at_once_neither_is_lost(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one begins when the first has read the file, and has not written it yet."""
    path = tmp_path / "keys.json"
    new_key(path, "a")
    write = api_keys._write
    has_read, is_waiting = Event(), Event()

    def written_late(path: Path, keys: list[ApiKey]) -> None:
        if not has_read.is_set():
            has_read.set()
            is_waiting.wait()
        write(path, keys)

    def told_lock(descriptor: int) -> None:
        if has_read.is_set():
            is_waiting.set()
        wait_lock(descriptor)

    def other() -> None:
        has_read.wait()
        try:
            new_key(path, "b") if change == "new" else revoke_key(path, "a")
        finally:
            is_waiting.set()

    monkeypatch.setattr(api_keys, "_write", written_late)
    monkeypatch.setattr("swarmnode.services.api_keys.wait_lock", told_lock)
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(other)
        new_key(path, "c")
        done.result()
    assert [key.name for key in read_keys(path)] == (["a", "c", "b"] if change == "new" else ["c"])


def test_names(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    new_key(path, "a")
    with pytest.raises(UsageError, match="already"):
        new_key(path, "a")
    for name in ("", " a", "a\n", "a" * 65, "ü"):
        with pytest.raises(UsageError, match="no name"):
            new_key(path, name)
    with pytest.raises(UsageError, match="there are: a"):
        revoke_key(path, "b")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"keys": [1]}',
        '{"keys": [{"name": "a"}]}',
        "[" * 100_000,
    ],
    ids=lambda text: text[:40],
)
def test_another_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    with pytest.raises(StoreError, match=r"keys\.json holds no API keys"):
        read_keys(path)
    with pytest.raises(StoreError):
        KeyRing(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "\x1b[31mroot"}, r"'\\x1b\[31mroot' is no name"),
        ({"name": "\ud800"}, "is no name"),
        ({"name": 5}, "5 is no name"),
        ({"shown": "\x1b[2J"}, "is no beginning"),
        ({"hash": "00"}, "'00' is no hash"),
        ({"hash": "AA" * 32}, "is no hash"),
        ({"hash": "00 " * 32}, "is no hash"),
        ({"hash": 5}, "5 is no hash"),
        ({"created_s": 10**30}, "is no time"),
        ({"created_s": -(10**15)}, "is no time"),
        ({"created_s": True}, "is no time"),
    ],
    ids=str,
)
def test_an_entry_that_people_have_broken_is_named(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    """`swarmnode key list` prints them, in a terminal, and their time as a date."""
    path = tmp_path / "keys.json"
    new_key(path, "a")
    (entry,) = json.loads(path.read_text())["keys"]
    path.write_text(json.dumps({"keys": [entry | change]}))
    with pytest.raises(
        StoreError, match=rf"keys\.json: .*{said}.*; correct it, or delete the file"
    ) as caught:
        read_keys(path)
    assert str(caught.value).isprintable()


def test_a_file_that_breaks_lets_nobody_in(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = new_key(path, "a")
    errors: list[StoreError] = []
    ring = KeyRing(path, errors.append)
    good = path.read_text()
    path.write_text("broken")
    assert not ring.admits(key)
    assert not ring.admits(key)
    assert len(errors) == 1
    path.write_text(good)
    assert ring.admits(key)
    entries = json.loads(good)["keys"]
    assert len(entries) == len(ring) == 1
