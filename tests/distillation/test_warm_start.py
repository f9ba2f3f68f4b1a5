"""Distillation for a changed target that goes on from the draft of the one before."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from draftsmith.corpus.chat import make_chat
from draftsmith.corpus.prompts import user_prompt
from draftsmith.corpus.rollouts import Rollout
from draftsmith.distillation.batches import collate, make_sequences, step_indices
from draftsmith.distillation.divergences import forward_kl
from draftsmith.distillation.recipe import recipe_digest, recipe_digests
from draftsmith.distillation.run import Distillation
from draftsmith.distillation.warm_start import DraftSource, source_of, start_from
from draftsmith.drafts.checkpoint import load_draft
from draftsmith.drafts.manifest import read_manifest
from draftsmith.drafts.medusa import HeadShape, build_heads
from draftsmith.drafts.settings import EagleConfig, LayerChoice, MedusaConfig, StudentConfig
from draftsmith.errors import DraftMisfitError
from draftsmith.targets.loading import load_target
from tests import tiny_target
from tests.distillation.small_training import make_config

RECIPE = StudentConfig(family="student", layers=(0, -1), vocabulary_size=0)
CONFIG = make_config(steps=12, signal="cache", checkpoint_steps=5)
PAIR = "p" * 64


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    """The small world's target and what a few more steps of training make of it."""
    tokenizer = tiny_target.make_tokenizer()
    model = tiny_target.make_model(tokenizer)
    folders = []
    for steps in (60, 8):
        tiny_target.train(model, tokenizer, "home", steps=steps)
        folders.append(tmp_path_factory.mktemp("target"))
        tiny_target.save(model, tokenizer, folders[-1])
    return [load_target(folder, dtype="float32") for folder in folders]


@pytest.fixture(scope="module")
def rollouts(targets):
    chat = make_chat(targets[0].model, targets[0].tokenizer)
    rows = []
    for index, (domain, question, answer) in enumerate(tiny_target.conversations("home")[::4]):
        response = targets[0].tokenizer(f"{answer}<|end|>", add_special_tokens=False)["input_ids"]
        ids = chat.prompt_ids(user_prompt(question, domain))
        rows.append(Rollout(str(index), domain, 0.0, ids, response, finished=True))
    return {"train": rows[5:], "eval": rows[:5]}


@pytest.fixture
def run(targets, rollouts, tmp_path):
    def call(name, *, source=None, target=targets[1], recipe=RECIPE, config=CONFIG, **options):
        folder = tmp_path / name
        folder.mkdir()
        job = Distillation("small", recipe, config, target, "d" * 64, rollouts, source)
        return job.run(folder, tmp_path / "partial", **options)

    return call


@pytest.fixture
def source(run, targets, tmp_path):
    """A draft of the first target."""
    run("source", target=targets[0], config=make_config(steps=30, signal="cache"))
    return DraftSource(tmp_path / "source", PAIR)


def first_loss(manifest):
    return manifest.training["history"][0]["loss"]


def loss_of(draft, target, rows):
    """Mean divergence over the positions of the first training batch."""
    sequences = make_sequences([(r.prompt_ids, r.response_ids) for r in rows])
    lengths = [len(sequence.token_ids) for sequence in sequences]
    indices = step_indices(lengths, CONFIG.batch_size, seed=CONFIG.seed, step=0)
    batch = collate(sequences, indices)
    with torch.no_grad():
        log_p, log_q = (
            model(input_ids=batch.token_ids).logits[batch.mask].log_softmax(-1)
            for model in (target, draft)
        )
    return float(forward_kl(log_p, log_q).mean())


def test_training_goes_on_from_the_loss_of_the_draft_on_the_new_target(
    run, source, targets, rollouts
):
    draft = load_draft(source.directory, targets[1].model, target_digest=None).model
    expected = loss_of(draft, targets[1].model, rollouts["train"])
    warm, cold = run("warm", source=source), run("cold")
    assert first_loss(warm) == pytest.approx(expected, rel=1e-4)
    assert first_loss(cold) > 1.5 * expected
    assert warm.training["loss"] < cold.training["loss"]


def test_the_manifest_names_the_start_and_the_recipe_is_another_one(run, source):
    draft_digest = read_manifest(source.directory).digest
    warm, cold = run("warm", source=source), run("cold")
    origin = {"pair_digest": PAIR, "draft_digest": draft_digest}
    assert warm.training["started_from"] == origin
    assert "started_from" not in cold.training
    assert cold.recipe_digest == recipe_digest(RECIPE, CONFIG)
    assert warm.recipe_digest == recipe_digest(RECIPE, CONFIG, started_from=draft_digest)
    known = recipe_digests(RECIPE, CONFIG, ["another", draft_digest], num_seeds=2)
    assert known.plain[0] == cold.recipe_digest
    assert warm.recipe_digest in known.warm
    assert len(set(known.all)) == 4


def test_a_warm_start_takes_a_number_of_steps_of_its_own(run, source):
    config, steps = dataclasses.replace(CONFIG, warm_start_steps=4, warmup_steps=6), []
    warm = run(
        "warm", source=source, config=config, on_step=lambda step, _metrics: steps.append(step)
    )
    assert steps == list(range(4))
    assert warm.training["steps"] == warm.training["history"][-1]["step"] == 4
    draft_digest = read_manifest(source.directory).digest
    assert warm.recipe_digest in recipe_digests(RECIPE, config, [draft_digest], num_seeds=1).warm
    cold = run("cold", config=config)
    assert cold.training["steps"] == cold.training["history"][-1]["step"] == 12
    assert cold.recipe_digest == recipe_digest(
        RECIPE, dataclasses.replace(config, warm_start_steps=9)
    )


