"""The dashboard in Chromium: from GET / to a map of 48 layers x 256 experts, with 500 nodes, that is on the screen.

The peer is a picture of 400 bytes from the same server, in the same browser: what any page costs here. Ends with exit
code 1 if the median is over a second, or if anything was asked of another host. Needs playwright and a Chromium.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from typing import Any

from swarmnode.services.dashboard_delta import delta_of
from swarmnode.testing.chromium import open_chromium
from swarmnode.testing.many_nodes import ManyNodes
from swarmnode.testing.page_server import PageServer, page_app, served_page

LIMIT_MS = 1000.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--nodes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    nodes = ManyNodes(options.layers, options.experts, options.nodes)
    for _ in range(120):
        nodes.step()
    print(
        f"{options.layers} x {options.experts} experts, {options.nodes} nodes; load {os.getloadavg()[0]:.1f}"
    )
    _show_server(nodes)
    with served_page(page_app(nodes.view)) as server, open_chromium() as browser:
        runs = [(_picture_ms(browser, server), *_page_ms(browser, server)) for _ in range(options.rounds)]
    strangers = {host for _, _, hosts in runs for host in hosts} - {f"127.0.0.1:{server.port}"}
    page_ms = _line("GET / to a drawn map", [drawn_ms for _, drawn_ms, _ in runs])
    _line("peer: a small picture", [picture_ms for picture_ms, _, _ in runs])
    print(f"other hosts that were asked: {', '.join(sorted(strangers)) or 'none'}")
    sys.exit(0 if page_ms <= LIMIT_MS and not strangers else 1)


def _show_server(nodes: ManyNodes) -> None:
    """What a tick costs the node, and what it sends."""
    before = nodes.view.look()
    data = json.dumps(before, separators=(",", ":"))
    gc.collect()
    looks_ms, sizes = [], []
    for _ in range(20):
        nodes.step()
        started_s = time.perf_counter()
        after = nodes.view.look()
        looks_ms.append((time.perf_counter() - started_s) * 1e3)
        sizes.append(len(json.dumps(delta_of(before, after), separators=(",", ":"))))
        before = after
    print(
        f"snapshot {len(data) / 1e3:.0f} kB; delta {statistics.median(sizes) / 1e3:.1f} kB; a look ", end=""
    )
    print(f"{statistics.median(looks_ms):.1f} ms on trio's thread")


def _page_ms(browser: Any, server: PageServer) -> tuple[float, set[str]]:
    """Until the map was on the screen, and which hosts were asked for anything."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    hosts: set[str] = set()
    page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
    page.goto(f"{server.url}/")
    drawn_ms = float(page.locator("#map[data-drawn-ms]").get_attribute("data-drawn-ms"))
    page.locator("#join-link").wait_for()
    context.close()
    return drawn_ms, hosts


def _picture_ms(browser: Any, server: PageServer) -> float:
    """Until a page that is one small picture was loaded."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{server.url}/dashboard/icon.svg")
    took_ms = float(page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd"))
    context.close()
    return took_ms


def _line(what: str, times_ms: list[float]) -> float:
    middle_ms = statistics.median(times_ms)
    print(f"{what:<24} median {middle_ms:5.0f} ms, {min(times_ms):5.0f} to {max(times_ms):5.0f}")
    return middle_ms


if __name__ == "__main__":
    main()
