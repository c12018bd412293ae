"""What `swarmnode bench` is to measure and what it measured: as a table, and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from swarmnode.config import Config
from swarmnode.counts import counted
from swarmnode.services.account import Account

QUIET_LOAD = 0.2
"""Of each core: a neighbour that takes a fifth of one can cost a program most of its speed (benchmarks/README.md)."""


@dataclass(frozen=True)
class Plan:
    """What is to be measured, and how."""

    sections: tuple[str, ...]
    model: Path
    device: str | None
    config: Config
    rounds: int
    prompt_tokens: int
    decode_tokens: int
    rtts_ms: tuple[float, ...]
    sequences: tuple[int, ...]
    n_workers: int
    worker_threads: int
    budget_bytes: int | None
    """Of each worker; None: its part of all experts."""


@dataclass(frozen=True)
class Sample:
    """One contestant in one round: tokens of all its sequences together, and what the swarm did for them."""

    seconds: float
    n_tokens: int
    account: Account
    answers: tuple[tuple[int, ...], ...] = ()
    """The tokens of each sequence."""


@dataclass(frozen=True)
class KernelFigure:
    """One width of batch: rows, each through one expert, at once."""

    rows: int
    rows_per_s: float
    batch_ms: float


@dataclass(frozen=True)
class TokenFigure:
    """A speed in tokens, and under which conditions it was had: without them it says nothing."""

    workers: int
    sequences: int
    rtt_ms: float | None
    """Emulated; None: no worker was asked."""
    rtt_measured_ms: float | None
    """Of one byte there and back through the same proxy."""
    tokens_per_s: float
    """Of all sequences together."""
    layers_remote: float
    """A pass, on average: of one token in decode, of one chunk in prefill."""
    layers_total: int
    rounds_per_token: float
    """Waits for workers; each remote layer is one."""
    pairs_remote: float
    """Share of all (row, expert) pairs that workers computed, 0 to 1."""
    late: int
    """Pairs that the local replica had to compute after all, over all rounds."""
    as_local: float
    """Share of the answers' tokens that are those of the run without workers, up to the first that differs."""


@dataclass(frozen=True)
class Machine:
    """What the figures are of."""

    model: str
    n_layer: int
    n_expert: int
    n_expert_used: int
    device: str
    threads: int
    worker_threads: int
    rounds: int
    prompt_tokens: int
    decode_tokens: int
    cores: int
    load: float | None
    """Processes that wanted a core in the minute before; None where the system does not say."""


@dataclass
class Figures:
    """All that one run measured; a section that was not asked for has none."""

    machine: Machine
    kernels: list[KernelFigure] = field(default_factory=list)
    prefill: list[TokenFigure] = field(default_factory=list)
    decode: list[TokenFigure] = field(default_factory=list)
    swarm: list[TokenFigure] = field(default_factory=list)

    @property
    def is_noisy(self) -> bool:
        """Whether other programs used the machine: threads of a graph meet after every operation, and all wait."""
        return self.machine.load is not None and self.machine.load > QUIET_LOAD * self.machine.cores

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def kernel_figure(rows: int, batch_s: Sequence[float]) -> KernelFigure:
    """The median over the rounds."""
    median_s = statistics.median(batch_s)
    return KernelFigure(rows, round(rows / median_s, 1), round(1e3 * median_s, 4))


def token_figure(
    samples: Sequence[Sample],
    n_layer: int,
    *,
    workers: int = 0,
    sequences: int = 1,
    rtt_ms: float | None = None,
    rtt_measured_ms: float | None = None,
    local: Sequence[tuple[int, ...]] = (),
) -> TokenFigure:
    """The median speed over the rounds; counts are of all rounds together. `local`: the answers without workers."""
    layers = sum(sample.account.layers for sample in samples)
    remote_layers = sum(sample.account.remote_layers for sample in samples)
    pairs = sum(sample.account.pairs for sample in samples)
    return TokenFigure(
        workers=workers,
        sequences=sequences,
        rtt_ms=rtt_ms,
        rtt_measured_ms=None if rtt_measured_ms is None else round(rtt_measured_ms, 2),
        tokens_per_s=round(statistics.median(sample.n_tokens / sample.seconds for sample in samples), 2),
        layers_remote=round(n_layer * remote_layers / layers, 2) if layers else 0.0,
        layers_total=n_layer,
        rounds_per_token=round(remote_layers / sum(sample.n_tokens for sample in samples), 3),
        pairs_remote=round(sum(sample.account.remote for sample in samples) / pairs, 4) if pairs else 0.0,
        late=sum(sample.account.fallback for sample in samples),
        as_local=round(statistics.fmean(share_equal(sample.answers, local) for sample in samples), 4),
    )


