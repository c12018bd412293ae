"""The handshake against published vectors and against a second implementation, and every way to break it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import HandshakeError, ProtocolError
from swarmnode.wire.constants import MAX_NONCE
from swarmnode.wire.noise import CipherState, NoiseXX

# The cacophony vectors, Noise_XX_25519_ChaChaPoly_SHA256 (published with the Noise specification's wiki).
PROLOGUE = "4a6f686e2047616c74"
INIT_STATIC = "e61ef9919cde45dd5f82166404bd08e38bceb5dfdfded0a34c8df7ed542214d1"
INIT_EPHEMERAL = "893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a"
RESP_STATIC = "4a3acbfdb163dec651dfa3194dece676d437029c62a408b4c5ea9114246e4893"
RESP_EPHEMERAL = "bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b"
HANDSHAKE_HASH = "c8e5f64e846193be2a834104c2a009868d6c9f3bd3c186299888b488b2f1f58e"
MESSAGES = [
    (
        "4c756477696720766f6e204d69736573",
        "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c79444c756477696720766f6e204d69736573",
    ),
    (
        "4d757272617920526f746862617264",
        "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f14480884381cbad1f276e038c48378ffce2b65285e08d6b68"
        "aaa3629a5a8639392490e5b9bd5269c2f1e4f488ed8831161f19b7815528f8982ffe09be9b5c412f8a0db50f8814c7194e83f23d"
        "bd8d162c9326ad",
    ),
    (
        "462e20412e20486179656b",
        "c7195ffacac1307ff99046f219750fc47693e23c3cb08b89c2af808b444850a80ae475b9df0f169ae80a89be0865b57f58c9fea0"
        "d4ec82a286427402f113e4b6ae769a1d95941d49b25030",
    ),
]
TRANSPORT = [
    ("4361726c204d656e676572", "96763ed773f8e47bb3712f0e29b3060ffc956ffc146cee53d5e1df"),
    (
        "4a65616e2d426170746973746520536179",
        "3e40f15f6f3a46ae446b253bf8b1d9ffb6ed9b174d272328ff91a7e2e5c79c07f5",
    ),
    (
        "457567656e2042f6686d20766f6e2042617765726b",
        "eb3f3515110702e047a6c9da4478b6ead94873c11c0f2d710ddb3f09fce024b3a58502ae3f",
    ),
]


def key(text: str) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(bytes.fromhex(text))


def sides(prologue: bytes = b"test", other: bytes | None = None) -> tuple[NoiseXX, NoiseXX]:
    """(initiator, responder)."""
    initiator = NoiseXX(is_initiator=True, static=X25519PrivateKey.generate(), prologue=prologue)
    responder = NoiseXX(
        is_initiator=False,
        static=X25519PrivateKey.generate(),
        prologue=prologue if other is None else other,
    )
    return initiator, responder


def finished() -> tuple[NoiseXX, NoiseXX]:
    initiator, responder = sides()
    responder.read_message_untrusted(initiator.write_message(b""))
    initiator.read_message_untrusted(responder.write_message(b""))
    responder.read_message_untrusted(initiator.write_message(b""))
    return initiator, responder


def test_the_published_vectors() -> None:
    prologue = bytes.fromhex(PROLOGUE)
    initiator = NoiseXX(
        is_initiator=True, static=key(INIT_STATIC), ephemeral=key(INIT_EPHEMERAL), prologue=prologue
    )
    responder = NoiseXX(
        is_initiator=False, static=key(RESP_STATIC), ephemeral=key(RESP_EPHEMERAL), prologue=prologue
    )
    writer, reader = initiator, responder
    for payload, message in MESSAGES:
        assert writer.write_message(bytes.fromhex(payload)).hex() == message
        assert reader.read_message_untrusted(bytes.fromhex(message)).hex() == payload
        writer, reader = reader, writer
    assert initiator.is_done
    assert responder.is_done
    assert initiator.handshake_hash.hex() == responder.handshake_hash.hex() == HANDSHAKE_HASH
    ours, theirs = responder.split(), initiator.split()
    for payload, sealed in TRANSPORT:
        assert ours[0].seal(bytes.fromhex(payload)).hex() == sealed
        assert theirs[1].open_untrusted(bytes.fromhex(sealed)).hex() == payload
        ours, theirs = theirs, ours


def other_implementation(*, is_initiator: bool, prologue: bytes) -> Any:
    """The same side by `noiseprotocol`, which shares no code with ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own, about old Python and cryptography calls
        from noise.connection import Keypair, NoiseConnection

        connection = NoiseConnection.from_name(b"Noise_XX_25519_ChaChaPoly_SHA256")
        if is_initiator:
            connection.set_as_initiator()
        else:
            connection.set_as_responder()
        connection.set_prologue(prologue)
        connection.set_keypair_from_private_bytes(
            Keypair.STATIC, X25519PrivateKey.generate().private_bytes_raw()
        )
        connection.start_handshake()
    return connection


