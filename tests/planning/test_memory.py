"""What is counted on tensors without memory is what the trainer's tensors take."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from draftsmith.distillation.batches import TrainingSequence, collate
from draftsmith.distillation.building import build_draft, in_float32, objective_of
from draftsmith.distillation.signals import TOKENS_PER_FORWARD, OnlineSignals
from draftsmith.distillation.topk_signals import TopKSignal
from draftsmith.drafts.vocabulary import choose_tokens
from draftsmith.planning import step as planning_step
from draftsmith.planning.memory import PeakMemory
from draftsmith.planning.models import draft_layers, draft_sizes, meta_target
from draftsmith.planning.step import PlannedStep, StepShape
from tests.distillation.small_training import make_config as make_distill
from tests.drafts.small_models import VOCAB_SIZE, make_target
from tests.planning.small_plans import RECIPES, make_mixture
from tests.planning.test_models import CACHE

SHAPE = StepShape(rows=3, prompt=6, response=20)
WIDE = {"hidden_size": 96}
NEAR = 0.05


def sequences(shape):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(VOCAB_SIZE, (shape.rows, shape.width), generator=generator)
    return [TrainingSequence(row.tolist(), shape.prompt - 1) for row in rows]


def prepared(recipe, config, target):
    """The draft and its objective, as the trainer has them on a CPU."""
    size = recipe.vocabulary_size
    ids = choose_tokens(torch.arange(VOCAB_SIZE), size) if size else None
    draft = build_draft(recipe, target, draft_layers(recipe, target), ids)
    draft.set_attn_implementation("eager")
    in_float32(draft)
    return draft, objective_of(recipe, config, draft, target, ids)


def signal_of(recipe, config, target, batch):
    layers = draft_layers(recipe, target) if recipe.family == "eagle" else ()
    signal = OnlineSignals(target, layers).signal(batch)
    if config.signal != "topk":
        return lambda: dataclasses.replace(
            signal,
            hidden=signal.hidden.clone(),
            log_normaliser=signal.log_normaliser.clone(),
            features=None if signal.features is None else signal.features.clone(),
        )
    rows = torch.zeros(len(signal.hidden), config.topk, dtype=torch.long)
    return lambda: TopKSignal(rows.clone(), torch.full(rows.shape, -5.0))


def measured_step(recipe, config, target):
    _, objective = prepared(recipe, config, target)
    batch = collate(sequences(SHAPE), list(range(SHAPE.rows)))
    make_signal = signal_of(recipe, config, target, batch)
    with PeakMemory() as memory:
        signal = make_signal()
        for _ in range(min(2, config.gradient_accumulation)):
            with torch.autocast("cpu", torch.bfloat16, enabled=config.mixed_precision == "bf16"):
                loss, _ = objective(batch, signal, torch.device("cpu"))
            loss.backward()
    return memory.peak


SETTINGS = [
    {},
    {"mixed_precision": "bf16"},
    {"gradient_accumulation": 2},
    {"gradient_checkpointing": True},
    {"signal": "topk"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda found: "-".join(found) or "plain")
@pytest.mark.parametrize("name", list(RECIPES))
def test_a_planned_step_takes_what_a_real_one_takes(config_of, name, settings):
    recipe, config = RECIPES[name], make_distill(**settings)
    if recipe.family != "student" and "signal" in settings:
        pytest.skip("for students alone")
    dtype = "bfloat16" if config.mixed_precision == "bf16" else "float32"
    step = PlannedStep(config_of(**WIDE), dtype, recipe, config, "cpu", SHAPE)
    measured = measured_step(recipe, config, make_target(dtype=getattr(torch, dtype), **WIDE))
    assert step.training_bytes() == pytest.approx(measured, rel=NEAR)


@pytest.mark.parametrize("name", ["student", "eagle", "medusa"])
def test_what_is_computed_again_takes_less(config_of, name):
    plain, again = (
        PlannedStep(
            config_of(**WIDE),
            "float32",
            RECIPES[name],
            make_distill(gradient_checkpointing=value),
            "cpu",
            StepShape(8, 6, 50),
        ).training_bytes()
        for value in (False, True)
    )
    assert again < plain


def test_attention_of_an_accelerator_keeps_no_scores(config_of):
    def bytes_of(device, response):
        shape = StepShape(2, 6, response)
        config = make_distill()
        return PlannedStep(
            config_of(), "float32", RECIPES["student"], config, device, shape
        ).training_bytes()

    growth = {device: bytes_of(device, 400) / bytes_of(device, 200) for device in ("cpu", "cuda")}
    assert growth["cuda"] < 2.1 < growth["cpu"]


@pytest.mark.parametrize("name", ["student", "eagle"])
@pytest.mark.parametrize("signal", ["cache", "online"])
def test_a_pass_for_signals_takes_what_a_real_one_takes(config_of, name, signal):
    recipe, config = RECIPES[name], make_distill(signal=signal)
    shape = SHAPE if signal == "online" else StepShape(TOKENS_PER_FORWARD // SHAPE.width, 6, 20)
    target = make_target(**WIDE)
    layers = draft_layers(recipe, target) if recipe.family == "eagle" else ()
    batch = collate(sequences(shape), list(range(shape.rows)))
    with PeakMemory() as memory:
        OnlineSignals(target, layers).signal(batch)
    planned = PlannedStep(config_of(**WIDE), "float32", recipe, config, "cpu", SHAPE)
    assert planned.signal_bytes() == pytest.approx(memory.peak, rel=NEAR)


@pytest.mark.parametrize("name", ["student", "eagle", "medusa"])
def test_weights_gradients_and_optimizer_take_what_is_planned(config_of, name):
    """Counted on the tensors that there are after a step."""
    recipe, config = RECIPES[name], make_distill()
    target = make_target(**WIDE)
    draft, objective = prepared(recipe, config, target)
    trained = [p for p in objective.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
    batch = collate(sequences(SHAPE), [0, 1])
    loss, _ = objective(batch, signal_of(recipe, config, target, batch)(), torch.device("cpu"))
    loss.backward()
    optimizer.step()
    sizes = draft_sizes(recipe, meta_target(config_of(**WIDE), "float32"), CACHE)
    assert sizes.trained == sum(p.nbytes for p in draft.parameters() if p.requires_grad)
    assert sizes.gradients == sum(p.grad.nbytes for p in trained if p.grad is not None)
    state = [tensor for entry in optimizer.state.values() for tensor in entry.values()]
    assert sizes.optimizer == sum(tensor.nbytes for tensor in state)


@pytest.mark.parametrize("name", ["student", "eagle"])
def test_a_mixture_of_experts_has_a_working_memory(tmp_path, name):
    make_mixture().save_pretrained(tmp_path)
    recipe = RECIPES[name]
    short, long = (
        PlannedStep(tmp_path, "float32", recipe, make_distill(), "cuda", StepShape(2, 6, response))
        for response in (20, 200)
    )
    assert 0 < short.training_bytes() < long.training_bytes()
    assert short.signal_bytes() > 0


def test_what_is_freed_counts_no_longer_and_a_view_counts_once():
    before = torch.zeros(1000)
    with PeakMemory() as memory:
        first = torch.zeros(100)
        assert memory.now == 400
        view = first[10:]
        del first
        assert memory.now == 400
        del view
        assert memory.now == 0
        before.add_(1)
        kept = before.view(10, 100)
        assert (memory.now, len(kept)) == (0, 10)
    assert memory.peak == 400


def test_a_class_that_needs_numbers_leaves_its_memory_unknown(config_of, monkeypatch, caplog):
    def need_numbers(*_):
        raise NotImplementedError("a mixture counts its tokens")

    step = PlannedStep(config_of(), "float32", RECIPES["student"], make_distill(), "cpu", SHAPE)
    monkeypatch.setattr(planning_step, "meta_target", need_numbers)
    assert step.training_bytes() is None
    assert "a mixture counts its tokens" in caplog.text
