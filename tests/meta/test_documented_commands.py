"""Every command line of README and docs is one that click takes, every option is documented, and help fits 80 columns.

Placeholders (FILE, N, NODEID ...) get values that fit; command lines with "..." are checked up to it.
"""

from __future__ import annotations

import configparser
import json
import plistlib
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from swarmnode.cli import main
from swarmnode.cli.checked import Checked, CheckedFile
from swarmnode.cli.settings import long_name
from swarmnode.identity import NodeKey

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "bootstrap" / "README.md",
    *sorted(path for path in (ROOT / "docs").glob("*.md")),
]
NODE = str(NodeKey.from_seed(bytes(32)).node_id)

VALUES = {
    "N": "1", "SIZE": "1MB", "TOKENS": "64", "SECONDS": "2", "A:B": "0:1", "NAME": "CPU", "PORT": "4790",
    "HOST:PORT": "h.example:4790", "127.0.0.1:PORT": "127.0.0.1:1", "A-B": "22:00-07:00", "TEXT": "text",
}  # fmt: skip
"""What stands for a value, in options whose values are checked."""

OBVIOUS = frozenset({"max-tokens", "output", "prompt", "seed", "tokens", "workers"})
"""Options whose name says all."""

OTHERS = frozenset({"--no-binary", "--now", "--real", "--reference"})
"""Options of other programs in the docs: pip, systemctl, a script in benchmarks/."""


def command_lines(text: str) -> Iterator[str]:
    """`swarmnode VERB ...` of indented blocks and of code between backticks."""
    joined = re.sub(r"\\\n\s*", "", text)
    for line in joined.splitlines():
        if line.startswith("    ") or line.lstrip().startswith(("ExecStart", "CMD", "exec ")):
            found = re.search(r"(?:^|[\s/\"(])(swarmnode(?:\.exe)?\s+[a-z].*)", line)
            if found:
                yield found[1]
    yield from re.findall(r"`(swarmnode [^`]+)`", " ".join(joined.split("\n")))


def words_of(line: str) -> list[str]:
    """The words of one command, up to a comment, a pipe, another command or "..."."""
    line = re.split(r"\s#\s|\s#$|\s[|<]|\s\d?>|\s&&|;|\.\.\.(?=\s|$)|\)\"|\)$|\s&$", line)[0]
    line = line.replace("[", "").replace("]", "").replace("\\|", " ")
    try:
        return shlex.split(line)
    except ValueError:
        return line.replace('"', "").replace("'", "").split()


def group_of(words: list[str]) -> tuple[click.Command | None, list[str]]:
    """The command that the words name, and its arguments; None for a verb that there is not."""
    command: click.Command = main
    words = words[1:]
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        with click.Context(command) as ctx:
            found = command.get_command(ctx, words[0])
        if found is None:
            return (None, words) if command is main or words[0].islower() else (command, words)
        command, words = found, words[1:]
    return command, words


def cases() -> list[tuple[str, str]]:
    return sorted(
        {
            (path.relative_to(ROOT).as_posix(), line)
            for path in DOCUMENTS
            for line in command_lines(path.read_text())
            if re.match(r"swarmnode\s+[a-z]+", line)
        }
    )


@pytest.fixture(autouse=True)
def files_that_are_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The documents name files of their reader's: what stands in them is not looked at."""
    for kind in (Checked, CheckedFile):
        monkeypatch.setattr(kind, "convert", lambda self, value, param, ctx: value)


@pytest.mark.parametrize(("document", "line"), cases(), ids=lambda text: text[:60])
def test_a_documented_command_is_taken(document: str, line: str) -> None:
    command, arguments = group_of(words_of(line))
    assert command is not None, f"{document}: {line}: no such verb"
    if arguments[:1] != ["--json"] and command is command_at(("config", "show")) and arguments:
        command, arguments = group_of(["swarmnode", *arguments])  # what stands behind the verb is the verb's
        assert command is not None
    arguments = [VALUES.get(word, word.replace("NODEID", NODE)) for word in arguments]
    known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)} | {
        "--help",
        "-h",
    }
    for word in arguments:
        if word.startswith("--") and word != "--":
            assert word.partition("=")[0] in known, f"{document}: {line}: {word}"
    if isinstance(command, click.Group) or "..." in line or "VERB" in line:
        return
    try:
        command.make_context(command.name or "", [*arguments])
    except click.exceptions.Exit:
        assert "--help" in arguments or "--version" in arguments
    except click.MissingParameter:
        assert len(arguments) <= 2, "only a command that is named, not shown, may lack something"