@pytest.mark.parametrize("we_initiate", [True, False])
@pytest.mark.parametrize("payload", [b"", b"identity" * 12])
def test_the_second_implementation_understands_us(we_initiate: bool, payload: bytes) -> None:
    other = other_implementation(is_initiator=not we_initiate, prologue=b"swarmnode/1 test")
    ours = NoiseXX(is_initiator=we_initiate, static=X25519PrivateKey.generate(), prologue=b"swarmnode/1 test")
    for number in range(3):
        if (number % 2 == 0) is we_initiate:
            assert bytes(other.read_message(ours.write_message(payload))) == payload
        else:
            assert ours.read_message_untrusted(bytes(other.write_message(payload))) == payload
    assert ours.handshake_hash == other.get_handshake_hash()
    sending, receiving = ours.split()
    for number in range(3):
        text = bytes([number]) * number
        assert bytes(other.decrypt(sending.seal(text))) == text
        assert receiving.open_untrusted(bytes(other.encrypt(text))) == text


def test_rekeying_agrees_with_the_second_implementation() -> None:
    other = other_implementation(is_initiator=False, prologue=b"")
    ours = NoiseXX(is_initiator=True, static=X25519PrivateKey.generate(), prologue=b"")
    other.read_message(ours.write_message(b""))
    ours.read_message_untrusted(bytes(other.write_message(b"")))
    other.read_message(ours.write_message(b""))
    sending, _ = ours.split()
    assert bytes(other.decrypt(sending.seal(b"before"))) == b"before"
    sending.rekey()
    other.rekey_inbound_cipher()
    assert bytes(other.decrypt(sending.seal(b"after"))) == b"after"


def test_another_prologue_fails_at_message_2() -> None:
    initiator, responder = sides(b"network one", b"network two")
    responder.read_message_untrusted(initiator.write_message(b""))
    with pytest.raises(HandshakeError):
        initiator.read_message_untrusted(responder.write_message(b"identity"))


@pytest.mark.parametrize("point", [bytes(32), b"\x01" + bytes(31)])
def test_a_zero_shared_secret_is_refused(point: bytes) -> None:
    """Points of small order give everybody the same secret."""
    _, responder = sides()
    responder.read_message_untrusted(point)
    with pytest.raises(HandshakeError, match="small order"):
        responder.write_message(b"")


@given(st.data())
def test_a_changed_handshake_message_is_refused_by_one_error(data: st.DataObject) -> None:
    """A bit flipped, cut off or added in any of the three messages."""
    initiator, responder = sides()
    wrong = data.draw(st.integers(0, 2))
    writer, reader = initiator, responder
    for number in range(3):
        message = writer.write_message(b"payload")
        if number == wrong:
            message = data.draw(mutations(message))
        try:
            reader.read_message_untrusted(message)
        except HandshakeError:
            return
        writer, reader = reader, writer
    raise AssertionError("a changed message went through")


def mutations(message: bytes) -> st.SearchStrategy[bytes]:
    def flip(bit: int) -> bytes:
        changed = bytearray(message)
        changed[bit // 8] ^= 1 << bit % 8
        return bytes(changed)

    return st.one_of(
        st.integers(0, 8 * len(message) - 1).map(flip),
        st.integers(0, len(message) - 1).map(lambda n: message[:n]),
        st.binary(min_size=1, max_size=64).map(lambda more: message + more),
    )


@given(st.binary(max_size=2000))
def test_noise_where_a_message_should_be(message: bytes) -> None:
    initiator, responder = sides()
    initiator.write_message(b"")
    with pytest.raises(HandshakeError):
        initiator.read_message_untrusted(message)
    if len(message) < 32 or len(message) > 1024:
        with pytest.raises(HandshakeError):
            responder.read_message_untrusted(message)


def test_the_last_nonce_is_never_used() -> None:
    cipher = CipherState(bytes(32))
    cipher.nonce = MAX_NONCE
    cipher.seal(b"the last one")
    with pytest.raises(ProtocolError, match="no nonce is left"):
        cipher.seal(b"one more")
    with pytest.raises(ProtocolError, match="no nonce is left"):
        cipher.open_untrusted(bytes(20))


def test_both_directions_have_their_own_keys() -> None:
    initiator, responder = finished()
    sealed = initiator.split()[0].seal(b"text")
    assert responder.split()[1].open_untrusted(sealed) == b"text"
    with pytest.raises(ProtocolError, match="seal is broken"):
        initiator.split()[1].open_untrusted(sealed)
