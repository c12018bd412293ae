"""The pictures in docs/images are made here: dark, light and phone. `make screenshots` keeps them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from swarmnode.testing.many_nodes import ManyNodes
from tests.browser.conftest import opened

pytestmark = pytest.mark.browser

IMAGES = Path(__file__).parents[2] / "docs" / "images"
MAX_BYTES = 200_000
DESKTOP = {"width": 1280, "height": 1100}
PHONE = {"width": 390, "height": 844}


@pytest.mark.parametrize(
    ("name", "scheme", "viewport"),
    [
        ("dashboard-dark", "dark", DESKTOP),
        ("dashboard-light", "light", DESKTOP),
        ("dashboard-phone", "dark", PHONE),
    ],
)
def test_a_picture(chromium: Any, tmp_path: Path, name: str, scheme: str, viewport: dict[str, int]) -> None:
    nodes = ManyNodes(48, 256, 500)
    for _ in range(400):
        nodes.step()
    nodes.peers.clear()
    for number in range(5, 100, 5):
        nodes.connect(number, (), "cpu")
    is_phone = viewport is PHONE
    with opened(chromium, nodes, viewport=viewport, color_scheme=scheme, is_mobile=is_phone) as found:
        found.goto()
        found.page.locator("#peers-body tr").nth(499).wait_for(state="attached")
        if is_phone:
            found.page.locator(".coverage").scroll_into_view_if_needed()
        path = tmp_path / f"{name}.png"
        found.page.screenshot(path=path)
    assert 10_000 < path.stat().st_size < MAX_BYTES
    if os.environ.get("SWARMNODE_SCREENSHOTS"):
        IMAGES.mkdir(exist_ok=True)
        (IMAGES / path.name).write_bytes(path.read_bytes())
