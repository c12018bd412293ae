"""The design's rules on rooms, as tests: an `ast` scan of every file of the package."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "swarmnode"
FILES = sorted(PACKAGE.rglob("*.py"))

LEVELS = [
    {"__main__"},
    {"cli"},
    {"node"},
    {"api"},
    {"services"},
    {"net", "schedule", "models", "gossip"},
    {"weights"},
    {"wire", "compute"},
    {"identity"},
    {"config", "errors", "state_file", "counts"},
]
"""Top to bottom; a room imports rooms below it. Rooms on one line do not import each other. `api` stands on
`services` (it serves the engine's events), `schedule`, `models` and `gossip` on `weights` (expert ranges,
the index)."""

TRIO_ROOMS = {"cli", "node", "net", "services", "api", "testing"}
"""Rooms that may import trio."""

PURE_ROOMS = {"wire", "schedule", "gossip", "config", "errors", "counts", "identity"}
"""Rooms without a clock or randomness of their own; `identity` makes keys with the system's randomness only through
`cryptography`."""

MAX_LINES = 700


def room_of(path: Path) -> str:
    """The first name under the package: `wire` for wire/codec.py, `node` for node.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> Iterator[str]:
    """Dotted names of everything a file imports, at any depth."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def level_of(room: str) -> int:
    return next(number for number, rooms in enumerate(LEVELS) if room in rooms)


def ids(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_imports_go_one_way(path: Path) -> None:
    room = room_of(path)
    used = {name.split(".")[1] for name in imports_of(path) if name.startswith("swarmnode.")} - {
        "__version__"
    }
    if room == "testing":
        return  # the kit may use everything
    assert "testing" not in used, "nothing in the package imports the test kit"
    if room == "__init__":
        assert not used
        return
    for other in used - {room}:
        assert level_of(other) > level_of(room), f"{room} imports {other}"


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_trio_only_in_shells(path: Path) -> None:
    uses_trio = any(name.split(".")[0] == "trio" for name in imports_of(path))
    assert not uses_trio or room_of(path) in TRIO_ROOMS


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_ggml_in_one_file(path: Path) -> None:
    uses_ggml = any(name.split(".")[0] == "ggml" for name in imports_of(path))
    assert not uses_ggml or path == PACKAGE / "compute" / "ggml.py"


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_no_clock_and_no_dice_in_pure_rooms(path: Path) -> None:
    if room_of(path) not in PURE_ROOMS:
        return
    roots = {name.split(".")[0] for name in imports_of(path)}
    assert not roots & {"time", "random", "secrets", "datetime"}


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_files_stay_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("path", [path for path in FILES if room_of(path) != "cli"], ids=ids)
def test_only_the_command_line_prints(path: Path) -> None:
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    assert not any(isinstance(call.func, ast.Name) and call.func.id == "print" for call in calls)


@pytest.mark.parametrize("path", FILES, ids=str)
def test_errors_grow_on_the_tree_of_errors_py(path: Path) -> None:
    """No class stands on Python's own exceptions but SwarmError."""
    own = {
        name
        for name, item in vars(builtins).items()
        if isinstance(item, type) and issubclass(item, BaseException)
    }
    found = [
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        and any(isinstance(base, ast.Name) and base.id in own for base in node.bases)
    ]
    assert found == (["SwarmError"] if path.name == "errors.py" else [])


def test_all_rooms_have_a_level() -> None:
    for path in FILES:
        room = room_of(path)
        assert room in {"testing", "__init__"} or level_of(room) >= 0
