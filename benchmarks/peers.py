"""llama.cpp in processes of its own: a script beside this one, under a Python that has it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

PEER_PYTHON = Path(__file__).parent.parent / ".venv-bench" / "bin" / "python"
"""Where `make bench-setup` installs xllamacpp."""


class Peer:
    """One process; ended on leaving its context."""

    def __init__(self, python: Path, script: str, model: Path, n_threads: int, *flags: str) -> None:
        self._process = subprocess.Popen(
            [str(python), str(Path(__file__).with_name(script)), str(model), str(n_threads), *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.pid = self._process.pid
        self.version: str = self._read()["version"]
        self.peak_bytes = 0

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()

    def ask(self, prompt: list[int], n_tokens: int) -> tuple[float, float]:
        """Seconds to the first token of a completion, and decode steps a second; blocks."""
        answer = self._reply({"prompt": prompt, "n_predict": n_tokens})
        self.peak_bytes = answer["peak_bytes"]
        return answer["first_s"], answer["decode_per_s"]

    def together_s(self, prompts: list[list[int]], n_tokens: int) -> float:
        """Seconds in which it answers all of these at once, each with so many tokens; blocks."""
        seconds: float = self._reply({"prompts": prompts, "n_predict": n_tokens})["wall_s"]
        return seconds

    def first_s(self, prompt: list[int]) -> float:
        """Seconds that a prompt takes; blocks."""
        seconds: float = self._reply({"prompt": prompt, "n_predict": 2})["first_s"]
        return seconds

    def _reply(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("peer "):
                answer: dict[str, Any] = json.loads(line.removeprefix("peer "))
                return answer
        raise SystemExit(f"the peer ended with {self._process.wait()}")


@contextmanager
def llama_peers(model: Path, n_threads: int, flags: Mapping[str, Sequence[str]]) -> Iterator[dict[str, Peer]]:
    """llama_peer.py by name, once with each of these flags; nobody where `make bench-setup` was not run."""
    if not PEER_PYTHON.exists():
        print("peer: none (make bench-setup)")
        yield {}
        return
    with ExitStack() as stack:
        peers = {
            name: stack.enter_context(Peer(PEER_PYTHON, "llama_peer.py", model, n_threads, *some))
            for name, some in flags.items()
        }
        print(f"peer: llama.cpp of xllamacpp {next(iter(peers.values())).version}")
        yield peers


@contextmanager
def llama_cpp_python_peer(python: Path, model: Path, n_threads: int) -> Iterator[dict[str, Peer]]:
    """llama_cpp_python_peer.py, under a Python where llama-cpp-python is installed."""
    with Peer(python, "llama_cpp_python_peer.py", model, n_threads) as peer:
        yield {f"llama-cpp-python {peer.version}": peer}
