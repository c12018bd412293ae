"""Another libggml: used if it passes the check, refused in words if not, and never loaded unchecked."""

from __future__ import annotations

import base64
import ctypes
import json
import os
import platform
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarmnode.cli import doctor
from swarmnode.compute import ggml, library, library_store, library_trial
from swarmnode.compute.bank import ExpertBank
from swarmnode.compute.devices import Device
from swarmnode.compute.library_check import layout_faults
from swarmnode.compute.library_samples import compute_samples, depends_on_company
from swarmnode.compute.library_store import built_in_package, has_libraries, library_file
from swarmnode.compute.library_trial import difference, try_library
from swarmnode.compute.ops import Ops
from swarmnode.errors import DeviceError

OURS = built_in_package() / "lib"
SHOW = (
    "import json, sys\n"
    "from swarmnode.compute import ggml, library\n"
    "used = library.chosen()\n"
    "maps = sorted({line.split()[-1] for line in open('/proc/self/maps') if 'libggml' in line})\n"
    "print(json.dumps([used.origin, str(used.folder), ggml.version(), maps, 'llama_cpp' in sys.modules]))\n"
)
linux = pytest.mark.skipif(
    sys.platform != "linux",
    reason="compiles or cuts .so files (macOS has .dylib, Windows .dll), or asks /proc what is loaded",
)
posix = pytest.mark.skipif(
    os.name != "posix",
    reason="Windows ends no process by a signal, and makes links only with a right of its own",
)


def python(
    code: str, tmp_path: Path, variable: object = "", path: str = ""
) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "SWARMNODE_HOME": str(tmp_path / "home"),
        "SWARMNODE_GGML_LIB": str(variable),
    }
    environment["PYTHONPATH"] = path
    return subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, check=False
    )


def shown(done: subprocess.CompletedProcess[str]) -> tuple[Any, ...]:
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(done.stdout))


def copied(folder: Path) -> Path:
    return Path(shutil.copytree(OURS, folder))


def patched(folder: Path, old: bytes, new: bytes) -> Path:
    """A copy of the built-in library with other text in it, of the same length."""
    assert len(old) == len(new)
    path = library_file(copied(folder), "ggml-base")
    assert path is not None
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new))
    return folder


def stubs(folder: Path, code: str) -> Path:
    """Three libraries compiled from a few lines of C."""
    folder.mkdir()
    for name in ("ggml", "ggml-base", "ggml-cpu"):
        target = str(folder / f"lib{name}.so")
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", target], input=code.encode(), check=True
        )
    return folder


def newer(folder: Path) -> Path:
    return patched(folder, ggml.version().encode() + b"\0", b"0.99.9\0")


@linux
def test_a_library_that_passes_is_used_and_checked_once(tmp_path: Path) -> None:
    folder = newer(tmp_path / "other")
    origin, used, version, maps, _ = shown(python(SHOW, tmp_path, folder))
    assert (origin, used, version) == ("SWARMNODE_GGML_LIB", str(folder), "0.99.9")
    assert [Path(path).parent for path in maps] == [folder] * 3
    (verdict,) = (tmp_path / "home").rglob("verdict.json")
    assert json.loads(verdict.read_text()) == {
        "version": "0.99.9",
        "refused": "",
        "older": False,
        "inexact": "",
    }
    verdict.write_text('{"version": "0.99.9", "inexact": "F32"}')
    done = python(SHOW, tmp_path, folder)
    assert shown(done)[0] == "SWARMNODE_GGML_LIB"
    assert "ggml 0.99.9 computes a row of F32 experts differently" in done.stderr
    verdict.write_text('{"refused": "what was kept is believed"}')
    refusal = python(SHOW, tmp_path, folder).stderr
    assert f"what was kept is believed (to check it again, delete {verdict})" in refusal
    for nonsense in ("no verdict", '{"refused": 3}', "[]", '{"version": null}'):
        verdict.write_text(nonsense)
        assert library_store._read(verdict) is None
    assert shown(python(SHOW, tmp_path, folder))[0] == "SWARMNODE_GGML_LIB"
    verdict.write_text('{"refused": "of another file"}')
    os.utime(folder / "libggml.so", (1, 1))
    assert shown(python(SHOW, tmp_path, folder))[0] == "SWARMNODE_GGML_LIB"


