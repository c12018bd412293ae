"""Verbs that need no network: what they print, what they refuse, and how."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner, Result
from gguf import GGUFReader

from swarmnode.cli import BACKBONE_LIBRARIES, VERBS, main
from swarmnode.cli.common import clear_errors, membership_of, parse_host_port, visible
from swarmnode.cli.demo import longest_allowed_s
from swarmnode.config import Folders
from swarmnode.errors import LocalError, UsageError
from swarmnode.identity import NodeKey
from swarmnode.node.common import hold_key
from swarmnode.weights.catalog import bundled_model
from swarmnode.wire.secret import network_tag

ADDRESS = f"swarm://{NodeKey.from_seed(bytes(32)).node_id}@127.0.0.1:1"


def run(*arguments: str, home: Path | None = None) -> Result:
    environment = {} if home is None else {"SWARMNODE_HOME": str(home)}
    return CliRunner().invoke(main, list(arguments), env=environment)


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_help_has_an_example_and_fits(verb: str) -> None:
    result = run(verb, "--help")
    assert result.exit_code == 0
    assert f"swarmnode {verb}" in result.output
    assert "Example:" in result.output
    assert max(len(line) for line in result.output.splitlines()) <= 80


def test_the_list_of_verbs() -> None:
    result = run("--help")
    assert all(verb in result.output for verb in VERBS)
    assert max(len(line) for line in result.output.splitlines()) <= 80


@pytest.mark.parametrize("module", ["swarmnode", "swarmnode.cli"])
def test_the_command_runs_as_a_module(module: str) -> None:
    """Where pip's folder of commands is not in the PATH, people write `python -m`."""
    found = subprocess.run(
        [sys.executable, "-m", module, "--help"], check=True, capture_output=True, text=True
    )
    assert found.stdout.startswith(f"Usage: python -m {module} [OPTIONS] COMMAND")


def test_identity_is_made_once(tmp_path: Path) -> None:
    first, second = run("identity", home=tmp_path), run("identity", home=tmp_path)
    assert "(new)" in first.output
    assert "(new)" not in second.output
    assert first.output.split()[2] == second.output.split()[2]


def test_inspect_prints_the_bundled_model() -> None:
    result = run("inspect")
    assert result.exit_code == 0
    assert "bytes of one expert" in result.output
    assert "ffn_down_exps" in result.output
    about = json.loads(run("inspect", "--json").output)
    assert about["experts"] >= 16
    assert about["quantisation"]["ffn_gate_exps"] == {"Q4_K": about["layers"]}
    assert about["quantisation"]["ffn_down_exps"] == {"Q6_K": about["layers"]}
    assert about["bytes"] <= 12_000_000


def test_shard_writes_a_gguf(tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    result = run(
        "shard", str(bundled_model()), "--layers", "0:2", "--experts", "0:3", "-o", str(out), home=tmp_path
    )
    assert result.exit_code == 0, result.output
    reader = GGUFReader(out)
    assert {tensor.name for tensor in reader.tensors} >= {
        "blk.0.ffn_up_exps.weight",
        "blk.1.ffn_down_exps.weight",
    }
    assert reader.tensors[0].shape[-1] == 3

    shown = run("inspect", str(out), home=tmp_path)
    assert shown.exit_code == 0
    assert "6 experts" in shown.output
    assert "layer 1, experts 0:3" in shown.output

    again = ["shard", str(bundled_model()), "--layers", "0:1", "--experts", "0:1", "-o", str(out)]
    refused = run(*again, home=tmp_path)
    assert refused.exit_code == 2
    assert "--force" in refused.output
    assert run(*again, "--force", home=tmp_path).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--layers", "0:99", "--experts", "0:3"], "have routed experts"),
        (["--layers", "0:1", "--experts", "0:99"], "has experts 0 to"),
        (["--layers", "1:1", "--experts", "0:3"], "no range"),
        (["--layers", "a:b", "--experts", "0:3"], "no range"),
        (["--layers", "-1:2", "--experts", "0:3"], "no range"),
        (["--layers", "0:٢", "--experts", "0:3"], "no range"),
    ],
)
def test_shard_refuses_wrong_ranges(tmp_path: Path, arguments: list[str], says: str) -> None:
    out = tmp_path / "out.gguf"
    result = run("shard", str(bundled_model()), *arguments, "-o", str(out), home=tmp_path)
    assert result.exit_code == 2
    assert says in result.output
    assert not out.exists()


