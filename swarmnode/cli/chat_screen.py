"""How `swarmnode chat` reads and shows: with history and living Markdown on a terminal, plain in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click
from rich.console import Console, Group
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

from swarmnode.cli.common import complain, say, visible

PROMPT = "> "
MORE = ". "
QUOTES = '"""'
MAX_HISTORY = 2000
Show = Callable[[str, str], None]
"""Called with all of the text so far, and of the thoughts."""


class Screen:
    """`is_rich`: Markdown that grows while it is written; else the bare text."""

    def __init__(self, *, is_rich: bool, history: Path | None) -> None:
        self._is_rich = is_rich
        self._console = Console(highlight=False)
        self._keep_history(history)

    def read(self) -> str:
        """What the person says: a line, lines that end in a backslash, or all between two lines of three quotes.

        EOFError at the end of input, KeyboardInterrupt for Ctrl-C.
        """
        line = self._line(PROMPT)
        if line.strip() == QUOTES:
            return "\n".join(iter(lambda: self._line(MORE), QUOTES))
        while line.endswith("\\"):
            line = line[:-1] + "\n" + self._line(MORE)
        return line

    def note(self, text: str) -> None:
        """Something about the conversation, beside it."""
        if self._is_rich:
            self._console.print(Text(visible(text, keep="\n"), style="dim"))
        else:
            complain(text)

    @contextmanager
    def answer(self) -> Iterator[Show]:
        """Shows an answer while it comes; what is there at the end stays, however it ended."""
        with self._rich() if self._is_rich else self._plain() as show:
            yield show

    @contextmanager
    def _rich(self) -> Iterator[Show]:
        text, thoughts = "", ""

        def show(new_text: str, new_thoughts: str) -> None:
            nonlocal text, thoughts
            text, thoughts = new_text, new_thoughts
            live.update(_rendered(text, thoughts))

        try:
            with Live(console=self._console, transient=True, vertical_overflow="ellipsis") as live:
                yield show
        finally:
            self._console.print(_rendered(text, thoughts))

    @contextmanager
    def _plain(self) -> Iterator[Show]:
        shown = 0

        def show(text: str, thoughts: str) -> None:
            nonlocal shown
            piece, shown = text[shown:], len(text)
            click.echo(visible(piece, keep="\n\t") if sys.stdout.isatty() else piece, nl=False)
            sys.stdout.flush()

        try:
            yield show
        finally:
            say()

    def _line(self, prompt: str) -> str:
        return input(prompt if self._is_rich else "")

    def _keep_history(self, path: Path | None) -> None:
        """Of earlier runs, where there is readline; it is the owner's only, for it has what was asked."""
        if path is None:
            return
        try:
            import readline
        except ImportError:  # Windows has none
            return
        import atexit

        with suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(mode=0o600)
            readline.read_history_file(path)
        readline.set_history_length(MAX_HISTORY)
        atexit.register(_store, path)


def _store(path: Path) -> None:
    import readline

    with suppress(OSError):
        readline.write_history_file(path)


def _rendered(text: str, thoughts: str) -> Group:
    parts: list[Text | Markdown] = []
    if thoughts:
        parts.append(Text(visible(thoughts, keep="\n\t"), style="dim italic"))
    parts.append(Markdown(visible(text, keep="\n\t")))
    return Group(*parts)
