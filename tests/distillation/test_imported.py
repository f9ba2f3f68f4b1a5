"""A draft that was trained elsewhere, from its folder to where stage distill puts drafts."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.distillation.imported import IMPORTED, import_checkpoint, take_over
from draftsmith.distillation.recipe import recipe_digest
from draftsmith.drafts.checkpoint import load_draft
from draftsmith.drafts.eagle3_layout import CONFIG, WEIGHTS
from draftsmith.drafts.manifest import read_manifest
from draftsmith.errors import DraftError, DraftMisfitError, TargetError
from draftsmith.evaluation.any_pair import load_any_draft
from draftsmith.serving.eagle3 import write_head
from draftsmith.targets.loading import load_target
from draftsmith.targets.resolved import TARGETS
from draftsmith.targets.snapshot import keep_copy
from tests.distillation.small_training import make_config
from tests.registry.tiny_models import save_target
from tests.serving.test_eagle3 import TOKEN_IDS, noisy_head


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(save_target(tmp_path_factory.mktemp("target")), dtype="float32")


@pytest.fixture
def source(tmp_path):
    return save_target(tmp_path / "elsewhere" / "sibling", seed=1)


@pytest.fixture
def root(tmp_path):
    (tmp_path / "project").mkdir()
    return tmp_path / "project"


@pytest.fixture
def imported(root, source, target):
    return import_checkpoint(source, "sibling", root=root, target=target.identity)


def taken(recipe, root, target):
    return take_over(recipe, target.identity, root / "drafts" / "sibling", root=root)


def with_another_tokenizer(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["zebra"])
    tokenizer.save_pretrained(folder)
    with_more_rows(folder, 1)


def with_more_rows(folder, count):
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(model.get_input_embeddings().weight.shape[0] + count)
    model.save_pretrained(folder)


def test_it_is_taken_over_as_it_is_with_its_origin_and_its_target(imported, root, source, target):
    manifest = taken(imported, root, target)
    folder = root / "drafts" / "sibling"
    for file in source.iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes()
    assert read_manifest(folder) == manifest
    assert (manifest.family, manifest.recipe) == ("causal-lm", "sibling")
    assert manifest.target_digest == target.identity.digest
    assert manifest.training == {"source": str(source), "files_digest": imported.digest}
    assert manifest.recipe_digest == recipe_digest(imported, make_config())
    assert load_draft(folder, target.model, target_digest=target.identity.digest)


def test_measured_where_it_came_from_it_is_the_same_draft(imported, root, source, target):
    measured = load_any_draft(target, source).manifest
    assert taken(imported, root, target).digest == measured.digest


def test_only_its_content_is_the_recipe(imported, root, source, target):
    (source / "optimizer.pt").write_bytes(b"states")
    again = import_checkpoint(source, "other", root=root, target=None)
    assert again.digest == imported.digest
    moved = dataclasses.replace(imported, source="somewhere")
    digests = {recipe_digest(recipe, make_config(steps=7)) for recipe in (imported, again, moved)}
    assert len(digests) == 1
    assert not (root / IMPORTED / "other" / "optimizer.pt").exists()
    other = import_checkpoint(save_target(source, seed=2), "sibling", root=root, target=None)
    assert recipe_digest(other, make_config(steps=7)) not in digests


def test_a_changed_copy_is_noticed_and_the_original_stands_in(imported, root, source, target):
    copy = root / IMPORTED / "sibling"
    save_target(copy, seed=2)
    assert taken(imported, root, target)
    shutil.rmtree(copy)
    first = taken(imported, root, target)
    save_target(source, seed=3)
    with pytest.raises(DraftError) as refused:
        taken(imported, root, target)
    for words in (str(copy), f"another checkpoint in {source}", imported.digest, "import-draft"):
        assert words in str(refused.value)
    assert read_manifest(root / "drafts" / "sibling") == first


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (with_another_tokenizer, DraftError),
        (lambda folder: with_more_rows(folder, 8), DraftMisfitError),
    ],
)
def test_what_does_not_fit_the_target_is_refused_at_once_and_at_the_latest(
    root, source, target, change, error
):
    change(source)
    with pytest.raises(error):
        import_checkpoint(source, "sibling", root=root, target=target.identity)
    assert not (root / IMPORTED / "sibling").exists()
    recipe = import_checkpoint(source, "sibling", root=root, target=None)
    with pytest.raises(error):
        taken(recipe, root, target)
    assert not (root / "drafts" / "sibling").exists()


def test_what_is_no_whole_model_is_refused_and_an_earlier_copy_stays(imported, root, source):
    before = {p.name: p.read_bytes() for p in (root / IMPORTED / "sibling").iterdir()}
    folders = {"missing": source.parent / "nowhere", "empty": source.parent}
    draft = source.parent / "student"
    shutil.copytree(source, draft)
    (draft / "draft.json").write_text("{}")
    cut = source.parent / "cut"
    shutil.copytree(source, cut)
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-64])
    for folder in (*folders.values(), draft, cut):
        with pytest.raises(DraftError, match=folder.name):
            import_checkpoint(folder, "sibling", root=root, target=None)
    assert {p.name: p.read_bytes() for p in (root / IMPORTED / "sibling").iterdir()} == before


@pytest.fixture
def head_folder(tmp_path, target):
    """A head of the target with output rows of its own, as it is exported."""
    folder = tmp_path / "elsewhere" / "head"
    write_head(noisy_head(target.model, (0, 1), own_head=True), TOKEN_IDS, folder)
    return folder


@pytest.fixture
def snapshot(root, target):
    """The project holds the target's files."""
    return keep_copy(target.directory, target.identity, root / TARGETS)


