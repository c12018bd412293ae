"""Which rows of a reply are looked at because they are large."""

from __future__ import annotations

import numpy as np

from swarmnode.services.magnitudes import MANY_TIMES, Magnitudes


def rows(*largest: float) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """A row of eight numbers for each, one of which is that large."""
    numbers = np.zeros((len(largest), 8), np.float32)
    numbers[:, 3] = largest
    return numbers


def test_what_is_much_larger_than_all_that_is_known_is_suspicious() -> None:
    known = Magnitudes()
    known.learn(5, rows(0.5, -2))
    bound = 2 * MANY_TIMES
    assert known.suspicious_row(5, rows(bound, -bound)) is None
    assert known.suspicious_row(5, rows(1, -bound - 1, bound)) == 1
    known.learn(5, rows(bound + 1))  # it was honest
    assert known.suspicious_row(5, rows(1, -bound - 1, bound)) is None


def test_of_an_unknown_layer_is_known_what_others_are_like() -> None:
    known = Magnitudes()
    assert known.suspicious_row(0, rows(1e-9)) == 0, "nothing is known at all"
    known.learn(0, rows(1))
    assert not known.knows(1)
    assert known.suspicious_row(1, rows(10)) is None
    assert known.suspicious_row(1, rows(0, 20)) == 1


def test_what_f16_cannot_hold_is_always_looked_at() -> None:
    known = Magnitudes()
    known.learn(0, rows(1e6))
    assert known.suspicious_row(0, rows(60_000)) is None
    assert known.suspicious_row(0, rows(70_000)) == 0
    known.learn(0, rows(np.inf))
    assert known.suspicious_row(0, rows(3e38)) == 0
