"""`python -m swarmnode.compute.library_check REPORT PACKAGE NEWER_THAN`: does this libggml do what we ask of it?

Runs in a process of its own (library_trial.py), because what it looks for may end in a crash or an abort. Each step is
said before it is taken, in the file REPORT, as standard output is the library's. PACKAGE is a folder with ggml-python's
files and `lib` (library_store.py).
"""

from __future__ import annotations

import base64
import ctypes
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from swarmnode.compute import library
from swarmnode.compute.library_store import library_file
from swarmnode.compute.library_trial import DONE, FIRST_STAGE

TYPES = {
    "f32": (0, 1, 4),
    "f16": (1, 1, 2),
    "q4_0": (2, 32, 18),
    "q8_0": (8, 32, 34),
    "q8_1": (9, 32, 36),
    "q4_K": (12, 256, 144),
    "q5_K": (13, 256, 176),
    "q6_K": (14, 256, 210),
    "q8_K": (15, 256, 292),
    "i32": (26, 1, 4),
    "i64": (27, 1, 8),
    "bf16": (30, 1, 2),
}
"""Number, values in a block, bytes of a block: a part of the GGUF format, so a library with others is broken."""


class Tell(Protocol):
    """Says something to the process that waits; what was said before still holds."""

    def __call__(self, **facts: object) -> None: ...


def main(report: Path, package: Path, newer_than: str) -> None:
    """Check and tell; what is raised here is told by the exit code and the last line of standard error."""
    with report.open("a", encoding="ascii") as file:

        def tell(**facts: object) -> None:
            file.write(json.dumps(facts) + "\n")
            file.flush()

        check(tell, package, newer_than)


def check(tell: Tell, package: Path, newer_than: str) -> None:
    """All steps, from reading the version to the numbers."""
    tell(stage=FIRST_STAGE)
    version = plain_version(package / "lib")
    tell(version=version)
    if newer_than and not _number(version) > _number(newer_than):
        tell(stage=DONE, older=True)
        return
    if not version:
        is_ggml = _function(package / "lib", "ggml_init") is not None
        reason = "it has no ggml_version(): older than ggml 0.9" if is_ggml else "it is no ggml"
        tell(stage=DONE, refused=reason)
        return
    tell(stage="loading it")
    try:
        library.use(library.Library("candidate", package / "lib", package))
        from swarmnode.compute import ggml
    except (AttributeError, RuntimeError, OSError) as error:  # a missing function, a missing file
        missing = f"it lacks the function {error.name}" if isinstance(error, AttributeError) else str(error)
        tell(stage=DONE, refused=_tidy(missing))
        return
    tell(stage="comparing its structs and types")
    wrong = next(layout_faults(ggml.api), "")
    if wrong:
        tell(stage=DONE, refused=f"ggml {version}: {wrong}")
    else:
        _compute(tell)


def plain_version(folder: Path) -> str:
    """ggml_version() without the bindings; empty if there is no such function. OSError if it does not load."""
    function = _function(folder, "ggml_version")
    if function is None:
        return ""
    function.restype = ctypes.c_char_p
    text: bytes = function() or b""
    return text.decode("ascii", "replace")[:40]


def _function(folder: Path, name: str) -> Any:
    """The first library's function of that name, None if none has it. OSError if they do not load."""
    for library_name in ("ggml-base", "ggml-cpu", "ggml"):  # in the order in which they need each other
        path = library_file(folder, library_name)
        if path is None:
            raise OSError(f"{folder} has no lib{library_name}")
        loaded = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        if hasattr(loaded, name):
            return getattr(loaded, name)
    return None


def _number(version: str) -> tuple[int, ...]:
    digits = version.split("-")[0].split(".")
    return tuple(int(part) for part in digits if part.isdecimal())


def _tidy(text: str) -> str:
    return "".join(character for character in text if character.isprintable())[:300]