def as_of_three_layers(folder):
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | {"num_hidden_layers": 3}))


def as_of_a_deeper_target(folder):
    config = json.loads((folder / CONFIG).read_text())
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 2]}
    (folder / CONFIG).write_text(json.dumps(config | layers))


@pytest.mark.usefixtures("snapshot")
def test_a_head_becomes_one_of_ours_with_its_origin_and_its_target(root, target, head_folder):
    (head_folder / "training_state.pt").write_bytes(b"states")
    recipe = import_checkpoint(head_folder, "head", root=root, target=target.identity)
    copies = sorted(file.name for file in (root / IMPORTED / "head").iterdir())
    assert copies == [CONFIG, WEIGHTS]
    shutil.rmtree(head_folder)
    folder = root / "drafts" / "head"
    manifest = take_over(recipe, target.identity, folder, root=root)
    assert read_manifest(folder) == manifest
    assert (manifest.family, manifest.recipe, manifest.corpus_digest) == ("eagle", "head", "")
    assert manifest.target_digest == target.identity.digest
    assert manifest.tokenizer_digest == target.identity.tokenizer_digest
    assert manifest.recipe_digest == recipe_digest(recipe, make_config())
    assert manifest.architecture["layers"] == [0, 1]
    assert manifest.training == {
        "source": recipe.source,
        "files_digest": recipe.digest,
        "max_position_embeddings": 256,
    }
    loaded = load_draft(folder, target.model, target_digest=target.identity.digest)
    assert torch.equal(loaded.token_ids, TOKEN_IDS)
    written = load_file(root / IMPORTED / "head" / WEIGHTS)
    assert torch.equal(loaded.model.get_output_embeddings().weight, written["lm_head.weight"])
    again = take_over(recipe, target.identity, folder, root=root)
    assert again == manifest


@pytest.mark.usefixtures("snapshot")
@pytest.mark.parametrize("change", [as_of_three_layers, as_of_a_deeper_target])
def test_a_head_that_is_refused_leaves_nothing_behind(root, target, head_folder, change):
    change(head_folder)
    with pytest.raises(DraftError, match=str(head_folder)):
        import_checkpoint(head_folder, "head", root=root, target=target.identity)
    assert not (root / IMPORTED).exists()


def test_what_only_the_target_tells_is_refused_when_the_head_is_taken_over(
    root, target, head_folder
):
    as_of_a_deeper_target(head_folder)
    recipe = import_checkpoint(head_folder, "head", root=root, target=None)
    folder = root / "drafts" / "head"
    with pytest.raises(TargetError, match="resolve_target"):
        take_over(recipe, target.identity, folder, root=root)
    keep_copy(target.directory, target.identity, root / TARGETS)
    with pytest.raises(DraftMisfitError, match="ascending inputs of the target's 2 layers"):
        take_over(recipe, target.identity, folder, root=root)
    assert not (root / "drafts").exists()