def test_another_seed_is_another_recipe_and_gives_another_draft(run):
    known = recipe_digests(RECIPE, CONFIG, [], num_seeds=3)
    again = run("again", config=CONFIG.reseeded(2))
    assert again.recipe_digest == known.plain[2]
    assert again.digest != run("cold").digest


def test_a_killed_warm_start_gives_the_same_draft_and_takes_up_no_cold_checkpoint(run, source):
    whole = run("whole", source=source)

    def kill(step, _metrics):
        if step == 7:
            raise KeyboardInterrupt

    for name, start in (("first", source), ("cold", None)):
        with pytest.raises(KeyboardInterrupt):
            run(name, source=start, on_step=kill)
    steps = []
    resumed = run("second", source=source, on_step=lambda step, _: steps.append(step))
    assert steps == list(range(5, 12))
    assert resumed == whole


@pytest.mark.parametrize(("layers", "found"), [((0,), r"\[0, 3\]"), ((0, 1), r"\[0, 3\]")])
def test_a_draft_of_other_layers_is_refused_with_both_named(run, source, layers, found):
    recipe = StudentConfig(family="student", layers=layers, vocabulary_size=0)
    with pytest.raises(DraftMisfitError, match=found) as refused:
        run("misfit", source=source, recipe=recipe)
    assert str(list(layers)) in str(refused.value)
    assert "start.action" in str(refused.value)


def test_layers_that_were_chosen_stay_those_of_the_draft(run, source):
    recipe = dataclasses.replace(RECIPE, layers=LayerChoice(2))
    warm = run("warm", source=source, recipe=recipe)
    assert warm.architecture["layers"] == [0, 3]
    with pytest.raises(DraftMisfitError, match=r"\[0, 3\]"):
        run("misfit", source=source, recipe=dataclasses.replace(RECIPE, layers=LayerChoice(1)))


HEAD = EagleConfig("eagle", feature_layers=(), vocabulary_size=0, unroll=2, step_decay=0.8)


HEADS = MedusaConfig(
    "medusa", num_heads=2, num_blocks=1, own_heads=False, vocabulary_size=0, head_decay=0.8
)
OWN = dataclasses.replace(HEADS, own_heads=True, vocabulary_size=200)


@pytest.mark.parametrize("recipe", [HEAD, HEADS, OWN], ids=["eagle", "medusa", "own_rows"])
def test_heads_go_on_from_heads_of_their_kind(run, targets, recipe, tmp_path):
    long = make_config(steps=30, signal="cache")
    run("head", target=targets[0], recipe=recipe, config=long)
    warm = run("warm", source=DraftSource(tmp_path / "head", PAIR), recipe=recipe)
    cold = run("cold", recipe=recipe)
    assert first_loss(warm) < first_loss(cold) / 1.5
    assert warm.training["started_from"]["pair_digest"] == PAIR


@pytest.mark.parametrize("recipe", [HEAD, HEADS], ids=["eagle", "medusa"])
def test_a_head_does_not_go_on_from_a_student(run, source, recipe):
    with pytest.raises(DraftMisfitError, match="family student") as refused:
        run("misfit", source=source, recipe=recipe)
    assert f"family {recipe.family}" in str(refused.value)


@pytest.mark.parametrize("changes", [{"num_heads": 1}, {"num_heads": 3}, {"own_heads": True}])
def test_heads_do_not_go_on_from_others(run, tmp_path, changes):
    run("heads", recipe=HEADS)
    with pytest.raises(DraftMisfitError, match="of shape"):
        run(
            "misfit",
            source=DraftSource(tmp_path / "heads", PAIR),
            recipe=dataclasses.replace(HEADS, **changes),
        )


def test_own_rows_go_to_the_same_tokens_of_another_vocabulary(run, targets, tmp_path):
    run("heads", recipe=OWN)
    source, target = DraftSource(tmp_path / "heads", PAIR), targets[1].model
    theirs = load_draft(source.directory, target, target_digest=None)
    known = theirs.token_ids.tolist()
    size = target.config.vocab_size
    unknown = [token for token in range(size) if token not in known]
    token_ids = torch.tensor([*known[10:], *unknown[:5]]).sort().values
    heads = build_heads(target, HeadShape(2, 1, own_heads=True), token_ids)
    fresh = heads.rows[1].weight.clone()
    start_from(source, heads, target, layers=(), token_ids=token_ids)
    for entry, token in enumerate(token_ids.tolist()):
        is_known = token in known
        origin = theirs.model.rows[1].weight[known.index(token)] if is_known else fresh[entry]
        assert torch.equal(heads.rows[1].weight[entry], origin)
    blocks = (model.heads[1][0].linear.weight for model in (theirs.model, heads))
    assert torch.equal(*blocks)


def test_a_draft_of_other_shapes_is_refused(run, source, targets):
    config = copy.deepcopy(targets[1].model.config)
    config.intermediate_size = 64  # the same family and width, with smaller layers inside
    narrow = type(targets[1].model)(config).eval()
    with pytest.raises(DraftMisfitError, match="mlp"):
        run("misfit", source=source, target=dataclasses.replace(targets[1], model=narrow))


def test_an_entry_of_start_names_the_folder_of_its_pair(tmp_path):
    assert source_of({"action": "retrain", "source_pair_digest": None}, tmp_path) is None
    named = source_of({"action": "warm_start", "source_pair_digest": PAIR}, tmp_path)
    assert named == DraftSource(tmp_path / PAIR[:16] / "draft", PAIR)
