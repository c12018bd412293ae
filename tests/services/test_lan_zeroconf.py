"""Real multicast, on the loopback interface only. Slow (the library probes for a name as the standard asks) and not for
every machine (something else may hold port 5353), so `make test-slow` runs it."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from swarmnode.config import LanConfig
from swarmnode.identity import NodeKey
from swarmnode.services.lan import LanService, announcement
from swarmnode.services.lan_zeroconf import ZeroconfBackend, hosts_of

TAG = bytes(range(16))
LOOPBACK = ["127.0.0.1"]


def test_one_host_is_itself_and_all_are_no_loopback() -> None:
    assert hosts_of("192.0.2.1") == ("192.0.2.1",)
    assert not {"127.0.0.1", "::1"} & set(hosts_of("0.0.0.0"))


@pytest.mark.slow
def test_two_backends_see_each_other_and_leave_no_thread() -> None:
    before = set(threading.enumerate())
    nodes = [NodeKey.from_seed(bytes([number]) * 32).node_id for number in (1, 2)]
    services = [announcement(node, TAG, ("127.0.0.1",), port) for port, node in enumerate(nodes, start=1)]
    seen: list[list[LanService]] = [[], []]
    done = [threading.Event(), threading.Event()]

    def on_seen(number: int, service: LanService) -> None:
        seen[number].append(service)
        if all(service in seen[number] for service in services):
            done[number].set()

    backends = [ZeroconfBackend(LanConfig(), LOOPBACK) for _ in nodes]
    try:
        for number, backend in enumerate(backends):
            backend.start(services[number], partial(on_seen, number))
        assert all(event.wait(20) for event in done)
    finally:
        for backend in backends:
            backend.close()
    assert set(threading.enumerate()) <= before
