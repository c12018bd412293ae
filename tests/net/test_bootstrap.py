"""Bootstrap lists: what they may hold, where they are looked for, and how a mistake is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmnode.config import BootstrapConfig
from swarmnode.errors import UsageError
from swarmnode.identity import NodeKey
from swarmnode.net.address import PeerAddress
from swarmnode.net.bootstrap import Bootstrap, find_peers, parse_list, read_list
from swarmnode.wire.secret import NetworkSecret

NODE = NodeKey.from_seed(bytes(32)).node_id
OTHER = NodeKey.from_seed(bytes([1]) * 32).node_id

LIST = f"""
# friends
swarm://{NODE}@backbone.example.org:4790   # at home

swarm://{OTHER}@192.0.2.10:1
\tswarm://{OTHER}@[2001:DB8::10]:65535
swarm://{NODE}@backbone.example.org:4790
"""


def test_names_ipv4_ipv6_comments_blank_lines_and_repeats() -> None:
    assert parse_list(LIST, "x") == (
        PeerAddress(NODE, "backbone.example.org", 4790),
        PeerAddress(OTHER, "192.0.2.10", 1),
        PeerAddress(OTHER, "2001:db8::10", 65535),
    )


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("backbone.example.org:4790", "starts with swarm://"),
        ("http://x@y:1", "starts with swarm://"),
        (f"swarm://{NODE}", "@ is missing"),
        (f"swarm://{NODE}@host", "has no port"),
        (f"swarm://{NODE}@host:", "is not a port"),
        (f"swarm://{NODE}@host:0", "is not a port"),
        (f"swarm://{NODE}@host:65536", "is not a port"),
        (f"swarm://{NODE}@host:٣", "is not a port"),
        (f"swarm://{NODE}@host:4790/path", "is not a port"),
        (f"swarm://{NODE}@2001:db8::10:4790", "stands in brackets"),
        (f"swarm://{NODE}@[2001:db8::zz]:4790", "is not an IPv6 address"),
        (f"swarm://{NODE}@[]:4790", "is not an IPv6 address"),
        (f"swarm://{NODE}@:4790", "neither a DNS name nor an IP address"),
        (f"swarm://{NODE}@-host:4790", "neither a DNS name nor an IP address"),
        (f"swarm://{NODE}@ho st:4790", "neither a DNS name nor an IP address"),
        (f"swarm://{NODE}@300.1.1.1:4790", "is not an IPv4 address"),
        (f"swarm://{NODE}@{'a.' * 200}b:4790", "neither a DNS name nor an IP address"),
        (f"swarm://{'a' * 51}@host:4790", "has 52 characters, not 51"),
        (f"swarm://{'1' * 52}@host:4790", "only the letters a-z"),
        (f"swarm://{str(NODE)[:-1]}b@host:4790", "mistyped"),
        (f"swarm://{'a' * 52}@host:4790", "weak key"),
        ("swarm://" + "x" * 600, "an address of 608 characters"),
    ],
)
def test_a_wrong_line_is_named_with_its_reason(entry: str, reason: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_list(f"# first\n\n{entry}\n", "peers.txt")
    assert str(error.value).startswith("peers.txt, line 3: ")
    assert reason in str(error.value)


def test_an_address_is_read_back_as_it_is_written() -> None:
    for host in ("localhost", "192.0.2.10", "2001:db8::10"):
        address = PeerAddress(NODE, host, 4790)
        assert PeerAddress.parse(str(address)) == address


def find(
    tmp_path: Path,
    *arguments: str,
    variable: str = "",
    lists: dict[str, str] | None = None,
) -> Bootstrap:
    """find_peers with these lists on the web; one that is not among them cannot be reached."""

    def fetch(source: str, config: BootstrapConfig) -> str:
        if source not in (lists or {}):
            raise OSError("no route to host")
        return (lists or {})[source]

    return find_peers(
        arguments,
        {"SWARMNODE_BOOTSTRAP": variable},
        tmp_path / "default.txt",
        cache=tmp_path / "cache",
        fetch=fetch,
    )


def ports(found: Bootstrap) -> list[int]:
    return [peer.port for peer in found.peers]


FIRST, SECOND, THIRD = (f"swarm://{NODE}@host:{port}" for port in (1, 2, 3))
WEB = "https://example.org/peers.txt"


def test_arguments_go_before_the_variable_and_the_variable_before_the_file(tmp_path: Path) -> None:
    named = tmp_path / "named.txt"
    assert find(tmp_path) == Bootstrap()
    (tmp_path / "default.txt").write_text(THIRD)
    assert ports(find(tmp_path)) == [3]
    assert ports(find(tmp_path, variable=f"{FIRST}, {SECOND}")) == [1, 2]
    named.write_text(f"{SECOND}\n{FIRST}\n")
    assert ports(find(tmp_path, str(named), FIRST, variable=THIRD)) == [2, 1]


def test_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shells expand it at the beginning of a word only."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "named.txt").write_text(SECOND)
    assert ports(find(tmp_path, variable=f"{FIRST},~/named.txt")) == [1, 2]
    assert ports(find(tmp_path, "~/named.txt")) == [2]


@pytest.mark.parametrize("item", ["x" * 5000, "/tmp/\udcff"])
def test_what_no_file_can_be_called_is_a_usage_error(item: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        find(tmp_path, item)


def test_what_no_url_can_be_called_is_a_list_that_cannot_be_fetched(tmp_path: Path) -> None:
    assert find_peers(["https://127.0.0.1:1/\udcff"], {}, tmp_path / "x", cache=tmp_path).failure


def test_what_is_neither_address_nor_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--bootstrap: 'nowhere' is neither an address"):
        find(tmp_path, "nowhere")
    with pytest.raises(UsageError, match="SWARMNODE_BOOTSTRAP 'swarm://x': "):
        find(tmp_path, variable="swarm://x")


def test_files_addresses_urls_and_names_together(tmp_path: Path) -> None:
    (tmp_path / "list").write_text(FIRST)
    lists = {WEB: f"# on the web\n{SECOND}\n", "dns:example.org": THIRD}
    found = find(tmp_path, str(tmp_path / "list"), WEB, "dns:example.org", SECOND, lists=lists)
    assert ports(found) == [1, 2, 3]
    assert found.warnings == ()


def test_a_list_that_cannot_be_fetched_is_a_warning_when_there_is_another(tmp_path: Path) -> None:
    found = find(tmp_path, WEB, FIRST)
    assert ports(found) == [1]
    assert found.warnings == (f"{WEB}: no route to host",)
    assert found.failure == ""
    found = find(tmp_path, WEB)
    assert found == Bootstrap(failure=f"no bootstrap list could be fetched: {WEB}: no route to host")


def test_the_last_good_copy_is_used(tmp_path: Path) -> None:
    assert ports(find(tmp_path, WEB, lists={WEB: SECOND})) == [2]
    for broken in ({}, {WEB: "<html>please log in</html>"}):
        found = find(tmp_path, WEB, lists=broken)
        assert ports(found) == [2]
        (warning,) = found.warnings
        assert warning.endswith("its last good copy is used")


def test_a_link_brings_its_network_and_secret(tmp_path: Path) -> None:
    secret = NetworkSecret(bytes(32))
    found = find(tmp_path, f"{FIRST}?network=home&secret={secret.text}&at=other:9", SECOND)
    assert (ports(found), found.network, found.secret) == ([1, 9, 2], "home", secret)
    with pytest.raises(UsageError, match="different networks"):
        find(tmp_path, f"{FIRST}?network=home", f"{FIRST}?network=work")
    with pytest.raises(UsageError) as error:
        find(tmp_path, f"{FIRST}?secret={secret.text}&secret=x")
    assert secret.text not in str(error.value)


def test_lists_that_are_no_text_or_too_long(tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not UTF-8 text"):
        read_list(path)
    path.write_bytes(b"#" * (1024 * 1024 + 1))
    with pytest.raises(UsageError, match="over 1 MiB"):
        read_list(path)
    path.write_bytes(b"\xef\xbb\xbf# from Windows\r\n" + f"swarm://{NODE}@host:1\r\n".encode())
    assert len(read_list(path)) == 1
    with pytest.raises(UsageError, match="cannot read the bootstrap list"):
        read_list(tmp_path)


def test_the_shipped_list_is_valid() -> None:
    shipped = Path(__file__).parents[2] / "bootstrap" / "peers.txt"
    assert read_list(shipped) == ()
