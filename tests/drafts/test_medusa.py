"""Heads on the last hidden state: how they start, what they say, and what is stored of them."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import silu

from draftsmith.decoding import MedusaProposer
from draftsmith.decoding.features import layer_inputs
from draftsmith.drafts.checkpoint import WEIGHTS, load_draft, save_draft
from draftsmith.drafts.manifest import draft_digest, read_manifest
from draftsmith.drafts.medusa import HeadShape, build_heads
from draftsmith.drafts.student import head_logits, own_parameter_names
from draftsmith.errors import DraftError, DraftMisfitError
from draftsmith.evaluation.profiling import forward_costs
from tests.decoding.conftest import _CLASSES
from tests.decoding.conftest import _build as build_family
from tests.drafts.small_models import (
    NUM_LAYERS,
    TARGET_DIGEST,
    VOCAB_SIZE,
    make_lineage,
    make_target,
    some_tokens,
)

ANY_KIND = sorted([*_CLASSES, "gpt2"])
SHAPE = HeadShape(num_heads=3, num_blocks=2, own_heads=False)
OWN = dataclasses.replace(SHAPE, own_heads=True)


@torch.no_grad()
def states_of(target, tokens):
    return target.base_model(input_ids=tokens).last_hidden_state


def changed_heads(target, shape=SHAPE, token_ids=None):
    """Heads that guess other things than the target's next token, each its own."""
    heads = build_heads(target, shape, token_ids)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name in own_parameter_names(heads):
            weight = heads.get_parameter(name)
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
    return heads


@pytest.fixture(params=[SHAPE, OWN], ids=["targets_rows", "own_rows"])
def saved_heads(request, llama, token_ids, tmp_path):
    heads = changed_heads(llama, request.param, token_ids)
    folder = tmp_path / "heads"
    folder.mkdir()
    save_draft(folder, heads, token_ids, lineage=make_lineage(()), training={})
    return folder, heads


@pytest.mark.parametrize("own_heads", [False, True])
@pytest.mark.parametrize("kind", ANY_KIND)
def test_every_head_starts_as_the_targets_own_law(kind, own_heads):
    target = build_family(kind).reference
    heads = build_heads(target, dataclasses.replace(SHAPE, own_heads=own_heads), None)
    tokens = some_tokens()
    with torch.no_grad():
        logits = heads.logits(heads.run(states_of(target, tokens), 3))
        expected = target(input_ids=tokens).logits
    assert logits.shape == (*tokens.shape, 3, expected.shape[-1])
    for head in range(3):
        torch.testing.assert_close(logits[:, :, head], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ANY_KIND)
def test_the_last_hidden_state_can_be_read_off_any_forward(kind):
    """Whether or not the forward makes logits of all positions."""
    target = build_family(kind).reference
    tokens = some_tokens()
    num_layers = target.config.num_hidden_layers
    with torch.no_grad():
        for options in ({}, {"logits_to_keep": torch.tensor([8])}):
            with layer_inputs(target, (0, num_layers)) as found:
                logits = target(input_ids=tokens, **options).logits
            assert found[0].shape == found[1].shape
            kept = found[1][:, -logits.shape[1] :]
            torch.testing.assert_close(head_logits(target, kept), logits, atol=1e-4, rtol=1e-4)
    assert not [m for m in target.modules() if m._forward_hooks or m._forward_pre_hooks]


def test_a_head_is_residual_blocks_under_the_output_rows(llama, token_ids):
    heads = changed_heads(llama, SHAPE, token_ids)
    hidden = states_of(llama, some_tokens())
    with torch.no_grad():
        found = heads.logits(heads.run(hidden, 2))
        for head in range(2):
            state = hidden
            for block in range(2):
                linear = heads.get_submodule(f"heads.{head}.{block}.linear")
                state = state + silu(state @ linear.weight.T + linear.bias)
            expected = state @ llama.lm_head.weight[token_ids].T
            torch.testing.assert_close(found[:, :, head], expected, atol=1e-4, rtol=1e-4)


def test_last_hidden_gives_the_first_heads_law_of_the_next_token(llama):
    """The law behind position t is the head's at t - 1; nothing predicts the second token."""
    heads = changed_heads(llama, OWN)
    theirs = states_of(llama, some_tokens())
    with torch.no_grad():
        own = heads.last_hidden(theirs)
        expected = heads.logits(heads.run(theirs, 1))[:, :-1, 0]
    assert not own[:, 0].any()
    torch.testing.assert_close(heads.logits_of(own[:, 1:], 0), expected)


