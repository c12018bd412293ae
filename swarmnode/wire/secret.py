"""The secret of a private network: 32 random bytes, 52 characters of base32 as text.

It is made by a machine, not thought up: whoever records message 1 of a handshake can try guesses on it, which is
hopeless against 256 random bits and would be easy against a phrase. Nothing here is ever logged or sent.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
from dataclasses import dataclass, field

from swarmnode.errors import UsageError

SECRET_BYTES = 32
SECRET_CHARS = 52
NETWORK_TAG_BYTES = 16


@dataclass(frozen=True, slots=True)
class NetworkSecret:
    """What every node of a private network knows and nobody else."""

    raw: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.raw) != SECRET_BYTES:
            raise UsageError(f"a network secret has {SECRET_BYTES} bytes, not {len(self.raw)}")

    @classmethod
    def generate(cls) -> NetworkSecret:
        """A new one from the system's randomness."""
        return cls(os.urandom(SECRET_BYTES))

    @classmethod
    def parse(cls, text: str) -> NetworkSecret:
        """Read the text form, in either case. Raises UsageError, which does not repeat the text."""
        if len(text) != SECRET_CHARS:
            raise UsageError(
                f"a network secret has {SECRET_CHARS} characters, not {len(text)}; `swarmnode invite` makes one"
            )
        try:
            secret = cls(base64.b32decode(text.upper() + "===="))
        except (binascii.Error, ValueError):
            raise UsageError("a network secret has only the letters a-z and the digits 2-7") from None
        if secret.text != text.lower():
            raise UsageError("the last character of the network secret is wrong: a mistyped secret")
        return secret

    @property
    def text(self) -> str:
        """The text form, for the secret's file and for links that carry it on purpose."""
        return base64.b32encode(self.raw).decode("ascii").lower().rstrip("=")

    @property
    def psk(self) -> bytes:
        """The pre-shared key of the handshake (wire/noise.py)."""
        return hmac.digest(self.raw, b"swarmnode:noise-psk", "sha256")


def network_tag(network: str, secret: NetworkSecret | None) -> bytes:
    """16 bytes that are the same on all nodes of a network, and tell others neither its secret nor (if it has one) its
    name: for records and LAN announcements."""
    name = b"swarmnode:network\0" + network.encode("utf-8")
    if secret is None:
        return hashlib.sha256(name).digest()[:NETWORK_TAG_BYTES]
    return hmac.digest(secret.raw, name, "sha256")[:NETWORK_TAG_BYTES]
