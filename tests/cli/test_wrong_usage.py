"""A value that cannot be used is wrong usage, whatever the verb: exit code 2, and a line that says what to write."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from swarmnode.cli import VERBS, main, module_of
from swarmnode.cli.checked import UserPath
from swarmnode.weights.catalog import bundled_model

ANY_TEXT = {
    ("chat", "--model"),
    ("chat", "--system"),
    ("demo", "--prompt"),
    # Names of models, which a home says what they stand for: the verb looks (test_a_model_that_nobody_knows).
    ("backbone", "--model"),
    ("bench", "--model"),
    ("doctor", "--model"),
}
"""Options that take whatever is written."""


def run(*arguments: str, home: Path, **environment: str) -> Result:
    return CliRunner().invoke(main, list(arguments), env={"SWARMNODE_HOME": str(home), **environment})


def commands(
    path: tuple[str, ...], command: click.Command
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    if isinstance(command, click.Group):
        for name, found in command.commands.items():
            yield from commands((*path, name), found)
    else:
        yield path, command


def options_with_values() -> Iterator[tuple[tuple[str, ...], click.Option]]:
    for verb in sorted(VERBS):
        for path, command in commands((verb,), module_of(verb).command):
            for param in command.params:
                if isinstance(param, click.Option) and not (param.is_flag or param.count):
                    yield path, param


def name_of(option: click.Option) -> str:
    return max(option.opts, key=len)


OPTIONS = [
    (path, option) for path, option in options_with_values() if (path[0], name_of(option)) not in ANY_TEXT
]


def unusable(option: click.Option, folder: Path) -> str:
    if isinstance(option.type, UserPath):
        (folder / "file").touch()
        return str(folder / "file") if option.type.dir_okay else str(folder)
    return "n" * 300 if option.name == "network" else "no such: value"


@pytest.mark.parametrize(
    ("path", "option"), OPTIONS, ids=[f"{' '.join(path)} {name_of(option)}" for path, option in OPTIONS]
)
def test_an_unusable_value_is_wrong_usage(
    path: tuple[str, ...], option: click.Option, tmp_path: Path
) -> None:
    """`status --api`, `invite --at` and others once ended with 1, as what fails does."""
    result = run(*path, name_of(option), unusable(option, tmp_path), home=tmp_path / "home")
    assert result.exit_code == 2, result.output
    said = f"Invalid value for {option.get_error_hint(click.Context(click.Command('x')))}"
    # A home that is none cannot have a settings file either, which is read first.
    assert said in result.output or (option.name == "home" and f"{tmp_path / 'file'}" in result.output)
    assert result.output.startswith("Usage: ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["shard", "MODEL", "--layers", "0-2", "--experts", "0:1", "-o", "x.gguf"],
            "write first:stop, as in 0:16",
        ),
        (
            ["shard", "MODEL", "--layers", "0:1", "--experts", "3", "-o", "x.gguf"],
            "write first:stop, as in 0:16",
        ),
        (
            ["shard", "MODEL", "--layers", "0:99", "--experts", "0:1", "-o", "x.gguf"],
            "have routed experts; layers 0",
        ),
        (
            ["shard", "MODEL", "--layers", "0:1", "--experts", "0:999", "-o", "x.gguf"],
            "this model has experts 0 to",
        ),
        (["bench", "--plot", "picture.pdf"], "write a name that ends in .png"),
        (["bench", "--plot", "nowhere/picture.png"], "there is no folder nowhere"),
        (["invite", "--at", "host:port"], "is not a port (1 to 65535)"),
        (["invite", "--at", "h", "--with-secret"], "give --secret FILE"),
        (["invite", *(word for _ in range(99) for word in ("--at", "h"))], "give --at less often"),
        (["status", "--api", ":::"], "write HOST:PORT, for example 127.0.0.1:8790"),
        (["chat", "--api", "http://[::1"], "write HOST:PORT, for example 127.0.0.1:8790"),
        (["chat", "--temperature", "nan"], "is no number; write for example 0.7"),
        (["generate", "hi", "--top-p", "2"], "top_p"),
        (["generate", "hi", "--top-k", "-1"], "top_k"),
        (["generate", "bad\udcff"], "not valid UTF-8"),
        (["key", "new", "--name", "a b"], "use letters, digits, _, -, . and @, 64 at most"),
        (["limits", "--hours", "9"], "write for example 22:00-07:30"),
        (["limits", "--hours", "always", "--hours", "9:00-10:00"], "--hours always goes alone"),
        (["demo", "--tokens", "20", "--kill-at", "20"], "behind the last of 20 tokens"),
        (["doctor", "--device", "foo"], "no device named 'foo'; this machine has: "),
        (["doctor", "--listen", "h:x"], "write HOST:PORT"),
        (["config", "show", "stauts"], "there is no verb 'stauts'"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else None,
)
def test_the_line_says_what_to_write(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [str(bundled_model()) if word == "MODEL" else word for word in arguments]
    result = run(*words, home=tmp_path / "home")
    assert result.exit_code == 2, result.output
    assert says in " ".join(result.output.split())
    assert list(tmp_path.rglob("*.gguf")) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["backbone", "--model", "nosuch"],
        ["bench", "kernels", "--model", "nosuch"],
        ["inspect", "nosuch"],
        ["models", "show", "nosuch"],
        ["models", "verify", "nosuch"],
        ["shard", "nosuch", "--layers", "0:1", "--experts", "0:1", "-o", "x.gguf"],
    ],
    ids=" ".join,
)
def test_a_model_that_nobody_knows(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*arguments, home=tmp_path / "home")
    assert result.exit_code == 2
    assert "nosuch is no file and no known model; known (in " in result.output


@pytest.mark.parametrize("arguments", [["status"], ["generate", "hi"]], ids=" ".join)
def test_a_key_in_the_environment_that_can_be_none(arguments: list[str], tmp_path: Path) -> None:
    result = run(*arguments, "--api", "127.0.0.1:9", home=tmp_path, SWARMNODE_API_KEY="schlüssel")
    assert result.exit_code == 2
    assert "SWARMNODE_API_KEY" in result.output
    assert "schlüssel" not in result.output