def truncated(folder: Path) -> Path:
    path = copied(folder) / "libggml-cpu.so"
    path.write_bytes(path.read_bytes()[:100_000])
    return folder


def empty(folder: Path) -> Path:
    folder.mkdir()
    return folder


@linux
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (empty, "does not hold libggml, libggml-base, libggml-cpu as shared libraries"),
        (lambda folder: folder, "does not hold"),
        (truncated, r"crashed \(SIG\w+\) while loading it|file too short|libggml-cpu.so"),
        (
            lambda folder: stubs(folder, 'char * ggml_version(void) { return "0.99.0"; }'),
            "lacks the function ggml_",
        ),
        (lambda folder: stubs(folder, "int nothing;"), "it is no ggml"),
        (
            lambda folder: stubs(folder, "void ggml_init(void) {}"),
            r"no ggml_version\(\): older than ggml 0.9",
        ),
        (
            lambda folder: stubs(folder, "void abort(void); char * ggml_version(void) { abort(); }"),
            r"it crashed \(SIGABRT\) while reading its version",
        ),
        (lambda folder: patched(folder, b"\0q4_K\0", b"\0q4_X\0"), "tensor type 12 is b'q4_X'"),
    ],
    ids=["empty", "missing", "truncated", "no functions", "no ggml", "no version", "aborts", "another type"],
)
def test_what_does_not_fit_is_an_error_in_words(
    tmp_path: Path, make: Callable[[Path], Path], why: str
) -> None:
    code = "from swarmnode.cli import main; main(['doctor'])"
    done = python(code, tmp_path, make(tmp_path / "other"))
    assert done.returncode == 1
    assert done.stdout == ""
    assert re.search(rf"^swarmnode: SWARMNODE_GGML_LIB={tmp_path}/other: .*({why})", done.stderr)
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(os.name != "posix", reason="Windows guesses where another user's home is")
def test_a_home_that_nobody_has_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.VARIABLE, "~nosuchuser/lib")
    with pytest.raises(
        DeviceError, match=r"^SWARMNODE_GGML_LIB=~nosuchuser/lib: .*; give the folder's full path"
    ):
        library.choose()


@pytest.fixture
def any_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check says yes without looking."""
    monkeypatch.setattr(library_store, "try_library", lambda *_, **__: library_trial.Trial("1", numbers={}))


def entry_of(cache: Path, folder: Path) -> Path:
    """Of a library's package, as a node that starts makes it."""
    library_store.verdict_on(cache, folder)
    return library_store.package_of(cache, folder).parent


def change(folder: Path) -> None:
    path = library_file(folder, "ggml")
    assert path is not None
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def age(*paths: Path) -> None:
    for path in paths:
        os.utime(path, (1, path.stat().st_mtime - library_store.UNUSED_S - 60))


@pytest.mark.usefixtures("any_passes")
def test_a_changed_library_leaves_no_old_entry(tmp_path: Path) -> None:
    folder, cache = copied(tmp_path / "other"), tmp_path / "cache"
    unrelated = entry_of(cache, copied(tmp_path / "unrelated"))
    age(unrelated)
    for _ in range(3):
        change(folder)
        entry = entry_of(cache, folder)
        assert set(cache.iterdir()) == {entry, unrelated}


