"""Counters of what the API served, and GET /metrics in Prometheus' text format (version 0.0.4). Pure but for /proc."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swarmnode.api.forms import Counts
from swarmnode.services.account import Account

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST_TOKEN_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKEN_GAP_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)

Sample: TypeAlias = tuple[Mapping[str, str], float]


@dataclass(frozen=True)
class Family:
    """A metric: its samples, each with labels."""

    name: str
    kind: Literal["counter", "gauge"]
    meaning: str
    samples: Sequence[Sample]


class Histogram:
    """Counts of values up to each of the bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """One more."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str, meaning: str) -> Iterable[str]:
        """In Prometheus' form: each bucket holds those before it, too."""
        yield from (f"# HELP {name} {meaning}", f"# TYPE {name} histogram")
        total = 0
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield from (f"{name}_sum {self._sum:.6f}", f"{name}_count {total}")


@dataclass
class Metrics:
    """What was served since the start."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By route and status."""
    answers: Counter[str] = field(default_factory=Counter)
    """By how they ended: a finish reason, or "broken" for failures and clients that left."""
    tokens: Counter[str] = field(default_factory=Counter)
    pairs: Counter[str] = field(default_factory=Counter)
    """(row, expert) pairs, by who computed them."""
    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_S))
    token_gap: Histogram = field(default_factory=lambda: Histogram(TOKEN_GAP_S))

    def ended(self, counts: Counts, account: Account, reasons: Iterable[str]) -> None:
        """The answers to one request ended, so far as they came."""
        self.answers.update(reasons)
        self.tokens.update(prompt=counts.prompt, cached=account.cached_tokens, new=counts.new)
        local = account.pairs - account.remote - account.fallback
        self.pairs.update(
            local=local, remote=account.remote, fallback=account.fallback, hedged=account.hedged
        )

    def text(self, gauges: Sequence[Family]) -> str:
        """The answer of GET /metrics; `gauges`: what is so now."""
        lines: list[str] = []
        for family in (*self._counters(), *gauges, *_process()):
            lines += [f"# HELP {family.name} {family.meaning}", f"# TYPE {family.name} {family.kind}"]
            lines += [f"{family.name}{_labels(labels)} {value:.15g}" for labels, value in family.samples]
        lines += self.first_token.lines(
            "swarmnode_first_token_seconds", "From the request's parsing to its first token."
        )
        lines += self.token_gap.lines(
            "swarmnode_token_gap_seconds", "From one token of an answer to the next."
        )
        return "\n".join(lines) + "\n"

    def _counters(self) -> Iterable[Family]:
        requests = [
            ({"route": route, "status": str(status)}, float(count))
            for (route, status), count in sorted(self.requests.items())
        ]
        yield Family("swarmnode_requests_total", "counter", "HTTP requests answered.", requests)
        yield _counted("swarmnode_answers_total", "Answers, by how they ended.", "reason", self.answers)
        yield _counted(
            "swarmnode_tokens_total",
            "Tokens of prompts (cached: of those, not run again) and answers.",
            "kind",
            self.tokens,
        )
        yield _counted(
            "swarmnode_pairs_total",
            "Expert rows by who computed them; hedged: of remote and fallback, asked for twice.",
            "by",
            self.pairs,
        )


class RequestMeter:
    """ASGI middleware: counts requests by route and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: frozenset[str]) -> None:
        """`routes`: paths that have a label of their own; whatever else is asked for has one in common."""
        self._app = app
        self._metrics = metrics
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and look at the status."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        route = scope["path"] if scope["path"] in self._routes else "other"

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.requests[route, message["status"]] += 1
            await send(message)

        await self._app(scope, receive, watched)


def _counted(name: str, meaning: str, label: str, counts: Counter[str]) -> Family:
    return Family(
        name, "counter", meaning, [({label: key}, float(value)) for key, value in sorted(counts.items())]
    )


def _process() -> Iterable[Family]:
    """Where there is /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        n_files = len(os.listdir("/proc/self/fd"))
    except (OSError, ValueError, IndexError):
        return
    n_bytes = float(pages * os.sysconf("SC_PAGE_SIZE"))
    yield Family("process_resident_memory_bytes", "gauge", "Memory of this process.", [({}, n_bytes)])
    yield Family("process_open_fds", "gauge", "Open files and sockets.", [({}, float(n_files))])


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