def test_shard_refuses_a_name_that_looks_split(tmp_path: Path) -> None:
    out = tmp_path / "x-00001-of-00002.gguf"
    result = run("shard", str(bundled_model()), "--layers", "0:1", "--experts", "0:1", "-o", str(out))
    assert result.exit_code == 2
    assert "split" in result.output


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["join", "--budget", "1x"], 2, "not a size"),
        (["join"], 2, "--budget"),
        (["join", "--budget", "3MB"], 2, "no peer is known"),
        (["join", "--budget", "3MB", "--bootstrap", "nonsense"], 2, "neither an address"),
        (["join", "--budget", "3MB", "--bootstrap", "swarm://abc@h:1"], 2, "52 characters"),
        (["join", "--budget", "3MB", "--listen", ":1", "--allow", "no-such-file"], 2, "cannot read the list"),
        (["join", "--budget", "3MB", "--bootstrap", ADDRESS, "--advertise", "foo"], 2, "write HOST:PORT"),
        (["join", "--budget", "3MB", "--bootstrap", ADDRESS, "--advertise", "foo:0"], 2, "is not a port"),
        (["backbone", "--advertise", "::1"], 2, "write HOST:PORT"),
        (
            ["join", "--budget", "3MB", "--bootstrap", ADDRESS, "--no-listen", "--advertise", "foo:1"],
            2,
            "--no-listen nobody",
        ),
        (["backbone", "--allow", "no-such-file"], 2, "cannot read the list of allowed nodes"),
        (["backbone", "--api", "127.0.0.1:0", "--model", "no-such-model"], 2, "no file and no known model"),
        (["backbone", "--api", "0.0.0.0:1"], 1, "swarmnode key new"),
        (["backbone", "--cors", "https://a.example/path"], 2, "write https://HOST"),
        (["backbone", "--listen", "127.0.0.1:xyz"], 2, "HOST:PORT"),
        (["backbone", "--listen", "127.0.0.1:٣"], 2, "HOST:PORT"),
        (["backbone", "--send", "never"], 2, "'auto', 'always'"),
        (["backbone", "--local-budget", "much"], 2, "is not a size"),
        (["inspect", "nothing.gguf"], 2, "no file and no known model"),
        (["generate", "hi", "--api", "127.0.0.1:9"], 1, "no backbone answers"),
        (["generate", "hi", "--api", ":::"], 2, "no address of an API"),
        (["generate", "hi", "--api", "http://[::1"], 2, "no address of an API"),
        (["generate", "hi", "--api", "a..b:1"], 1, "a..b"),
        (["generate", "hi", "--temperature", "nan"], 2, "temperature"),
        (["generate", "bad\udcff"], 2, "not valid UTF-8"),
        (["backbone", "--listen", "a..b:1", "--api", "127.0.0.1:0"], 1, "cannot listen"),
        (["identity", "--home", "x" * 300], 1, "File name too long"),
        (["join", "--budget", "3MB", "--hours", "25"], 2, "are no hours"),
        (["join", "--budget", "3MB", "--bootstrap", ADDRESS, "--device", "foo"], 2, "no device named 'foo'"),
        (["join", "--budget", "3MB", "--secret", "no-such-file"], 2, "cannot read the network secret"),
        (["backbone", "--network", "n" * 300], 2, "a network name has"),
        (["nonsense"], 2, "No such command"),
        (["invite", "--budget", "lots"], 2, "'lots' is not a size"),
        (["demo", "--budget", "lots"], 2, "'lots' is not a size"),
        (["stauts"], 2, "No such command 'stauts'. Did you mean 'status'?"),
    ],
)
def test_mistakes_get_one_clear_line(tmp_path: Path, arguments: list[str], code: int, says: str) -> None:
    result = run(*arguments, home=tmp_path)
    assert result.exit_code == code
    assert says in result.output
    assert "Traceback" not in result.output


