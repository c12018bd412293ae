"""A conversation as `swarmnode chat` keeps it: messages, what the answers were asked with, and its form as a file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarmnode.errors import UsageError

_TITLES = {"system": "System", "user": "You", "assistant": "Answer"}


@dataclass
class Conversation:
    """What was said. `sampling`: fields of the request as they are, those only that were given."""

    system: str = ""
    model: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    turns: list[dict[str, str]] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, str]]:
        """As the API takes them."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return [*head, *self.turns]

    def body(self) -> dict[str, Any]:
        """The request for the next answer."""
        named = {"model": self.model} if self.model else {}
        return {"messages": self.messages, "stream": True, **named, **self.sampling}

    def ask(self, text: str) -> None:
        """The person said something."""
        self.turns.append({"role": "user", "content": text})

    def answered(self, text: str) -> None:
        """The model said something; nothing at all takes the question back, so that it can be asked again."""
        if text:
            self.turns.append({"role": "assistant", "content": text})
        elif self.turns:
            self.turns.pop()

    def retract(self) -> str | None:
        """Take the last answer and its question back; the question, None if there is none."""
        while self.turns:
            turn = self.turns.pop()
            if turn["role"] == "user":
                return turn["content"]
        return None

    def clear(self) -> None:
        """Begin anew, with the same model and system message."""
        self.turns.clear()

    def as_text(self, suffix: str) -> str:
        """JSON for `.json`, else Markdown."""
        if suffix == ".json":
            return (
                json.dumps({"model": self.model, "messages": self.messages}, ensure_ascii=False, indent=1)
                + "\n"
            )
        parts = [f"## {_TITLES[turn['role']]}\n\n{turn['content'].strip()}\n" for turn in self.messages]
        return "\n".join(parts)

    def save(self, path: Path, *, replace: bool = False) -> None:
        """Write it to a file. UsageError if that exists (unless `replace`) or cannot be written."""
        try:
            with path.open("w" if replace else "x", encoding="utf-8") as file:
                file.write(self.as_text(path.suffix.lower()))
        except FileExistsError:
            raise UsageError(f"{path} exists; choose another name") from None
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}") from error
