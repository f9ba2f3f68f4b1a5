from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.artifacts import atomic_directory
from draftsmith.decoding import attention
from draftsmith.decoding.slot_model import SlotModel
from draftsmith.drafts.checkpoint import (
    VOCABULARY,
    WEIGHTS,
    copy_draft,
    load_draft,
    save_draft,
)
from draftsmith.drafts.manifest import read_manifest
from draftsmith.drafts.student import build_student, own_parameter_names
from draftsmith.errors import ArtifactError, DraftError
from tests.drafts.small_models import (
    KINDS,
    TARGET_DIGEST,
    VOCAB_SIZE,
    make_lineage,
    make_target,
    save_small,
    some_tokens,
)
from tests.full_disk import files_up_to


def logits_of(model):
    with torch.no_grad():
        return model(input_ids=some_tokens()).logits


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_comes_back_bit_for_bit(kind, trimmed, tied, token_ids, tmp_path):
    target = make_target(kind, tied=tied)
    chosen = token_ids if trimmed else None
    student, manifest = save_small(tmp_path, target, chosen)
    draft = load_draft(tmp_path, target, target_digest=TARGET_DIGEST)
    names = own_parameter_names(student)
    ours, theirs = draft.model.state_dict(), student.state_dict()
    assert own_parameter_names(draft.model) == names
    assert all(torch.equal(ours[name], theirs[name]) for name in names)
    assert torch.equal(logits_of(draft.model), logits_of(student))
    assert draft.manifest == manifest
    assert (draft.token_ids is None) if chosen is None else torch.equal(draft.token_ids, chosen)


@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_head_are_not_stored(tied, tmp_path):
    target = make_target("llama", tied=tied)
    save_small(tmp_path, target)
    stored = load_file(tmp_path / WEIGHTS)
    assert not [name for name in stored if "embed" in name or "lm_head" in name]
    size = sum(tensor.numel() for tensor in stored.values())
    assert size == read_manifest(tmp_path).architecture["num_trained_parameters"]
    draft = load_draft(tmp_path, target, target_digest=TARGET_DIGEST)
    assert draft.model.get_input_embeddings() is target.get_input_embeddings()
    assert draft.model.get_output_embeddings() is target.get_output_embeddings()


def test_weights_trained_in_float32_are_stored_in_the_targets_dtype(tmp_path):
    target = make_target("llama", dtype=torch.bfloat16)
    student = build_student(target, (0,), None)
    for parameter in student.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float() + 1e-4
    save_draft(tmp_path, student, None, lineage=make_lineage((0,)), training={})
    stored = load_file(tmp_path / WEIGHTS)
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    draft = load_draft(tmp_path, target, target_digest=TARGET_DIGEST)
    assert {p.dtype for p in draft.model.parameters()} == {torch.bfloat16}


def test_saving_twice_gives_one_digest(llama, token_ids, tmp_path):
    _, first = save_small(tmp_path / "a", llama, token_ids)
    _, second = save_small(tmp_path / "b", llama, token_ids)
    _, other = save_small(tmp_path / "c", llama, token_ids, noise=0.02)
    assert first == second
    assert first.digest != other.digest


def test_a_draft_without_room_is_one_error_and_the_old_one_stays(saved, llama, token_ids):
    before = contents(saved)
    with (
        files_up_to(len(before[WEIGHTS]) - 1),
        pytest.raises(ArtifactError, match=r"File too large.*free disk space"),
        atomic_directory(saved) as folder,
    ):
        save_small(folder, llama, token_ids, noise=0.02)
    assert contents(saved) == before
    assert list(saved.parent.iterdir()) == [saved]


def test_another_target_is_refused_by_name(saved, llama):
    with pytest.raises(DraftError) as caught:
        load_draft(saved, llama, target_digest="9" * 64)
    assert "9" * 64 in str(caught.value)
    assert TARGET_DIGEST in str(caught.value)
    load_draft(saved, llama, target_digest=None)


def test_truncated_weights_are_refused(saved, llama):
    path = saved / WEIGHTS
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DraftError, match=WEIGHTS):
        load_draft(saved, llama, target_digest=TARGET_DIGEST)


def test_a_flipped_byte_is_noticed(saved, llama):
    path = saved / WEIGHTS
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(DraftError, match=WEIGHTS):
        load_draft(saved, llama, target_digest=TARGET_DIGEST)


