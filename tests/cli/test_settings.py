"""The settings file, the environment and the command line: which is stronger, what is refused, what is shown."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from swarmnode.cli import main
from swarmnode.cli.settings import SHARED, read_settings, settable, variables_of
from swarmnode.cli.verb import Verb
from swarmnode.config import Folders
from swarmnode.errors import UsageError
from swarmnode.identity import NodeKey
from swarmnode.net.address import PeerAddress
from swarmnode.net.invite import Invite
from swarmnode.net.secret_file import create_secret
from swarmnode.wire.secret import NetworkSecret

SECRET = NetworkSecret(bytes(range(32)))
LINK = str(Invite((PeerAddress(NodeKey.from_seed(bytes(32)).node_id, "h", 1),), "home", SECRET))


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SWARMNODE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    Folders.under(tmp_path).settings.mkdir()
    return tmp_path


def write(home: Path, text: str) -> Path:
    path = Folders.under(home).settings / "config.toml"
    path.write_text(text)
    return path


def run(*arguments: str, home: Path, **environment: str) -> Result:
    return CliRunner().invoke(main, list(arguments), env={"SWARMNODE_HOME": str(home), **environment})


def shown(home: Path, *arguments: str, **environment: str) -> dict[str, tuple[object, str]]:
    result = run("config", "show", "--json", *arguments, home=home, **environment)
    assert result.exit_code == 0, result.output
    about = json.loads(result.output)[arguments[0]]
    return {name: (item["value"], item["source"]) for name, item in about.items()}


def test_flags_beat_the_environment_which_beats_the_file(home: Path) -> None:
    write(home, 'threads = 2\nnetwork = "of all"\n[join]\nbudget = "3MB"\nthreads = 3\n')
    plain = shown(home, "join")
    assert plain["budget"] == (3_000_000, "file [join] budget")
    assert plain["threads"] == (3, "file [join] threads")
    assert plain["network"] == ("of all", "file network")
    assert plain["listen"] == ("0.0.0.0:0", "default")
    assert shown(home, "backbone")["threads"] == (2, "file threads")

    environment = {"SWARMNODE_THREADS": "4", "SWARMNODE_NETWORK": "n"}
    told = shown(home, "join", **environment)
    assert told["threads"] == (4, "environment SWARMNODE_THREADS")
    environment["SWARMNODE_JOIN_THREADS"] = "5"
    assert shown(home, "join", **environment)["threads"] == (5, "environment SWARMNODE_JOIN_THREADS")
    assert shown(home, "join", "--threads", "6", **environment)["threads"] == (6, "command line")


def test_a_verb_is_run_with_them(home: Path) -> None:
    """What `config show` says is what is used: the refusals are those of the value."""
    write(home, '[join]\nbudget = "3MB"\n')
    assert "no peer is known" in run("join", home=home).output
    write(home, '[join]\nbudget = "3MB"\nbootstrap = "nonsense"\n')
    assert "neither an address" in run("join", home=home).output
    write(home, '[join]\nbudget = "3MB"\nadvertise = ["foo"]\nbootstrap = ["' + LINK + '"]\n')
    assert "--advertise foo" in run("join", home=home).output
    write(home, "")
    assert run("join", home=home).exit_code == 2
    assert "no peer is known" in run("join", home=home, SWARMNODE_JOIN_BUDGET="3MB").output


def test_home_chooses_the_file(home: Path, tmp_path: Path) -> None:
    write(home, '[join]\nbudget = "3MB"\n')
    elsewhere = tmp_path / "elsewhere"
    assert run("join", "--home", str(home), home=elsewhere).exit_code == 2
    assert "no peer is known" in run("join", "--home", str(home), home=elsewhere).output
    assert "--budget" in run("join", home=elsewhere).output
    found = run("config", "show", "--home", str(home), "join", home=elsewhere)
    assert "[join] budget" in found.output


def test_names_of_files_are_seen_from_the_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(home))
    path = write(
        home,
        f'secret = "home.secret"\nbootstrap = ["peers.txt", " {LINK[:60]}@h:1", "~/ids.txt", "dns:example.org"]\n'
        '[join]\nbudget = 3000000\nallow = "~/ids"\n',
    )
    (path.parent / "peers.txt").touch()
    (home / "ids.txt").touch()
    create_secret(path.parent / "home.secret")
    (home / "ids").write_text(f"{LINK[8:60]}\n")
    found = shown(home, "join")
    assert found["secret"][0] == str(path.parent / "home.secret")
    assert found["allow"][0] == os.path.expanduser("~/ids")
    assert found["budget"][0] == 3_000_000
    sources = [str(path.parent / "peers.txt"), f" {LINK[:60]}@h:1", str(home / "ids.txt"), "dns:example.org"]
    assert found["bootstrap"][0] == sources


@pytest.mark.parametrize("options", [["--home=~/node"], ["--home", "~/node"], []])
def test_the_users_folder_where_no_shell_puts_it(
    options: list[str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a folder named `~` in the current one."""
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    create_secret(home / "home.secret")
    variables = {"SWARMNODE_HOME": "~/node", "SWARMNODE_JOIN_SECRET": "~/home.secret"}
    result = CliRunner().invoke(main, ["config", "show", "--json", *options, "join"], env=variables)
    assert result.exit_code == 0, result.output
    about = json.loads(result.output)
    assert about["file"] == str(home / "node" / "config" / "config.toml")
    assert about["join"]["secret"]["value"] == str(home / "home.secret")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[join", "not valid TOML"),
        ("x = 1", "x is no setting for all verbs; put it into the table of a verb"),
        ('home = "/x"', "home is no setting for all verbs"),
        ("[jion]", "[jion] is none of the verbs"),
        ("[jion]", "did you mean join?"),
        ("netwrok = 'x'", "netwrok is no setting for all verbs; did you mean network?"),
        ("[join]\nbudgit = 1", "did you mean budget?"),
        ("[join]\nwibble = 1", "known: advertise, allow"),
        ("[join]\nhome = 'x'", "[join] home is no setting"),
        ("[join]\nbootstrap = 1", "[join] bootstrap is a list of texts"),
        ("[join]\nbootstrap = [1]", "is a list of texts"),
        ("lan = 1", "lan is true or false, not 1"),
        ("[join]\nbudget = true", "is a text or a number, not True"),
        ("[join]\nbudget = [1]", "is a text or a number"),
        ("[join]\nbudget = '3X'", "config.toml: [join] budget)"),
        ("threads = 'x'\n[join]\nbudget = 1", "config.toml: threads)"),
    ],
)
def test_mistakes_name_the_file_and_the_key(home: Path, text: str, says: str) -> None:
    path = write(home, text)
    result = run("join", home=home)
    assert result.exit_code == 2
    assert says in result.output
    assert str(path) in result.output
    looked_at = run("config", "show", "join", home=home)
    assert looked_at.exit_code == 2
    assert str(path) in looked_at.output


