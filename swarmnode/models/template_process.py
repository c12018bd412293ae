"""Starts, asks and ends the process that renders a chat template (template_renderer).

A template comes with the model file and is a program: it can loop for ever or build a string of 30 GB. A thread that
does so cannot be stopped; a process can, and its memory has a limit.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from swarmnode.config import ModelsConfig
from swarmnode.models.control_marks import holds_marks
from swarmnode.models.template_renderer import CPU_SIGNAL, decode, encode

WALL_FACTOR = 1 if CPU_SIGNAL is None else 20
"""The process has CPU time for its limit, and so much more time by the clock: a busy machine is no fault of a template.
One that is at work takes CPU time; the clock is for one that is stuck."""
_ENDED = "the process that renders the template ended"
_UNASKABLE = (TypeError, ValueError, RecursionError)
"""What `encode` raises for values that JSON has not."""


class TemplateProcess:
    """One template in one process, started when it is first asked and again after it had to be ended.

    Any thread may ask; requests wait for each other.
    """

    def __init__(
        self,
        source: str,
        bos_token: str,
        eos_token: str,
        control_tokens: Sequence[str],
        config: ModelsConfig,
    ) -> None:
        self._config = config
        self._setup = {
            "source": source,
            "bos_token": bos_token,
            "eos_token": eos_token,
            "control_tokens": list(control_tokens),
            "max_chars": config.max_prompt_chars,
            "memory_bytes": config.template_memory_bytes,
            "compile_s": config.template_compile_s,
            "render_s": config.template_render_s,
        }
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., Any] | None = None

    def compile(self) -> str | None:
        """Start and compile; returns what is wrong with the template, None if nothing."""
        with self._lock:
            return self._start()

    def render(self, request: Mapping[str, Any]) -> tuple[str, str | None]:
        """(the text with marks, what went wrong or None); `request`: what `template_renderer.Renderer.render` takes."""
        try:
            line = encode(request)
        except _UNASKABLE as error:
            return "", f"they are not JSON: {error}"
        if holds_marks(line):
            return "", "they are not valid Unicode (a lone surrogate)"
        with self._lock:
            problem = self._start() if self._process is None else None
            if problem is not None:
                return "", problem
            reply = self._ask(line, self._config.template_render_s)
        return reply.get("text", ""), reply.get("problem")

    def _start(self) -> str | None:
        search_path = os.pathsep.join(entry for entry in sys.path if entry)
        command = [sys.executable, "-P", "-m", "swarmnode.models.template_renderer"]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": search_path},
                start_new_session=True,  # the terminal's Ctrl-C is for its parent; it ends with its stdin
            )
        except OSError as error:
            return f"no process to render it can be started: {error}"
        self._end = weakref.finalize(self, _end_process, self._process)
        reply = self._ask(encode(self._setup), self._config.template_compile_s)
        problem: str | None = reply.get("problem")
        if problem is not None:
            self._stop()
        return problem

    def _ask(self, line: bytes, limit_s: float) -> dict[str, str]:
        """The reply to a line; a process that gives none within the limit has ended or is ended, and so is a half-asked
        one."""
        process = self._process
        if process is None:
            return {"problem": _ENDED}
        late = threading.Event()
        timer = threading.Timer(WALL_FACTOR * limit_s, _kill, (process, late))
        timer.daemon = True
        timer.start()
        reply: dict[str, str] | None = None
        try:
            reply = _exchange(process, line)
        finally:
            timer.cancel()
            if reply is None or late.is_set():
                self._stop()
        if reply is not None:
            return reply
        is_over = late.is_set() or (CPU_SIGNAL is not None and process.returncode == -CPU_SIGNAL)
        return {"problem": f"the template takes more than {limit_s:g} s" if is_over else _ENDED}

    def _stop(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._end = None


def _exchange(process: subprocess.Popen[bytes], line: bytes) -> dict[str, str] | None:
    """Write a line, read one; None if the process ends instead."""
    if process.stdin is None or process.stdout is None:
        return None
    try:
        process.stdin.write(line)
        process.stdin.flush()
        reply: dict[str, str] = decode(process.stdout.readline())
    except (OSError, ValueError):
        return None
    return reply


def _kill(process: subprocess.Popen[bytes], late: threading.Event) -> None:
    late.set()
    process.kill()


def _end_process(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    try:
        process.communicate()  # closes both pipes and waits
    except (OSError, ValueError):  # a request that it did not take is still in the pipe's buffer
        process.wait()
