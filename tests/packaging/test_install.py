"""The sdist and the wheel, built and installed as others do it: pip, new venvs, nothing of this clone on the path.

`make test-packaging`: it needs a package index, and compiles ggml where pip has not kept it from the last time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from functools import partial
from pathlib import Path
from shutil import copyfile

import pytest
import trio

from swarmnode.cli.processes import NodeProcess

pytestmark = [pytest.mark.packaging, pytest.mark.real_time]

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120.0
CMAKE_ARGS = "-DGGML_LLAMAFILE=ON -DGGML_OPENMP=OFF"
BUILD_SDIST = "import sys; from setuptools.build_meta import build_sdist; print(build_sdist(sys.argv[1]))"

RUST = {"cryptography"}
"""Rust wheels that a worker may need: Termux has this one as a package of its own."""

INSTALLED = """
import importlib.metadata, json, re
from pip._vendor.packaging.requirements import Requirement
canonical = lambda name: re.sub(r"[-_.]+", "-", name).lower()
found, needed, todo = {}, set(), ["swarmnode"]
for dist in importlib.metadata.distributions():
    found[canonical(dist.metadata["Name"])] = dist
while todo:
    name = canonical(todo.pop())
    if name not in needed and name in found:
        needed.add(name)
        for text in found[name].requires or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo.append(requirement.name)
rust = [name for name, dist in found.items() if "maturin" in (dist.read_text("WHEEL") or "")]
print(json.dumps({"installed": sorted(found), "needed": sorted(needed), "rust": rust}))
"""
"""What is installed, what swarmnode without extras pulls in, and what maturin (Rust's builder of wheels) built."""


def run(*command: str | Path, folder: Path, code: int = 0) -> str:
    """Output of a command that knows nothing of this clone but the folder that it starts in."""
    left_out = ("SWARMNODE_", "PYTHON", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    result = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env={**environment, "CMAKE_ARGS": CMAKE_ARGS, "HOME": str(folder), **cache_of_pip()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert result.returncode == code, result.stdout
    return result.stdout


def cache_of_pip() -> dict[str, str]:
    """Where pip keeps what it downloaded and compiled, which is below the real home."""
    return {"PIP_CACHE_DIR": os.environ.get("PIP_CACHE_DIR", os.path.expanduser("~/.cache/pip"))}


def new_venv(path: Path) -> Path:
    """Its folder of programs."""
    venv.create(path, with_pip=True)
    return path / ("Scripts" if sys.platform == "win32" else "bin")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packaging")


@pytest.fixture(scope="module")
def sources(folder: Path) -> Path:
    """What git would commit, and no remains of earlier builds."""
    listed = run("git", "-C", ROOT, "ls-files", "-co", "--exclude-standard", folder=folder)
    tree = folder / "tree"
    for name in filter(None, listed.splitlines()):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            copyfile(ROOT / name, tree / name)
    return tree


@pytest.fixture(scope="module")
def sdist(folder: Path, sources: Path) -> Path:
    programs = new_venv(folder / "builder")
    run(programs / "pip", "install", "--quiet", "setuptools>=77", folder=folder)
    name = run(programs / "python", "-c", BUILD_SDIST, folder / "dist", folder=sources).splitlines()[-1]
    return folder / "dist" / name


@pytest.fixture(scope="module")
def wheel(folder: Path, sources: Path) -> Path:
    return built(sources, folder / "dist")


@pytest.fixture(scope="module")
def worker(folder: Path, wheel: Path) -> Path:
    """Programs of a venv with the wheel and no extra."""
    programs = new_venv(folder / "worker")
    run(programs / "pip", "install", "--quiet", wheel, folder=folder)
    return programs


@pytest.fixture(scope="module")
def backbone(folder: Path, wheel: Path) -> Path:
    """Programs of a venv with the wheel and what a backbone needs."""
    programs = new_venv(folder / "backbone")
    run(programs / "pip", "install", "--quiet", f"{wheel}[backbone]", folder=folder)
    return programs


def built(source: Path, target: Path) -> Path:
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "-w",
        target,
        source,
        folder=target.parent,
    )
    (found,) = target.glob("*.whl")
    return found


def test_the_sdist_builds_the_same_wheel(folder: Path, sdist: Path, wheel: Path) -> None:
    again = built(sdist, folder / "again")
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(again) as second:
        assert {name: first.read(name) for name in first.namelist()} == {
            name: second.read(name) for name in second.namelist()
        }
        names = first.namelist()
    assert {"swarmnode/py.typed", "swarmnode/data/baker-street.gguf"} < set(names)
    assert any(name.startswith("swarmnode/data/dashboard/") for name in names)
    assert all(name.startswith(("swarmnode/", "swarmnode-0")) for name in names)
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "Makefile", "docs/README.md", "tests/conftest.py"} < inside


def test_a_worker_gets_what_it_needs_and_nothing_else(folder: Path, worker: Path) -> None:
    found = json.loads(run(worker / "python", "-c", INSTALLED, folder=folder))
    assert set(found["installed"]) - set(found["needed"]) <= {"pip", "setuptools"}
    assert set(found["rust"]) <= RUST
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"backbone", "json"} < set(extras)
    assert not {"tokenizers", "llguidance", "pydantic-core", "starlette"} & set(found["installed"])


