"""Workers of one machine count on its memory together."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from swarmnode.errors import BudgetError
from swarmnode.services.memory_lease import lease_folder, memory_lease

HOLD = """
import sys
from pathlib import Path
from swarmnode.services.memory_lease import memory_lease
with memory_lease(Path(sys.argv[1]), "CPU", 600, 1000):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_two_leases_share_one_memory(tmp_path: Path) -> None:
    with memory_lease(tmp_path, "CPU", 600, 1000):
        with memory_lease(tmp_path, "CPU", 400, 1000):
            pass
        refusal = pytest.raises(BudgetError, match=r"may use 0\.0 MB .* of CPU.*smaller --budget")
        with refusal, memory_lease(tmp_path, "CPU", 401, 1000):
            pass
        with memory_lease(tmp_path, "Vulkan0", 1000, 1000):
            pass
    with memory_lease(tmp_path, "CPU", 1000, 1000):
        pass
    assert not list(tmp_path.glob("*.lease"))


def test_an_unknown_size_refuses_nobody(tmp_path: Path) -> None:
    with memory_lease(tmp_path, "CPU", 600, 0), memory_lease(tmp_path, "CPU", 10**15, 0):
        pass


def test_another_process_counts_until_it_dies(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with pytest.raises(BudgetError), memory_lease(tmp_path, "CPU", 500, 1000):
        pass
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()
    with memory_lease(tmp_path, "CPU", 500, 1000):
        assert len(list(tmp_path.glob("*.lease"))) == 1, "the dead process's lease is deleted"


def test_files_that_are_no_leases_count_nothing(tmp_path: Path) -> None:
    for name in ("x.lease", "12.lease", "-CPU-1.lease", "9" * 20 + "-GPU-1.lease"):
        descriptor = os.open(tmp_path / name, os.O_RDWR | os.O_CREAT)
        os.close(descriptor)
    with memory_lease(tmp_path, "CPU", 1000, 1000):
        pass


def test_a_folder_that_cannot_be_made_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with memory_lease(tmp_path / "file" / "memory", "CPU", 1, 2):
        assert "no account of this machine's memory" in caplog.text


def test_errors_of_the_node_have_nothing_to_do_with_such_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KeyError) as caught, memory_lease(tmp_path / "file" / "memory", "CPU", 1, 2):
        raise KeyError
    assert caught.value.__context__ is None


def test_the_folder_is_one_for_all_nodes_of_a_user() -> None:
    assert lease_folder() == lease_folder()
    assert lease_folder().parent.name == "memory"


def test_machines_that_share_a_home_have_leases_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    here = lease_folder()
    monkeypatch.setattr(platform, "node", lambda: "another")
    assert lease_folder() != here
