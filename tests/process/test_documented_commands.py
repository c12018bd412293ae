"""Every command line of README and docs is run: in a home of its own, with the bundled model, a backbone and workers.

tests/meta/test_documented_commands.py checks that click takes them; here is what comes of them. A line that is in no
table below fails a test, as does an entry whose line is in the docs no more.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import click
import pytest
import trio

from swarmnode.cli.processes import NodeProcess
from swarmnode.cli.settings import long_name
from swarmnode.identity import NodeKey
from swarmnode.testing.tiny_gguf import TinyModel, write_tiny_gguf
from swarmnode.weights.catalog import bundled_model
from tests.meta.test_documented_commands import COMMANDS, ROOT, command_at, group_of
from tests.process.documented import AT_ONCE, TIMEOUT_S, Command, Place, Stage, documented, is_name, verb_of

pytestmark = pytest.mark.real_time

ALONE = [
    [Command("identity", r"key file .*node\.key  \(new\)"), Command("identity --token", r"^[\w-]{43}\n$")],
    [
        Command("key new", r"^sk-swarm-[\w-]{43}\n"),
        Command("key new --name laptop", "only its hash is stored"),
        Command("key new --name phone --max-concurrent 2 --per-minute 60", "only its hash is stored"),
        Command("key list", r"laptop +sk-swarm-[\w-]{4}\.\.\.[^$]*at most 2 at a time and 60 a minute"),
        Command("key revoke laptop", "the key laptop is revoked"),
    ],
    [
        Command("models add model-00001-of-00003.gguf", r"model: 3 files? linked"),
        Command("models list", r"baker-street .* bundled\nmodel "),
        Command("models verify", "baker-street.gguf: id 71f935e2"),
        Command("models verify model", "hashed for the first time"),
        Command("models remove model --yes", r"model is removed: 3 links?"),
        Command("models add --copy model-00001-of-00003.gguf", r"model: 3 files? copied", ours=True),
    ],
    [
        Command("models show", "a worker's budget covers"),
        Command("models show baker-street", "a worker's budget covers"),
        Command("inspect", "Baker Street 16M"),
        Command("inspect FILE.gguf", "experts           16 a layer"),
        Command("inspect model-00001-of-00003.gguf", r"in 3 files?(.|\n)*dense path"),
        Command("inspect --json FILE.gguf", '"experts": 16', ours=True),
    ],
    [
        Command("shard MODEL --layers 0:2 --experts 0:16 -o OUT.gguf", r"OUT\.gguf"),
        Command(
            "shard MODEL --layers 0:2 --experts 0:16 -o OUT.gguf --force", r"OUT\.gguf", ours=True),
    ],
    [
        Command("config show", r"backbone\n(.|\n)*\njoin\n"),
        Command("config show --json backbone", '"source": "environment SWARMNODE_LISTEN"'),
        Command("config show join --budget 300MB", r"budget +\S+ +command line"),
    ],
    [
        Command("completion bash", "_swarmnode_completion"),
        Command("completion zsh", "#compdef swarmnode"),
        Command("completion fish", "complete .*swarmnode"),
        Command("backbone --help", "Example: swarmnode backbone"),
    ],
    [
        Command("invite --new-secret home.secret", "a new network secret is in home.secret"),
        Command("invite --network home --secret home.secret --at 192.168.1.5", r"192\.168\.1\.5:4790\?network=home"),
        Command(
            "invite --network home --secret home.secret --with-secret --no-qr --budget 1GB --at h.example:1",
            "CARRIES THE NETWORK'S SECRET", ours=True),
        Command(
            "backbone --network home --secret home.secret --listen 0.0.0.0:4790", "^Workers join with", goes_on=True
        ),
    ],
    [
        Command("bench kernels", r"rows/s  ms a batch", more="--rounds 1"),
        Command(
            "bench prefill decode --model FILE.gguf --rounds 1 --tokens 4 --prompt 4 --sequences 1,2 --threads 1 "
            "--device CPU --plot speeds.png",
            r"decode, 4 tokens, no worker", ours=True),
    ],
]  # fmt: skip
"""They need no other node. The lists run beside each other."""

BACKBONES = [
    [
        Command("key new", "^sk-swarm-"),
        Command("backbone", "^Workers join with", goes_on=True),
        Command("backbone --api 0.0.0.0:8790", "^Workers join with", goes_on=True),
        Command("backbone --model FILE.gguf", "^model Baker Street 16M: 64 experts", goes_on=True),
        Command("backbone --model MODEL.gguf --q8", "^Workers join with", goes_on=True),
        Command("backbone --model MODEL.gguf --local-budget 24GB", "^Workers join with", goes_on=True),
    ],
    [
        Command(
            "backbone --model model-00001-of-00003.gguf --listen 0.0.0.0:4790",
            "^model Tiny Random: 32 experts",
            goes_on=True,
        ),
        Command(
            "backbone --home ~/all --network home --allow allowed.txt --bootstrap peers.txt --listen 127.0.0.1:0 "
            "--api 127.0.0.1:0 --cors https://chat.example --advertise home.example.org:14790 --context 512 --slots 2 "
            "--exact --deadline-ms 500 --send auto --speculate ngram --repack always --threads 1 --device CPU "
            "--log-json -v",
            '"event": "Ready"',
            goes_on=True, ours=True),
    ],
]  # fmt: skip
"""They start, say what they serve, and end with 0 when they are told to."""

THE_BACKBONE = Command(
    "backbone --send always",
    "^Workers join with: swarmnode join --budget 3MB --home ~/swarm-worker1 --bootstrap swarm://",
)
THE_WORKER = Command(
    "join --budget 3MB --home ~/swarm-worker1 --bootstrap swarm://jy4sqout...@127.0.0.1:4790",
    r"^full: 23 experts of Baker Street 16M, 2\.9 MB",
)
THE_TOLD = Command("join --budget 300MB", "^full: 64 experts")
"""All others have to do with these three."""

ANSWERED = r"swarm: \d+% of \d+ expert rows remote"
ASKED = [
    [
        Command("generate To Sherlock Holmes she is always", ANSWERED, more="--max-tokens 8"),
        Command("generate prompt", ANSWERED, more="--max-tokens 4"),
        Command("generate --chat Who are you?", ANSWERED, more="--max-tokens 4"),
        Command("generate --chat --max-tokens 64 Who are you?", ANSWERED),
        Command("generate --api HOST:PORT --max-tokens 4 prompt", ANSWERED, ours=True),
    ],
    [
        Command("generate", ANSWERED, more="--max-tokens 4", stdin="The door"),
        Command("generate --quiet", r"\A(?![\s\S]*swarm:)\s*\S", more="--max-tokens 4", stdin="The door"),
        Command(
            "generate --temperature 0.7 --top-k 20 --top-p 0.95 --min-p 0 --seed 1",
            ANSWERED,
            more="--max-tokens 4",
            stdin="The door",
        ),
    ],
    [
        Command("chat", ANSWERED, stdin="Who are you?\n", more="--max-tokens 4"),
        Command(
            "chat --api 192.168.1.5:8790 --system Answer briefly. --temperature 0.7 --max-tokens 400",
            ANSWERED,
            stdin="Who are you?\n/swarm\n",
        ),
        Command(
            "chat --api https://backbone.example.org/v1 --model NAME --plain",
            ANSWERED,
            stdin="/model\nWho?\n",
            more="--max-tokens 4 --top-k 20 --top-p 0.95 --min-p 0 --seed 1",
        ),
    ],
    [
        Command("status", r"coverage   \d+ of 64 experts"),
        Command(
            "status --api HOST:PORT --watch SECONDS --all --json", '"coverage": ', goes_on=True, code=130
        ),
        Command(
            "invite",
            r"join --budget 3MB --home ~/swarm-worker1 --bootstrap "
            r"\"swarm://\w+@127\.0\.0\.1:\d+\?network=public\"",
        ),
        Command("invite --at backbone.example.org:4790", r"@backbone\.example\.org:4790"),
        Command("doctor", "ok    a backbone runs with this key"),
        Command("doctor --bootstrap peers.txt", r"ok    peer \w+ at 127\.0\.0\.1 port \d+ answers"),
        Command(
            "doctor --device CPU --max-rows 8 --model FILE.gguf --listen 127.0.0.1:0 --api 127.0.0.1:0",
            "CPU: .* experts against float64", ours=True),
    ],
]  # fmt: skip
"""Of the home of the backbone, while workers come and go."""

TOLD = [
    Command("pause", "is paused"),
    Command("resume", "goes on"),
    Command("limits", r"budget     300\.0 MB"),
    Command(
        "limits --budget 200MB --hours 22:00-07:00 --on-battery serve --keep-free 1GB",
        r"budget     200\.0 MB \(started with 300\.0 MB\)",
    ),
    Command("limits --hours always", "hours +always"),
    Command("limits --json", '"budget_bytes": 200000000', ours=True),
    Command("leave", "leaves"),
]
"""Of the home of a worker."""

HOLDS = r"^downloading \d+ experts of Baker Street 16M"
SERVES = r"^serving \w+: \d+ experts"
JOINING = [
    Command("join --budget 300MB --bootstrap LINK", HOLDS, goes_on=True),
    Command("join --budget 300MB --bootstrap SOURCE", HOLDS, goes_on=True),
    Command("join --budget 300MB --bootstrap SOURCE --bootstrap SOURCE", HOLDS, goes_on=True),
    Command("join --budget 300MB --bootstrap peers.txt --log-json", '"event": "Planned"', goes_on=True),
    Command(
        "join --budget 2GB --listen 0.0.0.0:4790 --bootstrap /home/swarm/peers.txt --log-json",
        '"event": "Planned"',
        goes_on=True,
    ),
    Command(
        "join --budget 300MB --hours 23:00-07:00 --log-json", '"event": "(Planned|Paused)"', goes_on=True
    ),
    Command(
        "join --budget 300MB --bootstrap SOURCE --allow allowed.txt --threads 1 "
        "--device CPU --max-rows 8 --on-battery serve --keep-free 1MB --network public -v",
        SERVES,
        goes_on=True,
        ours=True,
    ),
    Command(
        "join --budget 300MB --listen 0.0.0.0:4790 --advertise home.example.org:14790", SERVES, goes_on=True
    ),
    Command("join --budget 300MB --no-listen --bootstrap SOURCE", SERVES, goes_on=True, ours=True),
]
"""Each from a home of its own; they find the backbone and take experts, and say goodbye."""

NOT_RUN = {
    "backbone --listen 0.0.0.0:4790 --lan": (
        "announces itself to every machine of the network that tests run in",
        "tests/services/test_lan_zeroconf.py",
    ),
    "join --budget 300MB --lan": (
        "looks for others on the network that tests run in",
        "tests/services/test_lan_zeroconf.py",
    ),
    "demo": ("takes twenty seconds", "tests/process/test_commands.py"),
    "demo --kill-at N": ("takes twenty seconds", "tests/process/test_commands.py"),
    "bench": ("takes minutes", "tests/process/test_bench.py"),
    "bench kernels prefill decode swarm": ("takes minutes", "tests/process/test_bench.py"),
    "bench swarm --model FOUR.gguf --sequences 1,16,64 --rtt 0,40 --prompt 16 --tokens 16 --rounds 2": (
        "takes minutes and a file of 6.5 GB",
        "tests/process/test_bench.py",
    ),
}
"""Why not here, and the file with the test that runs it."""

RUN = [
    THE_BACKBONE, THE_WORKER, THE_TOLD, *TOLD, *JOINING,
    *(command for chain in [*ALONE, *BACKBONES, *ASKED] for command in chain),
]  # fmt: skip


@asynccontextmanager
async def open_stage() -> AsyncIterator[Stage]:
    """No process is left behind, however it ends; what went wrong is told at the end."""
    async with trio.open_nursery() as nursery:
        stage = Stage(nursery, trio.CapacityLimiter(AT_ONCE), [], [])
        try:
            yield stage
        finally:
            with trio.CancelScope(shield=True):
                for node in stage.nodes:
                    node.kill()
                    await node.process.wait()
    assert not stage.problems, "\n\n".join(stage.problems)


@pytest.fixture
def here(tmp_path: Path) -> Place:
    """A person's home, and a folder with the files that the docs name."""
    home, folder = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    folder.mkdir()
    write_tiny_gguf(folder / "model.gguf", TinyModel(n_parts=3))
    (folder / "allowed.txt").write_text(f"{NodeKey.from_seed(bytes(32)).node_id}\n")
    values = {
        "0.0.0.0:4790": "0.0.0.0:0",
        "0.0.0.0:8790": "0.0.0.0:0",
        "FILE.gguf": str(bundled_model()),
        "MODEL.gguf": str(bundled_model()),
        "MODEL": str(bundled_model()),
        "~": str(home),
        "Answer briefly.": "Answer briefly.",
        "Who are you?": "Who are you?",
        "To Sherlock Holmes she is always": "To Sherlock Holmes she is always",
    }
    places = {"SWARMNODE_LISTEN": "127.0.0.1:0", "SWARMNODE_API": "127.0.0.1:0"}
    return Place(home, folder, places, values)


