from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from draftsmith.decoding import Engine, Tree, acceptance, attention
from draftsmith.decoding.acceptance import Verdict
from draftsmith.decoding.near_ties import rounding_difference
from draftsmith.decoding.slot_model import SlotModel
from draftsmith.drafts.checkpoint import load_draft
from draftsmith.evaluation import losslessness
from draftsmith.evaluation.losslessness import (
    SelfTest,
    corrupted_control,
    exact_equality,
    near_ties,
    transformers_greedy,
)
from tests.corpus.small_target import MAX_POSITIONS

NUM_PROMPTS = 5


class KeepsEverything(Engine):
    """A faulty engine: its drafts are never rejected."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.verify = losslessness._accept_everything


@pytest.fixture(scope="module")
def questions(prompts):
    return prompts[:NUM_PROMPTS]


@pytest.fixture(scope="module")
def test(stop_ids):
    return SelfTest(draft_length=3, lookup_length=0, num_tokens=12, stop_ids=stop_ids)


@pytest.fixture(scope="module")
def half_pair(target, draft_folders):
    """Target and student in bfloat16."""
    half = copy.deepcopy(target).bfloat16()
    return half, load_draft(draft_folders["student"], half, target_digest=None)


@pytest.mark.parametrize("name", ["student", "trimmed", "random", "whole"])
def test_float32_output_is_that_of_transformers_whatever_the_draft(
    target, drafts, questions, test, name
):
    result = exact_equality(target, drafts[name], questions, test)
    assert result["holds"]
    assert result["num_identical"] == result["num_prompts"] == NUM_PROMPTS
    assert NUM_PROMPTS < result["num_tokens"] <= NUM_PROMPTS * test.num_tokens


def test_trees_are_part_of_the_test_in_both_dtypes(
    target, drafts, half_pair, questions, test, monkeypatch
):
    with_tree = dataclasses.replace(test, tree=Tree.comb([3, 2, 1]))
    result = exact_equality(target, drafts["student"], questions, with_tree)
    assert result["holds"]
    assert result["num_tree_nodes"] == 6
    assert near_ties(*half_pair, questions, with_tree)["holds"]

    def keeps_first_guesses(draws, proposal, tree):
        path = torch.tensor(tree.spine).expand(len(draws), -1) + 1
        return Verdict(proposal.counts, draws.gather(1, path[:, -1:]).squeeze(1), path)

    monkeypatch.setattr(acceptance, "along_tree", keeps_first_guesses)
    assert exact_equality(target, drafts["student"], questions, test)["holds"]
    assert not exact_equality(target, drafts["student"], questions, with_tree)["holds"]
    assert not near_ties(*half_pair, questions, with_tree)["holds"]


def test_rounding_is_measured_over_the_widest_verification(test):
    """A comb of 13 nodes whose spine of 4 grows by one where a neighbour copies five tokens."""
    comb = Tree.comb([6, 4, 2, 1])
    copying = dataclasses.replace(test, draft_length=4, lookup_length=5)
    assert copying.width(comb) == 15
    assert copying.width(None) == 6
    assert dataclasses.replace(copying, lookup_length=0).width(comb) == 14


def test_the_reference_does_not_use_the_engines_attention(
    target, drafts, questions, test, monkeypatch
):
    """A fault of the slot attention must not be in both outputs."""
    sound = attention.slot_attention

    def faulty(module, query, key, value, attention_mask, **keywords):
        result, weights = sound(module, query, key, value, attention_mask, **keywords)
        return -result, weights

    monkeypatch.setattr(attention, "slot_attention", faulty)
    attention.register()
    try:
        assert not exact_equality(target, drafts["student"], questions, test)["holds"]
    finally:
        monkeypatch.undo()
        attention.register()


def test_the_served_dtype_holds_and_counts_its_divergences(half_pair, questions, test):
    result = near_ties(*half_pair, questions, test)
    assert result["holds"]
    assert result["num_prompts"] == NUM_PROMPTS
    assert result["num_identical"] == NUM_PROMPTS - len(result["divergences"])


class RoundsWideForwards(SlotModel):
    """Moves the two largest logits, by -0.5 and 0.25, in forwards of a verification's width."""

    width = 4

    def forward(self, tokens, positions, **settings):
        logits = super().forward(tokens, positions, **settings)
        if tokens.shape[1] == self.width:
            move = torch.tensor([-0.5, 0.25]).expand(*logits.shape[:-1], 2)
            logits.scatter_add_(-1, logits.topk(2).indices, move)
        return logits


