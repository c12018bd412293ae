"""The page in Chromium: drawn in time, by keyboard, on a phone, kept up to date, deaf to what peers say they are."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest

from swarmnode.services.dashboard_delta import delta_of
from swarmnode.testing.many_nodes import ManyNodes
from swarmnode.testing.page_server import LINK, page_app, served_page
from swarmnode.weights.slices import ExpertRange
from tests.browser.conftest import FAST, opened, watched

pytestmark = pytest.mark.browser

MAX_DRAWN_MS = 1000
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=alert(1)>"


def few(**options: Any) -> ManyNodes:
    """Two layers of eight experts; node 1 holds 0 to 3 of layer 0, node 2 the first two, node 3 some of layer 1."""
    nodes = ManyNodes(2, 8, 0, **options)
    nodes.join(1, (ExpertRange(0, 0, 4),), device="cuda", connected=True)
    nodes.join(2, (ExpertRange(0, 0, 2),), device="cpu", connected=False)
    nodes.join(3, (ExpertRange(1, 4, 4),), device="metal", connected=True)
    return nodes


def name(nodes: ManyNodes, number: int) -> str:
    return nodes.key(number).node_id.short


def test_the_map_of_a_large_swarm_is_drawn_within_a_second(chromium: Any) -> None:
    nodes = ManyNodes(48, 256, 500)
    took_ms = []
    with served_page(page_app(nodes.view)) as server:
        for _ in range(12):  # whatever else this machine does, once it should be left alone
            with watched(chromium, server, nodes) as found:
                took_ms.append(found.goto())
                found.page.locator("#peers-body tr").nth(499).wait_for(state="attached")
                assert "of 12,288 experts" in found.page.locator("#map-summary").text_content()
            if took_ms[-1] <= MAX_DRAWN_MS:
                break
    assert min(took_ms) <= MAX_DRAWN_MS, took_ms


def test_what_is_drawn_is_what_is_held(chromium: Any) -> None:
    nodes = few()
    with opened(chromium, nodes) as found:
        found.goto()
        box = found.page.locator("#map-canvas").bounding_box()
        for expert, text in ((0, "2 replicas"), (3, "1 replica."), (4, "no replica")):
            found.page.mouse.move(box["x"] + 30 + 28 * expert + 10, box["y"] + 10)
            tip = found.page.locator("#map-tip")
            tip.wait_for()
            assert text in tip.text_content()
        found.page.mouse.move(box["x"] + 30 + 10, box["y"] + 10)
        assert f"{name(nodes, 1)} (cuda)" in found.page.locator("#map-tip").text_content()
        colours = pixels(found, [(30 + 28 * expert + 10, 10) for expert in (0, 3, 4)])
        assert colours == ["#5fa3d6", "#a9cdea", "#e2643f"]
        found.page.keyboard.press("Escape")
        assert found.page.locator("#map-tip").is_hidden()


def pixels(found: Any, places: list[tuple[int, int]]) -> list[str]:
    """Colours of the map at CSS pixels."""
    colours: list[str] = found.page.evaluate(
        """places => {
            const canvas = document.getElementById("map-canvas");
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            return places.map(([x, y]) => {
                const at = 4 * (y * canvas.width + x) * devicePixelRatio;
                return "#" + [...data.slice(at, at + 3)].map(part => part.toString(16).padStart(2, "0")).join("");
            });
        }""",
        [list(place) for place in places],
    )
    return colours


def test_the_map_by_keyboard_and_for_a_screen_reader(chromium: Any) -> None:
    nodes = few()
    with opened(chromium, nodes) as found:
        found.goto()
        press = found.page.keyboard.press
        found.page.locator("#map").focus()
        names = sorted(name(nodes, number) for number in (1, 2))
        assert found.said.startswith("Layer 0, expert 0: 2 replicas. Held by")
        assert all(part in found.said for part in names)
        press("ArrowRight")
        press("ArrowRight")
        assert found.said == f"Layer 0, expert 2: 1 replica. Held by {name(nodes, 1)} (cuda)."
        press("End")
        assert found.said == "Layer 0, expert 7: no replica; this backbone computes it."
        press("ArrowRight")
        press("PageDown")
        assert found.said.startswith("Layer 1, expert 7: 1 replica.")
        press("Control+Home")
        assert found.said.startswith("Layer 0, expert 0:")
        press("ArrowUp")
        press("Enter")
        assert found.page.evaluate("document.activeElement.id") == "layer-choice"
        found.page.locator("#layer-body tr").nth(2).wait_for()
        rows = found.page.locator("#layer-body tr").all_text_contents()
        assert [row.split("Held")[0] for row in rows] == ["0 to 12", "2 to 31", "4 to 70nobody"]


def test_the_map_as_tables(chromium: Any) -> None:
    with opened(chromium, few()) as found:
        found.goto()
        found.page.locator("#layers-details summary").press("Enter")
        found.page.locator("#layers-body tr").nth(1).wait_for()
        rows = [row.split("\t") for row in found.page.locator("#layers-body").inner_text().splitlines()]
        assert rows == [["0", "4", "2", "0", "4 to 7"], ["1", "4", "0", "0", "0 to 3"]]


def test_everything_has_a_name_and_the_keyboard_reaches_it(chromium: Any) -> None:
    with opened(chromium, few()) as found:
        found.goto()
        snapshot = found.page.locator("body").aria_snapshot()
        for line in (
            'heading "swarmnode" [level=1]',
            'region "Coverage"',
            'application "Coverage map"',
            'log "Conversation"',
            'textbox "Message"',
            'textbox "Link"',
            'img "The link as a QR code"',
            'columnheader "Latency"',
            'img "Tokens per second over the last 10 minutes',
        ):
            assert line in snapshot, snapshot
        assert "- textbox:" not in snapshot
        assert "- button:" not in snapshot
        reached = []
        for _ in range(14):
            found.page.keyboard.press("Tab")
            reached.append(
                found.page.evaluate("document.activeElement.id || document.activeElement.className")
            )
        assert reached[0] == "skip"
        assert {"chat-log", "chat-text", "chat-send", "map", "join-link"} <= set(reached)


def test_what_changes_is_shown(chromium: Any) -> None:
    nodes = few()
    with opened(chromium, nodes) as found:
        found.goto()
        found.page.locator("#map").focus()
        assert found.page.locator("#peers-body tr").count() == 3
        found.do(lambda: nodes.join(4, (ExpertRange(0, 0, 8),), device="cpu", connected=True))
        found.page.locator("#peers-body tr").nth(3).wait_for()
        found.page.get_by_text("12 of 16 experts").wait_for()
        found.page.get_by_text("Layer 0, expert 0: 3 replicas").wait_for()
        found.do(lambda: nodes.leave(1))
        found.page.get_by_text("Layer 0, expert 0: 2 replicas").wait_for()
        assert name(nodes, 1) not in found.page.locator("#peers-body").text_content()
        for _ in range(3):
            found.do(nodes.step)
        found.page.locator("#tokens-now:not(:text-is('0'))").wait_for()


def test_deltas_add_up_to_what_a_snapshot_says(chromium: Any) -> None:
    nodes = ManyNodes(4, 32, 30)
    states = [nodes.view.look()]
    for number in range(1, 12):
        nodes.step()
        nodes.leave(number)
        states.append(nodes.view.look())
    deltas = [delta_of(before, after) for before, after in itertools.pairwise(states)]
    with opened(chromium, nodes) as found:
        found.goto()
        added_up = found.page.evaluate(
            """async ([first, deltas]) => {
                const { applied } = await import("/dashboard/state.js");
                return deltas.reduce(applied, first);
            }""",
            [json.loads(json.dumps(states[0])), json.loads(json.dumps(deltas))],
        )
    assert added_up == json.loads(json.dumps(states[-1]))


def test_what_peers_call_themselves_is_text(chromium: Any) -> None:
    nodes = few()
    nodes.connect(2, (ExpertRange(0, 0, 2),), HOSTILE)
    nodes.view._model = {**nodes.view._model, "name": HOSTILE}
    with opened(chromium, nodes) as found:
        found.goto()
        found.page.locator("#map").focus()
        assert HOSTILE in found.said
        found.page.keyboard.press("Enter")
        found.page.locator("#layer-body tr").first.wait_for()
        assert HOSTILE in found.page.locator("#peers-body").text_content()
        assert HOSTILE in found.page.locator("#layer-body").text_content()
        assert HOSTILE in found.page.locator("#model").text_content()
        assert found.page.locator("img, main script, iframe, object").count() == 0
        assert found.page.title() == f"{HOSTILE} · swarmnode"


def test_the_policy_stops_what_a_fault_would_let_in(chromium: Any) -> None:
    """Not needed by any known fault: text is never taken for markup."""
    nodes = few()
    with opened(chromium, nodes) as found:
        found.goto()
        outcome = found.page.evaluate(
            """async () => {
                const outcome = [];
                try { document.body.innerHTML = "<b>x</b>"; outcome.push("markup"); } catch { outcome.push("refused"); }
                await fetch("http://127.0.0.1:1/").then(() => outcome.push("sent"), () => outcome.push("refused"));
                const script = document.createElement("script");
                try { script.textContent = "document.title = 'owned'"; } catch { outcome.push("refused"); }
                document.body.append(script);
                outcome.push(document.title === "owned" ? "ran" : "did not run");
                return outcome;
            }"""
        )
        assert outcome == ["refused", "refused", "refused", "did not run"]
        found.problems.clear()  # what the browser said of each
        found.requests.clear()


def test_a_page_finds_its_node_again(chromium: Any) -> None:
    nodes = few()
    with served_page(page_app(nodes.view, FAST)) as server:
        port = server.port
        made = chromium.new_context()
        page = made.new_page()
        page.goto(f"{server.url}/")
        page.locator('#link-state[data-state="live"]').wait_for()
        page.locator("#peers-body tr").nth(2).wait_for()
    page.locator('#link-state[data-state="lost"]').wait_for()
    nodes.join(4, (ExpertRange(0, 0, 8),), device="cpu", connected=True)
    with served_page(page_app(nodes.view, FAST), port):
        page.locator('#link-state[data-state="live"]').wait_for(timeout=20_000)
        page.locator("#peers-body tr").nth(3).wait_for()
        made.close()


def test_panels_that_could_not_be_fetched_are_fetched_later(chromium: Any) -> None:
    nodes = few()
    with served_page(page_app(nodes.view, FAST)) as server:
        made = chromium.new_context()
        page = made.new_page()
        page.route("**/dashboard/panels.js", lambda route: route.abort())
        page.goto(f"{server.url}/")
        page.locator("#map[data-drawn-ms]").wait_for()
        page.wait_for_timeout(200)
        assert page.locator("#peers-body tr").count() == 0
        page.unroute("**/dashboard/panels.js")
        server.do(nodes.step)
        page.locator("#peers-body tr").nth(2).wait_for()
        made.close()


def test_how_to_join(chromium: Any) -> None:
    with opened(chromium, few()) as found:
        found.goto()
        link = found.page.locator("#join-link")
        assert link.input_value() == LINK
        assert LINK in found.page.locator("#join-command").input_value()
        dark, size = found.page.evaluate(
            """() => {
                const code = document.querySelector(".qr");
                const data = code.getContext("2d").getImageData(0, 0, code.width, code.height).data;
                let dark = 0;
                for (let at = 0; at < data.length; at += 4) dark += data[at] < 128;
                return [dark, code.width];
            }"""
        )
        rows = json.loads(found.page.evaluate("fetch('/api/invite').then(answer => answer.text())"))["qr"]
        assert size == len(rows) + 8
        assert dark == sum(row.count("1") for row in rows)


def test_on_a_phone(chromium: Any) -> None:
    nodes = ManyNodes(48, 256, 50)
    with opened(
        chromium, nodes, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True
    ) as found:
        found.goto()
        assert found.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        for control in found.page.locator(
            "button:visible, input:visible, textarea:visible, summary:visible"
        ).all():
            assert control.bounding_box()["height"] >= 44
        found.page.locator("#map-canvas").tap(position={"x": 100, "y": 100})
        assert found.said.startswith("Layer 12, expert 23:")


def test_too_many_pages_are_told_so_and_try_again(chromium: Any) -> None:
    nodes = few()
    config = replace(FAST, max_readers=1)
    with served_page(page_app(nodes.view, config)) as server:
        with watched(chromium, server, nodes) as first:
            first.goto()
            made = chromium.new_context()
            second = made.new_page()
            second.goto(f"{server.url}/")
            second.locator('#link-state[data-state="lost"]').wait_for()
        second.locator('#link-state[data-state="live"]').wait_for(timeout=20_000)
        made.close()
