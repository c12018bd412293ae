"""`swarmnode chat`: what is asked, what is shown, and the words with a slash."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from swarmnode.cli import chat as verb
from swarmnode.cli import chat_screen, main
from swarmnode.cli.chat_screen import Screen
from swarmnode.cli.conversation import Conversation
from swarmnode.errors import UsageError


@dataclass
class Api:
    """Answers as OpenAI's API does: with the number of messages so far."""

    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    deltas: list[dict[str, str]] = field(
        default_factory=lambda: [{"content": "It is **"}, {"content": "so**."}]
    )
    error: str = ""


@contextmanager
def serving() -> Iterator[Api]:
    api = Api()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            api.keys.append(self.headers["Authorization"])
            if self.path == "/v1/models":
                self._json(200, {"data": [{"id": "one"}, {"id": "two"}]})
            else:
                self._json(404, {"error": {"message": "there is nothing there"}})

        def do_POST(self) -> None:
            api.keys.append(self.headers["Authorization"])
            api.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            assert self.path == "/v1/chat/completions"
            if api.error:
                self._json(400, {"error": {"message": api.error}})
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            swarm = {"pairs": 8, "share_remote": 0.5, "pairs_fallback": 0, "workers": {}}
            for delta in api.deltas:
                self._event(json.dumps({"choices": [{"delta": delta}], "swarm": swarm}))
            self._event("[DONE]")

        def _event(self, text: str) -> None:
            self.wfile.write(f"data: {text}\n\n".encode())

        def _json(self, status: int, value: object) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        api.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield api
        finally:
            server.shutdown()
            thread.join()


def run(api: Api, text: str, *arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(main, ["chat", "--api", api.url, *arguments], input=text, env=environment)


def test_lines_are_questions_and_the_conversation_goes_on() -> None:
    with serving() as api:
        result = run(
            api, "Who?\n\nWhy?\n", "--system", "Be brief.", "--temperature", "0.5", "--max-tokens", "9"
        )
    assert result.exit_code == 0, result.output
    assert result.stdout == "It is **so**.\nIt is **so**.\n"
    assert "50% of 8 expert rows remote" in result.stderr
    first, second = api.requests
    assert first["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who?"},
    ]
    assert (first["temperature"], first["max_tokens"], first["stream"]) == (0.5, 9, True)
    assert "top_k" not in first
    assert [turn["role"] for turn in second["messages"]] == ["system", "user", "assistant", "user"]
    assert second["messages"][2]["content"] == "It is **so**."


def test_any_url_and_a_key() -> None:
    with serving() as api:
        api.url += "/v1/"
        result = run(api, "Who?\n/model\n", SWARMNODE_API_KEY="k123")
    assert result.exit_code == 0, result.output
    assert set(api.keys) == {"Bearer k123"}
    assert "k123" not in result.output
    assert "* one\n  two" in result.stderr


def test_a_key_that_cannot_be_one_is_named_but_not_shown() -> None:
    with serving() as api:
        result = run(api, "Who?\n", SWARMNODE_API_KEY="schlüssel")
    assert result.exit_code == 2
    assert "SWARMNODE_API_KEY" in result.output
    assert "schlüssel" not in result.output


def test_the_words_with_a_slash(tmp_path: Path) -> None:
    path = tmp_path / "said.md"
    with serving() as api:
        words = [
            "/model two", "/system Be kind.", "Who?", f"/save {path}", "/retry", f"/save {path}", "/new", "/system -",
            "Why?", "/help", "/quit", "never asked",
        ]  # fmt: skip
        result = run(api, "\n".join(words) + "\n")
    assert result.exit_code == 0, result.output
    first, again, fresh = api.requests
    assert first == again
    assert first["model"] == "two"
    assert first["messages"][0] == {"role": "system", "content": "Be kind."}
    assert fresh["messages"] == [{"role": "user", "content": "Why?"}]
    assert path.read_text() == "## System\n\nBe kind.\n\n## You\n\nWho?\n\n## Answer\n\nIt is **so**.\n"
    assert "/save FILE" in result.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("/dance", "there is no /dance"),
        ("/model three", "there is no model 'three'; there are: one, two"),
        ("/save", "say where"),
        ("/save /no/such/folder/x.md", "cannot be written"),
        ("/retry", "nothing was asked yet"),
        ("/swarm", "there is nothing there"),
    ],
)
def test_a_mistake_ends_nothing(words: str, says: str) -> None:
    with serving() as api:
        result = run(api, f"{words}\nWho?\n")
    assert says in result.stderr
    assert result.stdout == "It is **so**.\n"
    assert result.exit_code == 1  # of a pipe: something went wrong


