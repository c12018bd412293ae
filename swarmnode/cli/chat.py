"""`swarmnode chat`: a conversation with a backbone, or with whatever speaks OpenAI's API at a URL."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from swarmnode.cli.chat_screen import Screen
from swarmnode.cli.common import DEFAULT_API, clear_errors, folders_of, home_option, visible
from swarmnode.cli.conversation import Conversation
from swarmnode.cli.generate import piece_text, sampling_options, stream_completion, swarm_line
from swarmnode.cli.http_api import api_type, get_object
from swarmnode.cli.status import MAX_LISTED, lines_of, swarm_state
from swarmnode.cli.verb import Verb
from swarmnode.errors import SwarmError, UsageError

HELP = """\
/model [NAME]   show the models there, or ask another one
/system [TEXT]  show or set the system message; `/system -` takes it away
/swarm          who is there, and what is covered
/save FILE      write the conversation to a file: Markdown, or JSON for *.json
/new            begin anew
/retry          ask the last question again
/help, /quit    Ctrl-D ends, too; Ctrl-C stops an answer
A line that ends in \\ goes on in the next one; lines between two lines of \"\"\" are one text."""


@click.command("chat", cls=Verb)
@click.option(
    "--api",
    type=api_type(),
    default=DEFAULT_API,
    show_default=True,
    help="A backbone's API, or any other of OpenAI's kind; its key in SWARMNODE_API_KEY.",
)
@click.option("--model", help="Which of its models to ask; default: the first.")
@click.option("--system", default="", metavar="TEXT", help="The system message.")
@click.option("--max-tokens", type=click.IntRange(1), help="Longest answer; default: the API's.")
@sampling_options
@click.option("--plain", is_flag=True, help="The bare text, no Markdown, also on a terminal.")
@home_option
@clear_errors
def command(
    api: str,
    model: str | None,
    system: str,
    max_tokens: int | None,
    plain: bool,
    home: Path | None,
    **sampling: Any,
) -> None:
    """Talk with a model. Ctrl-C stops an answer, Ctrl-D ends the program; /help lists what else there is.

    Without a terminal each line of standard input is a question.

    \b
    Example: swarmnode chat --api 127.0.0.1:8790 --temperature 0.7
             swarmnode chat --api https://backbone.example.org/v1
    """
    given = {name: value for name, value in sampling.items() if value is not None}
    if max_tokens is not None:
        given["max_tokens"] = max_tokens
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    history = folders_of(home).data / "chat_history" if is_terminal else None
    screen = Screen(is_rich=is_terminal and not plain, history=history)
    chat = Chat(api, Conversation(system, model, given), screen)
    if is_terminal:
        chat.greet()
    sys.exit(0 if chat.run() or is_terminal else 1)


class Chat:
    """The loop: read, answer, and the words that begin with a slash."""

    def __init__(self, api: str, conversation: Conversation, screen: Screen) -> None:
        self._api = api
        self._conversation = conversation
        self._screen = screen
        self._saved: set[Path] = set()
        self._all_well = True
        self._words: dict[str, Callable[[str], None]] = {
            "/model": self._model,
            "/system": self._system,
            "/swarm": self._swarm,
            "/save": self._save,
            "/new": self._new,
            "/retry": self._retry,
            "/help": self._help,
        }

    def greet(self) -> None:
        """Say who answers, before the first question. UsageError or ConnectionLostError if nobody does."""
        names = self._models()
        self._screen.note(
            f"{self._conversation.model or names[0]} at {self._api}; /help lists what else there is"
        )

    def run(self) -> bool:
        """Until the end of input or /quit; whether all went well."""
        while True:
            try:
                text = self._screen.read()
            except EOFError:
                return self._all_well
            except KeyboardInterrupt:
                self._screen.note("\n(Ctrl-D or /quit ends)")
                continue
            word = text.split(maxsplit=1)[0] if text.strip() else ""
            if word in ("/quit", "/exit"):
                return self._all_well
            if word:
                self._do(word, text)

    def _do(self, word: str, text: str) -> None:
        """What goes wrong ends one answer, not the conversation."""
        try:
            if not word.startswith("/"):
                self._answer(text)
            elif word in self._words:
                self._words[word](text[len(word) :].strip())
            else:
                raise UsageError(f"there is no {word}; /help lists what there is")
        except SwarmError as error:
            self._all_well = False
            self._screen.note(str(error))
        except KeyboardInterrupt:
            self._screen.note("\n(stopped)")

    def _answer(self, question: str) -> None:
        conversation = self._conversation
        conversation.ask(question)
        body = conversation.body()
        text, thoughts, swarm, began_s, n_pieces = "", "", dict[str, Any](), time.monotonic(), 0
        try:
            with (
                closing(stream_completion(self._api, body, chat=True)) as pieces,
                self._screen.answer() as show,
            ):
                for piece in pieces:
                    text += piece_text(piece)
                    thoughts += piece_thoughts(piece)
                    swarm = piece.get("swarm", swarm)
                    n_pieces += 1
                    show(text, thoughts)
        finally:
            conversation.answered(text)
        if not text:
            self._screen.note("the answer is empty" + (": all of it were thoughts" if thoughts else ""))
        rate = f"{n_pieces / max(1e-3, time.monotonic() - began_s):.1f} pieces/s"
        self._screen.note(f"{rate}; {swarm_line(swarm)}" if swarm else rate)

    def _models(self) -> list[str]:
        answer = get_object(self._api, "/v1/models").get("data")
        names = [str(entry["id"]) for entry in answer if "id" in entry] if isinstance(answer, list) else []
        if not names:
            raise UsageError(f"there are no models at {self._api}")
        return names

    def _model(self, name: str) -> None:
        names = self._models()
        if not name:
            now = self._conversation.model or names[0]
            self._screen.note(
                "\n".join(f"{'*' if found == now else ' '} {visible(found)}" for found in names)
            )
        elif name in names:
            self._conversation.model = name
            self._screen.note(f"{name} answers from now on")
        else:
            raise UsageError(f"there is no model {name!r}; there are: {', '.join(names)}")

    def _system(self, text: str) -> None:
        if text:
            self._conversation.system = "" if text == "-" else text
        self._screen.note(f"system message: {self._conversation.system or 'none'}")

    def _swarm(self, _: str) -> None:
        self._screen.note(
            "\n".join(click.unstyle(line) for line in lines_of(swarm_state(self._api), MAX_LISTED))
        )

    def _save(self, name: str) -> None:
        if not name:
            raise UsageError("say where: /save FILE")
        path = Path(name).expanduser()
        self._conversation.save(path, replace=path in self._saved)
        self._saved.add(path)
        self._screen.note(f"saved to {path}")

    def _new(self, _: str) -> None:
        self._conversation.clear()
        self._screen.note("a new conversation")

    def _retry(self, _: str) -> None:
        question = self._conversation.retract()
        if question is None:
            raise UsageError("nothing was asked yet")
        self._answer(question)

    def _help(self, _: str) -> None:
        self._screen.note(HELP)


def piece_thoughts(piece: dict[str, Any]) -> str:
    """What a model thinks before it answers, in one streamed piece."""
    choices = piece.get("choices") or [{}]
    return choices[0].get("delta", {}).get("reasoning_content") or ""
