"""The list of nodes that may dial: whom it names, and what is said of a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmnode.errors import UsageError
from swarmnode.identity import NodeKey
from swarmnode.net.list_file import read_allowed

ONE, OTHER = (NodeKey.from_seed(bytes([number]) * 32).node_id for number in (1, 2))


def test_ids_with_comments(tmp_path: Path) -> None:
    path = tmp_path / "allowed"
    path.write_text(f"# friends\n\n{ONE}   # the phone\n{str(OTHER).upper()}\n{ONE}\n")
    assert read_allowed(path) == {ONE, OTHER}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("# nobody\n", "names nobody"),
        (f"{ONE}\nabc\n", "line 2: a node id has 52 characters"),
        (f"swarm://{ONE}@host:1\n", "line 1: a node id has"),
    ],
)
def test_wrong_lists(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "allowed"
    path.write_text(text)
    with pytest.raises(UsageError, match=says):
        read_allowed(path)


def test_no_list(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the list of allowed nodes"):
        read_allowed(tmp_path / "none")