def test_a_question_that_was_refused_is_taken_back() -> None:
    with serving() as api:
        api.error = "the prompt is too long"
        result = run(api, "Who?\nWhy?\n")
    assert result.stderr.count("the prompt is too long") == 2
    assert [len(request["messages"]) for request in api.requests] == [1, 1]


def test_texts_of_several_lines() -> None:
    with serving() as api:
        run(api, 'one \\\ntwo\n"""\na\n\nb\n"""\n')
    assert [request["messages"][-1]["content"] for request in api.requests] == ["one \ntwo", "a\n\nb"]


def test_thoughts_are_not_the_answer() -> None:
    with serving() as api:
        api.deltas = [{"reasoning_content": "hm"}]
        result = run(api, "Who?\n")
    assert "the answer is empty: all of it were thoughts" in result.stderr
    with serving() as api:
        api.deltas = [{"reasoning_content": "hm"}, {"content": "Yes."}]
        assert run(api, "Who?\n").stdout == "Yes.\n"


def test_nobody_answers() -> None:
    result = CliRunner().invoke(main, ["chat", "--api", "127.0.0.1:9"], input="Who?\n")
    assert result.exit_code == 1
    assert "no backbone answers" in result.output


class Typing(Screen):
    """What a person types, and when Ctrl-C comes."""

    def __init__(self, lines: list[str | BaseException]) -> None:
        super().__init__(is_rich=True, history=None)
        self._console = Console(width=60, force_terminal=True, record=True)
        self.lines = lines

    def read(self) -> str:
        if not self.lines:
            raise EOFError
        line = self.lines.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line

    @property
    def shown(self) -> str:
        return self._console.export_text(clear=False)


def test_ctrl_c_stops_the_answer_and_not_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(api: str, body: dict[str, Any], *, chat: bool) -> Iterator[dict[str, Any]]:
        if len(body["messages"]) == 1:
            yield {"choices": [{"delta": {"content": "Half of"}}]}
            raise KeyboardInterrupt
        yield {"choices": [{"delta": {"content": "All."}}]}

    monkeypatch.setattr(verb, "stream_completion", interrupted)
    screen = Typing(["Who?", KeyboardInterrupt(), "Why?"])
    conversation = Conversation()
    assert verb.Chat("x", conversation, screen).run()
    assert [turn["content"] for turn in conversation.turns] == ["Who?", "Half of", "Why?", "All."]
    assert "(stopped)" in screen.shown
    assert "(Ctrl-D or /quit ends)" in screen.shown
    assert "Half of" in screen.shown


def test_markdown_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    def pieces(api: str, body: dict[str, Any], *, chat: bool) -> Iterator[dict[str, Any]]:
        yield {"choices": [{"delta": {"reasoning_content": "hm\x1b[2J"}}]}
        yield {"choices": [{"delta": {"content": "# Title\n* **one**\x1b[2J\n"}}]}

    monkeypatch.setattr(verb, "stream_completion", pieces)
    screen = Typing(["Who?"])
    verb.Chat("x", Conversation(), screen).run()
    assert "Title" in screen.shown
    assert "**" not in screen.shown
    assert "hm" in screen.shown
    assert "\x1b[2J" not in screen.shown  # what a model says moves no cursor


def test_history_is_the_owners_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[Any] = []
    monkeypatch.setattr("atexit.register", lambda *call: stored.append(call))
    path = tmp_path / "data" / "chat_history"
    Screen(is_rich=False, history=path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert stored == [(chat_screen._store, path)]


def test_a_conversation_as_a_file(tmp_path: Path) -> None:
    talk = Conversation("s", "m")
    talk.ask("Grüße?")
    talk.answered("")
    assert talk.turns == []
    talk.ask("Grüße?")
    talk.answered("Ja.")
    path = tmp_path / "said.json"
    talk.save(path)
    assert json.loads(path.read_text())["messages"][-1] == {"role": "assistant", "content": "Ja."}
    with pytest.raises(UsageError, match="exists"):
        talk.save(path)
    assert talk.retract() == "Grüße?"
    assert talk.retract() is None


def test_generate_reads_a_pipe() -> None:
    result = CliRunner().invoke(main, ["generate", "--api", "127.0.0.1:9"], input="The door")
    assert "no backbone answers" in result.output
