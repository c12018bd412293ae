"""One is no plural."""

from __future__ import annotations

from swarmnode.cli.bench_figures import Figures, Machine, lines_of
from swarmnode.cli.join_face import lending_line
from swarmnode.counts import counted
from swarmnode.services.reports import Lending


def test_numbers_with_their_words() -> None:
    assert [counted(number, "row") for number in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]
    assert [counted(number, "entry", "entries") for number in (1, 3)] == ["1 entry", "3 entries"]


def test_a_worker_of_one_and_a_bench_of_one() -> None:
    """They said "1 experts", "1 rounds"."""
    now = Lending(
        at_s=1.0, model="M", n_experts=1, held_bytes=1, memory_bytes=1, requests=1, rows=1, tokens=1, bytes_in=1,
        bytes_out=1, fetched_bytes=0, device="CPU", peers=1, pause="", power="",
    )  # fmt: skip
    assert lending_line(now, now) == "0 rows/s | 1 token helped | 1 B in, 1 B out | 1 expert on CPU | 1 peer"
    machine = Machine(
        model="M", n_layer=1, n_expert=1, n_expert_used=1, device="CPU", threads=1, worker_threads=1, rounds=1,
        prompt_tokens=1, decode_tokens=1, cores=1, load=None,
    )  # fmt: skip
    assert list(lines_of(Figures(machine))) == [
        "M: 1 layer of 1 expert, 1 a token",
        "CPU, 1 thread; medians of 1 round taken in turns",
    ]
