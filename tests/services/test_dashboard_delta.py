"""What changed between two states is enough to get from one to the other, and is nothing more."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from swarmnode.services.dashboard_delta import FLAT, Delta, State, changed_fields, delta_of

VALUES = st.one_of(st.integers(0, 3), st.lists(st.integers(0, 2), max_size=2), st.none())
LINE = st.fixed_dictionaries({"name": st.text(max_size=2), "state": VALUES, "ranges": VALUES})
STATES = st.fixed_dictionaries(
    {name: st.fixed_dictionaries({"a": VALUES, "b": VALUES}) for name in FLAT}
    | {"nodes": st.dictionaries(st.text("xyz", min_size=1, max_size=2), LINE, max_size=4)}
)


def applied(before: State, delta: Delta) -> dict[str, Any]:
    """As the page does it (data/dashboard/state.js; tests/browser has it do so)."""
    after: dict[str, Any] = {name: {**before[name], **delta.get(name, {})} for name in FLAT}
    nodes = {node: fields for node, fields in before["nodes"].items() if node not in delta.get("gone", ())}
    for node, fields in delta.get("nodes", {}).items():
        nodes[node] = {**nodes.get(node, {}), **fields}
    return after | {"nodes": nodes}


@given(before=STATES, after=STATES)
def test_a_delta_leads_from_one_state_to_the_other(before: State, after: State) -> None:
    assert applied(before, delta_of(before, after)) == after


@given(state=STATES)
def test_nothing_changed_is_nothing_told(state: State) -> None:
    assert delta_of(state, state) == {}


def test_only_what_changed_of_a_node_is_told() -> None:
    before = {name: {"a": 1} for name in FLAT} | {"nodes": {"x": {"rows": 1, "ranges": [[0, 0, 8]]}}}
    after = before | {"nodes": {"x": {"rows": 2, "ranges": [[0, 0, 8]]}}}
    assert delta_of(before, after) == {"nodes": {"x": {"rows": 2}}}
    assert delta_of(after, before | {"nodes": {}}) == {"gone": ["x"]}


def test_fields_that_are_new_count_as_changed() -> None:
    assert changed_fields({}, {"a": None}) == {"a": None}
