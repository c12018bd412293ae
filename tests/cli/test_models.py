"""`swarmnode models`: what is listed and shown, added, verified and removed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from swarmnode.cli import main
from swarmnode.cli.models import experts_of, needs_of, states_of
from swarmnode.cli.sizes import format_bytes
from swarmnode.testing.tiny_gguf import TinyModel, write_tiny_gguf
from swarmnode.weights.catalog import bundled_model
from swarmnode.weights.index import ModelIndex
from swarmnode.weights.inspect import describe


def run(home: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["models", *arguments, "--home", str(home)])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "downloads"
    folder.mkdir()
    return write_tiny_gguf(folder / "Tiny.gguf", TinyModel(n_layer=2, n_expert=4, n_expert_used=2))


def test_add_list_show_remove(model: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    added = run(home, "add", str(model))
    assert added.exit_code == 0, added.output
    assert "swarmnode backbone --model Tiny" in added.output
    assert run(home, "add", str(model)).exit_code == 0  # twice does no harm
    listed = run(home, "list").output
    assert "baker-street" in listed
    assert "Tiny " in listed
    shown = run(home, "show", "tiny").output
    assert "a worker's budget covers" in shown
    assert "8 experts of 8 (100.0%)" in shown
    assert "for each of its --slots with --context 4096: " in shown

    assert "say so with --yes" in run(home, "remove", "Tiny").output
    removed = run(home, "remove", "tiny", "--yes")
    assert removed.output == "Tiny is removed: 1 link\n"
    assert model.exists()
    assert "is no model in" in run(home, "remove", "tiny", "--yes").output


def test_the_state_of_a_slot_is_shown_for_the_usual_and_the_longest_context(tmp_path: Path) -> None:
    with ModelIndex.open(bundled_model()) as index:
        about, states = describe(index), states_of(index)
    usual = states[0][1]
    lines = needs_of(about, [(4096, usual), (262_144, replace(usual, cache=64 * usual.cache))])
    shown = [line for line in lines if "--slots" in line]
    assert shown == [
        f"  {format_bytes(usual.total):>9}  for each of its --slots with --context 4096: "
        f"{format_bytes(usual.cache)} KV cache, {format_bytes(usual.recurrent)} recurrent state",
        f"  {format_bytes(64 * usual.cache + usual.recurrent):>9}  for each of its --slots with --context 262144: "
        f"{format_bytes(64 * usual.cache)} KV cache, {format_bytes(usual.recurrent)} recurrent state",
    ]


def test_a_model_that_cannot_be_run_is_shown_without_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmnode.models.registry.ARCHITECTURES", {})
    result = run(tmp_path, "show")
    assert result.exit_code == 0, result.output
    assert "of memory for the dense path" in result.output
    assert "--slots" not in result.output


def test_the_bundled_file_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bundled_model().parent)
    assert run(tmp_path, "list").output.count(bundled_model().stem) == 1


def test_a_shard_is_listed_as_what_it_is(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    cut = ["shard", "Tiny", "--layers", "0:2", "--experts", "0:3", "-o", "cut.gguf", "--home", str(tmp_path)]
    made = CliRunner().invoke(main, cut)
    assert made.exit_code == 0, made.output
    listed = run(tmp_path, "list").output.splitlines()
    (head,) = (number for number, line in enumerate(listed) if line.startswith("Shards"))
    assert "cut.gguf" not in " ".join(listed[:head])
    assert listed[head + 1].startswith("cut.gguf ")
    assert " 6 experts of model " in listed[head + 1]
    (tmp_path / "downloads" / "cut.gguf").write_bytes((model.parent / "cut.gguf").read_bytes()[:-1])
    assert run(tmp_path, "list").output.splitlines()[head + 1].endswith("a shard, but broken")
    refused = run(tmp_path, "show", "cut")
    assert refused.exit_code == 2
    assert "swarmnode inspect cut.gguf" in refused.output


def test_a_copy_is_a_file_of_its_own(model: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert "copied" in run(home, "add", "--copy", str(model)).output
    copy = home / "cache" / "models" / "Tiny.gguf"
    assert not copy.is_symlink()
    assert os.listdir(copy.parent) == ["Tiny.gguf"]
    other = write_tiny_gguf(tmp_path / "Tiny.gguf", TinyModel(n_layer=2, n_expert=4, n_expert_used=2, seed=3))
    refused = run(home, "add", str(other))
    assert refused.exit_code == 1
    assert "models remove" in refused.output
    assert "1 file" in run(home, "remove", "Tiny", "--yes").output
    assert not copy.exists()


def test_what_is_no_model_is_not_added(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    result = run(tmp_path / "home", "add", str(path))
    assert result.exit_code == 1
    assert str(path) in result.output
    assert not (tmp_path / "home" / "cache" / "models").exists()


def test_a_broken_model_can_be_removed(model: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    run(home, "add", "--copy", str(model))
    (home / "cache" / "models" / "Tiny.gguf").write_bytes(b"nothing")
    assert run(home, "remove", "Tiny", "--yes").exit_code == 0


def test_verify_finds_bytes_that_have_changed(model: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    first = run(home, "verify", str(model))
    assert first.exit_code == 0, first.output
    assert "hashed for the first time" in first.output
    assert "all bytes are as they were" in run(home, "verify", str(model)).output

    status = model.stat()
    with model.open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        byte = file.read(1)
        file.seek(-5, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(model, ns=(status.st_atime_ns, status.st_mtime_ns))  # as a failing disk would
    broken = run(home, "verify", str(model))
    assert broken.exit_code == 1
    assert "not those that were hashed before" in broken.output


def test_a_cache_folder_that_cannot_be_used_is_named(model: Path, tmp_path: Path) -> None:
    """Mesh-LLM 1042: a read-only cache folder broke the start."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "cache").touch()
    for arguments in (["add", str(model)], ["verify", str(model)]):
        result = run(home, *arguments)
        assert result.exit_code == 1
        assert str(home / "cache") in result.output
        assert "--home DIR" in result.output
    folder = model.parent
    folder.chmod(0o555)
    model.chmod(0o444)
    assert run(home, "show", str(model)).exit_code == 0  # models themselves may be read-only
    assert run(tmp_path / "other", "verify", str(model)).exit_code == 0
    assert os.listdir(folder) == ["Tiny.gguf"]


def test_budgets_count_the_real_bytes_of_each_layer() -> None:
    with ModelIndex.open(bundled_model()) as index:
        about = describe(index)
    mixed = replace(about, n_expert=4, expert_bytes={0: 10, 1: 25}, routed_bytes=140)
    assert [experts_of(mixed, budget) for budget in (0, 9, 10, 40, 64, 65, 140, 1000)] == [
        0,
        0,
        1,
        4,
        4,
        5,
        8,
        8,
    ]
    lines = needs_of(about)
    assert any("on disk" in line for line in lines)
    assert max(len(line) for line in lines) <= 110
