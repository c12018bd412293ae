"""A node that may choose its port is found where it was."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import trio

from swarmnode.config import Folders
from swarmnode.errors import UsageError
from swarmnode.identity import NodeKey
from swarmnode.net.peer import Peer
from swarmnode.net.port_file import read_host
from swarmnode.node.common import NodeOptions, endpoint_of
from swarmnode.node.listening import listen_for_nodes
from swarmnode.testing.memory_net import MemoryNetwork


async def nothing(peer: Peer) -> None:
    """Another node is nobody's business here."""


async def ports(network: MemoryNetwork, home: Path, port: int = 0, *, n_nodes: int = 1) -> list[int]:
    """Where so many nodes with one home listen, one started after the other."""
    folders = Folders.under(home)
    folders.data.mkdir(parents=True, exist_ok=True)
    options = NodeOptions(folders, "test", listen=("host", port))
    endpoint = endpoint_of(options, NodeKey.from_seed(bytes(32)), "worker")
    found = []
    async with trio.open_nursery() as nursery:
        start = partial(listen_for_nodes, nursery, options, network.host("host"), endpoint, {}, nothing)
        for _ in range(n_nodes):
            ((_, chosen),) = await start()
            found.append(chosen)
        nursery.cancel_scope.cancel()
    return found


async def test_the_port_of_the_last_run_is_taken_again(tmp_path: Path) -> None:
    network = MemoryNetwork()
    first = await ports(network, tmp_path / "one")
    other = await ports(network, tmp_path / "two")
    assert first != other
    assert await ports(network, tmp_path / "one") == first
    assert await ports(network, tmp_path / "two") == other


async def test_a_port_that_is_taken_is_replaced_and_forgotten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    network = MemoryNetwork()
    first, second = await ports(network, tmp_path, n_nodes=2)
    assert first != second
    assert f"port {first}, where others know this node, cannot be had" in caplog.text
    assert await ports(network, tmp_path) == [second]


async def test_a_port_that_was_asked_for_is_kept_too(tmp_path: Path) -> None:
    """Invitations name it."""
    assert await ports(MemoryNetwork(), tmp_path, 5790) == [5790]
    assert await ports(MemoryNetwork(), tmp_path) == [5790]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "0",
        "-1",
        "65536",
        "9" * 100,
        "port",
        "\u00b2",
        "5_7_9_0",
        "+4790",
        "1023",
        "22",
        20 * " " + "4790",
    ],
)
async def test_a_file_that_names_no_port_does_no_harm(content: str, tmp_path: Path) -> None:
    kept = Folders.under(tmp_path).port_file
    kept.parent.mkdir(parents=True)
    kept.write_text(content, encoding="utf-8")
    (chosen,) = await ports(MemoryNetwork(), tmp_path)
    assert kept.read_text() == f"{chosen}\n"
    assert read_host(kept) is not None


async def test_a_chosen_port_is_the_operators(tmp_path: Path) -> None:
    network = MemoryNetwork()
    await ports(network, tmp_path)
    assert await ports(network, tmp_path, 7) == [7]
    with pytest.RaisesGroup(pytest.RaisesExc(UsageError, match="port 7")):
        await ports(network, tmp_path, 7, n_nodes=2)
