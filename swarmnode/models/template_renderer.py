"""What runs in the process that renders a chat template; template_process starts it.

Templates are jinja2 written for Hugging Face transformers (utils/chat_template_utils.py): this gives them the
functions and whitespace rules they expect there, inside jinja2's sandbox. The sandbox keeps a template from files and
Python's insides, but not from loops and memory without end; that is why it has a process of its own.

One JSON object a line on stdin, one a line back on stdout: first the setup, then requests until stdin ends.
"""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any, BinaryIO, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from swarmnode.models.control_marks import ControlMarks, unmarked

_MAX_PROBLEM_CHARS = 500


class Renderer:
    """A template, compiled. `setup` and requests are what template_process sends."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        """Compile; any exception means that the template cannot be used.

        Control tokens that it writes come out between marks (`control_marks`).
        """
        self._max_chars: int = setup["max_chars"]
        self._now = datetime.min
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: self._now.strftime(form)
        marks = ControlMarks(setup["control_tokens"])
        environment.globals["bos_token"] = marks.mark(setup["bos_token"])
        environment.globals["eos_token"] = marks.mark(setup["eos_token"])
        environment.globals["documents"] = None
        self._template = environment.from_string(_marked(environment.parse(setup["source"]), marks))

    def render(self, request: Mapping[str, Any]) -> dict[str, str]:
        """{'text': ...} or {'problem': ...}"""
        self._now = datetime.fromisoformat(request["now"])
        pieces: list[str] = []
        n_chars = 0
        for piece in self._template.generate(
            request["names"], add_generation_prompt=request["add_generation_prompt"]
        ):
            n_chars += len(piece)
            if n_chars > self._max_chars:
                return {"problem": f"they make a prompt of more than {self._max_chars} characters"}
            pieces.append(piece)
        return {"text": "".join(pieces)}


class _Generation(Extension):
    """`{% generation %}` marks for training what the assistant said; a prompt has no use for the mark."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own form

    def parse(self, parser: Parser) -> nodes.Node:
        """The body, with names of its own."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _marked(template: nodes.Template, marks: ControlMarks) -> nodes.Template:
    """The template with marks in everything that it holds as text, in place."""
    for data in template.find_all(nodes.TemplateData):
        data.data = marks.mark(data.data)
    for constant in template.find_all(nodes.Const):
        if isinstance(constant.value, str):
            constant.value = marks.mark(constant.value)
    return template


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of jinja2's own filter, as templates for language models expect."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def encode(message: Mapping[str, Any]) -> bytes:
    """One line. Lone surrogates, which a message may hold, pass. ValueError, TypeError or RecursionError for what JSON
    has not.
    """
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def decode(line: bytes) -> Any:
    """What `encode` was given; ValueError for another line."""
    return json.loads(line.decode("utf-8", "surrogatepass"))


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer the setup with {} or {'problem': ...}, and then every request."""
    setup = decode(requests.readline())
    limit_memory(setup["memory_bytes"])
    limit_cpu(setup["compile_s"])
    try:
        renderer = Renderer(setup)
    except Exception as error:  # whatever a hostile template brings about: the parent words it
        _send(replies, {"problem": _describe(error)})
        return
    _send(replies, {})
    for line in requests:
        limit_cpu(setup["render_s"])
        try:
            reply = renderer.render(decode(line))
        except Exception as error:
            reply = {"problem": _describe(error)}
        _send(replies, reply)


def _send(replies: BinaryIO, reply: Mapping[str, str]) -> None:
    replies.write(encode(reply))
    replies.flush()


def _describe(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "out of memory"
    return unmarked(str(error) or type(error).__name__)[:_MAX_PROBLEM_CHARS]


if sys.platform == "win32":

    def limit_memory(n_bytes: int) -> None:
        """Windows has no such limit for a process itself."""

    def limit_cpu(seconds: float) -> None:
        """Nor this one: the parent's clock is all there is."""

    CPU_SIGNAL: int | None = None
    """What ends a process that took too much CPU time."""

else:
    import resource

    def limit_memory(n_bytes: int) -> None:
        """MemoryError from then on for more than this (where the system keeps to it: macOS does not)."""
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        n_bytes = n_bytes if most == resource.RLIM_INFINITY else min(n_bytes, most)
        resource.setrlimit(resource.RLIMIT_AS, (n_bytes, most))

    def limit_cpu(seconds: float) -> None:
        """End this process after so much more CPU time, however long that takes on a busy machine; the parent may have
        been killed meanwhile."""
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # a parent that ignores it would have us do so
        signal.setitimer(signal.ITIMER_PROF, seconds)
        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        limit = math.ceil(time.process_time() + seconds) + 1
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, most))

    CPU_SIGNAL: int | None = signal.SIGPROF
    """What ends a process that took too much CPU time."""


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where it has no session of its own: Windows
    serve(sys.stdin.buffer, sys.stdout.buffer)
