"""No test is bound to real time."""

from __future__ import annotations

import hypothesis


def test_hypothesis_has_no_deadline() -> None:
    """A profile has hypothesis' 200 ms an example unless it says otherwise (tests/conftest.py)."""
    assert hypothesis.settings().deadline is None
