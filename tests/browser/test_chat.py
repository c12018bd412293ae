"""The chat box on a real engine with a worker: streamed, stopped, and what is said is text."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import trio
from starlette.applications import Starlette

from swarmnode.api.access import Access
from swarmnode.config import Folders
from swarmnode.identity import NodeKey
from swarmnode.node.backbone_http import app_of, node_api_of
from swarmnode.node.backbone_parts import BackboneOptions
from swarmnode.testing.page_server import PageServer, served
from swarmnode.testing.swarm import Swarm, open_swarm
from swarmnode.testing.tiny_gguf import TinyModel, write_tiny_gguf
from swarmnode.weights.index import ModelIndex

pytestmark = pytest.mark.browser

MODEL = TinyModel(n_layer=2, n_expert=4, n_expert_used=2)
TOKEN = "t" * 43


def opener(folder: Path) -> Callable[[], Any]:
    """A backbone with one worker, as its page shows it."""

    @asynccontextmanager
    async def open_app() -> AsyncIterator[Starlette]:
        path = write_tiny_gguf(folder / "tiny.gguf", MODEL)
        async with open_swarm(path, folder, n_ctx=512) as swarm:
            await swarm.join(10**7)
            with slowed(swarm), ModelIndex.open(path) as index:
                key = NodeKey.from_seed(bytes(32))
                options = BackboneOptions(Folders.under(folder / "backbone"), "test", config=swarm.config)
                node = node_api_of(swarm.backbone, index, options, key, TOKEN)
                yield app_of(swarm.backbone, index, options, node, (swarm.address,), Access())

    return open_app


@contextmanager
def slowed(swarm: Swarm) -> Iterator[None]:
    """Tokens come one by one: a tiny model says all it has to say before a button can be hit."""
    passes = swarm.backbone.engine.passes
    run = passes.run

    async def slow(rows: Any) -> Any:
        await trio.sleep(0.02)
        return await run(rows)

    with patch.object(passes, "run", slow):
        yield


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    with served(opener(tmp_path_factory.mktemp("swarm"))) as server:
        yield server


@pytest.fixture
def page(chromium: Any, backbone: PageServer) -> Iterator[Any]:
    context = chromium.new_context()
    opened = context.new_page()
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.goto(f"{backbone.url}/")
    opened.locator("#join-link").wait_for()
    yield opened
    context.close()
    assert problems == []


def test_a_question_is_answered_and_the_workers_part_is_told(page: Any) -> None:
    page.get_by_label("Message").fill("<b>hello</b>")
    page.keyboard.press("Enter")
    page.locator("#chat-send:not([disabled])").wait_for(timeout=60_000)
    turns = page.locator(".turn").all_text_contents()
    assert turns[0] == "You<b>hello</b>"
    assert len(turns[1]) > len("Model")
    assert page.locator(".turn b").count() == 0
    account = page.locator("#chat-account").text_content()
    assert re.fullmatch(r"[1-9]\d* tokens?; 1 worker computed (100|9\d) % of the rows\.", account), account


def test_an_answer_can_be_stopped_and_a_conversation_forgotten(page: Any) -> None:
    page.get_by_label("Message").fill("go on")
    page.get_by_role("button", name="Send").click()
    page.locator("#chat-account:not(:empty)").wait_for()
    page.get_by_role("button", name="Stop").click()
    page.locator("#chat-send:not([disabled])").wait_for()
    assert page.locator(".turn.failed").count() == 0
    page.get_by_role("button", name="New conversation").click()
    assert page.locator(".turn").count() == 0
    assert page.evaluate("document.activeElement.id") == "chat-text"


def test_an_error_is_shown_and_the_next_question_goes_through(page: Any) -> None:
    page.get_by_label("Message").fill("x " * 5000)
    page.get_by_role("button", name="Send").click()
    page.locator(".turn.failed").wait_for(timeout=60_000)
    assert "The answer failed:" in page.locator(".turn.failed").text_content()
    page.get_by_label("Message").fill("hello")
    page.get_by_role("button", name="Send").click()
    page.locator("#chat-account:not(:empty)").wait_for()


def test_what_the_node_says_of_itself(page: Any) -> None:
    facts = page.locator("#node-facts").inner_text()
    assert "the whole model" in facts
    assert "all 8 experts" in facts
    assert "8 of 8 experts (100 %)" in page.locator("#map-summary").text_content()
    assert page.locator("#join-link").input_value().startswith("swarm://")