def test_a_list_of_who_may_dial_needs_a_node_that_listens(tmp_path: Path) -> None:
    allowed = tmp_path / "allowed"
    allowed.write_text(f"{NodeKey.from_seed(bytes(32)).node_id}\n")
    options = ["--bootstrap", ADDRESS, "--no-listen", "--allow", str(allowed)]
    result = run("join", "--budget", "3MB", *options, home=tmp_path)
    assert result.exit_code == 2
    assert "--no-listen nobody" in result.output


def test_lists_that_cannot_be_fetched_stop_nobody_who_knows_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    folders = Folders.under(tmp_path)
    lists = ["http://127.0.0.1:1/peers.txt"]
    with pytest.raises(LocalError, match=r"peers\.txt: refused: .*; try again, or name a node: --bootstrap"):
        membership_of(lists, "home", None, folders, lan=False)
    assert membership_of(lists, "home", None, folders, lan=True).peers == ()
    book = folders.address_book(network_tag("home", None))
    book.parent.mkdir(parents=True, exist_ok=True)
    book.touch()
    assert membership_of(lists, "home", None, folders, lan=False).peers == ()
    with pytest.raises(LocalError, match="name a node"):
        membership_of(lists, "another", None, folders, lan=False)
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 2
    assert warnings[1].endswith("; going on with nodes met earlier")


