"""A disk that refuses gives one error about the write, and nothing half-written stays."""

from __future__ import annotations

import pytest

from draftsmith.artifacts import atomic_directory
from draftsmith.errors import ArtifactError
from draftsmith.targets.conversion import convert_gguf
from draftsmith.targets.identity import identify
from draftsmith.targets.snapshot import keep_copy, keep_link
from tests.full_disk import files_up_to


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
def test_conversion_stops_at_the_file_that_finds_no_room(tiny_gguf, tmp_path, name):
    whole, place = tmp_path / "whole", tmp_path / "place"
    with atomic_directory(whole) as folder:
        convert_gguf(tiny_gguf, folder, dtype="auto")
    room = (whole / name).stat().st_size - 1
    with (
        files_up_to(room),
        pytest.raises(ArtifactError, match=r"writing .*File too large.*free disk space"),
        atomic_directory(place) as folder,
    ):
        convert_gguf(tiny_gguf, folder, dtype="auto")
    assert not place.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"whole", tiny_gguf.name}


def test_a_snapshot_without_room_leaves_those_before_it(checkpoint, root):
    identity = identify(checkpoint, "auto")
    kept = keep_copy(checkpoint, identity, root)
    before = {path.name: path.read_bytes() for path in kept.iterdir()}
    wide = identify(checkpoint, "float32")
    with files_up_to(20_000), pytest.raises(ArtifactError, match="File too large"):
        keep_copy(checkpoint, wide, root)
    assert {path.name for path in root.iterdir()} == {kept.name, ".sources.json"}
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == before


def test_a_link_leaves_nothing_beside_it(checkpoint, root):
    place = keep_link(checkpoint, identify(checkpoint, "auto"), root)
    assert place.is_symlink()
    assert place.samefile(checkpoint)
    assert {path.name for path in root.iterdir()} <= {place.name, ".sources.json"}