async def test_commands_that_need_no_other_node(here: Place) -> None:
    async with open_stage() as stage:
        await stage.play(here, *ALONE)
        assert stage.n_run == sum(map(len, ALONE))
    assert (here.folder / "speeds.png").read_bytes().startswith(b"\x89PNG")


async def test_backbones_as_the_docs_start_them(here: Place) -> None:
    async with open_stage() as stage:
        others = replace(
            here, home=here.home / "other", values={**here.values, "peers.txt": str(dead_list(here))}
        )
        await stage.play(here, BACKBONES[0])
        await stage.play(others, BACKBONES[1])


def dead_list(here: Place) -> Path:
    """A bootstrap list with one node that is not there."""
    path = here.folder / "nobody.txt"
    path.write_text(f"swarm://{NodeKey.from_seed(bytes(32)).node_id}@127.0.0.1:1\n")
    return path


async def test_a_swarm_as_the_docs_start_it(here: Place, tmp_path: Path) -> None:
    async with open_stage() as stage:
        node = await stage.start(here, THE_BACKBONE)
        address, api = await node.wait_line("swarm ", TIMEOUT_S), await node.wait_line("api ", TIMEOUT_S)
        here = with_swarm(here, address, api)
        told = replace(here, home=tmp_path / "told")

        async def told_after_its_start() -> None:
            await stage.start(told, THE_TOLD)
            await stage.play(told, TOLD)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stage.start, here, THE_WORKER)
            nursery.start_soon(told_after_its_start)
            nursery.start_soon(stage.play, here, *ASKED)
            for number, command in enumerate(JOINING):
                nursery.start_soon(stage.play, replace(here, home=tmp_path / f"joins{number}"), [command])
        await ends_well(stage, node)


