"""What `distill.gradient_checkpointing` does to the draft of each family."""

from __future__ import annotations

import pytest
import torch

from draftsmith.distillation.batches import collate
from draftsmith.distillation.building import build_draft, in_float32, named_layers, objective_of
from draftsmith.distillation.signals import OnlineSignals
from draftsmith.drafts.eagle import EagleHead
from draftsmith.drafts.settings import EagleConfig, MedusaConfig, StudentConfig
from draftsmith.planning.memory import PeakMemory
from tests.distillation.small_training import make_config, some_sequences
from tests.drafts.small_models import NUM_LAYERS, make_target

CPU = torch.device("cpu")
STUDENT = StudentConfig("student", (0, 2), 0)
HEAD = EagleConfig("eagle", (), 0, unroll=3, step_decay=0.8)
HEADS = MedusaConfig(
    "medusa", num_heads=3, num_blocks=2, own_heads=True, vocabulary_size=0, head_decay=0.8
)
RECIPES = [STUDENT, HEAD, HEADS]
# A part of what is computed again, and how often a forward pass computes it.
PARTS = {
    "student": (lambda draft: draft.model.layers[0].self_attn, 1),
    "eagle": (lambda draft: draft.body.layers[0], HEAD.unroll),
    "medusa": (lambda draft: draft.heads[0][0], 1),
}


class Step:
    """A training step of a recipe's draft."""

    def __init__(self, recipe, kind="llama"):
        self.target, self.recipe = make_target(kind, hidden_size=96), recipe
        layers = named_layers(recipe, NUM_LAYERS)
        self.draft = build_draft(recipe, self.target, layers, None)
        in_float32(self.draft)
        self.batch = collate(some_sequences(), range(6))
        features = layers if isinstance(self.draft, EagleHead) else ()
        self.signal = OnlineSignals(self.target, features).signal(self.batch)

    def objective(self, *, again):
        config = make_config(gradient_checkpointing=again)
        return objective_of(self.recipe, config, self.draft, self.target, None)

    def sums(self, objective):
        return objective(self.batch, self.signal, CPU)

    def results(self, objective):
        """Loss, alpha and the gradients of all that is trained."""
        loss, agreed = self.sums(objective)
        trained = [p for p in objective.parameters() if p.requires_grad]
        return [loss, agreed, *torch.autograd.grad(loss, trained)]

    def bytes_kept(self, objective):
        """What is still there between forward and backward pass."""
        with PeakMemory() as memory:
            loss, _ = self.sums(objective)
            kept = memory.now
        assert loss.requires_grad
        return kept


@pytest.mark.parametrize("kind", ["llama", "gemma3"])  # gemma3's last layer has a window
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.family)
def test_what_is_computed_again_gives_the_same_step_from_less_memory(recipe, kind):
    step = Step(recipe, kind)
    plain = step.objective(again=False)
    expected, kept = step.results(plain), step.bytes_kept(plain)
    again = step.objective(again=True)
    got = step.results(again)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected, strict=True))
    assert len(got) > 2
    assert step.bytes_kept(again) < kept


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.family)
def test_it_is_computed_again_in_the_backward_pass_and_only_there(recipe):
    step, calls = Step(recipe), []
    part, num_calls = PARTS[recipe.family]
    part(step.draft).register_forward_pre_hook(lambda *_: calls.append(1))
    step.results(step.objective(again=False))
    assert len(calls) == num_calls
    calls.clear()
    objective = step.objective(again=True)
    with torch.no_grad():
        step.sums(objective)
    assert len(calls) == num_calls
    step.sums(objective)
    assert len(calls) == 2 * num_calls
    step.results(objective)
    assert len(calls) == 4 * num_calls