def all_commands(command: click.Command = main, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    if isinstance(command, click.Group):
        with click.Context(command) as ctx:
            for name in command.list_commands(ctx):
                found = command.get_command(ctx, name)
                assert found is not None
                yield from all_commands(found, (*path, name))


COMMANDS = list(all_commands())


def command_at(path: tuple[str, ...]) -> click.Command:
    command, _ = group_of(["swarmnode", *path])
    assert command is not None
    return command


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_fits_a_terminal_and_has_an_example(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, [*path, "--help"], prog_name="swarmnode")
    assert result.exit_code == 0
    assert max(len(line) for line in result.output.splitlines()) <= 80
    assert "Example: swarmnode" in result.output


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_option_is_documented(path: tuple[str, ...]) -> None:
    """In README or docs, somewhere; and what it does, in the help."""
    text = "\n".join(document.read_text() for document in DOCUMENTS)
    for param in command_at(path).params:
        if isinstance(param, click.Option) and "--version" not in param.opts:
            names = [*param.opts, *param.secondary_opts]
            assert any(re.search(rf"{re.escape(name)}(?![a-z-])", text) for name in names), names
            assert param.help or long_name(param) in OBVIOUS, f"{names} has no help"


def test_every_verb_is_in_the_readme_or_the_commands() -> None:
    text = (ROOT / "README.md").read_text() + (ROOT / "docs" / "commands.md").read_text()
    for path in COMMANDS:
        if path:
            assert f"swarmnode {' '.join(path)}" in text or f"`{path[-1]}`" in text, path


def test_every_option_named_in_the_docs_exists() -> None:
    known = {
        name
        for path in COMMANDS
        for param in command_at(path).params
        for name in (*param.opts, *param.secondary_opts)
    }
    known |= {"--help", "--version"} | OTHERS
    for document in DOCUMENTS:
        text = document.read_text()
        for span in re.findall(r"`([^`\n]+)`", text):
            for name in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", span):
                assert name in known, f"{document.name}: {name}"


def test_placeholders_are_found() -> None:
    """The scan finds what it should: a test that looks at nothing is none."""
    lines = [line for _, line in cases()]
    assert len(lines) > 60
    assert any(line.startswith("swarmnode join --budget 300MB --lan") for line in lines)
    assert words_of('swarmnode join --budget 1MB --bootstrap "LINK"  # x')[-1] == "LINK"


def block_after(document: Path, words: str) -> str:
    """The first indented block behind some words, as a file."""
    lines = document.read_text().partition(words)[2].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("    "))
    block = []
    for line in lines[first:]:
        if line and not line.startswith("    "):
            break
        block.append(line[4:])
    return "\n".join(block).strip() + "\n"


OPERATIONS = ROOT / "docs" / "operations.md"


def taken(arguments: list[str]) -> None:
    command, rest = group_of(["swarmnode", *arguments])
    assert command is not None
    command.make_context(command.name or "", rest)


def test_the_systemd_unit() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(block_after(OPERATIONS, "**Linux, systemd**"))
    words = unit["Service"]["ExecStart"].split()
    assert words[0].endswith("/bin/swarmnode")
    taken(words[1:])
    assert unit["Service"]["RestartPreventExitStatus"] == "2"


def test_the_launchd_plist() -> None:
    plist = plistlib.loads(block_after(OPERATIONS, "**macOS, launchd**").encode())
    taken(plist["ProgramArguments"][1:])


def test_the_termux_script(tmp_path: Path) -> None:
    script = tmp_path / "swarmnode"
    script.write_text(block_after(OPERATIONS, "**Android, Termux:Boot**"))
    subprocess.run(["sh", "-n", str(script)], check=True)
    taken(words_of(script.read_text().splitlines()[-1].partition("bin/")[2])[1:])


def test_the_dockerfile() -> None:
    lines = block_after(OPERATIONS, "**A container**").splitlines()
    command = next(line.removeprefix("CMD ") for line in lines if line.startswith("CMD "))
    taken(json.loads(command))
    for line in filter(None, lines):
        assert line.split()[0] in [
            "FROM",
            "RUN",
            "COPY",
            "ENV",
            "USER",
            "VOLUME",
            "STOPSIGNAL",
            "ENTRYPOINT",
            "CMD",
        ]
