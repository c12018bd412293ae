"""`swarmnode generate`: continue a prompt with a running backbone, streamed, with a line of what the swarm did."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any

import click
import httpx

from swarmnode.cli.checked import Finite
from swarmnode.cli.common import DEFAULT_API, clear_errors, complain, visible, wrong_usage
from swarmnode.cli.http_api import api_type, base_url, error_message, key_headers, no_api, nobody_there
from swarmnode.cli.sizes import format_bytes
from swarmnode.cli.verb import Verb
from swarmnode.counts import counted
from swarmnode.errors import ConnectionLostError, UsageError
from swarmnode.models.sampling import SamplingParams


def sampling_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """How tokens are drawn; what is not given is left to the API, or to the caller."""
    for option in reversed(
        (
            click.option("--temperature", type=Finite(), help="0 takes the likeliest token."),
            click.option("--top-k", type=int, help="Sample from the k likeliest tokens."),
            click.option(
                "--top-p", type=Finite(), help="Sample from the likeliest tokens of this total probability."
            ),
            click.option(
                "--min-p", type=Finite(), help="Drop tokens less likely than this part of the likeliest."
            ),
            click.option("--seed", type=int, help="Makes sampling repeatable."),
        )
    ):
        function = option(function)
    return function


@click.command("generate", cls=Verb)
@click.argument("prompt", required=False)
@click.option(
    "--api",
    type=api_type(),
    default=DEFAULT_API,
    show_default=True,
    help="Where the backbone's API listens.",
)
@click.option("--max-tokens", type=click.IntRange(1), default=128, show_default=True)
@sampling_options
@click.option("--chat", is_flag=True, help="Put the prompt as a question through the chat template.")
@click.option("--quiet", is_flag=True, help="Only the text: no line about the swarm.")
@clear_errors
def command(prompt: str | None, api: str, max_tokens: int, chat: bool, quiet: bool, **sampling: Any) -> None:
    """Continue PROMPT with a running backbone; without it, or for "-", what standard input brings.

    Takes the likeliest token unless --temperature says otherwise. The text goes to standard output, a line
    about the swarm to standard error; so it fits into pipes.

    \b
    Example: swarmnode generate "To Sherlock Holmes she is always"
             swarmnode generate --quiet < prompt.txt > answer.txt
    """
    text = _prompt_text(prompt)
    given = {"temperature": 0.0} | {name: value for name, value in sampling.items() if value is not None}
    with wrong_usage():
        SamplingParams(**given)  # refuses what is wrong
    body: dict[str, Any] = {"max_tokens": max_tokens, "stream": True, **given}
    body |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    swarm: dict[str, Any] = {}
    try:
        for piece in stream_completion(api, body, chat=chat):
            swarm = piece.get("swarm", swarm)
            answer = piece_text(piece)
            click.echo(visible(answer, keep="\n\t") if sys.stdout.isatty() else answer, nl=False)
            sys.stdout.flush()
    finally:
        if swarm:  # something was printed
            click.echo()
    if not quiet:
        complain(swarm_line(swarm))


def _prompt_text(prompt: str | None) -> str:
    """The prompt, or standard input for "-" and for none; wrong usage if there is none, or no valid text."""
    if prompt is None and sys.stdin.isatty():
        raise click.UsageError('give a PROMPT, or "-" to type it and end it with Ctrl-D')
    try:
        text = sys.stdin.read() if prompt in ("-", None) else str(prompt)
        text.encode()
    except UnicodeError as error:
        raise click.UsageError("the prompt is not valid UTF-8 text") from error
    return text


def stream_completion(api: str, body: dict[str, Any], *, chat: bool) -> Generator[dict[str, Any]]:
    """The JSON pieces of a streamed answer; raises UsageError or ConnectionLostError with what to do."""
    base = base_url(api)
    url = f"{base}/v1/{'chat/' if chat else ''}completions"
    timeout = httpx.Timeout(10.0, read=None)  # prefill of a long prompt may take minutes
    has_answered = False
    try:
        with (
            httpx.Client(timeout=timeout, trust_env=False, headers=key_headers()) as client,
            client.stream("POST", url, json=body) as response,
        ):
            if response.status_code != 200:
                response.read()
                raise UsageError(error_message(response))
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                raise no_api(base)
            has_answered = True
            yield from _pieces(response)
    except (httpx.ConnectError, UnicodeError) as error:
        raise nobody_there(base, error) from error
    except httpx.HTTPError as error:
        if not has_answered:
            raise no_api(base, str(error) or type(error).__name__) from error
        if isinstance(error, httpx.RemoteProtocolError):
            raise ConnectionLostError("the answer broke off: the backbone was stopped") from error
        raise ConnectionLostError(f"the answer of {base} broke off: {error}") from error


def _pieces(response: httpx.Response) -> Iterator[dict[str, Any]]:
    done = False
    for line in response.iter_lines():
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            done = True
        elif line.startswith("data: "):
            piece = json.loads(data)
            if "error" in piece:
                raise UsageError(piece["error"]["message"])
            yield piece
    if not done:
        raise ConnectionLostError("the answer broke off: the backbone was stopped")


def piece_text(piece: dict[str, Any]) -> str:
    """The text of one streamed piece, of either route."""
    choices = piece.get("choices") or [{}]
    return choices[0].get("text") or choices[0].get("delta", {}).get("content") or ""


def swarm_line(swarm: dict[str, Any]) -> str:
    """One line about who computed the answer."""
    if not swarm or not swarm.get("pairs"):
        return "swarm: nothing was computed"
    line = (
        f"swarm: {swarm['share_remote']:.0%} of {counted(swarm['pairs'], 'expert row')} remote, "
        f"{swarm['pairs_fallback']} replaced by the local copy"
    )
    if swarm.get("drafted_tokens"):
        line += f", {swarm['accepted_tokens']} of {counted(swarm['drafted_tokens'], 'guessed token')} right"
    for name, worker in swarm["workers"].items():
        sent, received = format_bytes(worker["bytes_out"]), format_bytes(worker["bytes_in"])
        line += f" | {name}: {counted(worker['pairs'], 'row')}, {sent} out, {received} in"
    return line
