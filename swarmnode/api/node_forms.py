"""What the node-local routes are asked, checked field by field. Pure: JSON values in, dataclasses out.

Every wrong value is a UsageError that names its field; the answer is then status 422.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swarmnode.errors import UsageError
from swarmnode.net.address import join_host_port, split_host_port
from swarmnode.weights.limits import MAX_EXPERTS, MAX_LAYERS
from swarmnode.weights.slices import ExpertRange

MAX_ADDRESSES = 8
MAX_ADDRESS_CHARS = 264
MAX_RANGES = 4096
MAX_BUDGET_BYTES = 2**48
MAX_MODEL_CHARS = 256
MAX_SEED_CHARS = 64
MIN_ID_DIGITS = 8
"""Of a model's id, if only its beginning is given."""


@dataclass(frozen=True)
class AnnounceForm:
    """The body of POST /api/expert-coverage. A lease of 0 withdraws."""

    model: str
    addresses: tuple[str, ...]
    ranges: tuple[ExpertRange, ...]
    lease_s: int


@dataclass(frozen=True)
class VolunteerForm:
    """The body of POST /api/expert-volunteer."""

    model: str
    budget_bytes: int
    held: tuple[ExpertRange, ...]
    seed: str


def parse_announce_untrusted(body: object, max_lease_s: int) -> AnnounceForm:
    """Raises UsageError."""
    fields = _fields(body, {"model", "addresses", "ranges", "lease_s"})
    lease_s = _integer(fields, "lease_s", 0, max_lease_s)
    ranges = _ranges(fields, "ranges")
    if lease_s and not ranges:
        raise UsageError("ranges: at least one; a lease_s of 0 withdraws")
    return AnnounceForm(
        _text(fields, "model", MAX_MODEL_CHARS), addresses_of(fields.get("addresses")), ranges, lease_s
    )


def parse_volunteer_untrusted(body: object) -> VolunteerForm:
    """Raises UsageError."""
    fields = _fields(body, {"model", "budget_bytes", "held", "seed"})
    return VolunteerForm(
        _text(fields, "model", MAX_MODEL_CHARS),
        _integer(fields, "budget_bytes", 1, MAX_BUDGET_BYTES),
        _ranges(fields, "held"),
        _text(fields, "seed", MAX_SEED_CHARS) if fields.get("seed") is not None else "",
    )


def addresses_of(value: object) -> tuple[str, ...]:
    """`host:port`s, each at most once. UsageError unless they are 1 to MAX_ADDRESSES."""
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_ADDRESSES:
        raise UsageError(f"addresses: a list of 1 to {MAX_ADDRESSES} strings HOST:PORT is expected")
    found = []
    for item in value:
        if not isinstance(item, str) or len(item) > MAX_ADDRESS_CHARS:
            raise UsageError(f"addresses: strings of at most {MAX_ADDRESS_CHARS} characters are expected")
        try:
            host, port = split_host_port(item)
        except UsageError as error:
            raise UsageError(f"addresses: {error}") from None
        found.append(join_host_port(host, port))
    return tuple(dict.fromkeys(found))


def is_model(text: str, model_id: bytes, names: tuple[str, ...]) -> bool:
    """Whether a model is meant: by a name, its id in hexadecimal, or at least the first 8 digits of that."""
    return text in names or (len(text) >= MIN_ID_DIGITS and model_id.hex().startswith(text.lower()))


def _fields(body: object, known: set[str]) -> Mapping[str, Any]:
    if not isinstance(body, dict):
        raise UsageError("the body must be a JSON object")
    unknown = sorted(name[:MAX_SEED_CHARS] for name in body if name not in known)
    if unknown:
        raise UsageError(f"not known: {', '.join(unknown[:8])}; known are {', '.join(sorted(known))}")
    return body


def _text(fields: Mapping[str, Any], name: str, most: int) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not 1 <= len(value) <= most:
        raise UsageError(f"{name}: a string of 1 to {most} characters is expected")
    return value


def _integer(fields: Mapping[str, Any], name: str, lowest: int, highest: int) -> int:
    value = fields.get(name)
    if type(value) is not int or not lowest <= value <= highest:
        raise UsageError(f"{name}: an integer from {lowest} to {highest} is expected")
    return value


def _ranges(fields: Mapping[str, Any], name: str) -> tuple[ExpertRange, ...]:
    value = fields.get(name, [])
    if not isinstance(value, list) or len(value) > MAX_RANGES:
        raise UsageError(f"{name}: a list of at most {MAX_RANGES} ranges [layer, first, count] is expected")
    return tuple(_range(name, item) for item in value)


def _range(name: str, item: object) -> ExpertRange:
    is_triple = isinstance(item, list) and len(item) == 3 and all(type(number) is int for number in item)
    if not isinstance(item, list) or not is_triple:
        raise UsageError(f"{name}: a range is [layer, first, count], three integers")
    layer, first, count = item
    if not (0 <= layer < MAX_LAYERS and 0 <= first < MAX_EXPERTS and 1 <= count <= MAX_EXPERTS):
        raise UsageError(f"{name}: {item} is no range of experts")
    return ExpertRange(layer, first, count)
