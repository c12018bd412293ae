"""What requests leave behind, counted: no cache, list of labels, history or index has an entry more for each of them.

All containers of the process are looked at, so one that is added is, too. Memory of ggml's is not seen here;
`python -m benchmarks.clients` prints what a real process takes, a quarter of its requests at a time.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Sized
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.swarm.conftest import ALL_BYTES
from tests.swarm.site import CHAT, Site, fin, open_site, request, reset

N_REQUESTS = 40
"""In a round."""
CONTAINERS = (dict, list, set, deque)


def containers() -> list[tuple[Sized, int]]:
    """Everything that can hold entries, with how many it has. Without trio's deadlines: scopes that have ended stay
    there until there are a thousand."""
    gc.collect()
    found = [item for item in gc.get_objects() if isinstance(item, CONTAINERS)]
    return [(item, len(item)) for item in found if not _are_deadlines(item)]


def _are_deadlines(item: Any) -> bool:
    if not isinstance(item, list) or not item or not isinstance(item[0], tuple):
        return False
    return len(item[0]) == 3 and isinstance(item[0][2], trio.CancelScope)


async def ask(site: Site, number: int) -> None:
    """Every request is another: prompt, seed, key, tools; some are wrong, some clients leave."""
    stream = await site.client()
    body: dict[str, Any] = {
        **CHAT,
        "messages": [{"role": "user", "content": f"{number} times I have seen {number * 7919 % 1000}"}],
        "temperature": 1.0,
        "seed": number,
        "user": f"user {number}",
        "logit_bias": {str(number % 250): 1},
        "stream": bool(number % 2),
    }
    if number % 5 == 1:
        body["model"] = f"model {number}"
    await stream.send_all(request(body, f"X-Request-Id: {number}", "Connection: close"))
    if number % 7 == 0:
        await stream.receive_some()
        await (reset if number % 2 else fin)(stream)
        return
    while await stream.receive_some():
        pass
    await stream.aclose()


async def round_of(site: Site, first: int) -> None:
    for number in range(first, first + N_REQUESTS):
        await ask(site, number)
    await trio.sleep(30)


@pytest.mark.parametrize("n_leaked", [0, 1], ids=["as it is", "with a list that grows"])
async def test_no_container_grows_with_the_requests(tiny_model: Path, tmp_path: Path, n_leaked: int) -> None:
    """The second case says that the first one would notice. What has a bound (graphs, what gossip remembers) may still
    grow a little, but not by an entry for every third request.
    """
    leak: list[object] = []
    async with open_site(tiny_model, tmp_path) as site:
        await site.swarm.join(ALL_BYTES // 2)
        await site.note()
        await round_of(site, 0)  # graphs are built, routes and codecs are met for the first time
        dashboard = site.swarm.config.dashboard
        await trio.sleep(dashboard.n_samples * dashboard.sample_s)  # its curves have all their points
        before = containers()
        for number in (1, 2, 3):
            await round_of(site, number * N_REQUESTS)
            leak += [number] * (n_leaked * N_REQUESTS)
        assert site.swarm.backbone.engine.n_tokens > 4 * N_REQUESTS
        grown = sorted(
            ((len(item) - n, item) for item, n in before if item is not before), key=lambda pair: pair[0]
        )
    most, item = grown[-1]
    assert (most > N_REQUESTS) is (n_leaked > 0), f"{most} entries more: {str(item)[:200]}"
    assert item is leak or not n_leaked
