"""Links: read back as written, pasted with line breaks, and refused with a reason."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import UsageError
from swarmnode.identity import NodeKey
from swarmnode.net.address import PeerAddress
from swarmnode.net.invite import Invite
from swarmnode.wire.secret import NetworkSecret

NODE = NodeKey.from_seed(bytes(32)).node_id
HERE = PeerAddress(NODE, "backbone.example.org", 4790)
LAN, V6 = PeerAddress(NODE, "192.0.2.10", 4790), PeerAddress(NODE, "2001:db8::10", 65535)
SECRET = NetworkSecret(bytes(range(32)))


def test_a_link_without_extras_is_an_address() -> None:
    assert str(Invite((HERE,))) == str(HERE)
    assert Invite.parse(str(HERE)) == Invite((HERE,))


@given(st.text(st.characters(exclude_categories=["Cs", "Zs", "Zl", "Zp", "Cc"]), min_size=1, max_size=16))
def test_a_link_is_read_back_as_it_is_written(network: str) -> None:
    invite = Invite((V6, HERE, LAN), network, SECRET)
    link = str(invite)
    assert Invite.parse(link) == invite
    assert not set(link) & set(" \"'`$\\!<>|;^"), "it stands between double quotes in every shell"


def test_a_pasted_link_may_be_broken_over_lines() -> None:
    link = str(Invite((HERE, LAN), "home", SECRET))
    pasted = "\n ".join(link[start : start + 40] for start in range(0, len(link), 40)) + "\r\n"
    assert Invite.parse(pasted) == Invite.parse(link)


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ("?x=1", "'x' in a link is unknown"),
        ("?network=a&network=b", "'network' in a link is unknown, or there twice"),
        ("?network=", "a network name has 1 to 64 bytes"),
        (f"?network={'a' * 65}", "a network name has 1 to 64 bytes"),
        ("?network=%ff", "name=value"),
        ("?network", "name=value"),
        ("?secret=abc", "has 52 characters, not 3"),
        ("?at=host", "has no port"),
        ("?" + "&".join(f"at=h:{port}" for port in range(1, 9)), "a link with 9 places"),
        ("?" + "&".join(f"at=h:{port}" for port in range(1, 30)), "name=value"),
        ("?at=" + "x" * 3000, "a link of"),
    ],
)
def test_a_wrong_link_is_refused_with_its_reason(extra: str, reason: str) -> None:
    with pytest.raises(UsageError) as error:
        Invite.parse(str(HERE) + extra)
    assert reason in str(error.value)


@given(st.text(max_size=200))
def test_whatever_stands_behind_the_question_mark_raises_one_error(text: str) -> None:
    with contextlib.suppress(UsageError):
        Invite.parse(f"{HERE}?{text}")
