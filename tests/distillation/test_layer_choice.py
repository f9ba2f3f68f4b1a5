from __future__ import annotations

import pytest
import torch

from draftsmith.distillation.divergences import forward_kl, negative_log_acceptance
from draftsmith.distillation.layer_choice import calibration_loss, choose_layers
from draftsmith.errors import DraftError
from tests.distillation.small_training import some_sequences
from tests.drafts.small_models import KINDS, NUM_LAYERS, make_target


def loss_from(worth, pairs=()):
    """A loss that falls by each layer's worth, and by more for some pairs."""

    def loss_of(layers):
        assert list(layers) == sorted(set(layers))
        gained = sum(worth[layer] for layer in layers)
        return 10.0 - gained - sum(value for pair, value in pairs if set(pair) <= set(layers))

    return loss_of


def test_the_layers_of_most_worth_are_chosen_in_ascending_order():
    chosen = choose_layers(4, 2, loss_from([1.0, 0.5, 0.2, 3.0]))
    assert chosen.layers == (0, 3)
    assert chosen.losses == pytest.approx((7.0, 6.0))


def test_a_layer_is_judged_beside_those_that_were_chosen():
    chosen = choose_layers(4, 2, loss_from([1.0, 0.5, 0.2, 3.0], [((2, 3), 2.0)]))
    assert chosen.layers == (2, 3)


def test_ties_go_to_the_lower_layer():
    assert choose_layers(5, 3, loss_from([1.0] * 5)).layers == (0, 1, 2)


def test_all_layers_are_a_choice_too_and_more_are_an_error():
    assert choose_layers(3, 3, loss_from([0.1, 0.3, 0.2])).layers == (0, 1, 2)
    with pytest.raises(DraftError, match=r"layers\.choose = 4(.|\n)*3 layers"):
        choose_layers(3, 4, loss_from([0.1, 0.3, 0.2]))


def test_the_number_of_students_is_that_of_a_greedy_search():
    tried = []

    def loss_of(layers):
        tried.append(layers)
        return float(sum(layers))

    choose_layers(6, 2, loss_of)
    assert len(tried) == len(set(tried)) == 6 + 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_student_of_all_layers_has_no_loss_and_any_other_has_one(kind, dtype):
    target = make_target(kind, dtype=dtype)
    loss_of = calibration_loss(target, None, some_sequences(), forward_kl)
    whole = loss_of(tuple(range(NUM_LAYERS)))
    assert whole == pytest.approx(0.0, abs=1e-3 if dtype == torch.float32 else 0.05)
    assert all(loss_of(layers) > whole + 0.01 for layers in ((0,), (1, 2)))


def test_a_layer_that_does_nothing_is_the_one_left_out(target):
    layer = target.base_model.layers[1]
    with torch.no_grad():
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    loss_of = calibration_loss(target, None, some_sequences(), forward_kl)
    chosen = choose_layers(NUM_LAYERS, 2, loss_of)
    assert chosen.layers == (0, 2)
    assert chosen.losses[-1] == pytest.approx(0.0, abs=1e-4)


def test_a_loss_is_measured_twice_alike_and_leaves_the_target_alone(target):
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    token_ids = torch.arange(0, 48, 2)
    losses = [
        calibration_loss(target, token_ids, some_sequences(40), negative_log_acceptance)((0, 2))
        for _ in range(2)
    ]
    assert losses[0] == losses[1] > 0
    assert all(torch.equal(before[name], t) for name, t in target.state_dict().items())