def test_the_commands_of_a_worker(folder: Path, worker: Path) -> None:
    assert "Usage: swarmnode" in run(worker / "swarmnode", "--help", folder=folder)
    assert "Example: swarmnode join" in run(worker / "swarmnode", "join", "--help", folder=folder)
    told = run(worker / "swarmnode", "doctor", folder=folder)
    assert "model baker-street.gguf: 4 layers of 16 experts" in told
    for verb in ("backbone", "generate", "demo", "status", "chat"):
        told = run(worker / "swarmnode", verb, folder=folder, code=1)
        assert f"swarmnode: `swarmnode {verb}` needs" in told
        assert "[backbone]" in told


async def test_a_swarm_of_both_installations(folder: Path, backbone: Path, worker: Path) -> None:
    """A backbone with its extra, a worker without any: an answer with rows of the worker."""
    async with trio.open_nursery() as nursery:
        nodes: list[NodeProcess] = []
        try:
            here = ["--listen", "127.0.0.1:0", "--api", "127.0.0.1:0", "--home", str(folder / "home-b")]
            server = await start(
                backbone / "swarmnode", ["backbone", "--send", "always", *here], folder, nursery, nodes
            )
            address = await server.wait_line("swarm ", TIMEOUT_S)
            api = await server.wait_line("api ", TIMEOUT_S)
            join = ["join", "--budget", "9MB", "--home", str(folder / "home-w"), "--bootstrap", address]
            helper = await start(worker / "swarmnode", join, folder, nursery, nodes)
            await helper.wait_line("full: 64 experts", TIMEOUT_S)
            await server.wait_line("64 of 64 experts covered by workers", TIMEOUT_S)
            ask = (backbone / "swarmnode", "generate", "--max-tokens", "8", "--api", api, "The door")
            answer = await trio.to_thread.run_sync(partial(run, *ask, folder=folder))
            assert "swarm: " in answer
            assert "swarm: 0%" not in answer
        finally:
            with trio.CancelScope(shield=True):
                for node in nodes:
                    node.kill()
                    await node.process.wait()
            nursery.cancel_scope.cancel()


async def start(
    program: Path, arguments: list[str], folder: Path, nursery: trio.Nursery, nodes: list[NodeProcess]
) -> NodeProcess:
    """A node of an installation; its output is read."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    process = await trio.lowlevel.open_process(
        [str(program), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=folder,
        env={**environment, "PYTHONUNBUFFERED": "1"},
    )
    node = NodeProcess(arguments[0], process)
    nodes.append(node)
    nursery.start_soon(node.read)
    return node
