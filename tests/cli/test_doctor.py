"""`swarmnode doctor`: each line says ok, warn or fail, and what to do."""

from __future__ import annotations

import socket
from functools import partial
from pathlib import Path

import pytest
import trio
from click.testing import CliRunner

from swarmnode.cli import doctor_machine, main
from swarmnode.cli.common import Membership
from swarmnode.cli.doctor_machine import Finding
from swarmnode.cli.doctor_peers import dial_all, peers
from swarmnode.config import Folders
from swarmnode.identity import NodeKey
from swarmnode.net.address import PeerAddress
from swarmnode.net.links import serve
from swarmnode.services.machine import MachineState
from swarmnode.testing.memory_net import MemoryNetwork
from swarmnode.wire.endpoint import Endpoint
from swarmnode.wire.handshake import Credentials
from swarmnode.wire.secret import NetworkSecret

GB = 10**9
KEY = NodeKey.from_seed(bytes(32))


@pytest.fixture(autouse=True)
def no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SWARMNODE_BOOTSTRAP", "SWARMNODE_SECRET"):
        monkeypatch.delenv(name, raising=False)


def only(found: list[Finding]) -> Finding:
    assert len(found) == 1
    return found[0]


def test_every_line_has_a_level(tmp_path: Path) -> None:
    places = ["--listen", "127.0.0.1:0", "--api", "127.0.0.1:0", "--home", str(tmp_path)]
    result = CliRunner().invoke(main, ["doctor", "--max-rows", "8", *places])
    assert result.exit_code == 0, result.output
    assert {line.split()[0] for line in result.output.splitlines()} <= {"ok", "warn"}
    looked_at = "Python ggml device memory key cache clock swarm: api: peer relay model"
    for what in looked_at.split():
        assert what in result.output


def test_a_broken_model_fails(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF")
    arguments = ["doctor", "--max-rows", "1", "--home", str(tmp_path), "--model", str(path)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    assert any(line.startswith("fail  model: ") and str(path) in line for line in result.output.splitlines())
    result = CliRunner().invoke(main, [*arguments[:-1], "nothere"])
    assert result.exit_code == 1
    assert "fail  nothere is no file and no known model; known (in " in result.output
    assert ": baker-street (" in result.output
    assert "\\n" not in result.output


def test_unwritable_folders_fail_and_name_the_option(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    found = dict(zip(("key", "cache"), doctor_machine.folders(Folders.under(tmp_path)), strict=True))
    assert found["key"][0] == "ok"
    level, text = found["cache"]
    assert level == "fail"
    assert str(tmp_path / "cache") in text
    assert "--home DIR" in text


@pytest.mark.parametrize(
    ("machine", "levels", "says"),
    [
        (MachineState(), ["ok"], "does not say"),
        (MachineState(4 * GB, 8 * GB), ["ok"], "--budget 2000MB"),
        (MachineState(GB // 10, 8 * GB), ["warn"], "--keep-free"),
        (MachineState(4 * GB, 8 * GB, 30.0), ["ok", "warn"], "30 % of the time"),
        (MachineState(4 * GB, 8 * GB, 0.0, True, 50), ["ok", "ok"], "--on-battery serve"),
    ],
)
def test_memory_and_power(machine: MachineState, levels: list[str], says: str) -> None:
    found = list(doctor_machine.memory(machine))
    assert [level for level, _ in found] == levels
    assert says in found[-1][1]


@pytest.mark.parametrize(
    ("now_s", "state", "level"), [(0.0, 0, "fail"), (1.8e9, 5, "warn"), (1.8e9, 0, "ok"), (1.8e9, None, "ok")]
)
def test_the_clock(now_s: float, state: int | None, level: str) -> None:
    assert only(list(doctor_machine.clock(now_s, lambda: state)))[0] == level


def test_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = listener.getsockname()
        level, text = only(list(doctor_machine.port("swarm", place, "--listen", is_running=False)))
        assert level == "warn"
        assert "give --listen" in text
        assert only(list(doctor_machine.port("swarm", place, "--listen", is_running=True)))[0] == "ok"
    assert only(list(doctor_machine.port("api", ("127.0.0.1", 0), "--api", is_running=False)))[0] == "ok"
    assert only(list(doctor_machine.port("api", ("203.0.113.9", 1), "--api", is_running=False)))[0] == "warn"


def test_whether_a_node_runs(tmp_path: Path) -> None:
    folders = Folders.under(tmp_path)
    assert doctor_machine.running(folders) == (False, [("ok", "no node runs with this key now")])
    folders.data.mkdir()
    folders.control_socket.touch()
    assert doctor_machine.running(folders)[0] is False


def test_no_peer_is_named() -> None:
    nobody = Membership((), "public", None)
    assert only(list(peers(nobody, knows_others=False)))[0] == "warn"
    assert only(list(peers(nobody, knows_others=True)))[0] == "ok"


def test_peers_that_are_all_unreachable_fail() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = listener.getsockname()
    member = Membership((PeerAddress(KEY.node_id, *place),), "public", None)
    level, text = only(list(peers(member, knows_others=False)))
    assert level == "fail"
    assert "firewalls" in text


async def test_who_is_reached_and_who_not() -> None:
    """Up to the end of the handshake: another key or network is not taken for the node."""
    network = MemoryNetwork()
    endpoint = Endpoint.create(Credentials(KEY), network="home", agent="x", roles=("backbone",))
    other = NodeKey.from_seed(bytes([1] * 32)).node_id
    async with trio.open_nursery() as nursery:
        run = partial(serve, network.host("node"), endpoint, handlers={}, host="node", port=1)
        await nursery.start(run)
        places = (
            PeerAddress(KEY.node_id, "node", 1),
            PeerAddress(other, "node", 1),
            PeerAddress(KEY.node_id, "nobody", 1),
        )
        found = await dial_all(Membership(places, "home", None), network.host("doctor"))
        assert [level for level, _ in found] == ["ok", "warn", "warn"]
        assert "end of the handshake" in found[0][1]
        wrong = [
            Membership(places[:1], "elsewhere", None),
            Membership(places[:1], "home", NetworkSecret(bytes(32))),
        ]
        for member in wrong:
            assert only(await dial_all(member, network.host("doctor")))[0] == "warn"
        nursery.cancel_scope.cancel()
