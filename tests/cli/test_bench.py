"""`swarmnode bench`: what it takes, what it refuses at once, medians and tables; the picture where matplotlib is."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from swarmnode.cli import main
from swarmnode.cli.bench_figures import (
    Figures,
    KernelFigure,
    Machine,
    Sample,
    TokenFigure,
    kernel_figure,
    lines_of,
    share_equal,
    token_figure,
)
from swarmnode.cli.bench_plot import check_drawing, check_name, draw
from swarmnode.cli.bench_swarm import part_of_experts_bytes
from swarmnode.errors import UsageError
from swarmnode.services.account import Account
from swarmnode.weights.catalog import bundled_model
from swarmnode.weights.hashing import build_manifest
from swarmnode.weights.index import ModelIndex

MACHINE = Machine(
    model="A Model",
    n_layer=4,
    n_expert=16,
    n_expert_used=4,
    device="CPU (some)",
    threads=2,
    worker_threads=1,
    rounds=3,
    prompt_tokens=128,
    decode_tokens=32,
    cores=2,
    load=0.1,
)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", *arguments])


def sample(seconds: float, remote_layers: int, fallback: int = 0) -> Sample:
    """Ten tokens of a model of four layers, 16 pairs each."""
    account = Account(
        pairs=160,
        remote=4 * remote_layers - fallback,
        fallback=fallback,
        layers=40,
        remote_layers=remote_layers,
    )
    return Sample(seconds, 10, account, ((1, 2, 3, 4),))


def figures() -> Figures:
    made = Figures(MACHINE, kernels=[kernel_figure(8, [0.5, 0.001, 0.002])])
    made.decode = [token_figure([sample(1.0, 0)], 4)]
    alone = token_figure([sample(1.0, 0)], 4, sequences=4)
    far = token_figure([sample(2.0, 30)], 4, workers=2, sequences=4, rtt_ms=40.0, rtt_measured_ms=41.26)
    made.swarm = [alone, far]
    return made


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nonsense"], "nonsense"),
        (["--rtt", "0,x"], "no list of numbers"),
        (["--rtt", ""], "no list of numbers"),
        (["--rtt", "-1"], "numbers must be from 0"),
        (["--rtt", "nan"], "numbers must be from 0"),
        (["--sequences", "0"], "numbers must be from 1"),
        (["--sequences", "1.5"], "no list of numbers"),
        (["--rounds", "0"], "--rounds"),
        (["--budget", "much"], "is not a size"),
    ],
)
def test_wrong_usage_is_told_at_once(arguments: list[str], says: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert says in result.output


def test_a_model_that_is_not_there() -> None:
    result = run("kernels", "--model", "/nowhere.gguf")
    assert result.exit_code == 2
    assert "no known model" in result.output


def test_a_picture_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("--plot", str(tmp_path / "x.png"))
    assert result.exit_code == 1
    assert result.output.startswith("swarmnode: --plot needs the extra `bench`: ")
    assert 'pip install "./swarmnode[bench]"' in result.output


def test_kernels_need_no_extra_and_the_rest_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "swarmnode.cli.bench_model", None)
    result = run("kernels", "decode")
    assert result.exit_code == 1
    assert "measuring" not in result.output
    assert "swarmnode[backbone]" in result.output
    assert "Traceback" not in result.output
    result = run("kernels", "--rounds", "1", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["kernels"]
    assert [row["rows"] for row in rows] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert all(row["rows_per_s"] > 0 for row in rows)


def test_medians_and_counts() -> None:
    assert kernel_figure(8, [0.5, 0.001, 0.002]) == KernelFigure(rows=8, rows_per_s=4000.0, batch_ms=2.0)
    rounds = [sample(1.0, 40), sample(2.0, 30, fallback=2), sample(50.0, 20)]
    figure = token_figure(rounds, 4, workers=2, rtt_ms=10.0, rtt_measured_ms=10.456, local=[(1, 2, 9, 4)])
    assert figure == TokenFigure(
        workers=2,
        sequences=1,
        rtt_ms=10.0,
        rtt_measured_ms=10.46,
        tokens_per_s=5.0,
        layers_remote=3.0,
        layers_total=4,
        rounds_per_token=3.0,
        pairs_remote=round((160 + 118 + 80) / 480, 4),
        late=2,
        as_local=0.5,
    )


def test_answers_are_compared_up_to_the_first_difference() -> None:
    assert share_equal([(1, 2, 3), (4, 5, 6)], [(1, 2, 3), (4, 9, 6)]) == 4 / 6
    assert share_equal([], []) == 1.0


def test_every_speed_stands_beside_its_conditions() -> None:
    lines = list(lines_of(figures()))
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "      8       4000       2.000" in text
    assert "      2     40     41.3       4      5.0           3/4           3.00   75% 100%" in text
    assert "prefill," not in text
    assert "NOISY" not in text


def test_late_pairs_and_noise_are_said() -> None:
    noisy = figures()
    noisy.swarm.append(token_figure([sample(1.0, 10, fallback=3)], 4, workers=2, rtt_ms=0.0))
    noisy.machine = replace(MACHINE, load=3.0)
    text = "\n".join(lines_of(noisy))
    assert "3 pairs came too late" in text
    assert "NOISY: a load of 3.0 on 2 cores" in text


def test_json_has_every_field() -> None:
    plain = json.loads(json.dumps(figures().as_dict()))
    assert plain["machine"]["rounds"] == 3
    assert plain["swarm"][1]["rtt_ms"] == 40.0
    assert plain["swarm"][0]["rtt_ms"] is None
    assert plain["prefill"] == []


def test_workers_have_room_for_all_experts_between_them() -> None:
    with ModelIndex.open(bundled_model()) as index:
        manifest = build_manifest(index)
        routed = sum(layout.n_expert * layout.expert_bytes for layout in index.expert_layers.values())
    assert routed < 3 * part_of_experts_bytes(manifest, 3) < 2 * routed


def test_a_picture(tmp_path: Path) -> None:
    check_drawing()
    check_name(tmp_path / "x.png")
    with pytest.raises(UsageError, match=r"ends in \.png"):
        check_name(tmp_path / "x.pdf")
    with pytest.raises(UsageError, match="no folder"):
        check_name(tmp_path / "no" / "x.png")
    draw(figures(), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
