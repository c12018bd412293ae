"""Who talks to whom: the dialer's hello, three Noise messages, and the identities sealed inside them.

    dialer                                                acceptor
      -> hello "SN" version class | e                      4 + 32 bytes
      <- e, ee, s, es | identity                           192 bytes
      -> s, se        | identity                           160 bytes

identity = Ed25519 public key (32) | signature of the static Noise key (64). Sizes are fixed: anything longer or shorter
is not this protocol. The prologue, mixed into every key, is the protocol's name, the network's name and the connection
class; with another one message 2 does not open, and the dialer goes away without having said who it is.

On a private network the secret is mixed in before anything else (wire/noise.py), the magic is "SP" and message 1 has a
tag (48 bytes): a dialer with another secret, or none, gets no answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from swarmnode.errors import HandshakeError, UsageError, WrongNodeError
from swarmnode.identity import NODE_ID_BYTES, SIGNATURE_BYTES, NodeId, NodeKey
from swarmnode.wire.constants import (
    HELLO_BYTES,
    HELLO_MAGIC,
    MAX_NETWORK_NAME_BYTES,
    PRIVATE_HELLO_MAGIC,
    PROTOCOL_NAME,
    PROTOCOL_VERSION,
    TAG_BYTES,
    ConnectionClass,
)
from swarmnode.wire.noise import KEY_BYTES, SEALED_KEY_BYTES, CipherState, NoiseXX
from swarmnode.wire.secret import NetworkSecret

STATIC_KEY_DOMAIN = "noise-static"
IDENTITY_BYTES = NODE_ID_BYTES + SIGNATURE_BYTES
MESSAGE_1_BYTES = KEY_BYTES
PRIVATE_MESSAGE_1_BYTES = KEY_BYTES + TAG_BYTES
MESSAGE_2_BYTES = KEY_BYTES + SEALED_KEY_BYTES + IDENTITY_BYTES + TAG_BYTES
MESSAGE_3_BYTES = SEALED_KEY_BYTES + IDENTITY_BYTES + TAG_BYTES


class Credentials:
    """A node key with a Noise key signed by it. One a process is enough: signing is done once, the Noise key is never
    stored."""

    def __init__(self, key: NodeKey) -> None:
        self.node_id = key.node_id
        self.static = X25519PrivateKey.generate()
        signature = key.sign(STATIC_KEY_DOMAIN, self.static.public_key().public_bytes_raw())
        self.identity = bytes(key.node_id) + signature
        """What travels sealed in the handshake: 96 bytes."""


@dataclass(frozen=True)
class Secrets:
    """What a finished handshake gives."""

    node_id: NodeId
    """The peer."""
    sending: CipherState
    receiving: CipherState
    handshake_hash: bytes


def prologue(network: str, connection_class: ConnectionClass) -> bytes:
    """The bytes both sides must agree on before anything else. Raises UsageError for a network name over 64 bytes."""
    name = network.encode("utf-8")
    if not 1 <= len(name) <= MAX_NETWORK_NAME_BYTES:
        raise UsageError(f"a network name has 1 to {MAX_NETWORK_NAME_BYTES} bytes, not {len(name)}")
    return PROTOCOL_NAME + bytes([len(name)]) + name + bytes([connection_class])


class DialerHandshake:
    """The side that opened the stream; it knows whom it wants."""

    def __init__(
        self,
        credentials: Credentials,
        network: str,
        connection_class: ConnectionClass,
        expected: NodeId,
        secret: NetworkSecret | None = None,
    ) -> None:
        self.needs_bytes = MESSAGE_2_BYTES
        """How many bytes `receive_untrusted` is to be given next."""
        self._credentials = credentials
        self._expected = expected
        self.connection_class: ConnectionClass | None = connection_class
        self._noise = NoiseXX(
            is_initiator=True,
            static=credentials.static,
            prologue=prologue(network, connection_class),
            psk=_psk(secret),
        )
        hello = _magic(secret) + bytes([PROTOCOL_VERSION, connection_class])
        self.first_bytes = hello + self._noise.write_message(b"")
        """Hello and message 1."""

    def receive_untrusted(self, data: bytes) -> tuple[bytes, Secrets | None]:
        """Message 2 in; message 3 and the secrets out. Raises HandshakeError before anything about us is sent."""
        payload = self._noise.read_message_untrusted(data)
        node_id = identity_untrusted(payload, self._noise.remote_static)
        if node_id != self._expected:
            raise WrongNodeError(
                f"dialled {self._expected.short}, but {node_id.short} answered: another node, or a new key; "
                "take the address that it prints now"
            )
        answer = self._noise.write_message(self._credentials.identity)
        return answer, _secrets(self._noise, node_id)


class AcceptorHandshake:
    """The side that was dialled."""

    def __init__(self, credentials: Credentials, network: str, secret: NetworkSecret | None = None) -> None:
        self.needs_bytes = HELLO_BYTES
        self.connection_class: ConnectionClass | None = None
        """Known after the hello."""
        self._credentials = credentials
        self._network = network
        self._secret = secret
        self._noise: NoiseXX | None = None

    def receive_untrusted(self, data: bytes) -> tuple[bytes, Secrets | None]:
        """The hello, message 1 or message 3 in; what to answer, and after message 3 the secrets, out."""
        if self._noise is None:
            self.connection_class = _connection_class_untrusted(data, self._secret)
            self._noise = NoiseXX(
                is_initiator=False,
                static=self._credentials.static,
                prologue=prologue(self._network, self.connection_class),
                psk=_psk(self._secret),
            )
            self.needs_bytes = MESSAGE_1_BYTES if self._secret is None else PRIVATE_MESSAGE_1_BYTES
            return b"", None
        payload = self._noise.read_message_untrusted(data)
        if self.needs_bytes != MESSAGE_3_BYTES:
            self.needs_bytes = MESSAGE_3_BYTES
            return self._noise.write_message(self._credentials.identity), None
        node_id = identity_untrusted(payload, self._noise.remote_static)
        if node_id == self._credentials.node_id:
            raise HandshakeError("a connection from ourselves")
        return b"", _secrets(self._noise, node_id)


def identity_untrusted(payload: bytes, static: bytes) -> NodeId:
    """The node whose key signed `static`. Raises HandshakeError."""
    if len(payload) != IDENTITY_BYTES:
        raise HandshakeError(f"an identity of {len(payload)} bytes")
    try:
        node_id = NodeId(payload[:NODE_ID_BYTES])
    except UsageError as error:
        raise HandshakeError(str(error)) from None
    if not node_id.verify(STATIC_KEY_DOMAIN, static, payload[NODE_ID_BYTES:]):
        raise HandshakeError(f"the signature is not by {node_id.short}")
    return node_id


def _psk(secret: NetworkSecret | None) -> bytes | None:
    return None if secret is None else secret.psk


def _magic(secret: NetworkSecret | None) -> bytes:
    return HELLO_MAGIC if secret is None else PRIVATE_HELLO_MAGIC


def _connection_class_untrusted(hello: bytes, secret: NetworkSecret | None) -> ConnectionClass:
    magic = hello[:2]
    if magic not in (HELLO_MAGIC, PRIVATE_HELLO_MAGIC):
        raise HandshakeError("not a swarmnode dialer")
    if magic != _magic(secret):
        raise HandshakeError("one side has a network secret and the other has none")
    if hello[2] != PROTOCOL_VERSION:
        raise HandshakeError(f"protocol version {hello[2]}")
    try:
        return ConnectionClass(hello[3])
    except ValueError:
        raise HandshakeError(f"connection class {hello[3]}") from None


def _secrets(noise: NoiseXX, node_id: NodeId) -> Secrets:
    sending, receiving = noise.split()
    return Secrets(node_id, sending, receiving, noise.handshake_hash)