def test_the_tolerance_is_the_measured_change_of_the_margin(
    target, drafts, questions, test, monkeypatch
):
    fine = near_ties(target, drafts["student"], questions, test)
    assert fine["tolerance"] < 1e-4
    assert RoundsWideForwards.width == test.draft_length + 1
    monkeypatch.setattr("draftsmith.decoding.near_ties.SlotModel", RoundsWideForwards)
    coarse = near_ties(target, drafts["student"], questions, test)
    assert coarse["tolerance"] == pytest.approx(0.75, abs=1e-4)


def test_the_rounding_difference_in_float32_is_next_to_nothing(target, questions):
    responses = {name: [5, 6, 7] for name, _ in questions}
    assert rounding_difference(target, questions, responses, width=1) < 1e-4


def test_an_engine_that_keeps_every_draft_fails_both_tests(
    target, drafts, questions, test, monkeypatch
):
    monkeypatch.setattr(losslessness, "Engine", KeepsEverything)
    assert not exact_equality(target, drafts["student"], questions, test)["holds"]
    result = near_ties(target, drafts["student"], questions, test)
    assert not result["holds"]
    assert max(entry["gap"] for entry in result["divergences"]) > result["tolerance"]
    assert {entry["prompt_id"] for entry in result["divergences"]} <= {
        name for name, _ in questions
    }


def divert(monkeypatch, change):
    """Let the speculative output, and only that one, pass through `change`."""
    sound = losslessness.greedy

    def changed(target, draft, *arguments, **settings):
        outputs = sound(target, draft, *arguments, **settings)
        return outputs if draft is None else {n: change(ids) for n, ids in outputs.items()}

    monkeypatch.setattr(losslessness, "greedy", changed)


@torch.inference_mode()
def test_a_divergence_reports_its_place_and_the_targets_margin(
    target, drafts, questions, test, monkeypatch
):
    plain = losslessness.greedy(target, None, questions, test)
    other = 9
    divert(monkeypatch, lambda ids: [*ids[:2], other, *ids[3:]])
    result = near_ties(target, drafts["student"], questions, test)
    assert not result["holds"]
    assert result["num_identical"] == 0
    for (name, prompt_ids), entry in zip(questions, result["divergences"], strict=True):
        inputs = torch.tensor([prompt_ids + plain[name][:2]])
        logits = target(input_ids=inputs).logits[0, -1]
        margin = float(logits[plain[name][2]] - logits[other])
        assert (entry["prompt_id"], entry["position"]) == (name, 2)
        assert entry["gap"] == pytest.approx(margin, abs=1e-4)


def test_a_divergence_between_two_equally_likely_tokens_is_excused(
    target, questions, test, draft_folders, monkeypatch
):
    """Two tokens with one embedding row tie exactly in the target."""
    tied = copy.deepcopy(target)
    plain = losslessness.greedy(tied, None, questions, test)
    common, twin = plain[questions[0][0]][0], 9
    assert all(twin not in ids for ids in plain.values())
    weight = tied.get_input_embeddings().weight
    with torch.no_grad():
        weight[twin] = weight[common]
    draft = load_draft(draft_folders["student"], tied, target_digest=None)
    low, high = sorted((common, twin))
    divert(monkeypatch, lambda ids: [high if token == low else token for token in ids])
    result = near_ties(tied, draft, questions, test)
    assert len(result["divergences"]) > 0
    assert {entry["gap"] for entry in result["divergences"]} == {0.0}
    assert result["holds"]


def test_an_output_that_stops_early_is_never_excused(target, drafts, questions, test, monkeypatch):
    divert(monkeypatch, lambda ids: ids[:-1])
    result = near_ties(target, drafts["student"], questions, test)
    assert not result["holds"]
    assert all(entry["position"] > 0 for entry in result["divergences"])


@pytest.mark.parametrize("name", ["student", "random", "whole"])
def test_the_corrupted_control_is_noticed_even_for_a_draft_that_never_errs(
    target, drafts, questions, test, name
):
    control = corrupted_control(target, drafts[name], questions, test)
    assert control["detected"]
    assert control["num_identical"] < control["num_prompts"] == NUM_PROMPTS


def test_a_greedy_reference_stops_at_a_stop_id_and_at_the_limit(target, prompts, stop_ids):
    _, prompt_ids = prompts[0]
    whole = transformers_greedy(target, prompt_ids, SelfTest(1, 0, 60, stop_ids))
    assert whole[-1] in stop_ids
    assert not set(whole[:-1]) & set(stop_ids)
    assert len(whole) < 60 < MAX_POSITIONS - len(prompt_ids)
    assert transformers_greedy(target, prompt_ids, SelfTest(1, 0, 4, stop_ids)) == whole[:4]
