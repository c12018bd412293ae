"""A worker gives way, unless its owner has said how it is to be scheduled."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the classes are Linux's")

AFTER = "import os; from swarmnode.cli.priority import give_way; give_way(); print(os.sched_getscheduler(0))"


@pytest.mark.parametrize(("before", "after"), [("OTHER", "BATCH"), ("BATCH", "BATCH"), ("IDLE", "IDLE")])
def test_the_usual_class_is_left_and_no_other(before: str, after: str) -> None:
    start = f"import os; os.sched_setscheduler(0, os.SCHED_{before}, os.sched_param(0)); "
    done = subprocess.run([sys.executable, "-c", start + AFTER], capture_output=True, text=True, check=True)
    assert int(done.stdout) == getattr(os, f"SCHED_{after}")


def test_what_the_system_does_not_allow_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from swarmnode.cli.priority import give_way

    def refuses(*arguments: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_getscheduler", lambda pid: os.SCHED_OTHER)
    monkeypatch.setattr(os, "sched_setscheduler", refuses)
    give_way()