def test_shard_checks_ranges_before_it_makes_lists(tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    result = run("shard", str(bundled_model()), "--layers", "0:400000000", "--experts", "0:1", "-o", str(out))
    assert result.exit_code == 2
    assert "routed experts" in result.output


def test_shard_writes_files_only(tmp_path: Path) -> None:
    """Replacing what is there by rename once turned a device node into a file."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    result = run("shard", str(bundled_model()), "--layers", "0:1", "--experts", "0:1", "-o", str(fifo))
    assert result.exit_code == 2
    assert "not a file" in result.output
    assert fifo.is_fifo()
    missing = tmp_path / "no" / "out.gguf"
    result = run("shard", str(bundled_model()), "--layers", "0:1", "--experts", "0:1", "-o", str(missing))
    assert result.exit_code == 2
    assert "no folder" in result.output


def test_the_demo_allows_for_a_busy_machine() -> None:
    """A median of 10 ms once allowed 12 ms over the deadline."""
    assert longest_allowed_s(0.01, 0.25) == pytest.approx(0.35)
    assert longest_allowed_s(1.0, 0.25) == pytest.approx(1.45)


def test_control_characters_are_shown_not_sent() -> None:
    assert visible("a\x1b]0;x\x07\nserving") == "a\\x1b]0;x\\x07\\nserving"
    assert visible("a\nb\t", keep="\n\t") == "a\nb\t"
    assert visible("Grüße 日本 🙂") == "Grüße 日本 🙂"


def test_one_running_node_a_home(tmp_path: Path) -> None:
    folders = Folders.under(tmp_path)
    with (
        hold_key(folders),
        pytest.raises(UsageError, match="--home DIR of its own"),
        hold_key(folders),
    ):
        raise AssertionError("two nodes hold one key")
    with hold_key(folders) as key:
        assert key.node_id


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("0.0.0.0:1", ("0.0.0.0", 1)),
        ("host", ("host", 7)),
        (":5", ("127.0.0.1", 5)),
        ("[::1]:5", ("::1", 5)),
        ("[::1]", ("::1", 7)),
        ("::1", ("::1", 7)),
    ],
)
def test_host_and_port(text: str, place: tuple[str, int]) -> None:
    assert parse_host_port(text, 7) == place


def test_a_worker_needs_nothing_of_the_backbones_extra() -> None:
    """A phone installs the base dependencies only."""
    code = (
        "import sys\n"
        "for name in ('tokenizers', 'jinja2', 'starlette', 'hypercorn', 'httpx'):\n"
        "    sys.modules[name] = None\n"
        "import swarmnode.cli.join, swarmnode.cli.identity, swarmnode.cli.inspect, swarmnode.cli.shard\n"
        "import swarmnode.cli.doctor, swarmnode.cli.bench, swarmnode.cli.models\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("verb", ["backbone", "demo", "generate", "status"])
@pytest.mark.parametrize("library", sorted(BACKBONE_LIBRARIES))
def test_a_verb_that_needs_the_extra_says_so(
    verb: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place of a traceback, and of the help of a verb that would not run."""

    def without(name: str) -> ModuleType:
        raise ModuleNotFoundError(f"No module named {library!r}", name=f"{library}.part")

    monkeypatch.setattr("swarmnode.cli.importlib.import_module", without)
    for arguments in ([verb], [verb, "--help"]):
        result = run(*arguments)
        assert result.exit_code == 1
        assert result.output.count("\n") == 1
        assert result.output.startswith(f"swarmnode: `swarmnode {verb}` needs the extra `backbone`: ")
        assert 'pip install "./swarmnode[backbone]"' in result.output


def test_the_worker_installation_says_what_it_lacks() -> None:
    """In a process that really cannot import them."""
    code = (
        "import sys\n"
        "for name in ('tokenizers', 'jinja2', 'starlette', 'hypercorn', 'httpx'):\n"
        "    sys.modules[name] = None\n"
        "from swarmnode.cli import main\n"
        "main(['status'])\n"
    )
    found = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert found.returncode == 1
    assert found.stderr.startswith("swarmnode: `swarmnode status` needs the extra `backbone`: ")
    assert found.stderr.count("\n") == 1


def test_the_libraries_of_the_extra_are_those_of_pyproject() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    named = project["project"]["optional-dependencies"]["backbone"]
    assert {re.split(r"[\[>=]", item)[0] for item in named} == BACKBONE_LIBRARIES


@pytest.mark.parametrize("verb", ["identity", "status"])
def test_ctrl_c_while_a_verb_is_imported(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> ModuleType:
        raise KeyboardInterrupt

    monkeypatch.setattr("swarmnode.cli.importlib.import_module", interrupted)
    result = run(verb)
    assert (result.exit_code, result.output) == (130, "")


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        BaseExceptionGroup("", [KeyboardInterrupt()]),
        BaseExceptionGroup(
            "", [BaseExceptionGroup("", [KeyboardInterrupt()]), ValueError("its consequence")]
        ),
    ],
)
def test_ctrl_c_in_a_verb(error: BaseException, capfd: pytest.CaptureFixture[str]) -> None:
    @clear_errors
    def verb() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        verb()
    assert ended.value.code == 130
    assert capfd.readouterr() == ("", "")


def test_a_worker_does_not_load_what_it_can_do_without() -> None:
    """3 MB for a progress bar nobody sees, 2 MB for numpy's generators: a budget is a promise about memory."""
    code = (
        "import sys\n"
        "import swarmnode.cli.join\n"
        "from swarmnode.compute.devices import open_device\n"
        "from swarmnode.compute.self_test import check_device\n"
        "assert check_device(open_device('CPU', 1)).passed\n"
        "print(sorted({'rich', 'numpy.random'} & set(sys.modules)))\n"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout == "[]\n"


def test_rows_travel_in_one_encoding() -> None:
    result = run("backbone", "--exact", "--q8")
    assert result.exit_code == 2
    assert "--exact and --q8 exclude each other" in result.output
