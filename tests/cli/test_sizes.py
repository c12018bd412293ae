"""Byte sizes as people write them."""

from __future__ import annotations

import pytest

from swarmnode.cli.sizes import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("300MB", 300_000_000),
        ("1.5GiB", 1_610_612_736),
        ("8 mb", 8_000_000),
        ("512M", 2**29),
        ("1000B", 1000),
    ],
)
def test_sizes(text: str, n_bytes: int) -> None:
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize(
    "text", ["", "MB", "300", "-1MB", "1x", "0", "1e9", "1.5.2MB", "999999999TB", "٣MB", "nan"]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match=r"size|range"):
        parse_bytes(text)


def test_short_forms() -> None:
    assert [format_bytes(n) for n in (0, 999, 1234, 1_234_567, 10**12)] == [
        "0 B",
        "999 B",
        "1.2 kB",
        "1.2 MB",
        "1000.0 GB",
    ]