def layout_faults(api: Any) -> Iterator[str]:
    """What differs from the bindings in structs, types and constants, in words; nothing is computed."""
    yield from _type_faults(api)
    size = ctypes.sizeof(api.ggml_object) + ctypes.sizeof(api.ggml_tensor)
    if api.ggml_tensor_overhead() != size:
        yield f"a tensor takes {api.ggml_tensor_overhead()} bytes, not {size}"
        return
    yield from _tensor_faults(api)
    yield from _threadpool_faults(api)
    if api.ggml_status_to_string(api.GGML_STATUS_SUCCESS) != b"GGML status: success":
        yield "status 0 is not success"
    if api.ggml_backend_dev_by_type(api.GGML_BACKEND_DEVICE_TYPE_CPU) is None:
        yield "it has no CPU device"


def _type_faults(api: Any) -> Iterator[str]:
    for name, (number, block, size) in TYPES.items():
        traits = api.ggml_get_type_traits(number).contents
        seen = (api.ggml_type_name(number), api.ggml_blck_size(number), api.ggml_type_size(number))
        if seen != (name.encode(), block, size):
            yield f"tensor type {number} is {seen[0]!r}, {seen[2]} bytes for {seen[1]} values; {name} was due"
        elif (traits.type_name, traits.blck_size, traits.type_size) != seen:
            yield "ggml_type_traits has another layout"


def _tensor_faults(api: Any) -> Iterator[str]:
    """ggml_init_params goes in by value, ggml_tensor is read in place: each field is seen to be where it should be."""
    room = 16 * api.ggml_tensor_overhead()
    context = api.ggml_init(api.ggml_init_params(mem_size=room, mem_buffer=None, no_alloc=True))
    if not context or (api.ggml_get_mem_size(context), api.ggml_get_no_alloc(context)) != (room, True):
        yield "ggml_init_params has another layout"
        return
    base = api.ggml_new_tensor(context, TYPES["f16"][0], 4, (ctypes.c_int64 * 4)(3, 5, 7, 11))
    api.ggml_set_name(base, b"a name")
    view = api.ggml_view_4d(context, base, 2, 5, 7, 11, 6, 30, 210, 2)
    total = api.ggml_add(context, base, base)
    fields = base.contents
    seen = (
        fields.type,
        *fields.ne,
        *fields.nb,
        fields.op,
        fields.name,
        fields.data,
        fields.buffer,
        fields.extra,
    )
    if seen != (1, 3, 5, 7, 11, 2, 6, 30, 210, 0, b"a name", None, None, None):
        yield "ggml_tensor has another layout"
    elif (
        not view.contents.view_src or view.contents.view_offs != 2 or list(view.contents.ne) != [2, 5, 7, 11]
    ):
        yield "views in ggml_tensor have another layout"
    elif not (total.contents.src[0] and total.contents.src[1]) or total.contents.src[2]:
        yield "sources in ggml_tensor have another layout"
    api.ggml_free(context)


def _threadpool_faults(api: Any) -> Iterator[str]:
    """It comes back by value: one that has grown would be written over what lies behind ours."""
    kind = api.ggml_threadpool_params
    room = bytearray(b"\xa5" * (ctypes.sizeof(kind) + 1024))
    params = kind.from_buffer(room)
    api.ggml_threadpool_params_init(ctypes.byref(params), 3)
    grown = any(byte != 0xA5 for byte in room[ctypes.sizeof(kind) :])
    if grown or params.n_threads != 3 or not 0 <= params.poll <= 100 or any(params.cpumask):
        yield "ggml_threadpool_params has another layout"


def _compute(tell: Tell) -> None:
    from swarmnode.compute.devices import open_device
    from swarmnode.compute.library_samples import compute_samples, depends_on_company
    from swarmnode.compute.self_test import check_device

    tell(stage="opening the CPU")
    device = open_device("CPU", 1)
    tell(stage="testing an expert against float64")
    report = check_device(device, max_rows=16)
    if not report.passed:
        worst = min(report.results, key=lambda result: result.min_cosine - result.threshold)
        tell(stage=DONE, refused=f"{worst.weights} experts are wrong: cosine {worst.min_cosine:.6f}")
        return
    tell(stage="computing every op")
    samples = compute_samples(device)
    tell(stage="computing rows in batches")
    tell(inexact=depends_on_company(device))
    device.close()
    numbers = {name: base64.b64encode(values.tobytes()).decode() for name, values in samples.items()}
    tell(stage=DONE, numbers=numbers)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