def test_what_is_no_text_file_is_named(home: Path) -> None:
    path = write(home, "")
    path.write_bytes(b"\xff")
    assert "not valid TOML" in run("join", home=home).output
    path.unlink()
    path.mkdir()
    assert f"{path} cannot be read" in run("join", home=home).output


def test_values_that_would_be_refused_are_shown(home: Path) -> None:
    write(home, '[join]\nbudget = "3X"\n')
    result = run("config", "show", "join", home=home)
    assert result.exit_code == 2
    assert "refused: '3X' is not a size" in result.output
    told = run("config", "show", "join", "--threads", "x", home=home)
    assert "refused: 'x' is not a valid integer" in told.output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--hours", "25"], "'25' are no hours"),
        (["--bootstrap", "bad"], "neither an address"),
        (["--secret", "nofile"], "cannot read the network secret nofile"),
        (["--allow", "nofile"], "cannot read the list of allowed nodes nofile"),
        (["--device", "foo"], "no device named 'foo'"),
        (["--listen", "h:x"], "write HOST:PORT"),
        (["--advertise", "h"], "write HOST:PORT"),
    ],
)
def test_config_show_refuses_what_the_verb_refuses(home: Path, options: list[str], says: str) -> None:
    result = run("config", "show", "join", *options, home=home)
    assert result.exit_code == 2
    assert f"refused: {says}" in result.output or ("refused: " in result.output and says in result.output)


def test_config_show_looks_at_the_variables_that_are_no_options(home: Path) -> None:
    for variable, says in {"SWARMNODE_BOOTSTRAP": "neither an address", "SWARMNODE_SECRET": "secret"}.items():
        result = run("config", "show", "join", home=home, **{variable: "bad"})
        assert result.exit_code == 2
        assert says in result.output.partition("refused: ")[2]


def test_a_list_elsewhere_is_not_fetched_to_show_it(home: Path) -> None:
    link = "https://nowhere.invalid/peers.txt"
    assert shown(home, "join", "--bootstrap", link)["bootstrap"] == ([link], "command line")


def test_secrets_are_not_shown(home: Path) -> None:
    write(home, f'[join]\nbootstrap = ["{LINK}"]\n')
    environment = {"SWARMNODE_SECRET": SECRET.text}
    for arguments in (["join"], ["--json", "join"]):
        result = run("config", "show", *arguments, home=home, **environment)
        assert SECRET.text not in result.output
        assert "secret=[hidden]" in result.output
        assert "environment SWARMNODE_SECRET" in result.output
    links = run("config", "show", "backbone", home=home, SWARMNODE_BOOTSTRAP=LINK)
    assert "environment SWARMNODE_BOOTSTRAP" in links.output
    assert SECRET.text not in links.output


