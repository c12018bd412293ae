"""What the owner of a running node may tell it: pause, resume, leave, limits. Requests come from the control socket."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from swarmnode.errors import UsageError
from swarmnode.identity import NodeId
from swarmnode.schedule.restraint import Hours

REQUESTS = ("leave", "limits", "pause", "resume")


class Restrained(Protocol):
    """What a worker's steward can do (services/steward)."""

    @property
    def most_bytes(self) -> int: ...
    def wish(self, **changes: Any) -> None: ...
    def state(self) -> Mapping[str, Any]: ...


class Control:
    """`answer` is for net.control_socket. `steward`: None for a node that is no worker, which can only leave."""

    def __init__(
        self, node_id: NodeId, role: str, leave: Callable[[], None], steward: Restrained | None = None
    ) -> None:
        self._head = {"node": node_id.short, "role": role}
        self._leave = leave
        self._steward = steward

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The state after what was asked for. UsageError for what cannot be."""
        asked = request.get("do")
        if asked == "leave":
            self._leave()
            return dict(self._head)
        if asked not in REQUESTS:
            raise UsageError(f"{asked!r} is none of {', '.join(REQUESTS)}")
        steward = self._steward
        if steward is None:
            raise UsageError(
                f"the node that runs here is a {self._head['role']}, which can only leave: "
                "it serves people, and does not lend"
            )
        changes = {"pause": {"is_paused": True}, "resume": {"is_paused": False}}.get(asked)
        steward.wish(**(_wishes(request, steward.most_bytes) if changes is None else changes))
        return {**self._head, **steward.state()}


def _wishes(request: dict[str, Any], most_bytes: int) -> dict[str, Any]:
    """The fields of Wishes that a request for other limits names. UsageError."""
    changes: dict[str, Any] = {}
    for name, value in request.items():
        if name == "do":
            continue
        if name in ("budget_bytes", "keep_free_bytes"):
            changes[name] = _bytes(name, value)
        elif name == "on_battery" and value in ("pause", "serve"):
            changes[name] = value
        elif name == "hours" and isinstance(value, list) and len(value) <= 16:
            changes[name] = tuple(Hours.parse(str(item)) for item in value)
        else:
            raise UsageError(f"{name}: {value!r} is no limit")
    if changes.get("budget_bytes", 0) > most_bytes:
        raise UsageError(
            f"this node was started with a budget of {most_bytes / 1e6:.1f} MB, and may hold less, not more; "
            "for more start it again"
        )
    return changes


def _bytes(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**50:
        raise UsageError(f"{name}: {value!r} is no number of bytes")
    return value
