"""Noise_XX_25519_ChaChaPoly_SHA256 (noiseprotocol.org, revision 34), the one suite; sections are of that document.

    dialer                                   acceptor
      -> e                                    32 bytes
      <- e, ee, s, es  + payload              32 + 48 + payload + 16
      -> s, se         + payload              48 + payload + 16

With a pre-shared key (a private network) it is Noise_XXpsk0_25519_ChaChaPoly_SHA256 (section 9): message 1 is `psk, e`
and has a tag of 16 bytes, so who does not know the key gets no answer at all.

`CipherState` is also the key of one direction of records after the handshake.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from swarmnode.errors import OTHER_NETWORK, HandshakeError, ProtocolError
from swarmnode.wire.constants import MAX_NONCE, TAG_BYTES

KEY_BYTES = 32
HASH_BYTES = 32
SEALED_KEY_BYTES = KEY_BYTES + TAG_BYTES
MAX_HANDSHAKE_BYTES = 1024

SUITE = b"Noise_XX_25519_ChaChaPoly_SHA256"
PSK_SUITE = b"Noise_XXpsk0_25519_ChaChaPoly_SHA256"
PATTERNS: dict[bytes, tuple[tuple[str, ...], ...]] = {
    SUITE: (("e",), ("e", "ee", "s", "es"), ("s", "se")),
    PSK_SUITE: (("psk", "e"), ("e", "ee", "s", "es"), ("s", "se")),
}
"""The tokens of the three messages, by the name of the whole."""

_REKEY_NONCE = b"\0\0\0\0" + (2**64 - 1).to_bytes(8, "little")


class CipherState:
    """A key and a counter (section 5.1). Each nonce is used once; running out ends the connection."""

    def __init__(self, key: bytes) -> None:
        self._aead = ChaCha20Poly1305(key)
        self.nonce = 0

    def seal_into(self, plain: bytes | memoryview, out: memoryview) -> None:
        """Encrypt `plain` into `out`, which is 16 bytes longer. Raises ProtocolError when no nonce is left."""
        self._aead.encrypt_into(self._next_nonce(), plain, None, out)

    def open_untrusted(self, sealed: bytes | memoryview, associated: bytes | None = None) -> bytes:
        """Decrypt. Raises ProtocolError `bad_record`; the counter then stays, but the connection is over anyway."""
        try:
            return self._aead.decrypt(self._next_nonce(), sealed, associated)
        except InvalidTag:
            raise ProtocolError("bad_record", "the seal is broken") from None

    def open_into_untrusted(self, sealed: bytes | memoryview, out: memoryview) -> None:
        """Decrypt into `out`, which is 16 bytes shorter. Raises as `open_untrusted`."""
        try:
            self._aead.decrypt_into(self._next_nonce(), sealed, None, out)
        except InvalidTag:
            raise ProtocolError("bad_record", "the seal is broken") from None

    def seal(self, plain: bytes, associated: bytes | None = None) -> bytes:
        """Encrypt a handshake payload."""
        return self._aead.encrypt(self._next_nonce(), plain, associated)

    def rekey(self) -> None:
        """A new key from the old one, with the counter going on (sections 4.2 and 11.3)."""
        self._aead = ChaCha20Poly1305(self._aead.encrypt(_REKEY_NONCE, bytes(KEY_BYTES), None)[:KEY_BYTES])

    def _next_nonce(self) -> bytes:
        nonce = self.nonce
        if nonce > MAX_NONCE:
            raise ProtocolError("bad_record", "no nonce is left under this key")
        self.nonce = nonce + 1
        return b"\0\0\0\0" + nonce.to_bytes(8, "little")


class _SymmetricState:
    """Section 5.2."""

    def __init__(self, suite: bytes) -> None:
        # A name of up to 32 bytes is not hashed, but filled up with zeros.
        is_short = len(suite) <= HASH_BYTES
        self.hash = suite.ljust(HASH_BYTES, b"\0") if is_short else hashlib.sha256(suite).digest()
        self._chaining_key = self.hash
        self._cipher: CipherState | None = None

    def mix_hash(self, data: bytes) -> None:
        self.hash = hashlib.sha256(self.hash + data).digest()

    def mix_key(self, secret: bytes) -> None:
        self._chaining_key, key = self._hkdf(secret)
        self._cipher = CipherState(key)

    def mix_key_and_hash(self, secret: bytes) -> None:
        """For pre-shared keys."""
        temporary = hmac.digest(self._chaining_key, secret, "sha256")
        self._chaining_key = hmac.digest(temporary, b"\x01", "sha256")
        mixed = hmac.digest(temporary, self._chaining_key + b"\x02", "sha256")
        self.mix_hash(mixed)
        self._cipher = CipherState(hmac.digest(temporary, mixed + b"\x03", "sha256"))

    def encrypt_and_hash(self, plain: bytes) -> bytes:
        sealed = plain if self._cipher is None else self._cipher.seal(plain, self.hash)
        self.mix_hash(sealed)
        return sealed

    def decrypt_and_hash(self, sealed: bytes) -> bytes:
        plain = sealed if self._cipher is None else self._cipher.open_untrusted(sealed, self.hash)
        self.mix_hash(sealed)
        return plain

    def split(self) -> tuple[CipherState, CipherState]:
        first, second = self._hkdf(b"")
        return CipherState(first), CipherState(second)

    def _hkdf(self, secret: bytes) -> tuple[bytes, bytes]:
        temporary = hmac.digest(self._chaining_key, secret, "sha256")
        first = hmac.digest(temporary, b"\x01", "sha256")
        return first, hmac.digest(temporary, first + b"\x02", "sha256")


class NoiseXX:
    """One side of one handshake (section 5.3). After message 3 `split` gives the keys of the two directions."""

    def __init__(
        self,
        *,
        is_initiator: bool,
        static: X25519PrivateKey,
        prologue: bytes,
        psk: bytes | None = None,
        ephemeral: X25519PrivateKey | None = None,
    ) -> None:
        """`psk`: 32 bytes that both sides must know. `ephemeral` is given by tests only; the default is a new key from
        the system's randomness."""
        self._is_initiator = is_initiator
        self._static = static
        self._ephemeral = X25519PrivateKey.generate() if ephemeral is None else ephemeral
        self._remote_ephemeral = b""
        self.remote_static = b""
        """The peer's static public key, once its message was read."""
        self._psk = psk
        suite = SUITE if psk is None else PSK_SUITE
        self._symmetric = _SymmetricState(suite)
        self._symmetric.mix_hash(prologue)
        self._left: Sequence[tuple[str, ...]] = PATTERNS[suite]

    @property
    def handshake_hash(self) -> bytes:
        """32 bytes that are equal on both sides and unique to this connection."""
        return self._symmetric.hash

    @property
    def is_done(self) -> bool:
        """All three messages were written or read."""
        return not self._left

    def write_message(self, payload: bytes) -> bytes:
        """The next message of ours. Raises HandshakeError if the peer's key is of small order."""
        out = b""
        for token in self._next_tokens():
            if token == "e":
                public = self._ephemeral.public_key().public_bytes_raw()
                self._mix_ephemeral(public)
                out += public
            elif token == "s":
                out += self._symmetric.encrypt_and_hash(self._static.public_key().public_bytes_raw())
            else:
                self._mix_secret(token)
        return out + self._symmetric.encrypt_and_hash(payload)

    def read_message_untrusted(self, message: bytes) -> bytes:
        """The payload of the peer's next message. Raises HandshakeError, after which this object is of no more use."""
        if len(message) > MAX_HANDSHAKE_BYTES:
            raise HandshakeError(f"a handshake message of {len(message)} bytes")
        try:
            return self._read(message)
        except ProtocolError:  # a broken seal, which a prologue or a pre-shared key of its own brings about
            raise HandshakeError(OTHER_NETWORK) from None

    def split(self) -> tuple[CipherState, CipherState]:
        """(for sending, for receiving)."""
        first, second = self._symmetric.split()
        return (first, second) if self._is_initiator else (second, first)

    def _read(self, message: bytes) -> bytes:
        rest = message
        for token in self._next_tokens():
            if token == "e":
                self._remote_ephemeral, rest = _take(rest, KEY_BYTES)
                self._mix_ephemeral(self._remote_ephemeral)
            elif token == "s":
                sealed, rest = _take(rest, SEALED_KEY_BYTES)
                self.remote_static = self._symmetric.decrypt_and_hash(sealed)
            else:
                self._mix_secret(token)
        return self._symmetric.decrypt_and_hash(rest)

    def _next_tokens(self) -> tuple[str, ...]:
        tokens, self._left = self._left[0], self._left[1:]
        return tokens

    def _mix_ephemeral(self, public: bytes) -> None:
        self._symmetric.mix_hash(public)
        if (
            self._psk is not None
        ):  # section 9.2: keys must differ even where only the pre-shared key was mixed
            self._symmetric.mix_key(public)

    def _mix_secret(self, token: str) -> None:
        """The pre-shared key, or ee, es, se: the first letter is the initiator's key. Raises HandshakeError for a key
        of small order."""
        if token == "psk":
            assert self._psk is not None
            self._symmetric.mix_key_and_hash(self._psk)
            return
        mine, theirs = (token[0], token[1]) if self._is_initiator else (token[1], token[0])
        private = self._ephemeral if mine == "e" else self._static
        public = self._remote_ephemeral if theirs == "e" else self.remote_static
        try:
            self._symmetric.mix_key(private.exchange(X25519PublicKey.from_public_bytes(public)))
        except ValueError:  # the shared secret would be zero, whatever our key
            raise HandshakeError("a key of small order") from None


def _take(data: bytes, n_bytes: int) -> tuple[bytes, bytes]:
    if len(data) < n_bytes:
        raise HandshakeError(f"a handshake message of {len(data)} bytes is too short")
    return data[:n_bytes], data[n_bytes:]