def share_equal(answers: Sequence[tuple[int, ...]], local: Sequence[tuple[int, ...]]) -> float:
    """Tokens before the first one that differs, of all tokens; 1 where there is nothing to compare with."""
    total = equal = 0
    for ours, theirs in zip(answers, local, strict=False):
        total += len(theirs)
        differing = (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
        equal += next(differing, min(len(ours), len(theirs)))
    return equal / total if total else 1.0


def lines_of(figures: Figures) -> Iterator[str]:
    """The tables, for people."""
    machine = figures.machine
    layers, experts = counted(machine.n_layer, "layer"), counted(machine.n_expert, "expert")
    yield f"{machine.model}: {layers} of {experts}, {machine.n_expert_used} a token"
    threads, rounds = counted(machine.threads, "thread"), counted(machine.rounds, "round")
    yield f"{machine.device}, {threads}; medians of {rounds} taken in turns"
    if figures.kernels:
        yield ""
        yield from _kernel_lines(figures.kernels)
    titles = {
        "prefill": f"prefill, {counted(machine.prompt_tokens, 'token')}, no worker",
        "decode": f"decode, {counted(machine.decode_tokens, 'token')}, no worker",
        "swarm": f"decode, {counted(machine.decode_tokens, 'token')}, workers behind a delaying proxy, "
        f"threads of each: {machine.worker_threads}",
    }
    for name, title in titles.items():
        if rows := getattr(figures, name):
            yield ""
            yield title
            yield from _token_lines(rows)
    if figures.is_noisy:
        yield ""
        cores = counted(machine.cores, "core")
        yield f"NOISY: a load of {machine.load:.1f} on {cores} before; these figures say little"


def _kernel_lines(rows: Sequence[KernelFigure]) -> Iterator[str]:
    yield "kernels: rows through experts of one layer as a worker computes them, no network"
    yield f"{'batch':>7} {'rows/s':>10} {'ms a batch':>11}"
    for row in rows:
        yield f"{row.rows:>7} {row.rows_per_s:>10.0f} {row.batch_ms:>11.3f}"


def _token_lines(rows: Sequence[TokenFigure]) -> Iterator[str]:
    yield (
        f"{'workers':>7} {'RTT ms':>6} {'measured':>8} {'at once':>7} {'tok/s':>8} {'layers remote':>13} "
        f"{'rounds a token':>14} {'pairs':>5} {'same':>4}"
    )
    for row in rows:
        rtt = "-" if row.rtt_ms is None else f"{row.rtt_ms:g}"
        measured = "-" if row.rtt_measured_ms is None else f"{row.rtt_measured_ms:.1f}"
        layers = f"{row.layers_remote:.4g}/{row.layers_total}"
        yield (
            f"{row.workers:>7} {rtt:>6} {measured:>8} {row.sequences:>7} {row.tokens_per_s:>8.1f} {layers:>13} "
            f"{row.rounds_per_token:>14.2f} {row.pairs_remote:>5.0%} {row.as_local:>4.0%}"
        )
    if any(row.workers for row in rows):
        yield "pairs: of (row, expert), computed by workers; same: tokens until one differs"
        yield "from the answer without workers (16-bit rows and sums round)"
    if late := sum(row.late for row in rows):
        were = "was" if late == 1 else "were"
        yield (
            f"{counted(late, 'pair')} came too late and {were} computed here: the speeds above are not the workers'"
        )
