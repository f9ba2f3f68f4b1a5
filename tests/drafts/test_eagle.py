"""The feature head: how it starts, what it reads, and what it cannot be built on."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from draftsmith.decoding import DraftModelProposer, FeatureProposer
from draftsmith.decoding.features import layer_inputs
from draftsmith.decoding.slot_model import SlotModel
from draftsmith.drafts.checkpoint import WEIGHTS, copy_draft, load_draft, save_draft
from draftsmith.drafts.eagle_start import build_head, resolve_feature_layers
from draftsmith.drafts.manifest import read_manifest
from draftsmith.drafts.student import build_student, head_logits, own_parameter_names
from draftsmith.errors import DraftError, DraftMisfitError
from tests.decoding.conftest import _build as build_family
from tests.decoding.conftest import _config as family_config
from tests.drafts.small_models import TARGET_DIGEST, make_lineage, make_target, some_tokens

LAYERS = (1, 2, 2)
SUPPORTED = ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3"]


def any_target(kind):
    """Of any class that the decoder's tests know, two layers."""
    return build_family(kind).reference


@pytest.fixture
def saved_head(llama, token_ids, tmp_path):
    head = build_head(llama, LAYERS, token_ids)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name in own_parameter_names(head):
            weight = head.get_parameter(name)
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
    folder = tmp_path / "head"
    folder.mkdir()
    save_draft(folder, head, token_ids, lineage=make_lineage(LAYERS), training={"unroll": 3})
    return folder, head


@torch.no_grad()
def features_of(target, tokens, layers=LAYERS):
    with layer_inputs(target, layers) as found:
        target(input_ids=tokens)
    return torch.cat(found, -1)


@pytest.mark.parametrize(
    ("num_layers", "expected"), [(30, (6, 18, 29)), (4, (1, 2, 3)), (2, (0, 1, 1)), (1, (0, 0, 0))]
)
def test_unnamed_layers_are_a_low_a_middle_and_the_last_one(num_layers, expected):
    assert resolve_feature_layers((), num_layers) == expected


def test_negative_layers_count_from_the_end():
    assert resolve_feature_layers((0, -1), 6) == (0, 5)


@pytest.mark.parametrize("layers", [(6,), (-7,)])
def test_layers_that_the_target_lacks_are_refused(layers):
    with pytest.raises(DraftError, match="6 layers"):
        resolve_feature_layers(layers, 6)


def test_features_are_what_the_layers_read(llama):
    tokens = some_tokens()
    features = features_of(llama, tokens)
    with torch.no_grad():
        states = llama(input_ids=tokens, output_hidden_states=True).hidden_states
    assert torch.equal(features, torch.cat([states[layer] for layer in LAYERS], -1))
    assert not [m for m in llama.modules() if m._forward_pre_hooks], "hooks are left"


@pytest.mark.parametrize("kind", SUPPORTED)
def test_it_starts_in_the_targets_own_space(kind):
    """Without the half for embeddings it is the target's last layer over its last feature."""
    target = any_target(kind)
    head = build_head(target, (0, 1), None)
    hidden = target.config.hidden_size
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(head.body.layers[0].self_attn, name).weight.data[:, :hidden] = 0
    tokens = some_tokens()
    with torch.no_grad():
        own = head.run(tokens, head.fuse(features_of(target, tokens, (0, 1))), use_cache=False)
        expected = target(input_ids=tokens).logits
        torch.testing.assert_close(head.logits(own), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", SUPPORTED)
def test_both_halves_matter(kind):
    target = any_target(kind)
    head = build_head(target, (0, 1), None)
    tokens = some_tokens()
    with torch.no_grad():
        features = head.fuse(features_of(target, tokens, (0, 1)))
        plain = head.run(tokens, features, use_cache=False)
        other_tokens = head.run(tokens.flip(1), features, use_cache=False)
        other_features = head.run(tokens, features.flip(1), use_cache=False)
    assert not torch.allclose(plain, other_tokens, atol=1e-3)
    assert not torch.allclose(plain, other_features, atol=1e-3)


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "olmo2", "phi3"])
def test_a_target_of_another_shape_is_refused_by_name(kind):
    target = any_target(kind)
    with pytest.raises(DraftError, match=type(target).__name__) as caught:
        build_head(target, (0, 1), None)
    assert "family student" in str(caught.value)


def test_a_target_that_scales_its_inputs_is_refused():
    target = any_target("granite")
    target.base_model.embedding_multiplier = 2.0
    target.config.embedding_multiplier = 2.0
    with pytest.raises(DraftError, match="scales the embeddings"):
        build_head(target, (0, 1), None)


def test_last_hidden_gives_the_law_of_the_next_token(llama, token_ids):
    """Position s is predicted by the entry before it, which holds token s."""
    head = build_head(llama, LAYERS, token_ids)
    tokens = some_tokens()
    with torch.no_grad():
        features = features_of(llama, tokens)
        hidden = head.last_hidden(tokens, features)
        own = head.run(tokens[:, 1:], head.fuse(features)[:, :-1], use_cache=False)
    assert hidden.shape == (*tokens.shape, 32)
    assert not hidden[:, 0].any()
    torch.testing.assert_close(head_logits(head, hidden[:, 1:]), head.logits(own))


