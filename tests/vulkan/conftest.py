"""The Vulkan device, for a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from swarmnode.compute.devices import Device, open_device
from swarmnode.compute.thread import release_compute_thread

from .kit import vulkan_name


@pytest.fixture(scope="module")
def vulkan() -> Iterator[Device]:
    release_compute_thread()
    opened = open_device(vulkan_name())
    yield opened
    opened.close()
    release_compute_thread()
