"""Which models `--model` knows: the bundled one, names found in folders, and paths.

Shards (weights/shard) lie beside models and have names like theirs, but are parts: no name stands for one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from swarmnode.errors import UsageError
from swarmnode.weights.parts import split_name
from swarmnode.weights.shard_layout import is_shard

MAX_DEPTH = 3
"""Folders below a model folder that are looked into: publishers put each quantisation in a folder of its own. Below the
current folder none is: it may be anything, a home folder with clones of this repository, say."""


@dataclass(frozen=True)
class KnownModel:
    """A model file by the name `--model` takes. `path`: the file, or its first part; `n_bytes`: of all parts found."""

    name: str
    path: Path
    n_bytes: int


def bundled_model() -> Path:
    """The small model that comes with the package. UsageError if this installation has none."""
    folder = _bundled_folder()
    models = known_models([folder])
    if not models:
        raise UsageError(f"no model is bundled in {folder}; name one: --model FILE.gguf")
    return models[0].path


def known_models(folders: Iterable[Path]) -> tuple[KnownModel, ...]:
    """The GGUFs in these folders by name; folders that do not exist are skipped, parts of a split model are one entry.

    A file that cannot be read is one, too: what is wrong with it, opening it tells. Multimodal projectors (`mmproj*`)
    and shards are left out.
    """
    return tuple(model for model in _known_files(folders) if not is_shard(model.path))


def known_shards(folders: Iterable[Path]) -> tuple[KnownModel, ...]:
    """The shards in these folders, by the names that they would have as models."""
    return tuple(model for model in _known_files(folders) if is_shard(model.path))


def _known_files(folders: Iterable[Path]) -> tuple[KnownModel, ...]:
    """Models and shards, by name. Goes by names only: no file is opened."""
    parts: dict[tuple[Path, str], dict[int, Path]] = {}
    for folder in folders:
        for path in _ggufs(folder):
            split = split_name(path.name)
            stem, number = (path.stem, 1) if split is None else split[:2]
            parts.setdefault((path.parent, stem), {})[number] = path
    models = [
        KnownModel(stem, numbered[min(numbered)], sum(path.stat().st_size for path in numbered.values()))
        for (_, stem), numbered in parts.items()
    ]
    return tuple(sorted(_each_once(models), key=lambda model: (model.name.lower(), model.path)))


def resolve_model(name_or_path: str | Path | None, folders: Iterable[Path] = ()) -> Path:
    """The file to open for `--model`: a path (to any part), a name or the unambiguous beginning of one, case ignored;
    None is the bundled model, which is known by its name, too, where no folder has that.

    Raises UsageError, listing what is known, if nothing or more than one model fits; it says so if a shard would.
    """
    if name_or_path is None:
        return bundled_model()
    path = Path(os.path.expanduser(name_or_path))  # no error for a user who is not there
    if path.is_file():
        return path
    folders = tuple(folders)
    models = known_models([*folders, path] if path.is_dir() else folders)
    wanted = str(name_or_path).lower()
    fitting = [model for model in models if model.name.lower() == wanted]
    if not fitting and not path.is_dir():
        fitting = [model for model in known_models([_bundled_folder()]) if model.name.lower() == wanted]
    fitting = fitting or [model for model in models if model.name.lower().startswith(wanted)]
    if path.is_dir() and not fitting:
        fitting = [model for model in models if path in model.path.parents]
    elif not fitting:
        models += (bundled := known_models([_bundled_folder()]))
        fitting = [model for model in bundled if model.name.lower().startswith(wanted)]
    if len(fitting) == 1:
        return fitting[0].path
    problem = "is no file and no known model" if not fitting else f"fits {len(fitting)} models"
    if not fitting and (shards := _shards_like(wanted, path, folders)):
        problem = (
            f"is no model, but {shards[0].path} is a shard, a part of one; `swarmnode inspect {shards[0].path}` tells "
            "of which"
        )
    listed = "".join(f"\n  {model.name}  ({model.path})" for model in fitting or models) or " none"
    looked = ", ".join(str(folder) for folder in folders) or "no folder"
    raise UsageError(f"{name_or_path} {problem}; known (in {looked}):{listed}")


def _shards_like(wanted: str, path: Path, folders: tuple[Path, ...]) -> list[KnownModel]:
    """Shards that somebody may have meant by that name, or by a folder."""
    shards = known_shards([*folders, path] if path.is_dir() else folders)
    return [shard for shard in shards if shard.name.lower().startswith(wanted) or path in shard.path.parents]


def _each_once(models: Iterable[KnownModel]) -> Iterable[KnownModel]:
    """A file by one path only, the first: a link to it by the same name is no second model."""
    found: dict[tuple[str, Path], KnownModel] = {}
    for model in models:
        found.setdefault((model.name, model.path.resolve()), model)
    return found.values()


def _bundled_folder() -> Path:
    return Path(str(resources.files("swarmnode"))) / "data"


def _ggufs(folder: Path) -> Iterator[Path]:
    max_depth = 0 if folder == Path() else MAX_DEPTH
    for parent, folders, names in os.walk(folder):
        depth = len(Path(parent).relative_to(folder).parts)
        folders[:] = sorted(folders) if depth < max_depth else []
        for name in sorted(names):
            path = Path(parent, name)
            if name.endswith(".gguf") and not name.startswith("mmproj") and path.is_file():
                yield path
