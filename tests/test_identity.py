"""Node keys: the file, the id as text, signatures that say what they are for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from swarmnode.errors import StoreError, UsageError
from swarmnode.identity import SMALL_ORDER_POINTS, NodeId, NodeKey

P = 2**255 - 19
D = -121665 * pow(121666, -1, P) % P


def test_the_key_is_made_once_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "node.key"
    first = NodeKey.load_or_create(path)
    assert NodeKey.load_or_create(path).node_id == first.node_id
    assert path.stat().st_mode & 0o777 == 0o600
    assert [item.name for item in path.parent.iterdir()] == ["node.key"]


def test_two_processes_that_start_at_once_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "node.key"
    other = NodeKey.load_or_create(path)
    exists = Path.exists
    monkeypatch.setattr(
        Path, "exists", lambda self: self != path and exists(self)
    )  # we looked before it wrote
    assert NodeKey.load_or_create(path).node_id == other.node_id


def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    path = tmp_path / "node.key"
    assert NodeKey.load_or_create(path).node_id == NodeKey.load_or_create(path).node_id
    assert len(list(tmp_path.iterdir())) == 1


def test_a_key_that_others_can_read_is_refused_with_the_cure(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    NodeKey.load_or_create(path)
    path.chmod(0o640)
    with pytest.raises(StoreError, match=r"chmod 600 .*node\.key"):
        NodeKey.load_or_create(path)


@pytest.mark.parametrize("content", [b"", b"-----BEGIN PRIVATE KEY-----\n", b"\0" * 5000, b"hello"])
def test_a_broken_key_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "node.key"
    path.touch(0o600)
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"node\.key is not a node key; move it away"):
        NodeKey.load_or_create(path)


def test_a_key_of_another_kind_is_named(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    path.touch(0o600)
    path.write_bytes(
        X25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    with pytest.raises(StoreError, match="is not an Ed25519 key"):
        NodeKey.load_or_create(path)


def test_places_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot read the node key"):
        NodeKey.load_or_create(tmp_path)  # a folder
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"cannot write the node key .*file/node\.key"):
        NodeKey.load_or_create(tmp_path / "file" / "node.key")


def test_an_id_is_read_back_in_either_case() -> None:
    node_id = NodeKey.generate().node_id
    text = str(node_id)
    assert len(text) == 52
    assert NodeId.parse(text) == NodeId.parse(text.upper()) == node_id
    assert text.startswith(node_id.short)
    assert bytes(node_id) == node_id.raw


@pytest.mark.parametrize("text", ["", "a" * 53, "0" * 52, "ß" * 52, "=" * 52, " " * 52])
def test_what_is_no_id(text: str) -> None:
    with pytest.raises(UsageError):
        NodeId.parse(text)


def test_unused_bits_of_the_last_character_must_be_zero() -> None:
    text = str(NodeKey.from_seed(bytes(32)).node_id)
    with pytest.raises(UsageError, match="mistyped"):
        NodeId.parse(text[:-1] + ("b" if text[-1] != "b" else "c"))


def test_a_signature_is_good_for_its_domain_data_and_node_only() -> None:
    key, other = NodeKey.generate(), NodeKey.generate()
    signature = key.sign("gossip", b"data")
    assert key.node_id.verify("gossip", b"data", signature)
    assert not key.node_id.verify("noise-static", b"data", signature)
    assert not key.node_id.verify("gossip", b"Data", signature)
    assert not other.node_id.verify("gossip", b"data", signature)
    assert not key.node_id.verify("gossip", b"data", signature[:-1])
    assert not key.node_id.verify("gossip", b"data", bytes(64))
    # A domain cannot be made of another domain and the beginning of its data.
    assert not key.node_id.verify("gos", b"sip\0data", signature)


def test_keys_never_show_their_secret() -> None:
    key = NodeKey.from_seed(bytes(32))
    assert repr(key) == f"NodeKey(of {key.node_id.short})"


def test_seeds_and_ids_of_a_wrong_length() -> None:
    with pytest.raises(UsageError, match="a key seed has 32 bytes, not 31"):
        NodeKey.from_seed(bytes(31))
    with pytest.raises(UsageError, match="a node id has 32 bytes, not 33"):
        NodeId(bytes(33))


def test_the_weak_points_are_all_of_small_order() -> None:
    """All y of points with 8 * point = 0, computed here, plus the two encodings that are not canonical."""
    ys = {y for point in _torsion() for y in (point[1],)}
    expected = {y.to_bytes(32, "little") for y in ys} | {
        (y + P).to_bytes(32, "little") for y in ys if y + P < 2**255
    }
    assert expected == SMALL_ORDER_POINTS
    for point in expected:
        for sign in (0, 0x80):
            with pytest.raises(UsageError, match="weak key"):
                NodeId(point[:-1] + bytes([point[-1] | sign]))


def _add(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    (x1, y1), (x2, y2) = one, other
    product = D * x1 * x2 * y1 * y2 % P
    x = (x1 * y2 + x2 * y1) * pow(1 + product, -1, P)
    y = (y1 * y2 + x1 * x2) * pow(1 - product, -1, P)
    return x % P, y % P


def _torsion() -> set[tuple[int, int]]:
    """The 8 points of order dividing 8: any point times the prime order of the main subgroup generates them."""
    order = 2**252 + 27742317777372353535851937790883648493
    for y in range(2, 100):
        x2 = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
        x = pow(x2, (P + 3) // 8, P)
        if x * x % P != x2:
            x = x * pow(2, (P - 1) // 4, P) % P
        if x * x % P != x2:
            continue
        point, factor, generator = (x, y), order, (0, 1)
        while factor:
            if factor & 1:
                generator = _add(generator, point)
            point, factor = _add(point, point), factor >> 1
        points = {(0, 1)}
        for _ in range(8):
            points |= {_add(known, generator) for known in points}
        if len(points) == 8:
            return points
    raise AssertionError("no generator found")