def swap(folder):
    ids = load_file(folder / VOCABULARY)["token_ids"]
    save_file({"token_ids": ids.flip(0).contiguous()}, folder / VOCABULARY)


def truncate(folder):
    path = folder / VOCABULARY
    path.write_bytes(path.read_bytes()[:-10])


@pytest.mark.parametrize(
    "damage",
    [
        swap,
        truncate,
        lambda folder: (folder / VOCABULARY).unlink(),
        lambda folder: save_file({"other": torch.zeros(1)}, folder / VOCABULARY),
    ],
    ids=["swapped", "truncated", "missing", "renamed"],
)
def test_another_vocabulary_map_is_refused(saved, llama, tmp_path, damage):
    damage(saved)
    with pytest.raises(DraftError, match=VOCABULARY):
        load_draft(saved, llama, target_digest=TARGET_DIGEST)
    with pytest.raises(DraftError, match=VOCABULARY):
        copy_draft(saved, tmp_path / "copy")


def test_a_target_of_another_width_is_refused(saved):
    wider = make_target("llama", hidden_size=64)
    with pytest.raises(DraftError, match="hidden size 32"):
        load_draft(saved, wider, target_digest=None)


def test_a_target_with_fewer_tokens_than_the_map_is_refused(saved):
    smaller = make_target("llama", vocab_size=40)
    with pytest.raises(DraftError, match="vocabulary map"):
        load_draft(saved, smaller, target_digest=None)


def test_a_configuration_of_other_layers_is_refused(saved, llama):
    config = (saved / "config.json").read_text()
    assert '"num_hidden_layers": 2' in config
    changed = config.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3')
    (saved / "config.json").write_text(changed)
    with pytest.raises(DraftError, match="another configuration"):
        load_draft(saved, llama, target_digest=TARGET_DIGEST)


def test_a_copy_is_the_draft_byte_for_byte(saved, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "left-over").write_text("of an older draft")
    manifest = copy_draft(saved, copy)
    assert contents(copy) == contents(saved)
    assert manifest == read_manifest(saved)


def test_a_damaged_draft_is_not_copied_and_the_old_copy_stays(saved, tmp_path):
    copy_draft(saved, tmp_path / "copy")
    before = contents(tmp_path / "copy")
    data = bytearray((saved / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (saved / WEIGHTS).write_bytes(bytes(data))
    with pytest.raises(DraftError, match=WEIGHTS):
        copy_draft(saved, tmp_path / "copy")
    assert contents(tmp_path / "copy") == before


@pytest.mark.parametrize("kind", KINDS)
def test_under_the_whole_head_the_trimmed_rows_are_the_same(kind, token_ids, tmp_path):
    target = make_target(kind)
    save_small(tmp_path, target, token_ids)
    draft = load_draft(tmp_path, target, target_digest=TARGET_DIGEST)
    full = draft.as_causal_lm(target)
    assert logits_of(full).shape[-1] == VOCAB_SIZE
    assert logits_of(draft.model).shape[-1] == len(token_ids)
    torch.testing.assert_close(logits_of(full)[..., token_ids], logits_of(draft.model))


def test_loading_and_driving_one_model_switches_no_other(saved, llama, tmp_path):
    shutil.copytree(saved, tmp_path / "twin")
    SlotModel(llama)
    first = load_draft(saved, llama, target_digest=TARGET_DIGEST)
    second = load_draft(tmp_path / "twin", llama, target_digest=TARGET_DIGEST)
    full = first.as_causal_lm(llama)
    models = (first.model, second.model, full)
    assert [m.config._attn_implementation for m in models] == ["sdpa"] * 3
    assert llama.config._attn_implementation == attention.NAME
    SlotModel(second.model)
    assert [m.config._attn_implementation for m in models] == ["sdpa", attention.NAME, "sdpa"]


def test_loading_leaves_the_files_alone(saved, llama):
    before = contents(saved)
    load_draft(saved, llama, target_digest=TARGET_DIGEST)
    assert contents(saved) == before


def test_another_configuration_is_refused(saved, llama):
    path = saved / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    with pytest.raises(DraftError, match="another configuration"):
        load_draft(saved, llama, target_digest=None)


def test_the_version_that_wrote_the_configuration_does_not_count(saved, llama):
    path = saved / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"transformers_version": "5.99.0"}))
    load_draft(saved, llama, target_digest=None)
