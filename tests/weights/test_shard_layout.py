"""The layout of a shard, computed: equal to the file that is written, from any byte on."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.errors import ModelFileError
from swarmnode.weights.index import ModelIndex
from swarmnode.weights.manifest import Manifest
from swarmnode.weights.shard import write_shard
from swarmnode.weights.shard_layout import ShardLayout
from swarmnode.weights.slices import ExpertRange

RANGES = (ExpertRange(0, 1, 2), ExpertRange(3, 0, 6), ExpertRange(0, 4, 1), ExpertRange(0, 2, 3))


@pytest.fixture(scope="module")
def written(mixed: ModelIndex, manifest: Manifest, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("layout") / "some.gguf"
    write_shard(path, mixed, manifest, RANGES)
    return path.read_bytes()


def test_all_of_it_is_the_file(mixed: ModelIndex, manifest: Manifest, written: bytes) -> None:
    layout = ShardLayout.of(manifest, RANGES)
    assert layout.n_bytes == len(written)
    assert bytes(layout.read(mixed, 0, layout.n_bytes)) == written


@given(data=st.data())
@settings(max_examples=60)
def test_any_part_of_it_is_a_part_of_the_file(
    mixed: ModelIndex, manifest: Manifest, written: bytes, data: st.DataObject
) -> None:
    layout = ShardLayout.of(manifest, RANGES)
    edges = [tensor.offset for tensor in layout.tensors] + [tensor.stop for tensor in layout.tensors]
    near = st.sampled_from(edges).flatmap(lambda edge: st.integers(edge - 40, edge + 40))
    place = (st.integers(0, len(written)) | near).filter(lambda at: 0 <= at <= len(written))
    start, stop = sorted((data.draw(place), data.draw(place)))
    assert bytes(layout.read(mixed, start, stop)) == written[start:stop]


@pytest.mark.parametrize("ranges", [(), (ExpertRange(4, 0, 1),), (ExpertRange(0, 5, 2),)])
def test_experts_that_are_not_there(manifest: Manifest, ranges: tuple[ExpertRange, ...]) -> None:
    with pytest.raises(ModelFileError):
        ShardLayout.of(manifest, ranges)


def test_write_shard_names_the_file_in_what_it_refuses(
    mixed: ModelIndex, manifest: Manifest, tmp_path: Path
) -> None:
    with pytest.raises(ModelFileError, match=r"none\.gguf"):
        write_shard(tmp_path / "none.gguf", mixed, manifest, ())
