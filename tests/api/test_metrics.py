"""GET /metrics: Prometheus' text format, and numbers that fit what was asked."""

from __future__ import annotations

import re
from pathlib import Path

from swarmnode.api.metrics import Family, Histogram, Metrics
from tests.api.test_app import ASK, open_client

LINE = re.compile(r'(# (HELP|TYPE) [a-z_]+ .+|[a-z_]+(\{([a-z]+="(\\.|[^"\\])*",?)+\})? -?[0-9.e+]+)')


def values(text: str) -> dict[str, float]:
    assert text.endswith("\n")
    lines = text.splitlines()
    for line in lines:
        assert LINE.fullmatch(line), line
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


async def test_what_was_served_is_counted(tmp_path: Path) -> None:
    async with open_client(tmp_path) as (client, _):
        await client.post("/v1/completions", json={**ASK, "n": 2})
        await client.post("/v1/completions", json={**ASK, "stream": True})
        await client.post("/v1/completions", json={"prompt": 5})
        await client.get("/v1/" + "x" * 100)
        answer = await client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = values(answer.text)
    assert found['swarmnode_requests_total{route="/v1/completions",status="200"}'] == 2
    assert found['swarmnode_requests_total{route="/v1/completions",status="400"}'] == 1
    assert found['swarmnode_requests_total{route="other",status="404"}'] == 1
    assert found['swarmnode_answers_total{reason="length"}'] == 3
    assert found['swarmnode_tokens_total{kind="new"}'] == 18
    assert found['swarmnode_pairs_total{by="local"}'] > 0
    assert found["swarmnode_first_token_seconds_count"] == 3
    assert found["swarmnode_token_gap_seconds_count"] == 15
    assert found["swarmnode_slots_free"] == 2
    assert found["process_open_fds"] > 3


def test_labels_are_escaped_and_buckets_add_up() -> None:
    family = Family("swarmnode_x", "gauge", "X.", [({"name": 'a"b\\\n'}, 1.5)])
    assert values(Metrics().text([family]))['swarmnode_x{name="a\\"b\\\\\\n"}'] == 1.5
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.add(value)
    assert list(histogram.lines("h", "H."))[2:] == [
        'h_bucket{le="1.0"} 2',
        'h_bucket{le="2.0"} 3',
        'h_bucket{le="+Inf"} 4',
        "h_sum 12.000000",
        "h_count 4",
    ]
