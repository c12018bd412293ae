"""A CPU device for the module, and random layers of experts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from swarmnode.compute.devices import Device, open_device
from swarmnode.compute.thread import release_compute_thread


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    release_compute_thread()
    opened = open_device("CPU", n_threads=2)
    yield opened
    opened.close()
    release_compute_thread()
