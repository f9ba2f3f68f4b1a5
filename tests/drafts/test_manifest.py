from __future__ import annotations

import json

import pytest

from draftsmith.drafts.manifest import (
    FILE_NAME,
    DraftManifest,
    draft_digest,
    read_manifest,
    write_manifest,
)
from draftsmith.errors import ArtifactError, DraftError

MANIFEST = DraftManifest(
    schema=1,
    family="student",
    recipe="small",
    recipe_digest="1" * 64,
    digest="2" * 64,
    weights_digest="3" * 64,
    vocabulary_digest=None,
    target_digest="4" * 64,
    tokenizer_digest="5" * 64,
    corpus_digest="6" * 64,
    architecture={"layers": [0, 2], "dtype": "bfloat16"},
    training={"steps": 10, "history": [{"step": 10.0, "loss": 0.5}]},
)


def rewrite(folder, change):
    path = folder / FILE_NAME
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_what_is_written_is_read(tmp_path):
    write_manifest(tmp_path, MANIFEST)
    assert read_manifest(tmp_path) == MANIFEST


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda data: data.update(schema=2), "schema 2"),
        (lambda data: data.pop("schema"), "schema None"),
        (lambda data: data.pop("weights_digest"), "weights_digest"),
        (lambda data: data.update(colour="red"), "colour"),
    ],
)
def test_other_schemas_are_refused_and_named(tmp_path, change, named):
    write_manifest(tmp_path, MANIFEST)
    rewrite(tmp_path, change)
    with pytest.raises(DraftError, match=named) as caught:
        read_manifest(tmp_path)
    assert "schema 1" in str(caught.value)


def test_a_folder_without_a_manifest_is_refused(tmp_path):
    with pytest.raises(ArtifactError, match="draft.json"):
        read_manifest(tmp_path)


def test_a_manifest_that_is_no_json_is_refused(tmp_path):
    (tmp_path / FILE_NAME).write_text("{")
    with pytest.raises(ArtifactError, match="draft.json"):
        read_manifest(tmp_path)


def test_the_digest_depends_on_weights_vocabulary_and_architecture():
    digests = {
        draft_digest("1", None, {"layers": [0]}),
        draft_digest("2", None, {"layers": [0]}),
        draft_digest("1", "3", {"layers": [0]}),
        draft_digest("1", None, {"layers": [1]}),
    }
    assert len(digests) == 4