def test_heads_come_back_bit_for_bit(saved_heads, llama, token_ids):
    folder, heads = saved_heads
    draft = load_draft(folder, llama, target_digest=TARGET_DIGEST)
    assert draft.model.shape == heads.shape
    assert draft.model.feature_layers == (NUM_LAYERS,)
    assert torch.equal(draft.token_ids, token_ids)
    tokens = some_tokens()
    theirs, ours = draft.last_hidden(llama, tokens)
    assert torch.equal(theirs, states_of(llama, tokens))
    with torch.no_grad():
        assert torch.equal(ours, heads.last_hidden(theirs))
        assert torch.equal(draft.logits(ours), heads.logits_of(ours, 0))
        states = heads.run(theirs, 3)
        assert torch.equal(draft.model.logits(states), heads.logits(states))


def test_only_what_is_its_own_is_stored(saved_heads, llama):
    folder, heads = saved_heads
    stored = load_file(folder / WEIGHTS)
    has_rows = heads.shape.own_heads
    assert any(name.startswith("rows.") for name in stored) is has_rows
    assert not [name for name in stored if "embedding" in name or "lm_head" in name]
    size = sum(tensor.numel() for tensor in stored.values())
    assert size == read_manifest(folder).architecture["num_trained_parameters"]
    assert size == 3 * (2 * (32 * 32 + 32) + has_rows * 12 * 32)
    draft = load_draft(folder, llama, target_digest=TARGET_DIGEST)
    assert draft.model.get_input_embeddings() is llama.get_input_embeddings()


def test_the_shape_is_part_of_what_the_heads_are(saved_heads, llama):
    folder, heads = saved_heads
    manifest = read_manifest(folder)
    assert manifest.family == "medusa"
    assert manifest.architecture["heads"] == dataclasses.asdict(heads.shape)
    assert manifest.architecture["layers"] == []
    others = dict(manifest.architecture, heads=dataclasses.asdict(heads.shape) | {"num_heads": 2})
    weights, vocabulary = manifest.weights_digest, manifest.vocabulary_digest
    assert draft_digest(weights, vocabulary, manifest.architecture) == manifest.digest
    assert draft_digest(weights, vocabulary, others) != manifest.digest
    text = json.loads((folder / "draft.json").read_text())
    (folder / "draft.json").write_text(json.dumps(text | {"architecture": others}))
    with pytest.raises(DraftMisfitError, match=r"heads\.2"):
        load_draft(folder, llama, target_digest=None)


def test_own_rows_do_not_go_under_another_number_of_rows(llama, tmp_path):
    heads = changed_heads(llama, OWN)
    save_draft(tmp_path, heads, None, lineage=make_lineage(()), training={})
    other = make_target("llama", vocab_size=VOCAB_SIZE + 16)
    with pytest.raises(DraftMisfitError, match=r"rows\.0"):
        load_draft(tmp_path, other, target_digest=None)


def test_a_target_of_another_depth_can_be_joined(saved_heads):
    """They are about no layer but the state behind the last one."""
    folder, _ = saved_heads
    target = make_target("llama", num_layers=2)
    draft = load_draft(folder, target, target_digest=None)
    assert draft.model.feature_layers == (2,)


def test_the_target_stays_as_it_is(llama):
    before = {name: tensor.clone() for name, tensor in llama.state_dict().items()}
    implementation = llama.config._attn_implementation
    heads = changed_heads(llama, OWN)
    heads.set_attn_implementation("eager")
    assert llama.config._attn_implementation == implementation
    assert all(torch.equal(llama.state_dict()[name], before[name]) for name in before)
    assert heads.rows[0].weight.requires_grad
    assert not llama.lm_head.weight.requires_grad


def test_a_joined_draft_says_how_it_drafts(saved_heads, llama):
    folder, _ = saved_heads
    draft = load_draft(folder, llama, target_digest=None)
    assert isinstance(draft.proposer(), MedusaProposer)
    assert not draft.is_causal_lm
    with pytest.raises(DraftError, match="family medusa"):
        draft.as_causal_lm(llama)


@pytest.mark.parametrize("kind", ANY_KIND)
def test_its_step_can_be_timed_like_a_models(kind):
    target = build_family(kind).target
    heads = build_heads(target, OWN, None)
    costs = forward_costs(target, heads, [4], batch_size=2, context=16, repeats=1)
    assert costs.draft_step_ms > 0
