"""`swarmnode status`: what it prints of a state, how wide, and what it says when nobody answers."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.cli import main
from swarmnode.cli.status import WIDTH, heat_line, lines_of

COLOUR = re.compile("\x1b\\[[0-9;]*m")
NODE = "a" * 52


def own(**changes: Any) -> dict[str, Any]:
    values = {
        "node": NODE,
        "name": "aaaaaaaa",
        "roles": ["backbone"],
        "device": "cpu",
        "state": "seeding",
        "addresses": ["203.0.113.7:4790"],
        "serving": 0,
        "fetching": 0,
        "holdings": [],
        "seeds": True,
        "incarnation": 1,
        "key_conflict": False,
        "connected": 1,
        "neighbours": 1,
        "dialled_by_others": 3,
        "dialled_from_outside": 1,
        "last_dialled_s_ago": 75.0,
    }
    return values | changes


def node(number: int, **changes: Any) -> dict[str, Any]:
    values = {
        "node": f"{number:052}",
        "name": f"n{number:07}",
        "roles": ["worker"],
        "device": "gpu",
        "addresses": ["203.0.113.100:65535"],
        "state": "serving",
        "serving": 64,
        "fetching": 0,
        "capacity_bytes": 340_000_000,
        "connected": number == 0,
        "known_s": 60.0 * number,
    }
    return values | changes


def layer(number: int, replicas: str) -> dict[str, Any]:
    counts = [int(digit) for digit in replicas]
    return {
        "layer": number,
        "covered": sum(count > 0 for count in counts),
        "twice": sum(count > 1 for count in counts),
        "fetching": 0,
        "replicas": replicas,
    }


def state(n_expert: int = 256, n_layer: int = 3, n_nodes: int = 2, **changes: Any) -> dict[str, Any]:
    digits = ("0012" * n_expert)[:n_expert]
    values = {
        "model": "Some Model 122B",
        "model_id": "0f" * 32,
        "experts_per_layer": n_expert,
        "own": own(),
        "nodes_known": n_nodes,
        "roles": {"worker": n_nodes} if n_nodes else {},
        "nodes": [node(number) for number in range(n_nodes)],
        "nodes_serving_or_fetching": n_nodes,
        "coverage": [layer(number, digits) for number in range(n_layer)],
        "scarcest": [
            {"layer": 47, "first": 252, "count": 4, "replicas": 0.38, "demand": 7.25, "scarcity": 50.1}
        ],
    }
    return values | changes


def printed(value: dict[str, Any], max_nodes: int = 12) -> list[str]:
    return [COLOUR.sub("", line) for line in lines_of(value, max_nodes)]


class Handler(BaseHTTPRequestHandler):
    """Answers everything with what it was made with."""

    def __init__(self, answer: tuple[int, bytes], *arguments: Any) -> None:
        self._answer = answer
        super().__init__(*arguments)

    def do_GET(self) -> None:
        status, body = self._answer
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@contextmanager
def answering(body: bytes, status: int = 200) -> Iterator[str]:
    """HOST:PORT where every request is answered so."""
    with HTTPServer(("127.0.0.1", 0), partial(Handler, (status, body))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def run(*arguments: str, colour: bool = False) -> Result:
    return CliRunner().invoke(main, ["status", *arguments], color=colour)


@pytest.mark.parametrize(
    ("replicas", "group", "heat"),
    [
        ("0123459", 1, ".123333"),
        ("0123", 2, ".2"),
        ("33219", 2, "313"),
        ("9999", 4, "3"),
        ("1", 64, "1"),
    ],
)
def test_a_heat_line(replicas: str, group: int, heat: str) -> None:
    assert heat_line(replicas, group) == heat


@pytest.mark.parametrize(
    ("n_expert", "width"), [(1, 1), (16, 16), (64, 64), (65, 33), (128, 64), (256, 64), (512, 64)]
)
def test_every_layer_is_one_line(n_expert: int, width: int) -> None:
    lines = printed(state(n_expert, n_layer=48))
    layers = [line for line in lines if re.match(r" +\d+ [.123]+ +\d+% +\d+%$", line)]
    assert len(layers) == 48
    assert all(len(line.split()[1]) == width for line in layers)
    assert max(map(len, lines)) <= WIDTH


def test_what_is_printed() -> None:
    text = "\n".join(printed(state(16)))
    assert "Some Model 122B (0f0f0f0f0f0f0f0f)" in text
    assert f"this node  {NODE}" in text
    assert "addresses  203.0.113.7:4790" in text
    assert "reachable  yes: dialled 3 times, last 1 min ago; once from the internet" in text
    assert "24 of 48 experts (50%), twice 25%" in text
    assert "    2 ..12..12..12..12  50%  25%" in text
    assert re.search(r"47 +252:256 +0\.38 +7\.25", text)
    assert "connected  1 node; 1 gossip neighbour" in text
    assert "nodes      2 others known: 2 worker" in text
    assert "nodes      1 other known: 1 worker" in printed(state(16, n_nodes=1))
    assert re.search(r"\* n0000000 worker +gpu +serving +64 340\.0 MB +0 s +203\.0\.113\.100", text)


def test_nodes_that_were_only_heard_of_are_marked() -> None:
    """Their records stand for minutes after they went."""
    lines = printed(state(nodes=[node(0), node(1), node(2, state="lost"), node(3, state="idle")]))
    assert [line[1] for line in lines if re.match(" . n000000", line)] == ["*", "?", " ", " "]
    assert "   * connected with this node" in lines
    assert any(line.startswith("   ? by what it said last; not connected") for line in lines)
    assert not any(line.startswith("   ? ") for line in printed(state(nodes=[node(0)])))


def test_nobody_has_dialled() -> None:
    text = "\n".join(printed(state(own=own(dialled_by_others=0, last_dialled_s_ago=None, addresses=[]))))
    assert "nobody has dialled this node yet" in text
    assert "addresses  none" in text
    text = "\n".join(printed(state(own=own(dialled_from_outside=0))))
    assert "not from the internet" in text


def test_a_copied_key_is_told() -> None:
    assert any("WARNING" in line for line in printed(state(own=own(key_conflict=True))))


def test_many_nodes_are_cut_short() -> None:
    lines = printed(state(n_nodes=100))
    assert sum(" worker " in line for line in lines) == 12
    assert "   and 88 more (--all)" in lines
    assert sum(" worker " in line for line in printed(state(n_nodes=100), 10**9)) == 100
    assert "   and 9900 more" in printed(state(n_nodes=100, nodes_known=10_000), 10**9)


@given(st.text(max_size=300), st.lists(st.text(max_size=264), max_size=3), st.text(max_size=32))
def test_what_peers_say_stays_in_its_line(model: str, addresses: list[str], device: str) -> None:
    strange = node(1, addresses=addresses, device=device, state=device, roles=[device])
    value = state(model=model, nodes=[strange], roles={device: 1})
    lines = printed(value | {"own": own(addresses=addresses, device=device)})
    assert all(len(line) <= WIDTH for line in lines)
    assert not any(ord(character) < 32 or 127 <= ord(character) < 160 for line in lines for character in line)


def test_against_an_api() -> None:
    value = state(16)
    with answering(json.dumps(value).encode()) as api:
        shown = run("--api", api)
        assert shown.exit_code == 0, shown.output
        assert "\x1b" not in shown.output
        assert "\x1b[31m..\x1b[0m" in run("--api", api, colour=True).output
        assert json.loads(run("--api", api, "--json").output) == value


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"hello", 200, "is no backbone"),
        (b"[]", 200, "is no backbone"),
        (b"{}", 200, "is no backbone"),
        (b'{"own": 1, "coverage": []}', 200, "is no backbone"),
        (b'{"error": {"message": "not today"}}', 500, "not today"),
        (b"not found", 404, "answered 404"),
    ],
)
def test_something_else_answers(body: bytes, status: int, says: str) -> None:
    with answering(body, status) as api:
        result = run("--api", api)
    assert result.exit_code == 1
    assert says in result.output
    assert len(result.output.splitlines()) == 1


def test_nobody_answers() -> None:
    with answering(b"") as api:
        pass  # and stops
    result = run("--api", api)
    assert result.exit_code == 1
    assert "start one with `swarmnode backbone`" in result.output


def test_watching_ends_with_the_backbone(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    with answering(json.dumps(state()).encode()) as api:

        def sleep(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 3:
                raise KeyboardInterrupt

        monkeypatch.setattr("swarmnode.cli.status.time.sleep", sleep)
        result = run("--api", api, "--watch", "2.5")
    assert result.exit_code == 130
    assert pauses == [2.5] * 3
    assert result.output.count("coverage ") == 3
    assert run("--watch", "0").exit_code == 2


def test_the_token_is_printed_alone(tmp_path: Any) -> None:
    result = CliRunner().invoke(main, ["identity", "--token", "--home", str(tmp_path)])
    assert result.output.strip() == (tmp_path / "data" / "api.token").read_text().strip()
    shown = CliRunner().invoke(main, ["identity", "--home", str(tmp_path)])
    assert "api.token" in shown.output
    assert result.output.strip() not in shown.output


def test_a_state_is_not_cut() -> None:
    lines = printed(state(nodes=[node(0, state="other model")], n_nodes=1))
    assert any(" other model " in line for line in lines)
    assert all(len(line) <= WIDTH for line in lines)


def test_a_node_that_listens_everywhere_is_not_said_to_be_out_of_reach() -> None:
    met_nobody = printed(state(own=own(addresses=[], listens_everywhere=4790)))
    assert "addresses  all of this machine, port 4790; which one others use is not known yet" in met_nobody
    dials_only = printed(state(own=own(addresses=[])))
    assert "addresses  none: only nodes that it dials are met" in dials_only
