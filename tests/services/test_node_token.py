"""The node's token: made once, private, and refused when anything about the file is wrong."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from swarmnode.errors import StoreError
from swarmnode.services.node_token import load_or_create_token


def test_it_is_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "data" / "api.token"
    token = load_or_create_token(path)
    assert len(token) >= 43  # 256 bits
    assert load_or_create_token(path) == token
    assert load_or_create_token(tmp_path / "other") != token
    if os.name == "posix":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_two_processes_that_start_at_once_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one looks when the first has opened a file, and has written nothing yet: it once saw half a token."""
    path = tmp_path / "api.token"
    fdopen = os.fdopen
    seen: list[str] = []

    def opened(*arguments: Any) -> Any:
        monkeypatch.setattr(os, "fdopen", fdopen)
        seen.append(load_or_create_token(path))
        return fdopen(*arguments)

    monkeypatch.setattr(os, "fdopen", opened)
    assert load_or_create_token(path) == load_or_create_token(path)
    assert seen == [load_or_create_token(path)]


@pytest.mark.parametrize("content", [b"", b"short", b"a b" * 20, b"\xff" * 50, b"x" * 5000])
def test_a_file_that_holds_no_token(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "api.token"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(StoreError, match="holds no token"):
        load_or_create_token(path)


def test_a_file_that_others_can_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "api.token"
    load_or_create_token(path)
    monkeypatch.setattr(os, "name", "posix")
    path.chmod(0o644)
    with pytest.raises(StoreError, match="chmod 600"):
        load_or_create_token(path)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"api\.token"):
        load_or_create_token(tmp_path / "file" / "api.token")
