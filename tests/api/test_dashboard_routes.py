"""The page's files and their policy, who is told how to join, and that the page names no other host."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.resources import files

import httpx
import pytest

from swarmnode.api.dashboard_routes import Invitation, page_files
from swarmnode.services.runners import Inline
from swarmnode.testing.many_nodes import ManyNodes
from swarmnode.testing.page_server import INVITATION, LINK, TOKEN, page_app

NODES = ManyNodes(2, 8, 3)
PAGE = {"Sec-Fetch-Site": "same-origin"}


@asynccontextmanager
async def open_client(
    invitation: Invitation | None = INVITATION, client: tuple[str, int] = ("127.0.0.1", 1)
) -> AsyncIterator[httpx.AsyncClient]:
    app = page_app(NODES.view, threads=Inline(), invitation=lambda: invitation)
    transport = httpx.ASGITransport(app=app, client=client)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as opened:
        yield opened


async def test_the_page_and_all_that_it_names_are_there() -> None:
    async with open_client() as client:
        page = await client.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        named = set(re.findall(r'(?:src|href)="(/[^"]+)"', page.text))
        known, new = {"/"}, named
        while new:
            known |= new
            answers = [await client.get(path) for path in new]
            assert [answer.status_code for answer in answers] == [200] * len(new)
            texts = "".join(answer.text for answer in answers)
            new = {f"/dashboard/{name}" for name in re.findall(r'"\./([^"]+\.js)"', texts)} - known
    assert {path.rpartition("/")[2] or "index.html" for path in known} == set(page_files())


def test_what_the_map_needs_is_fetched_at_once() -> None:
    """None of its files is asked for only because another one has come."""
    known = {name: file.data.decode() for name, file in page_files().items()}
    needed, new = set(), {"main.js"}
    while new:
        needed |= new
        new = {name for part in new for name in re.findall(r'from "\./([^"]+)"', known[part])} - needed
    assert "map.js" in needed
    assert "chat.js" not in needed
    assert needed == set(re.findall(r'"/dashboard/([^"]+\.js)"', known["index.html"]))


async def test_a_strict_policy_on_every_file() -> None:
    async with open_client() as client:
        for path in ("/", "/dashboard/map.js", "/dashboard/dashboard.css", "/dashboard/icon.svg"):
            headers = (await client.get(path)).headers
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "script-src 'self';" in policy
            assert "unsafe" not in policy
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"


async def test_a_file_that_is_known_is_not_sent_again() -> None:
    async with open_client() as client:
        first = await client.get("/dashboard/map.js")
        again = await client.get("/dashboard/map.js", headers={"If-None-Match": first.headers["etag"]})
        other = await client.get("/dashboard/map.js", headers={"If-None-Match": '"other"'})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    assert other.status_code == 200
    assert first.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize(
    "path", ["/dashboard/none.js", "/dashboard/..%2Fdata", "/dashboard/", "/dashboard/%00"]
)
async def test_other_names_are_not_found(path: str) -> None:
    async with open_client() as client:
        assert (await client.get(path)).status_code == 404


@pytest.mark.parametrize("path", ["/", "/dashboard/main.js", "/api/events", "/api/invite"])
@pytest.mark.parametrize(
    "headers",
    [{"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}],
)
async def test_other_sites_are_kept_out(path: str, headers: dict[str, str]) -> None:
    async with open_client() as client:
        answer = await client.get(path, headers={"Authorization": f"Bearer {TOKEN}", **headers})
    assert answer.status_code == 403


def test_no_file_names_another_host_or_has_scripts_in_it() -> None:
    for name, file in page_files().items():
        text = file.data.decode()
        hosts = set(re.findall(r"(?:https?|wss?):?//[^\s\"'`<>)]*", text)) - {"http://www.w3.org/2000/svg"}
        assert not hosts, f"{name}: {hosts}"
        assert not re.search(r"@import|url\(", text), name
        if name.endswith(".html"):
            assert not re.search(r"<script(?![^>]*src=)|\son\w+=|style=|<style", text)
        if name.endswith(".js"):
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text
            )


def test_files_are_package_data() -> None:
    folder = files("swarmnode").joinpath("data", "dashboard")
    assert {item.name for item in folder.iterdir()} == set(page_files())


async def test_how_to_join_is_told_to_the_page_and_to_whoever_has_the_token() -> None:
    async with open_client() as client:
        by_page = await client.get("/api/invite", headers=PAGE)
        by_token = await client.get("/api/invite", headers={"Authorization": f"Bearer {TOKEN}"})
    assert by_page.json() == by_token.json()
    told = by_page.json()
    assert told["link"] == LINK
    assert LINK in told["command"]
    assert {len(row) for row in told["qr"]} == {len(told["qr"])}
    assert told["qr"][0].startswith("1111111")  # a corner's mark
    assert by_page.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    "headers",
    [{}, {"Sec-Fetch-Site": "same-site"}, {"Sec-Fetch-Site": "none"}, {"Authorization": "Bearer wrong"}],
)
async def test_how_to_join_is_not_told_to_others(headers: dict[str, str]) -> None:
    async with open_client() as client:
        answer = await client.get("/api/invite", headers=headers)
    assert answer.status_code == 403
    assert LINK not in answer.text


@pytest.mark.parametrize("host", ["192.168.1.7", "2001:db8::1", "localhost.evil.example", ""])
async def test_how_to_join_is_not_told_over_a_network(host: str) -> None:
    async with open_client(client=(host, 1)) as client:
        headers = {**PAGE, "Authorization": f"Bearer {TOKEN}"}
        answer = await client.get("/api/invite", headers=headers)
    assert answer.status_code in (401, 403)  # the page's guard, or that of the whole API before it
    assert LINK not in answer.text


async def test_a_node_that_nobody_can_dial_says_so() -> None:
    async with open_client(None) as client:
        answer = await client.get("/api/invite", headers=PAGE)
    assert answer.status_code == 404
    assert "--listen" in answer.json()["error"]["message"]


async def test_over_ipv6_loopback() -> None:
    async with open_client(replace(INVITATION, needs_secret=True), ("::1", 1)) as client:
        assert (await client.get("/api/invite", headers=PAGE)).json()["needs_secret"]
