from __future__ import annotations

import pytest
import torch
from torch import nn

from draftsmith.decoding import attention
from draftsmith.decoding.slot_model import SlotModel
from draftsmith.drafts.student import (
    build_student,
    check_head,
    head_logits,
    layer_prefix,
    num_trained_parameters,
    own_parameter_names,
    resolve_layers,
    student_config,
)
from draftsmith.errors import DraftError
from tests.drafts.small_models import NUM_LAYERS, VOCAB_SIZE, make_target, some_tokens

ALL_LAYERS = tuple(range(NUM_LAYERS))


def logits_of(model, tokens=None):
    with torch.no_grad():
        return model(input_ids=some_tokens() if tokens is None else tokens).logits


def test_negative_layers_count_from_the_end():
    assert resolve_layers([0, -1], 5) == (0, 4)
    assert resolve_layers([-5, -2], 5) == (0, 3)
    assert resolve_layers([3, 1], 5) == (3, 1)


@pytest.mark.parametrize("layers", [[5], [-6], [0, 9], [1, 1], [0, -5]])
def test_layers_outside_the_target_or_named_twice_are_refused(layers):
    with pytest.raises(DraftError, match="5 layers") as caught:
        resolve_layers(layers, 5)
    assert str(layers) in str(caught.value)


def test_a_student_of_all_layers_is_its_target(target):
    student = build_student(target, ALL_LAYERS, None)
    assert torch.equal(logits_of(student), logits_of(target))


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_target_gives_the_same_student(tied):
    target = make_target("llama", tied=tied)
    student = build_student(target, ALL_LAYERS, None)
    assert torch.equal(logits_of(student), logits_of(target))
    assert (target.get_output_embeddings().weight is target.get_input_embeddings().weight) is tied


def test_a_trimmed_student_of_all_layers_gives_the_targets_rows(target, token_ids):
    student = build_student(target, ALL_LAYERS, token_ids)
    head = student.get_output_embeddings()
    assert torch.equal(head.weight, target.get_output_embeddings().weight[token_ids])
    torch.testing.assert_close(logits_of(student), logits_of(target)[..., token_ids])


def test_the_bias_of_a_head_is_trimmed_alike(llama, token_ids):
    llama.lm_head = nn.Linear(32, VOCAB_SIZE)
    student = build_student(llama, ALL_LAYERS, token_ids)
    assert torch.equal(student.get_output_embeddings().bias, llama.lm_head.bias[token_ids])
    torch.testing.assert_close(logits_of(student), logits_of(llama)[..., token_ids])


def test_the_embedding_is_the_targets_own_module(target, token_ids):
    student = build_student(target, (0,), token_ids)
    assert student.get_input_embeddings() is target.get_input_embeddings()
    assert build_student(target, (0,), None).get_output_embeddings() is (
        target.get_output_embeddings()
    )


def test_layers_are_taken_in_the_order_that_is_named(target):
    student = build_student(target, (2, 0), None)
    prefix = layer_prefix(target)
    ours, theirs = student.state_dict(), target.state_dict()
    names = [n.removeprefix(f"{prefix}0.") for n in ours if n.startswith(f"{prefix}0.")]
    assert names
    for name in names:
        assert torch.equal(ours[f"{prefix}0.{name}"], theirs[f"{prefix}2.{name}"])
        assert torch.equal(ours[f"{prefix}1.{name}"], theirs[f"{prefix}0.{name}"])


def test_only_layers_and_norms_are_its_own_and_trained(target, token_ids):
    student = build_student(target, (0, 2), token_ids)
    own = set(own_parameter_names(student))
    trained = {name for name, p in student.named_parameters() if p.requires_grad}
    shared = {
        id(p)
        for module in (student.get_input_embeddings(), student.get_output_embeddings())
        for p in module.parameters()
    }
    assert own == trained
    assert not shared & {id(p) for n, p in student.named_parameters() if n in own}
    count = sum(p.numel() for p in student.parameters() if p.requires_grad)
    assert num_trained_parameters(student) == count


def test_training_a_student_leaves_its_target_alone(target, token_ids):
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    student = build_student(target, (0, 2), token_ids)
    with torch.no_grad():
        for parameter in student.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)
    assert all(torch.equal(before[name], t) for name, t in target.state_dict().items())


def test_lists_with_an_entry_a_layer_are_cut_alike():
    target = make_target("gemma3")
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert target.config.layer_types == kinds
    student = build_student(target, (2, 1), None)
    assert student.config.layer_types == ["sliding_attention", "full_attention"]
    assert student.config.num_hidden_layers == 2
    assert target.config.layer_types == kinds


def test_a_list_of_ids_is_no_list_of_layers():
    config = make_target("llama", eos_token_id=[1, 2, 3]).config
    assert student_config(config, (0,)).eos_token_id == [1, 2, 3]


def test_the_targets_configuration_is_left_alone(target):
    before = target.config.to_dict()
    build_student(target, (0,), None)
    assert target.config.to_dict() == before


def test_neither_model_switches_the_attention_of_the_other(target):
    student = build_student(target, (0, 2), None)
    other = build_student(target, (0, 2), None)
    SlotModel(student)
    assert student.config._attn_implementation == attention.NAME
    assert target.config._attn_implementation == "sdpa"
    assert other.config._attn_implementation == "sdpa"
    SlotModel(target)
    assert other.config._attn_implementation == "sdpa"


def test_a_student_keeps_the_targets_dtype():
    student = build_student(make_target("llama", dtype=torch.bfloat16), (0,), None)
    assert {p.dtype for p in student.parameters()} == {torch.bfloat16}


def test_logits_follow_from_hidden_states(target):
    with torch.no_grad():
        hidden = target.base_model(input_ids=some_tokens()).last_hidden_state
    torch.testing.assert_close(head_logits(target, hidden), logits_of(target))
    check_head(target, some_tokens(rows=1))


def test_capped_logits_are_capped():
    target = make_target("gemma3", final_logit_softcapping=2.0)
    with torch.no_grad():
        hidden = target.base_model(input_ids=some_tokens()).last_hidden_state
    assert head_logits(target, hidden).abs().max() <= 2.0
    check_head(target, some_tokens(rows=1))


def test_unknown_treatment_of_logits_is_refused(llama):
    def halve(_module, _arguments, output):
        output.logits = output.logits / 2
        return output

    llama.register_forward_hook(halve)
    with pytest.raises(DraftError, match="LlamaForCausalLM"):
        check_head(llama, some_tokens(rows=1))


def test_a_model_without_a_list_of_layers_is_refused(llama):
    llama.config.num_hidden_layers = NUM_LAYERS + 1
    with pytest.raises(DraftError, match="no list of decoder layers"):
        layer_prefix(llama)
