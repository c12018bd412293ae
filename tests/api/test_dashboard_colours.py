"""The page's colours can be read in both themes: contrast as WCAG 2 computes it."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from swarmnode.api.dashboard_routes import page_files

STYLE = page_files()["dashboard.css"].data.decode()
THEMES = dict(zip(("light", "dark"), re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL), strict=True))


def colours_of(theme: str) -> dict[str, str]:
    return dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})\b", THEMES[theme]))


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", THEMES)
def test_text_stands_out(theme: str) -> None:
    colours = colours_of(theme)
    for text in ("text", "quiet", "bad", "good", "accent"):
        for ground in ("surface", "ground"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    assert contrast(colours["on-accent"], colours["accent"]) >= 4.5
    for mark in ("focus", "curve"):
        assert contrast(colours[mark], colours["surface"]) >= 3


@pytest.mark.parametrize("theme", THEMES)
def test_more_replicas_differ_in_lightness_too(theme: str) -> None:
    colours = colours_of(theme)
    lights = [luminance(colours[f"map-{step}"]) for step in range(1, 5)]
    assert lights in (sorted(lights), sorted(lights, reverse=True))
    for one, other in pairwise(lights):
        assert (max(one, other) + 0.05) / (min(one, other) + 0.05) >= 1.4