def with_swarm(here: Place, address: str, api: str) -> Place:
    """With a backbone's addresses for those in the docs; clients find it by their variables."""
    peers = here.folder / "peers.txt"
    peers.write_text(f"{address}\n")
    values = {
        "swarm://jy4sqout...@127.0.0.1:4790": address,
        "SOURCE": address,
        "LINK": f"{address}?network=public",
        "/home/swarm/peers.txt": str(peers),
        "192.168.1.5:8790": api,
        "https://backbone.example.org/v1": f"{api}/v1",
        "HOST:PORT": api.removeprefix("http://"),
        "NAME": "Baker Street 16M",
        "SECONDS": "1",
    }
    variables = {"SWARMNODE_API": api.removeprefix("http://"), "SWARMNODE_BOOTSTRAP": str(peers)}
    return replace(here, variables=variables, values={**here.values, **values})


async def ends_well(stage: Stage, backbone: NodeProcess) -> None:
    """The backbone, and the workers that nobody told to leave, end with 0 at Ctrl-C."""
    for node in stage.nodes:
        if await node.stop(TIMEOUT_S) != 0 and "--watch" not in node.name:
            stage.problems.append(f"{node.name}: ended with {node.process.returncode}\n{node.lines[-20:]}")
    for command in (THE_WORKER, THE_TOLD):
        (lines,) = (node.lines for node in stage.nodes if node.name == command.line)
        if not any(re.search(command.says, line) for line in lines):
            stage.problems.append(f"{command.line}: does not say {command.says!r}\n{lines[-20:]}")
    assert backbone.lines[-1] == "stopped"


