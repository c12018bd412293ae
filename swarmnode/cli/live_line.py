"""One line at the bottom of a terminal that is written again and again. Without rich: it would cost a worker 3 MB."""

from __future__ import annotations

import shutil
import sys
from typing import TextIO

from swarmnode.cli.common import visible

_CLEAR = "\r\x1b[2K"


class LiveLine:
    """Shows nothing where there is no terminal. `clear` it before anything else is printed."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._is_shown = False

    @property
    def is_terminal(self) -> bool:
        """Whether somebody could see it."""
        return self._stream.isatty()

    def show(self, text: str) -> None:
        """Write the line in place of the one before, cut to the terminal's width."""
        if self.is_terminal:
            columns = shutil.get_terminal_size().columns
            self._write(_CLEAR + visible(text)[: columns - 1])
            self._is_shown = True

    def clear(self) -> None:
        """Take it away."""
        if self._is_shown:
            self._is_shown = False
            self._write(_CLEAR)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
