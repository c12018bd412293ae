"""`swarmnode invite`, and how a link, --network and --secret come together."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from swarmnode.cli import invite as verb
from swarmnode.cli import main
from swarmnode.cli.common import Membership, membership_of
from swarmnode.config import Folders
from swarmnode.errors import UsageError
from swarmnode.identity import NodeKey
from swarmnode.net.invite import Invite, suggested_budget
from swarmnode.net.own_hosts import own_hosts
from swarmnode.net.port_file import write_budget, write_host, write_port
from swarmnode.net.secret_file import read_secret
from swarmnode.wire.secret import NetworkSecret

NODE = NodeKey.from_seed(bytes(32)).node_id
ADDRESS = f"swarm://{NODE}@127.0.0.1:1"
SECRET, OTHER = NetworkSecret(bytes(32)), NetworkSecret(bytes([1]) * 32)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SWARMNODE_SECRET", "SWARMNODE_BOOTSTRAP", "SWARMNODE_HOME"):
        monkeypatch.delenv(name, raising=False)


def run(home: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["invite", "--home", str(home), *arguments])


def link_of(result: Result) -> Invite:
    assert result.exit_code == 0, result.output
    return Invite.parse(result.output.splitlines()[0])


def secret_in(folder: Path, secret: NetworkSecret = SECRET) -> Path:
    path = folder / "secret"
    path.write_text(secret.text + "\n")
    path.chmod(0o600)
    return path


def test_a_link_a_command_and_a_qr_code(tmp_path: Path) -> None:
    result = run(tmp_path, "--at", "backbone.example.org", "--at", "[2001:db8::1]:5", "--at", "2001:db8::2")
    invite = link_of(result)
    assert invite.addresses[0].node_id == NodeKey.load_or_create(Folders.under(tmp_path).key_file).node_id
    assert [(address.host, address.port) for address in invite.addresses] == [
        ("backbone.example.org", 4790),
        ("2001:db8::1", 5),
        ("2001:db8::2", 4790),
    ]
    assert (invite.network, invite.secret) == ("public", None)
    assert f'swarmnode join --budget 300MB --bootstrap "{invite}"' in result.output
    assert "█" in result.output
    assert "█" not in run(tmp_path, "--at", "h", "--no-qr").output


def test_the_addresses_of_this_machine_are_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verb, "own_hosts", lambda: ["192.168.1.5", "fd00::5"])
    result = run(tmp_path)
    assert [address.host for address in link_of(result).addresses] == ["192.168.1.5"]
    assert "inside your own network only" in result.output
    monkeypatch.setattr(verb, "own_hosts", list)
    assert "give --at" in run(tmp_path).output


def test_the_port_of_the_last_run_is_named(tmp_path: Path) -> None:
    port_file = Folders.under(tmp_path).port_file
    port_file.parent.mkdir(parents=True)
    port_file.write_text("5790\n")
    result = run(tmp_path, "--at", "h", "--at", "i:1", "--at", "[::1]")
    assert [address.port for address in link_of(result).addresses] == [5790, 1, 5790]
    assert "--listen 0.0.0.0:5790" in result.output


@pytest.mark.parametrize(
    ("listened", "hosts", "says"),
    [
        ("0.0.0.0", ["192.168.1.5"], "it listens for others at port 5790."),
        ("::", ["192.168.1.5", "fd00::5"], "it listens for others at port 5790."),
        ("192.168.7.7", ["192.168.7.7"], "it listens for others at port 5790."),
        ("127.0.0.1", ["127.0.0.1"], "for this machine only; start it with --listen 0.0.0.0:5790"),
    ],
)
def test_only_addresses_that_answer_are_named(
    listened: str, hosts: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verb, "own_hosts", lambda: ["192.168.1.5", "fd00::5"])
    port_file = Folders.under(tmp_path).port_file
    port_file.parent.mkdir(parents=True)
    write_port(port_file, 5790)
    write_host(port_file, listened)
    result = run(tmp_path)
    assert [address.host for address in link_of(result).addresses] == hosts
    assert result.output.splitlines()[-1].endswith(says)
    beside = listened == "127.0.0.1"
    assert ("On this machine" in result.output) == beside
    assert ("join --budget 300MB --home ~/swarm-worker1 --bootstrap" in result.output) == beside


def test_the_budget_is_that_of_the_last_backbone(tmp_path: Path) -> None:
    """The dashboard's invitation names the same (tests/node/test_dashboard.py)."""
    port_file = Folders.under(tmp_path).port_file
    port_file.parent.mkdir(parents=True)
    write_budget(port_file, suggested_budget(8_159_232))
    assert "swarmnode join --budget 3MB --bootstrap" in run(tmp_path, "--at", "h").output
    assert "swarmnode join --budget 1GB --bootstrap" in run(tmp_path, "--at", "h", "--budget", "1GB").output
    port_file.with_name(port_file.name + ".budget").write_text("$(reboot)")
    assert "swarmnode join --budget 300MB --bootstrap" in run(tmp_path, "--at", "h").output
    assert suggested_budget(70_000_000_000) == "300MB"


