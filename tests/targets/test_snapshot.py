"""Copies are whole or absent."""

from __future__ import annotations

import errno

import pytest

from draftsmith.errors import ArtifactError, TargetError
from draftsmith.targets import snapshot
from draftsmith.targets.identity import identify
from draftsmith.targets.snapshot import clone_file, identity_of, keep_copy
from draftsmith.targets.stamps import IdentityCache


def test_clone_is_equal_and_independent(tmp_path):
    source, copy = tmp_path / "a", tmp_path / "b"
    source.write_bytes(b"weights" * 1000)
    clone_file(source, copy)
    source.write_bytes(b"other")
    assert copy.read_bytes() == b"weights" * 1000


def test_full_disk_leaves_nothing(checkpoint, root, monkeypatch):
    identity = identify(checkpoint, "auto")

    def no_room(source, destination):
        destination.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(snapshot, "clone_file", no_room)
    with pytest.raises(ArtifactError, match="No space left"):
        keep_copy(checkpoint, identity, root)
    assert list(root.iterdir()) == []


def test_source_that_changes_while_it_is_copied_is_refused(checkpoint, root):
    identity = identify(checkpoint, "auto")
    template = checkpoint / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    with pytest.raises(TargetError, match="changed while"):
        keep_copy(checkpoint, identity, root)
    assert list(root.iterdir()) == []


def test_source_that_changes_while_it_is_hashed_is_refused(checkpoint, root, monkeypatch):
    def slow_identify(directory, dtype, **options):
        identity = identify(directory, dtype, **options)
        (directory / "generation_config.json").write_text("{}")
        return identity

    monkeypatch.setattr(snapshot, "identify", slow_identify)
    with pytest.raises(TargetError, match="changed while"):
        identity_of(checkpoint, "auto", cache=IdentityCache(root))
