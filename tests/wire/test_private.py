"""Private networks: who does not know the secret gets no answer and learns nothing."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import HandshakeError, UsageError
from swarmnode.wire import noise
from swarmnode.wire.connection import Connection, State
from swarmnode.wire.constants import HELLO_BYTES, HELLO_MAGIC, PRIVATE_HELLO_MAGIC
from swarmnode.wire.events import Ended, Opened
from swarmnode.wire.handshake import PRIVATE_MESSAGE_1_BYTES
from swarmnode.wire.noise import NoiseXX
from swarmnode.wire.secret import NetworkSecret, network_tag
from tests.wire.pairs import endpoint, fresh_pair, open_pair, pump
from tests.wire.test_noise import INIT_EPHEMERAL, INIT_STATIC, PROLOGUE, RESP_EPHEMERAL, RESP_STATIC, key

SECRET, OTHER = NetworkSecret(bytes(32)), NetworkSecret(bytes([1]) * 32)

# The cacophony vectors of Noise_XXpsk3_25519_ChaChaPoly_SHA256, with the keys of test_noise.py. For psk0 alone none
# were published; below are snow's for psk0+psk3, and the second implementation speaks psk0 itself.
PSK3_SUITE = b"Noise_XXpsk3_25519_ChaChaPoly_SHA256"
PSK3 = "54686973206973206d7920417573747269616e20706572737065637469766521"
PSK3_HASH = "a477edf6a131bbdb54707f6ea30eab6cd935d9b560f0e5fd1f053a95a99669fb"
PSK3_MESSAGES = [
    (
        "4c756477696720766f6e204d69736573",
        "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c7944c9f5ff0e8079630cb7e270c20bbf480821b77a38"
        "4a645c71a2fd9b3db1c16a5f",
    ),
    (
        "4d757272617920526f746862617264",
        "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f144808843b123def17f71e6ae8e57e0e1dec5949c5f7415c6"
        "f33517398747d821a06dc23ad430aa1fd7381d46195c378a819fd574425462cbb2d4ca339e738a0b7001dc91423fbf55a99af0c6"
        "f1df21012ceb2f",
    ),
    (
        "462e20412e20486179656b",
        "52187316111b118d4c060364f7b975dc0809b2590779aff2d63113c564f11744493384db7bf32d5ae6686df6ab06d508d2e07caa"
        "f1d6afc010b978735fc78900e71ae1d314130d042e729a",
    ),
]
PSK3_TRANSPORT = [
    ("4361726c204d656e676572", "eaedc672d4c21e0e2955758756fb98f194c4e90d5deb5b6cf30b27"),
    (
        "4a65616e2d426170746973746520536179",
        "522d543c5fe799d09a3d9da7ff54d0dc03c8af1dc7751d2ff708339d2290943e98",
    ),
]


def test_the_published_vectors_of_a_psk_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "PSK_SUITE", PSK3_SUITE)
    monkeypatch.setitem(noise.PATTERNS, PSK3_SUITE, (("e",), ("e", "ee", "s", "es"), ("s", "se", "psk")))
    prologue, psk = bytes.fromhex(PROLOGUE), bytes.fromhex(PSK3)
    initiator = NoiseXX(
        is_initiator=True,
        static=key(INIT_STATIC),
        ephemeral=key(INIT_EPHEMERAL),
        prologue=prologue,
        psk=psk,
    )
    responder = NoiseXX(
        is_initiator=False,
        static=key(RESP_STATIC),
        ephemeral=key(RESP_EPHEMERAL),
        prologue=prologue,
        psk=psk,
    )
    writer, reader = initiator, responder
    for payload, message in PSK3_MESSAGES:
        assert writer.write_message(bytes.fromhex(payload)).hex() == message
        assert reader.read_message_untrusted(bytes.fromhex(message)).hex() == payload
        writer, reader = reader, writer
    assert initiator.handshake_hash.hex() == responder.handshake_hash.hex() == PSK3_HASH
    ours, theirs = responder.split(), initiator.split()
    for payload, sealed in PSK3_TRANSPORT:
        assert ours[0].seal(bytes.fromhex(payload)).hex() == sealed
        assert theirs[1].open_untrusted(bytes.fromhex(sealed)).hex() == payload
        ours, theirs = theirs, ours


# The vectors of the snow project for psk0 and psk3 together.
SNOW_SUITE = b"Noise_XXpsk0+psk3_25519_ChaChaPoly_SHA256"
SNOW_PROLOGUE = (
    "5468657265206973206e6f20726967687420616e642077726f6e672e2054"
    "686572652773206f6e6c792066756e20616e6420626f72696e672e"
)
SNOW_PSKS = [
    "3829658d61de7c60129328910df4e4cdee261f7b9cb1aa2a326bd50dead817df",
    "3b9b4c7f360b3dbea6511b2287dfe76180049f5127c27fb3376ae514732ce40f",
]
SNOW_KEYS = [
    "e9c2c125ba62723d19c2a666ca87e4aea7997e7086d724715e647cbb7e3dced9",
    "0b8e02c4bdd7a4f00d5cec49d2418aa4c50fce820d851039a18f5d603c2c38b9",
    "a56eff6ea4b13103cbff6f68e18d23c15476259b8eaf3a7636f64c08f431969f",
    "e09e1b02aa28340c45132a19675a7386f24dfe3700905bdb67b1554486661c44",
]
"""Static and ephemeral of the initiator, then of the responder."""
SNOW_MESSAGES = [
    (
        "151cb17403c63f2a7c4be662f989854aaf727c61222c78a6eda9b1cd9a4ef884",
        "e29aafc005c2d034941ecc120973bdc81778728c10d6bbea5df041e2b2ed79073a1bc0b8a4cbac3893b9621f2376ebc78eef4286"
        "ec65239ec4329d07639ca6cda0f1072dc24f0c6efe905e8d3a261d94",
    ),
    (
        "20513d30ac69774a37b8dd80a145d179eca53ec26ddd26193acfc7857bc42244",
        "9f6c1d9af2b8d64e8338ad1692972ac72fbd2172e41c2c226986e9e25cfa86201701845f5357d91e3ef9cb17dd3d18b95394375f"
        "2a099d7013c269bb10b813103bbf5f3a52a4422d4e48be3cf6d9aa07fa2066438390f994a71d646133cfb034fcfe9220b80f52ba"
        "771850ad23c938fcf10f11a15c5b81ccf6b2941b20c53907",
    ),
    (
        "6a71df147bbab68e95003fb62d8065bb57f3c7266310b0644f00f3fd52790815",
        "337634cb103903adcb05a30c70f37a1dd1a7bd2b31ba35c1607fd915075f13b50d95d834bc82c211f871af87426ac1e05865b6bd"
        "d1e31363b6bc51e5c9164ec2116c77b5117e7b662f8a52aaed936d3b7146399ec385d873f0ce4bc4887ebe6b",
    ),
]


def test_the_published_vectors_with_a_key_before_message_1(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = (("psk", "e"), ("e", "ee", "s", "es"), ("s", "se", "psk"))
    monkeypatch.setattr(noise, "PSK_SUITE", SNOW_SUITE)
    monkeypatch.setitem(noise.PATTERNS, SNOW_SUITE, tokens)
    writer, reader = (
        NoiseXX(
            is_initiator=number == 0,
            static=key(SNOW_KEYS[number]),
            ephemeral=key(SNOW_KEYS[number + 1]),
            prologue=bytes.fromhex(SNOW_PROLOGUE),
            psk=bytes.fromhex(SNOW_PSKS[0]),
        )
        for number in (0, 2)
    )
    for number, (payload, message) in enumerate(SNOW_MESSAGES):
        if number == 2:
            writer._psk = reader._psk = bytes.fromhex(SNOW_PSKS[1])
        assert writer.write_message(bytes.fromhex(payload)).hex() == message
        assert reader.read_message_untrusted(bytes.fromhex(message)).hex() == payload
        writer, reader = reader, writer


def other_implementation(*, is_initiator: bool, psk: bytes) -> Any:
    """The same side by `noiseprotocol`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from noise.connection import Keypair, NoiseConnection

        connection = NoiseConnection.from_name(noise.PSK_SUITE)
        if is_initiator:
            connection.set_as_initiator()
        else:
            connection.set_as_responder()
        connection.set_psks(psk)
        connection.set_prologue(b"p")
        connection.set_keypair_from_private_bytes(
            Keypair.STATIC, X25519PrivateKey.generate().private_bytes_raw()
        )
        connection.start_handshake()
    return connection


