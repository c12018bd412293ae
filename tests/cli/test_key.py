"""`swarmnode key`: made, listed, revoked."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner, Result

from swarmnode.cli.key import command
from swarmnode.config import Folders
from swarmnode.services.api_keys import KeyRing


def key(home: Path, *arguments: str) -> Result:
    return CliRunner().invoke(command, [*arguments, "--home", str(home)])


def test_a_key_is_shown_once_and_good_until_it_is_revoked(tmp_path: Path) -> None:
    assert "swarmnode key new" in key(tmp_path, "list").stdout
    made = key(tmp_path, "new", "--name", "laptop")
    shown = made.stdout.strip()
    assert made.exit_code == 0
    ring = KeyRing(Folders.under(tmp_path).api_keys_file)
    assert ring.admits(shown)
    listed = key(tmp_path, "list").stdout
    key(tmp_path, "new", "--name", "phone-in-the-kitchen")
    lines = key(tmp_path, "list").stdout.splitlines()
    assert lines[0].split() == ["name", "key", "begins", "with", "made"]
    at = [lines[0].index(head) for head in ("key begins", "made")]
    assert [
        [line[: at[0]].strip(), line[at[0] : at[0] + 9], line[at[1] : at[1] + 2]] for line in lines[1:3]
    ] == [["laptop", "sk-swarm-", "20"], ["phone-in-the-kitchen", "sk-swarm-", "20"]]
    assert shown not in listed
    again = key(tmp_path, "new", "--name", "laptop")
    assert again.exit_code == 1
    assert "revoke it first" in again.stderr
    assert key(tmp_path, "revoke", "laptop").exit_code == 0
    assert not ring.admits(shown)
    gone = key(tmp_path, "revoke", "laptop")
    assert (gone.exit_code, "there are: phone-in-the-kitchen" in gone.stderr) == (1, True)


def test_limits_are_listed(tmp_path: Path) -> None:
    for name, options in {
        "none": (),
        "both": ("--max-concurrent", "2", "--per-minute", "60"),
        "one": ("--per-minute", "5"),
    }.items():
        assert key(tmp_path, "new", "--name", name, *options).exit_code == 0
    none, both, one = key(tmp_path, "list").stdout.splitlines()[1:4]
    assert "at most" not in none
    assert both.endswith("  at most 2 at a time and 60 a minute")
    assert one.endswith("  at most 5 a minute")
    wrong = key(tmp_path, "new", "--name", "wrong", "--max-concurrent", "0")
    assert (wrong.exit_code, "1<=x<=1024" in wrong.stderr) == (2, True)
