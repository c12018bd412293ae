"""The parts of a split GGUF: `NAME-00001-of-00003.gguf` and so on, found by name, checked against `split.*`.

The metadata decides whether a file is a part, not its name: a whole model may keep a name that looks like
one.
"""

from __future__ import annotations

import re
from pathlib import Path

from swarmnode.counts import counted
from swarmnode.errors import ModelFileError
from swarmnode.weights.gguf_file import GgufFile

MAX_PARTS = 1000

_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def part_name(stem: str, number: int, count: int) -> str:
    """File name of part `number` (from 1) of `count`, as llama.cpp's gguf-split writes it."""
    return f"{stem}-{number:05d}-of-{count:05d}.gguf"


def split_name(name: str) -> tuple[str, int, int] | None:
    """(stem, number from 1, count) of a file name that looks like a part, else None."""
    match = _PART_NAME.fullmatch(name)
    return (match["stem"], int(match["number"]), int(match["count"])) if match else None


def open_parts(path: Path) -> tuple[GgufFile, ...]:
    """Open a GGUF given by any of its parts; the parts in order, one for a file that is not split.

    Raises ModelFileError (naming a missing part, or parts that do not belong together) or
    UnsupportedModelError.
    """
    opened = GgufFile(path)
    count = _split_number(opened, "split.count", default=1)
    if count <= 1:
        return (opened,)
    if count > MAX_PARTS:
        raise ModelFileError(f"{path}: split.count is {count}, more than {MAX_PARTS}")
    named = split_name(path.name)
    if named is None:
        number = _split_number(opened, "split.no") + 1
        raise ModelFileError(
            f"{path}: is part {number} of {count}, but its name does not end in "
            f"-{number:05d}-of-{count:05d}.gguf, so that the other parts cannot be found"
        )
    stem, number, named_count = named
    if named_count != count:
        raise ModelFileError(
            f"{path}: split.count is {count}, but the name says {counted(named_count, 'part')}"
        )
    siblings = [path.with_name(part_name(stem, n, count)) for n in range(1, count + 1)]
    missing = [sibling for sibling in siblings if not sibling.exists()]
    if missing:
        raise ModelFileError(f"{missing[0]}: missing, with {len(missing) - 1} more of the {count} parts")
    parts = tuple(opened if n == number else GgufFile(part) for n, part in enumerate(siblings, 1))
    _check_parts(parts)
    return parts


def _check_parts(parts: tuple[GgufFile, ...]) -> None:
    seen: set[str] = set()
    n_tensors = sum(len(part.tensors) for part in parts)
    for index, part in enumerate(parts):
        if _split_number(part, "split.count") != len(parts):
            raise ModelFileError(f"{part.path}: its split.count is not {len(parts)}, as the other parts say")
        if _split_number(part, "split.no") != index:
            raise ModelFileError(f"{part.path}: split.no does not say that this is part {index + 1}")
        promised = _split_number(part, "split.tensors.count", default=n_tensors)
        if promised != n_tensors:
            raise ModelFileError(
                f"{part.path}: promises {counted(promised, 'tensor')}, but all parts hold {n_tensors}"
            )
        repeated = seen & part.tensors.keys()
        if repeated:
            raise ModelFileError(f"{part.path}: tensor {min(repeated)!r} is in another part, too")
        seen |= part.tensors.keys()


def _split_number(part: GgufFile, key: str, default: int | None = None) -> int:
    stored = part.metadata.get(key)
    value = default if stored is None else stored.value
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ModelFileError(f"{part.path}: {key} is missing or not a count")
    return value