@pytest.mark.parametrize("we_initiate", [True, False])
def test_the_second_implementation_understands_us(we_initiate: bool) -> None:
    other = other_implementation(is_initiator=not we_initiate, psk=SECRET.psk)
    ours = NoiseXX(
        is_initiator=we_initiate, static=X25519PrivateKey.generate(), prologue=b"p", psk=SECRET.psk
    )
    for number in range(3):
        if (number % 2 == 0) is we_initiate:
            message = ours.write_message(b"identity")
            assert bytes(other.read_message(message)) == b"identity"
        else:
            assert ours.read_message_untrusted(bytes(other.write_message(b"identity"))) == b"identity"
    assert ours.handshake_hash == other.get_handshake_hash()
    sending, receiving = ours.split()
    assert bytes(other.decrypt(sending.seal(b"text"))) == b"text"
    assert receiving.open_untrusted(bytes(other.encrypt(b"text"))) == b"text"


def test_two_nodes_with_the_secret_open_a_connection() -> None:
    one, other = open_pair(endpoint(1, secret=SECRET), endpoint(2, secret=SECRET))
    assert one.handshake_hash == other.handshake_hash


@pytest.mark.parametrize(
    ("dialer", "acceptor"),
    [(OTHER, SECRET), (None, SECRET), (SECRET, None)],
    ids=["another secret", "a dialer without", "an acceptor without"],
)
def test_without_the_secret_there_is_no_answer(
    dialer: NetworkSecret | None, acceptor: NetworkSecret | None
) -> None:
    one, other = fresh_pair(endpoint(1, secret=dialer), endpoint(2, secret=acceptor))
    (ended,) = other.receive_data(one.data_to_send(4096))
    assert isinstance(ended, Ended)
    assert isinstance(ended.error, HandshakeError)
    assert other.state is State.CLOSED
    assert not other.has_data_to_send
    assert other.node_id is None