def test_every_documented_command_is_run() -> None:
    """Or says why not. A line that only names a verb needs another one that runs it."""
    run = {command.line for command in RUN}
    lines = documented()
    assert len(lines) > 60, "the scan finds what it should"
    for command in RUN:
        assert command.ours != (command.line in lines), (
            f"`swarmnode {command.line}` came into the docs, or left them"
        )
    verbs_run = {verb_of(line) for line in run}
    for line in lines - run - NOT_RUN.keys():
        assert is_name(line), f"`swarmnode {line}` is in the docs, and no test runs it"
        assert verb_of(line) in verbs_run, f"`swarmnode {line}` only names a verb that is never run"
    assert NOT_RUN.keys() <= lines, "not in the docs any more"
    assert not run & NOT_RUN.keys()


@pytest.mark.parametrize("line", NOT_RUN)
def test_who_runs_the_others(line: str) -> None:
    _, name = NOT_RUN[line]
    text = (ROOT / name).read_text()
    verb = line.split()[0]
    assert f'"{verb}"' in text or "--lan" in line, f"{name} does not run {verb}"


def test_every_option_is_in_a_run() -> None:
    """Of every verb; an option that verbs share, with the same help, is one."""
    used: set[tuple[str, str | None]] = set()
    for line in [*(f"{command.line} {command.more}" for command in RUN), *NOT_RUN]:
        command, words = group_of(["swarmnode", *line.split()])
        assert command is not None
        used |= {key(option) for option in options_of(command) if set(names_of(option)) & set(words)}
    for path in COMMANDS:
        for option in options_of(command_at(path)):
            is_used = key(option) in used or is_run_elsewhere(path, option)
            assert is_used, f"no test runs swarmnode {' '.join(path)} {long_name(option)}"


def is_run_elsewhere(path: tuple[str, ...], option: click.Option) -> bool:
    return any(
        f'"{name}"' in (ROOT / file).read_text()
        for line, (_, file) in NOT_RUN.items()
        if path == (line.split()[0],) and "--lan" not in line
        for name in names_of(option)
    )


def options_of(command: click.Command) -> list[click.Option]:
    return [
        param for param in command.params if isinstance(param, click.Option) and "--version" not in param.opts
    ]


def names_of(option: click.Option) -> list[str]:
    return [*option.opts, *option.secondary_opts]


def key(option: click.Option) -> tuple[str, str | None]:
    return long_name(option), option.help