def test_without_a_verb_those_that_run_for_long(home: Path) -> None:
    result = run("config", "show", home=home)
    assert result.exit_code == 0
    assert "config.toml  (not there)" in result.output
    assert {"backbone", "join"} <= set(result.output.splitlines())


@pytest.mark.parametrize(("verb", "says"), [("nonsense", "there is no verb"), ("demo", "takes no settings")])
def test_verbs_without_settings(home: Path, verb: str, says: str) -> None:
    result = run("config", "show", verb, home=home)
    assert result.exit_code == 2
    assert says in result.output


def test_no_variable_stands_for_two_things() -> None:
    """`SWARMNODE_X` of one verb is no other option's name, and none that the program reads otherwise."""
    taken = {"SWARMNODE_HOME", "SWARMNODE_SECRET", "SWARMNODE_BOOTSTRAP", "SWARMNODE_GGML_LIB"}
    ctx = click.Context(main)
    seen: dict[str, str] = {}
    for verb in main.list_commands(ctx):
        command = main.get_command(ctx, verb)
        assert command is not None
        if not isinstance(command, Verb):
            continue
        for name, option in settable(command).items():
            for variable in variables_of(verb, option):
                assert variable not in taken
                assert seen.setdefault(variable, name) == name


def test_shared_settings_are_options_of_several_verbs() -> None:
    ctx = click.Context(main)
    commands = [main.get_command(ctx, verb) for verb in main.list_commands(ctx)]
    counts = [
        sum(name in settable(command) for command in commands if isinstance(command, Verb)) for name in SHARED
    ]
    assert min(counts) >= 2


def test_a_folder_without_a_file_says_nothing(tmp_path: Path) -> None:
    found = read_settings(tmp_path, ["join"])
    assert (found.exists, dict(found.shared), dict(found.of_verbs)) == (False, {}, {})
    (tmp_path / "config.toml").write_bytes(b"x" * (1 << 20) + b"xx")
    with pytest.raises(UsageError, match="over 1048576 bytes"):
        read_settings(tmp_path, ["join"])


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str, tmp_path: Path) -> None:
    result = run("completion", shell, home=tmp_path)
    assert result.exit_code == 0
    assert "_SWARMNODE_COMPLETE" in result.output


def test_verbs_and_options_are_completed(tmp_path: Path) -> None:
    def completed(words: str, count: int) -> str:
        environment = {
            "_SWARMNODE_COMPLETE": "bash_complete",
            "COMP_WORDS": words,
            "COMP_CWORD": str(count),
        }
        return CliRunner().invoke(main, [], prog_name="swarmnode", env=environment).output

    assert "plain,join" in completed("swarmnode jo", 1)
    assert "plain,--budget" in completed("swarmnode join --bu", 2)


def test_misspelt_variables_are_told(home: Path) -> None:
    environment = {
        "SWARMNODE_DOCTOR_MAX_ROW": "1", "SWARMNODE_LISTEM": "x", "SWARMNODE_QQQQQQQQ": "1",
        "SWARMNODE_API_KEY": "k", "SWARMNODE_JOIN_BUDGET": "1MB", "SWARMNODE_THREADS": "1",
    }  # fmt: skip
    wanted = [
        "swarmnode: the environment's SWARMNODE_DOCTOR_MAX_ROW is no setting; did you mean SWARMNODE_DOCTOR_MAX_ROWS?",
        "swarmnode: the environment's SWARMNODE_LISTEM is no setting; did you mean SWARMNODE_LISTEN?",
        "swarmnode: the environment's SWARMNODE_QQQQQQQQ is no setting",
    ]
    result = run("doctor", "--max-rows", "1", home=home, **environment)
    assert result.stderr.splitlines()[:3] == wanted
    result = run("config", "show", "join", home=home, SWARMNODE_JOIN_BUDGIT="1MB", SWARMNODE_DOCTOR_X="1")
    assert result.stderr == (
        "swarmnode: the environment's SWARMNODE_JOIN_BUDGIT is no setting; did you mean SWARMNODE_JOIN_BUDGET?\n"
    )
    result = run("join", "--budget", "1MB", "--log-json", "--no-listen", home=home, SWARMNODE_X="1")
    told = json.loads(result.stderr.splitlines()[0])
    assert (told["level"], told["message"]) == ("warning", "the environment's SWARMNODE_X is no setting")
