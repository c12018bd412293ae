"""Who a node is: one Ed25519 key, its public half as the node's id, signatures that say what they are for.

A signature covers `b"swarmnode:" + domain + b"\\0" + data`: bytes signed for one purpose are worthless for another.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from swarmnode.errors import StoreError, UsageError
from swarmnode.state_file import create_small, read_private

NODE_ID_BYTES = 32
NODE_ID_CHARS = 52
"""32 bytes in base32 without padding: ceil(256 / 5)."""
SIGNATURE_BYTES = 64
MAX_KEY_FILE_BYTES = 4096

# Encodings (sign bit cleared) of the points of order 1, 2, 4 and 8 of edwards25519, canonical or not. A signature by
# such a "key" can be made by anyone, so it is nobody's identity. tests/test_identity.py computes the same list.
SMALL_ORDER_POINTS = frozenset(
    bytes.fromhex(point)
    for point in (
        "0000000000000000000000000000000000000000000000000000000000000000",
        "0100000000000000000000000000000000000000000000000000000000000000",
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    )
)


@lru_cache(maxsize=8192)
def _short(raw: bytes) -> str:
    """Workers are named in accounts several times a layer."""
    return base64.b32encode(raw[:5]).decode("ascii").lower()


@dataclass(frozen=True, order=True, slots=True)
class NodeId:
    """A node's public Ed25519 key (32 bytes); as text, 52 characters of lower-case base32."""

    raw: bytes

    def __post_init__(self) -> None:
        if len(self.raw) != NODE_ID_BYTES:
            raise UsageError(f"a node id has {NODE_ID_BYTES} bytes, not {len(self.raw)}")
        if self.raw[:-1] + bytes([self.raw[-1] & 0x7F]) in SMALL_ORDER_POINTS:
            raise UsageError("this node id is a weak key that anybody could sign for")

    @classmethod
    def parse(cls, text: str) -> NodeId:
        """Read the text form, in either case. Raises UsageError naming what is wrong."""
        if len(text) != NODE_ID_CHARS:
            raise UsageError(f"a node id has {NODE_ID_CHARS} characters, not {len(text)}")
        try:
            raw = base64.b32decode(text.upper() + "====")
        except (binascii.Error, ValueError):
            raise UsageError("a node id has only the letters a-z and the digits 2-7") from None
        node_id = cls(raw)
        if str(node_id) != text.lower():
            raise UsageError("the last character of the node id is wrong: a mistyped id")
        return node_id

    def __str__(self) -> str:
        return base64.b32encode(self.raw).decode("ascii").lower().rstrip("=")

    def __repr__(self) -> str:
        return f"NodeId({self.short})"

    def __bytes__(self) -> bytes:
        return self.raw

    @property
    def short(self) -> str:
        """The first 8 characters, for logs and accounts."""
        return _short(self.raw)

    def verify(self, domain: str, data: bytes, signature: bytes) -> bool:
        """True when this node signed exactly `data` for exactly `domain`."""
        if len(signature) != SIGNATURE_BYTES:
            return False
        try:
            Ed25519PublicKey.from_public_bytes(self.raw).verify(signature, _signed_bytes(domain, data))
        except (InvalidSignature, ValueError):
            return False
        return True


class NodeKey:
    """The private half. Never printed, compared or pickled."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.node_id = NodeId(private.public_key().public_bytes_raw())

    @classmethod
    def generate(cls) -> NodeKey:
        """A new key from the system's randomness."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> NodeKey:
        """The key of a 32-byte seed: for tests and demos, where ids must repeat."""
        if len(seed) != NODE_ID_BYTES:
            raise UsageError(f"a key seed has {NODE_ID_BYTES} bytes, not {len(seed)}")
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def load_or_create(cls, path: Path) -> NodeKey:
        """The key in `path` (PEM, PKCS #8, mode 0600), made at the first start.

        Raises StoreError, which names the file, if it cannot be read or written, holds something else or is readable
        by others.
        """
        try:
            exists = path.exists()
        except OSError as error:  # a name too long for the file system
            raise StoreError(f"{path} cannot be used: {error.strerror}") from error
        if not exists:
            _create_key_file(path)
        return cls(_read_key_file(path))

    def sign(self, domain: str, data: bytes) -> bytes:
        """64-byte signature of `data` for `domain`."""
        return self._private.sign(_signed_bytes(domain, data))

    def __repr__(self) -> str:
        return f"NodeKey(of {self.node_id.short})"


def _signed_bytes(domain: str, data: bytes) -> bytes:
    return b"swarmnode:" + domain.encode("ascii") + b"\0" + data


def _create_key_file(path: Path) -> None:
    """Write a new key so that no other process ever sees half of it; keep the other's if two start at once."""
    pem = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        create_small(path, pem)
    except OSError as error:
        raise StoreError(f"cannot write the node key {path}: {error.strerror}") from error


def _read_key_file(path: Path) -> Ed25519PrivateKey:
    try:
        data, is_private = read_private(path, MAX_KEY_FILE_BYTES)
    except OSError as error:
        raise StoreError(f"cannot read the node key {path}: {error.strerror}") from error
    if not is_private:
        raise StoreError(f"the node key {path} can be read by others; run: chmod 600 {path}")
    try:
        private = load_pem_private_key(data, password=None)
    except (ValueError, TypeError) as error:
        raise StoreError(
            f"{path} is not a node key; move it away and a new key (with a new node id) is made"
        ) from error
    if not isinstance(private, Ed25519PrivateKey):
        raise StoreError(f"the key in {path} is not an Ed25519 key")
    return private