@pytest.mark.usefixtures("any_passes")
def test_entries_of_other_machines_stay_until_they_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes of two machines that share a home start by turns, and at once."""
    folder, cache = copied(tmp_path / "other"), tmp_path / "cache"
    machine = ""
    monkeypatch.setattr(platform, "node", lambda: machine)
    entries = {}
    for machine in ("a", "b", "a"):
        entries[machine] = entry_of(cache, folder)
    assert set(cache.iterdir()) == set(entries.values())

    age(*entries.values())
    machine = "b"
    entry_of(cache, folder)  # in use again
    machine = "c"
    entries["c"] = entry_of(cache, folder)
    assert set(cache.iterdir()) == {entries["b"], entries["c"]}


@pytest.mark.usefixtures("any_passes")
def test_what_dead_processes_left_is_removed_and_what_others_make_is_not(tmp_path: Path) -> None:
    folder, cache = copied(tmp_path / "other"), tmp_path / "cache"
    entry = entry_of(cache, folder)
    dead = [entry / "draft-dead", cache / "gone-dead-1", cache / "0123-without-a-package"]
    live = [entry / "draft-live", cache / "0123-in-the-making"]
    for path in dead + live:
        path.mkdir()
        (path / "ggml.py").write_text("")
    (entry / "verdict.4711").write_text("{")
    age(*dead, entry / "verdict.4711")
    (entry / "verdict.json").unlink()
    assert entry_of(cache, folder) == entry
    assert {path.name for path in entry.iterdir()} == {"ggml", "verdict.json", "draft-live"}
    assert set(cache.iterdir()) == {entry, live[1]}


class Ending:
    """In place of `run_check`: processes that say these stages and end with this code."""

    def __init__(self, code: int, *stages: str, error: str = "") -> None:
        self._said = "".join(json.dumps({"stage": stage}) + "\n" for stage in stages).encode()
        self._code = code
        self._error = error.encode()

    def __call__(self, arguments: list[str], errors: Path) -> int:
        Path(arguments[0]).write_bytes(self._said)
        errors.write_bytes(self._error)
        return self._code


FIRST, LOADING, COMPUTING = "reading its version", "loading it", "computing every op"


@posix
@pytest.mark.parametrize(
    ("ending", "why"),
    [
        (Ending(-signal.SIGKILL, FIRST, LOADING), r"crashed \(SIGKILL\) while loading it"),
        (Ending(-signal.SIGKILL, FIRST, LOADING, COMPUTING), r"crashed \(SIGKILL\) while computing every op"),
        (Ending(-signal.SIGTERM, FIRST, LOADING), r"crashed \(SIGTERM\)"),
        (Ending(-signal.SIGINT, FIRST, LOADING), r"crashed \(SIGINT\)"),
        (Ending(1, FIRST, LOADING, error="MemoryError\n"), r"failed \(exit code 1\) while loading it: MemoryError"),
        (Ending(1, FIRST, LOADING, COMPUTING, error="swarmnode.errors.DeviceError: x"), "DeviceError: x"),
        (Ending(1, error="ModuleNotFoundError"), r"failed \(exit code 1\) while the check was started"),
        (Ending(1, FIRST, error="OSError: too many open files"), "too many open files"),
        (Ending(-signal.SIGSEGV), r"crashed \(SIGSEGV\) while the check was started"),
        (Ending(-signal.SIGSEGV, FIRST), r"crashed \(SIGSEGV\) while reading its version"),
    ],
)  # fmt: skip
def test_a_death_that_says_nothing_about_the_library_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: Ending, why: str
) -> None:
    folder = copied(tmp_path / "other")

    def theirs_dies(package: Path, newer_than: str = "") -> library_trial.Trial:
        if package == built_in_package():
            return library_trial.Trial("0.1", numbers={})
        return try_library(package, newer_than)

    monkeypatch.setattr(library_store, "try_library", theirs_dies)
    monkeypatch.setattr(library_trial, "run_check", ending)
    with pytest.raises(DeviceError, match=why):
        library_store.verdict_on(tmp_path / "cache", folder)
    assert not list(tmp_path.rglob("verdict*"))


@posix
@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT", "SIGILL", "SIGBUS", "SIGFPE"])
@pytest.mark.parametrize("stage", [LOADING, COMPUTING])
def test_a_crash_of_the_library_is_a_verdict(monkeypatch: pytest.MonkeyPatch, name: str, stage: str) -> None:
    monkeypatch.setattr(library_trial, "run_check", Ending(-signal.Signals[name], FIRST, stage))
    assert try_library(OURS.parent).refused == f"it crashed ({name}) while {stage}"


def package_with(tmp_path: Path, code: str) -> Path:
    """A package of libraries compiled from a few lines of C, as the check gets it."""
    return library_store.package_of(tmp_path / "cache", stubs(tmp_path / "other", code))


SPAM = (
    "int printf(const char *, ...); int fflush(void *); "
    "char * ggml_version(void) { "
    'printf("{\\"stage\\": [[[[\\n{\\"version\\": {}, \\"refused\\": null, \\"numbers\\": 3}\\n"); '
    'fflush((void *)0); return "0.99.0"; }'
)


@linux
def test_what_a_library_prints_is_not_what_its_check_says(tmp_path: Path) -> None:
    assert re.fullmatch("it lacks the function ggml_.*", try_library(package_with(tmp_path, SPAM)).refused)


CHILD = (
    "#include <fcntl.h>\n#include <unistd.h>\n"
    "char * ggml_version(void) { "
    'write(open("FIFO", O_WRONLY), "x", 1); if (fork() == 0) { sleep(1000); _exit(0); } END }'
)


@linux
@pytest.mark.parametrize(
    ("end", "why"),
    [("_exit(3);", r"failed \(exit code 3\)"), ("sleep(1000); return 0;", "did not end within")],
)
def test_a_check_waits_for_no_child_of_the_library_and_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, why: str
) -> None:
    monkeypatch.setattr(library_trial, "TRIAL_S", 5.0)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    descriptor = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        package = package_with(tmp_path, CHILD.replace("FIFO", str(fifo)).replace("END", end))
        with pytest.raises(DeviceError, match=why):
            try_library(package)
        assert os.read(descriptor, 10) == b"x"
        assert select.select([descriptor], [], [], 10)[0], "somebody still has the pipe open"
        assert os.read(descriptor, 10) == b""
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    "said",
    [
        b'{"stage": ["done"]}',
        b'{"version": {}}',
        b'{"refused": null}',
        b'{"older": 1}',
        b'{"numbers": 3}',
        b'{"numbers": {"a": 3}}',
        b'{"numbers": {"a": "?"}}',
        b'{"numbers": {"a": "AAA="}}',
        b'{"whatever": 1}',
        b'[["stage", "done"], 1]',
        b'"done"',
        b'{"stage": "do',
        b"\xff\xfe",
        b"[" * 100_000,
        b" " * library_trial.MAX_REPORT_BYTES + b"{}",
    ],
    ids=lambda said: repr(said[:20]),
)
def test_a_report_that_makes_no_sense_is_an_error(monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    def ends_well(arguments: list[str], errors: Path) -> int:
        Path(arguments[0]).write_bytes(b'{"stage": "done"}\n' + said)
        errors.touch()
        return 0

    monkeypatch.setattr(library_trial, "run_check", ends_well)
    with pytest.raises(DeviceError, match="its check said what makes no sense"):
        try_library(OURS.parent)


def test_a_check_that_cannot_be_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/python")
    with pytest.raises(DeviceError, match=r"its check could not be run: .*No such file"):
        try_library(OURS.parent)


def test_a_check_without_an_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_trial, "TRIAL_S", 0.001)
    with pytest.raises(DeviceError, match="did not end within"):
        try_library(OURS.parent)


@linux
def test_llama_cpp_pythons_library_is_used_only_if_it_is_newer_and_fits(tmp_path: Path) -> None:
    """Found without importing that package."""
    site = tmp_path / "site"
    lib = site / "llama_cpp" / "lib"
    lib.parent.mkdir(parents=True)
    (lib.parent / "__init__.py").write_text("raise SystemError('imported')")

    copied(lib)
    done = python(SHOW, tmp_path, path=str(site))
    assert shown(done)[:2] == ("built in", str(OURS))
    assert done.stderr == ""

    shutil.rmtree(lib)
    newer(lib)
    origin, folder, version, _, imported = shown(python(SHOW, tmp_path, path=str(site)))
    assert (origin, folder, version, imported) == ("llama-cpp-python", str(lib), "0.99.9", False)
    assert shown(python(SHOW, tmp_path, "builtin", path=str(site)))[0] == "built in"

    for verdict in (tmp_path / "home").rglob("verdict-newer.json"):
        verdict.write_text('{"version": "0.99.9", "inexact": "F32"}')
    done = python(SHOW, tmp_path, path=str(site))
    assert shown(done)[0] == "built in"
    assert "is not used: ggml 0.99.9 computes a row of F32 experts differently" in done.stderr

    shutil.rmtree(lib)
    stubs(lib, 'char * ggml_version(void) { return "0.99.0"; }')
    done = python(SHOW, tmp_path, path=str(site))
    assert shown(done)[0] == "built in"
    assert done.stderr.count("\n") == 1
    assert "lacks the function ggml_" in done.stderr


@posix
def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    done = python(SHOW, tmp_path, copied(tmp_path / "other"))
    assert done.returncode == 1
    assert "could not be written" in done.stderr


def test_doctor_says_which_library_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(doctor._ggml())
    assert ("ok", f"libggml built in: {OURS}") in found
    used = library.Library("SWARMNODE_GGML_LIB", Path("/x"), Path("/y/ggml"), "not exact", "passed over")
    monkeypatch.setattr(library, "chosen", lambda: used)
    found = list(doctor._ggml())
    assert ("ok", f"libggml of SWARMNODE_GGML_LIB: {Path('/x')}") in found
    assert {("warn", "not exact"), ("warn", "passed over")} < set(found)


class OtherApi:
    """The bindings with some functions replaced."""

    def __init__(self, **replaced: object) -> None:
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(ggml.api, name)


def test_the_built_in_library_has_no_faults() -> None:
    assert has_libraries(OURS)
    assert list(layout_faults(ggml.api)) == []


def _grown_threadpool(params: Any, n_threads: int) -> None:
    ggml.api.ggml_threadpool_params_init(params, n_threads)
    end = params._obj
    ctypes.memset(ctypes.addressof(end) + ctypes.sizeof(end), 0, 8)


@pytest.mark.parametrize(
    ("replaced", "fault"),
    [
        ({"ggml_tensor_overhead": lambda: 384}, "a tensor takes 384 bytes"),
        ({"ggml_type_size": lambda number: 1}, "1 bytes for"),
        ({"ggml_get_no_alloc": lambda context: False}, "ggml_init_params"),
        ({"ggml_set_name": lambda tensor, name: None}, "ggml_tensor has another"),
        ({"ggml_threadpool_params_init": _grown_threadpool}, "ggml_threadpool_params"),
        ({"ggml_status_to_string": lambda status: b"?"}, "status 0"),
        ({"ggml_backend_dev_by_type": lambda kind: None}, "no CPU device"),
    ],
)
def test_another_layout_is_seen(replaced: dict[str, object], fault: str) -> None:
    assert fault in next(layout_faults(OtherApi(**replaced)))


def test_the_samples_use_every_op(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()
    ops = [name for name, member in vars(Ops).items() if callable(member) and not name.startswith("_")]

    def recorder(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*arguments: Any) -> Any:
            seen.add(name)
            return op(*arguments)

        return recorded

    for name in ops:
        monkeypatch.setattr(Ops, name, recorder(name, getattr(Ops, name)))
    results = compute_samples(device)
    assert seen == set(ops)
    for values in results.values():
        assert np.isfinite(values).all()
        assert values.std() > 1e-3


def test_rows_in_other_company_are_compared(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    assert depends_on_company(device) == ""
    experts = ExpertBank.experts

    def wide_ones_differ(bank: ExpertBank, layer: int, rows: Any, *pairs: Any) -> Any:
        y = experts(bank, layer, rows, *pairs)
        return np.nextafter(y, np.float32(9)) if len(rows) > 32 else y

    monkeypatch.setattr(ExpertBank, "experts", wide_ones_differ)
    assert depends_on_company(device) == "F32+F32, Q4_K+Q6_K, Q8_0+Q5_K"


def encoded(*values: float) -> str:
    return base64.b64encode(np.array(values, np.float32).tobytes()).decode()


@pytest.mark.parametrize(
    ("theirs", "found"),
    [
        ({"a": encoded(1, 2, 3)}, ""),
        ({"a": encoded(1.001, 2, 3)}, ""),
        ({"a": encoded(1, 2.2, 3)}, "a, cosine"),
        ({"a": encoded(2, 4, 6)}, "a, cosine"),
        ({"a": encoded(1, 2)}, "another size"),
        ({"a": encoded(1, 2, float("nan"))}, "not finite"),
        ({"b": encoded(1, 2, 3)}, "other samples"),
    ],
)
def test_numbers_are_compared(theirs: dict[str, str], found: str) -> None:
    difference_found = difference({"a": encoded(1, 2, 3)}, theirs)
    assert found in difference_found
    assert bool(found) == bool(difference_found)
