"""Keeps a worker within what its machine and its owner allow, does what the owner says, and tells how it goes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import trio

from swarmnode.config import RestraintConfig
from swarmnode.schedule.restraint import Conditions, Restraint, Stance, Wishes
from swarmnode.services.machine import MachineState
from swarmnode.services.reports import Lending, Paused, Resumed, SteppedBack
from swarmnode.services.runners import Runner
from swarmnode.services.volunteer import VolunteerService

log = logging.getLogger(__name__)

Report = Callable[[Lending | Paused | Resumed | SteppedBack], None]


@dataclass(frozen=True)
class Senses:
    """How the machine is looked at. `machine` blocks and runs on `threads`; `minute` is the local minute of the day."""

    machine: Callable[[], MachineState]
    minute: Callable[[], int]
    threads: Runner


class Steward:
    """One worker's. `run` until cancelled; the owner's wishes come in between (services/control)."""

    def __init__(
        self,
        service: VolunteerService,
        wishes: Wishes,
        senses: Senses,
        config: RestraintConfig,
        report: Report,
        peers: Callable[[], int],
    ) -> None:
        """`peers`: how many nodes are connected."""
        self._service = service
        self._most_bytes = wishes.budget_bytes
        self._senses = senses
        self._config = config
        self._report = report
        self._peers = peers
        self._restraint = Restraint(config)
        self._machine = MachineState()
        self._wished = trio.Event()
        self.wishes = wishes
        self.stance = Stance(wishes.budget_bytes)

    @property
    def most_bytes(self) -> int:
        """The budget of the start: what was promised to be there (services/memory_lease); wishes stay below."""
        return self._most_bytes

    async def run(self) -> None:
        """Look at the machine now and then, and tell how it goes more often."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look_on)
            nursery.start_soon(self._tell_on)

    def wish(self, **changes: Any) -> None:
        """Other wishes from now on, fields of Wishes by name. They hold until the node ends."""
        self.wishes = replace(self.wishes, **changes)
        self._apply()
        self._wished.set()

    def state(self) -> Mapping[str, Any]:
        """Wishes, what follows from them, and how it goes: plain values, for people and programs."""
        wishes, stance, machine = self.wishes, self.stance, self._machine
        return {
            "paused": stance.pause,
            "memory": stance.memory,
            "budget_bytes": wishes.budget_bytes,
            "most_bytes": self._most_bytes,
            "allowed_bytes": stance.budget_bytes,
            "least_bytes": self._least_bytes(),
            "hours": [str(hours) for hours in wishes.hours],
            "on_battery": wishes.on_battery,
            "keep_free_bytes": self._restraint.reserve_bytes(wishes, self._conditions()),
            "available_bytes": machine.available_bytes,
            "running_on_battery": machine.on_battery,
            "battery_percent": machine.battery_percent,
            "temperature_c": machine.temperature_c,
            **vars(self._lending()),
        }

    async def _look_on(self) -> None:
        while True:
            self._machine = await self._senses.threads.run(self._senses.machine)
            self._wished = trio.Event()
            self._apply()
            with trio.move_on_after(self._config.look_s):
                await self._wished.wait()

    async def _tell_on(self) -> None:
        while True:
            await trio.sleep(self._config.tell_s)
            self._report(self._lending())

    def _conditions(self) -> Conditions:
        machine = self._machine
        return Conditions(
            self._senses.minute(),
            machine.available_bytes,
            machine.total_bytes,
            machine.stalled_percent,
            machine.on_battery,
        )

    def _apply(self) -> None:
        before, now_s = self.stance, trio.current_time()
        stance = self._restraint.decide(self.wishes, self._conditions(), self._memory_bytes(), now_s)
        self.stance = stance
        self._service.limit(stance.budget_bytes)
        self._service.pause(bool(stance.pause))
        if stance.pause and stance.pause != before.pause and not (before.pause and stance.pause[:2] == "it"):
            self._report(Paused(stance.pause))
        elif before.pause and not stance.pause:
            self._report(Resumed())
        if stance.memory and stance.budget_bytes < before.budget_bytes:
            self._report(SteppedBack(stance.memory, stance.budget_bytes))

    def _memory_bytes(self) -> int:
        residence = self._service.residence
        return 0 if residence is None else residence.bank.used_bytes

    def _least_bytes(self) -> int:
        """What one expert takes, the smallest; 0 while no model is known."""
        residence = self._service.residence
        return 0 if residence is None else residence.manifest.least_expert_bytes

    def _lending(self) -> Lending:
        residence, market = self._service.residence, self._service.market
        served = None if residence is None else residence.server.served
        return Lending(
            at_s=trio.current_time(),
            model="" if residence is None else residence.title,
            n_experts=0 if residence is None else residence.n_experts,
            held_bytes=0 if residence is None else residence.held_bytes,
            memory_bytes=self._memory_bytes(),
            requests=0 if served is None else served.requests,
            rows=0 if served is None else served.pairs,
            tokens=0 if served is None else served.tokens,
            bytes_in=0 if served is None else served.bytes_in,
            bytes_out=0 if served is None else served.bytes_out,
            fetched_bytes=0 if market is None else market.fetched_bytes,
            device=self._service.device_name,
            peers=self._peers(),
            pause=self.stance.pause,
            power=power_text(self._machine),
        )


def power_text(machine: MachineState) -> str:
    """Battery and temperature, as far as the machine tells: "battery 81 %, discharging, 47 °C"; else ""."""
    found = []
    if machine.battery_percent is not None:
        found.append(f"battery {machine.battery_percent} %{' in use' if machine.on_battery else ''}")
    if machine.temperature_c is not None:
        found.append(f"{machine.temperature_c:.0f} °C")
    return ", ".join(found)