def test_it_can_be_driven_over_a_slot_cache(llama):
    head = build_head(llama, LAYERS, None)
    tokens = some_tokens()[:1]
    with torch.no_grad():
        features = head.fuse(features_of(llama, tokens))
        expected = head.logits(head.run(tokens, features, use_cache=False))
        slots = SlotModel(copy.deepcopy(head))
        slots.reserve(rows=1, slots=16)
        places = torch.arange(tokens.shape[1])[None]
        cut = tokens.shape[1] // 2
        logits = [
            slots.run(
                tokens[:, part], places[:, part], span=tokens.shape[1], features=features[:, part]
            ).logits
            for part in (slice(0, cut), slice(cut, None))
        ]
    torch.testing.assert_close(torch.cat(logits, 1), expected)


def test_a_head_comes_back_bit_for_bit(saved_head, llama, token_ids):
    folder, head = saved_head
    draft = load_draft(folder, llama, target_digest=TARGET_DIGEST)
    assert draft.manifest.family == "eagle"
    assert draft.manifest.architecture["layers"] == list(LAYERS)
    assert draft.model.feature_layers == LAYERS
    assert torch.equal(draft.token_ids, token_ids)
    tokens = some_tokens()
    theirs, ours = draft.last_hidden(llama, tokens)
    with torch.no_grad():
        assert torch.equal(ours, head.last_hidden(tokens, features_of(llama, tokens)))
        assert torch.equal(theirs, llama.base_model(input_ids=tokens).last_hidden_state)


def test_its_embedding_and_output_rows_are_the_targets_and_not_stored(saved_head, llama):
    folder, _ = saved_head
    stored = load_file(folder / WEIGHTS)
    assert not [name for name in stored if "embed_tokens" in name or "lm_head" in name]
    size = sum(tensor.numel() for tensor in stored.values())
    assert size == read_manifest(folder).architecture["num_trained_parameters"]
    draft = load_draft(folder, llama, target_digest=TARGET_DIGEST)
    assert draft.model.get_input_embeddings() is llama.get_input_embeddings()


def test_the_target_keeps_its_norm_and_layers(llama):
    before = {name: tensor.clone() for name, tensor in llama.state_dict().items()}
    head = build_head(llama, LAYERS, None)
    assert llama.base_model.norm is not head.norm
    assert {n: t.shape for n, t in llama.state_dict().items()} == {
        n: t.shape for n, t in before.items()
    }
    assert all(torch.equal(llama.state_dict()[name], before[name]) for name in before)


def test_a_flipped_byte_is_noticed(saved_head, llama, tmp_path):
    folder, _ = saved_head
    data = bytearray((folder / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (folder / WEIGHTS).write_bytes(bytes(data))
    with pytest.raises(DraftError, match=WEIGHTS):
        load_draft(folder, llama, target_digest=None)
    with pytest.raises(DraftError, match=WEIGHTS):
        copy_draft(folder, tmp_path / "copy")


def test_a_target_with_fewer_layers_than_it_reads_is_a_misfit(saved_head):
    folder, _ = saved_head
    with pytest.raises(DraftMisfitError, match="for a target of 2"):
        load_draft(folder, make_target("llama", num_layers=2), target_digest=None)


def test_a_joined_draft_says_how_it_drafts(saved_head, saved, llama):
    folder, _ = saved_head
    head = load_draft(folder, llama, target_digest=None)
    student = load_draft(saved, llama, target_digest=None)
    assert isinstance(head.proposer(), FeatureProposer)
    assert isinstance(student.proposer(), DraftModelProposer)
    assert student.is_causal_lm
    assert not head.is_causal_lm
    with pytest.raises(DraftError, match="family eagle"):
        head.as_causal_lm(llama)


def test_a_head_of_experts_comes_back_bit_for_bit(tmp_path):
    target = any_target("qwen3_moe")
    head = build_head(target, (0, 1), None)
    save_draft(tmp_path, head, None, lineage=make_lineage((0, 1)), training={})
    draft = load_draft(tmp_path, target, target_digest=TARGET_DIGEST)
    tokens = some_tokens()
    with torch.no_grad():
        expected = head.last_hidden(tokens, features_of(target, tokens, (0, 1)))
    assert torch.equal(draft.last_hidden(target, tokens)[1], expected)


@pytest.mark.parametrize("dense", [0, 1])
def test_layers_of_several_kinds_are_refused_where_another_kind_would_take_their_place(dense):
    config = family_config("qwen3_moe", 48, 64)
    config.mlp_only_layers = [dense]
    target = AutoModelForCausalLM.from_config(config)
    with pytest.raises(DraftError, match=r"found no model\.layers\.1\.mlp\..* family medusa"):
        build_head(target, (0, 1), None)
    assert build_student(target, (0, 1), None).config.num_hidden_layers == 2
    with pytest.raises(DraftError, match=r"found no model\.layers\.1\.mlp\..* name other layers"):
        build_student(target, (1,), None)
