"""Remembering peers: what is kept, in which order it is tried, and a file that may be anything."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.config import AddressBookConfig
from swarmnode.errors import StoreError, UsageError
from swarmnode.identity import NodeId, NodeKey
from swarmnode.net.address import PeerAddress
from swarmnode.net.bootstrap import read_list
from swarmnode.services.address_book import AddressBook, AddressBookKeeper, load_book, save_book
from swarmnode.services.runners import Inline

CONFIG = AddressBookConfig(max_nodes=4, max_addresses=2, dial_nodes=3, precision_s=100)
NODES = [NodeKey.from_seed(bytes([number]) * 32).node_id for number in range(1, 9)]


def at(node: NodeId, host: str = "host", port: int = 1) -> PeerAddress:
    return PeerAddress(node, host, port)


def nodes_of(book: AddressBook) -> list[NodeId]:
    return list(dict.fromkeys(address.node_id for address in book.to_dial()))


def test_met_comes_before_heard_and_late_before_early() -> None:
    book = AddressBook(CONFIG)
    book.heard([at(NODES[0])], 500)
    book.met(at(NODES[1]), 100)
    book.met(at(NODES[2]), 200)
    assert nodes_of(book) == [NODES[2], NODES[1], NODES[0]]
    book.met(at(NODES[1]), 300)
    book.met(at(NODES[3]), 50)
    assert nodes_of(book) == [NODES[1], NODES[2], NODES[3]], "at most dial_nodes"


def test_the_place_where_a_node_was_met_last_is_first() -> None:
    book = AddressBook(CONFIG)
    book.met(at(NODES[0], "old"), 1)
    book.met(at(NODES[0], "new"), 2)
    assert [address.host for address in book.to_dial()] == ["new", "old"]
    for number in range(10):
        book.heard([at(NODES[0], f"hearsay{number}")], 3)
    assert [address.host for address in book.to_dial()] == ["new", "hearsay9"]


def test_hearsay_never_pushes_out_who_was_met() -> None:
    book = AddressBook(CONFIG)
    for node in NODES[:4]:
        book.met(at(node), 1)
    book.heard([at(node) for node in NODES[4:]], 1000)
    assert {address.node_id for address in AddressBook.decode(book.encode(), CONFIG).to_dial()} <= set(
        NODES[:4]
    )
    book.met(at(NODES[7]), 2)
    assert len(book) == 4
    assert nodes_of(book)[0] == NODES[7]


def test_the_file_is_a_bootstrap_list_and_is_read_back(tmp_path: Path) -> None:
    book = AddressBook(CONFIG)
    book.met(at(NODES[0], "2001:db8::1"), 1_800_000_000.7)
    book.met(at(NODES[0], "name"), 1_800_000_001)
    book.heard([at(NODES[1], "192.0.2.1")], 1_800_000_002)
    path = tmp_path / "new folder" / "book"
    save_book(path, book.encode())
    assert set(read_list(path)) == set(book.to_dial())
    again = load_book(path, CONFIG)
    assert again.to_dial() == book.to_dial()
    assert again.encode() == book.encode()
    assert not again.is_changed
    assert os.listdir(path.parent) == ["book"]


@pytest.mark.parametrize(
    "content", [b"\x00\xff", b"swarm://x@y:1  # met 1\n", b"hello\n", b"#" * (1 << 21)], ids=range(4)
)
def test_a_broken_file_is_a_warning_and_a_new_beginning(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "book"
    path.write_bytes(content)
    assert len(load_book(path, CONFIG)) == 0
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@given(st.text(max_size=300))
def test_any_text_raises_one_error(text: str) -> None:
    with contextlib.suppress(UsageError):
        AddressBook.decode(text, CONFIG)


def test_a_file_with_too_many_is_cut() -> None:
    lines = [f"{at(node, f'h{port}', port)}  # met {port}" for node in NODES for port in range(1, 9)]
    book = AddressBook.decode("\n".join(lines), CONFIG)
    assert len(book) == CONFIG.max_nodes
    assert len(book.to_dial()) == CONFIG.dial_nodes * CONFIG.max_addresses


async def test_it_is_written_now_and_then_and_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "book"
    keeper = AddressBookKeeper(AddressBook(CONFIG), path, Inline(), trio.current_time)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeper.run)
        await trio.sleep(CONFIG.save_interval_s + 1)
        assert not path.exists(), "nothing has changed"
        keeper.met(at(NODES[0]))
        await trio.sleep(CONFIG.save_interval_s)
        assert len(load_book(path, CONFIG)) == 1
        written = path.stat().st_mtime_ns
        keeper.met(at(NODES[0]))
        await trio.sleep(CONFIG.save_interval_s)
        assert path.stat().st_mtime_ns == written, "seen again just now is no news"
        keeper.heard([at(NODES[1])])
        nursery.cancel_scope.cancel()
    assert len(load_book(path, CONFIG)) == 2


async def test_a_folder_that_cannot_be_written_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "book"
    with pytest.raises(StoreError):
        save_book(path, "")
    keeper = AddressBookKeeper(AddressBook(CONFIG), path, Inline(), trio.current_time)
    for node in NODES[:3]:
        keeper.met(at(node))
        await keeper.save()
    assert len(caplog.records) == 1
