"""A whole model as a draft, on a tiny target with a tokenizer."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch

from draftsmith.drafts.causal_lm import describe, identify_causal_lm
from draftsmith.drafts.checkpoint import copy_draft, load_draft
from draftsmith.drafts.manifest import write_manifest
from draftsmith.errors import DraftError, DraftMisfitError
from draftsmith.targets.loading import load_target
from tests.drafts.small_models import make_target
from tests.registry.tiny_models import save_target

TARGET_DIGEST = "a" * 64


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(checkpoint):
    return load_target(checkpoint, dtype="float32").model


@pytest.fixture
def folder(tmp_path):
    """A whole model with its manifest."""
    checkpoint = save_target(tmp_path / "draft", seed=1)
    identity = identify_causal_lm(checkpoint, "float32")
    manifest = describe(identity, recipe="sibling", target_digest=TARGET_DIGEST)
    write_manifest(checkpoint, manifest)
    return checkpoint


def test_it_is_loaded_whole_and_shares_nothing_with_its_target(folder, target):
    draft = load_draft(folder, target, target_digest=TARGET_DIGEST)
    alone = load_target(folder, dtype="float32").model
    ids = torch.arange(3, 9)[None]
    assert torch.equal(draft.model(ids).logits, alone(ids).logits)
    assert draft.token_ids is None
    assert draft.manifest.family == "causal-lm"
    shared = {p.data_ptr() for p in draft.model.parameters()} & {
        p.data_ptr() for p in target.parameters()
    }
    assert not shared


def test_it_drafts_in_the_dtype_of_the_target_at_hand(folder, checkpoint):
    half = load_target(checkpoint, dtype="bfloat16").model
    draft = load_draft(folder, half, target_digest=None)
    assert draft.model.dtype == torch.bfloat16


def test_another_target_is_refused_unless_nobody_asks(folder, target):
    with pytest.raises(DraftError, match=TARGET_DIGEST):
        load_draft(folder, target, target_digest="b" * 64)
    assert load_draft(folder, target, target_digest=None)


def test_other_output_rows_are_refused(folder):
    with pytest.raises(DraftMisfitError, match="48, as the target has"):
        load_draft(folder, make_target("llama"), target_digest=None)


@pytest.mark.parametrize("damage", ["replaced", "cut", "without config"])
def test_a_damaged_model_is_refused_and_not_copied(folder, target, damage, tmp_path):
    weights = folder / "model.safetensors"
    match damage:
        case "replaced":
            other = save_target(tmp_path / "other", seed=2)
            shutil.copyfile(other / "model.safetensors", weights)
        case "cut":
            weights.write_bytes(weights.read_bytes()[:-64])
        case "without config":
            (folder / "config.json").unlink()
    with pytest.raises(DraftError):
        load_draft(folder, target, target_digest=None)
    with pytest.raises(DraftError):
        copy_draft(folder, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_copy_is_the_same_draft(folder, target, tmp_path):
    extra = folder / "additional_chat_templates"
    extra.mkdir()
    (extra / "tools.jinja").write_text("tools")
    manifest = describe(identify_causal_lm(folder, "float32"), recipe="sibling")
    write_manifest(folder, manifest)
    assert copy_draft(folder, tmp_path / "copy") == manifest
    assert (tmp_path / "copy/additional_chat_templates/tools.jinja").read_text() == "tools"
    copied = load_draft(tmp_path / "copy", target, target_digest=None)
    assert dataclasses.asdict(copied.manifest) == dataclasses.asdict(manifest)