def test_own_hosts_are_addresses() -> None:
    for host in own_hosts():
        assert link_of_host(host).addresses[0].host == host


def link_of_host(host: str) -> Invite:
    place = f"[{host}]:1" if ":" in host else f"{host}:1"
    return Invite.parse(f"swarm://{NODE}@{place}")


def test_the_secret_travels_only_when_asked_and_that_is_said(tmp_path: Path) -> None:
    secret = str(secret_in(tmp_path))
    quiet = run(tmp_path, "--at", "h", "--secret", secret)
    assert link_of(quiet).secret is None
    assert SECRET.text not in quiet.output
    assert "--secret FILE" in quiet.output
    loud = run(tmp_path, "--at", "h", "--secret", secret, "--with-secret", "--network", "home")
    assert link_of(loud).secret == SECRET
    assert link_of(loud).network == "home"
    assert "CARRIES THE NETWORK'S SECRET" in loud.output
    none = run(tmp_path, "--at", "h", "--with-secret")
    assert none.exit_code == 2
    assert "give --secret FILE" in none.output


def test_a_new_secret_is_for_its_owner_only_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "secret"
    result = run(tmp_path, "--new-secret", str(path))
    assert result.exit_code == 0, result.output
    made = read_secret(path)
    assert made.text not in result.output
    if os.name == "posix":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        path.chmod(0o644)
        with pytest.raises(UsageError, match="chmod 600"):
            read_secret(path)
        path.chmod(0o600)
    again = run(tmp_path, "--new-secret", str(path))
    assert again.exit_code == 1
    assert read_secret(path) == made


@pytest.mark.parametrize("content", [b"", b"short", b"\xff\xfe", b"x" * 9000], ids=range(4))
def test_a_file_without_a_secret_is_named_and_not_shown(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(UsageError, match="file"):
        read_secret(path)


def member(
    home: Path, *bootstrap: str, network: str | None = None, secret_file: Path | None = None
) -> Membership:
    return membership_of(bootstrap, network, secret_file, Folders.under(home), lan=False)


def test_a_link_says_the_network_unless_it_contradicts_the_option(tmp_path: Path) -> None:
    link = f"{ADDRESS}?network=home"
    assert member(tmp_path, link).network == "home"
    assert member(tmp_path, link, network="home").network == "home"
    assert member(tmp_path, ADDRESS).network == "public"
    assert member(tmp_path, ADDRESS, network="work").network == "work"
    with pytest.raises(UsageError, match="the link is for the network home"):
        member(tmp_path, link, network="work")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--network", "\udcff"], "not UTF-8"),
        (["--network", "\u00e9" * 33], "1 to 64 bytes"),
        ([word for port in range(1, 10) for word in ("--at", f"h:{port}")], "8 places, not 9"),
    ],
)
def test_no_link_is_shown_that_others_could_not_read(
    arguments: list[str], reason: str, tmp_path: Path
) -> None:
    result = run(tmp_path, "--at", "h:99", *arguments) if len(arguments) == 2 else run(tmp_path, *arguments)
    assert result.exit_code != 0
    assert reason in result.output
    assert "swarm://" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)


@pytest.mark.parametrize("network", ["\udcff", "x" * 65])
def test_a_name_that_no_network_can_have_is_refused_at_once(network: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a network name"):
        member(tmp_path, ADDRESS, network=network)


def test_where_a_secret_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = f"{ADDRESS}?secret={SECRET.text}"
    assert member(tmp_path, ADDRESS).secret is None
    settings = Folders.under(tmp_path).secret_file
    settings.parent.mkdir(parents=True)
    secret_in(tmp_path, OTHER).rename(settings)
    assert member(tmp_path, ADDRESS).secret == OTHER
    monkeypatch.setenv("SWARMNODE_SECRET", SECRET.text)
    assert member(tmp_path, ADDRESS).secret == SECRET
    monkeypatch.setenv("SWARMNODE_SECRET", OTHER.text)
    assert member(tmp_path, link).secret == SECRET
    path = secret_in(tmp_path)
    assert member(tmp_path, link, secret_file=path).secret == SECRET
    with pytest.raises(UsageError, match="carries another secret"):
        member(tmp_path, link, secret_file=secret_in(tmp_path, OTHER))
    monkeypatch.setenv("SWARMNODE_SECRET", "nonsense")
    with pytest.raises(UsageError, match="SWARMNODE_SECRET: a network secret has 52") as error:
        member(tmp_path, ADDRESS)
    assert "nonsense" not in str(error.value)