def test_a_recorded_first_message_gets_an_answer_that_nobody_else_can_read() -> None:
    """What psk0 cannot prevent: a replay is answered. It tells that someone is there, and no more."""
    one, other = fresh_pair(endpoint(1, secret=SECRET), endpoint(2, secret=SECRET))
    recorded = one.data_to_send(4096)
    assert other.receive_data(recorded) == []
    answer = other.data_to_send(4096)
    (ended,) = Connection.dialer(
        endpoint(1, secret=SECRET), other._endpoint.credentials.node_id
    ).receive_data(answer)
    assert isinstance(ended, Ended)
    assert bytes(endpoint(2).credentials.node_id) not in answer


@given(st.binary(min_size=PRIVATE_MESSAGE_1_BYTES, max_size=PRIVATE_MESSAGE_1_BYTES))
def test_noise_instead_of_the_first_message_is_never_answered(data: bytes) -> None:
    other = Connection.acceptor(endpoint(2, secret=SECRET))
    (ended,) = other.receive_data(PRIVATE_HELLO_MAGIC + b"\x01\x01" + data)
    assert isinstance(ended, Ended)
    assert not other.has_data_to_send


def test_a_private_hello_is_told_by_its_magic() -> None:
    one, _ = fresh_pair(endpoint(1, secret=SECRET), endpoint(2))
    first = one.data_to_send(4096)
    assert first[:2] == PRIVATE_HELLO_MAGIC != HELLO_MAGIC
    assert len(first) == HELLO_BYTES + PRIVATE_MESSAGE_1_BYTES
    ones, others = pump(*fresh_pair(endpoint(1), endpoint(2)))
    assert [type(event) for event in ones + others] == [Opened, Opened]


def test_a_secret_is_read_back_and_never_shown() -> None:
    made = NetworkSecret.generate()
    assert NetworkSecret.parse(made.text) == NetworkSecret.parse(made.text.upper()) == made
    assert made.text not in repr(made)
    assert repr(made.raw) not in repr(made)
    assert made != NetworkSecret.generate()


@pytest.mark.parametrize(
    ("text", "reason"),
    [("", "has 52 characters, not 0"), ("1" * 52, "only the letters"), ("a" * 51 + "b", "mistyped")],
)
def test_a_wrong_secret_is_refused_without_repeating_it(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as error:
        NetworkSecret.parse(text)
    assert not text or text not in str(error.value)


def test_the_tag_of_a_network_tells_networks_apart_and_gives_nothing_away() -> None:
    tags = {network_tag(name, secret) for name in ("a", "b") for secret in (None, SECRET, OTHER)}
    assert len(tags) == 6
    assert {len(tag) for tag in tags} == {16}
    assert network_tag("a", SECRET) not in (SECRET.raw[:16], SECRET.psk[:16])
