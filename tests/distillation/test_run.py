"""A whole distillation of a tiny target that was really trained."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from draftsmith.artifacts import atomic_directory, digest_json
from draftsmith.console import EXIT_USER_ERROR, run_stage
from draftsmith.corpus.chat import make_chat
from draftsmith.corpus.prompts import user_prompt
from draftsmith.corpus.rollouts import Rollout
from draftsmith.distillation.head_guesses import held_out_guesses
from draftsmith.distillation.recipe import recipe_digest
from draftsmith.distillation.run import Distillation
from draftsmith.drafts.checkpoint import load_draft
from draftsmith.drafts.manifest import read_manifest
from draftsmith.drafts.settings import EagleConfig, LayerChoice, MedusaConfig, StudentConfig
from draftsmith.errors import CorpusError, DraftError
from draftsmith.targets.loading import load_target
from tests import tiny_target
from tests.distillation.small_training import make_config
from tests.full_disk import files_up_to

RECIPE = StudentConfig(family="student", layers=(0, -1), vocabulary_size=200)
HEAD = EagleConfig("eagle", feature_layers=(), vocabulary_size=200, unroll=2, step_decay=0.8)
HEADS = MedusaConfig(
    "medusa", num_heads=3, num_blocks=1, own_heads=True, vocabulary_size=200, head_decay=0.8
)
CONFIG = make_config(steps=24, signal="cache", mixed_precision="bf16", checkpoint_steps=10)
CORPUS_DIGEST = "d" * 64


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    tokenizer = tiny_target.make_tokenizer()
    model = tiny_target.make_model(tokenizer)
    tiny_target.train(model, tokenizer, "home", steps=60)
    tiny_target.save(model, tokenizer, folder)
    return load_target(folder, dtype="bfloat16")


@pytest.fixture(scope="module")
def rollouts(target):
    """The small world's own answers; every tenth is held out."""
    chat = make_chat(target.model, target.tokenizer)
    rows = []
    for index, (domain, question, answer) in enumerate(tiny_target.conversations("home")):
        response = target.tokenizer(f"{answer}<|end|>", add_special_tokens=False)["input_ids"]
        ids = chat.prompt_ids(user_prompt(question, domain))
        rows.append(Rollout(str(index), domain, 0.0, ids, response, finished=True))
    held_out = rows[::10]
    return {"train": [row for row in rows if row not in held_out], "eval": held_out}


@pytest.fixture
def job(target, rollouts):
    def make(config=CONFIG, recipe=RECIPE, rows=rollouts):
        return Distillation("small", recipe, config, target, CORPUS_DIGEST, rows)

    return make


def run(job, folder, partial, **options):
    folder.mkdir()
    return job.run(folder, partial, **options)


def test_a_draft_comes_out_with_its_facts(job, target, rollouts, tmp_path):
    manifest = run(job(), tmp_path / "draft", tmp_path / "partial")
    assert read_manifest(tmp_path / "draft") == manifest
    assert manifest.recipe == "small"
    assert manifest.recipe_digest == recipe_digest(RECIPE, CONFIG)
    assert manifest.target_digest == target.identity.digest
    assert manifest.tokenizer_digest == target.identity.tokenizer_digest
    assert manifest.corpus_digest == CORPUS_DIGEST
    assert manifest.architecture["layers"] == [0, 3]
    facts = manifest.training
    assert facts["predicted_tokens"] == sum(len(r.response_ids) for r in rollouts["train"])
    assert facts["longest_sequence"] <= 128
    assert 0.9 < facts["held_out_coverage"] <= 1.0
    assert [entry["step"] for entry in facts["history"]] == [float(n) for n in range(1, 25)]
    assert facts["history"][-1]["alpha"] > facts["history"][0]["alpha"] + 0.1


def test_the_draft_joins_its_target_and_knows_how_turns_end(job, target, tmp_path):
    run(job(), tmp_path / "draft", tmp_path / "partial")
    draft = load_draft(tmp_path / "draft", target.model, target_digest=target.identity.digest)
    assert len(draft.token_ids) == 200
    assert set(make_chat(target.model, target.tokenizer).stop_ids) <= set(draft.token_ids.tolist())
    assert {p.dtype for p in draft.model.parameters()} == {torch.bfloat16}


def test_a_recipe_may_keep_the_whole_vocabulary(job, target, tmp_path):
    recipe = StudentConfig(family="student", layers=(0,), vocabulary_size=0)
    manifest = run(job(recipe=recipe), tmp_path / "draft", tmp_path / "partial")
    assert manifest.vocabulary_digest is None
    assert manifest.training["held_out_coverage"] is None
    load_draft(tmp_path / "draft", target.model, target_digest=target.identity.digest)


def test_words_of_training_prompts_are_in_the_drafts_vocabulary(job, target, rollouts, tmp_path):
    used = {i for row in rollouts["train"] for i in (*row.prompt_ids, *row.response_ids)}
    # So late in the vocabulary that no tie would bring them in.
    rare, unseen = sorted(set(range(target.model.config.vocab_size)) - used)[-2:]
    rows = {
        split: [
            dataclasses.replace(row, prompt_ids=[token, *row.prompt_ids]) for row in rollouts[split]
        ]
        for split, token in (("train", rare), ("eval", unseen))
    }
    run(job(make_config(steps=1), rows=rows), tmp_path / "draft", tmp_path / "partial")
    draft = load_draft(tmp_path / "draft", target.model, target_digest=target.identity.digest)
    assert rare in draft.token_ids
    assert unseen not in draft.token_ids


@pytest.mark.parametrize("recipe", [RECIPE, HEAD], ids=["student", "eagle"])
def test_a_head_of_its_own_starts_as_the_targets_rows_and_is_stored(job, target, tmp_path, recipe):
    own = dataclasses.replace(recipe, own_head=True)
    alphas = {}
    for name, one in (("shared", recipe), ("own", own)):
        manifest = run(job(recipe=one), tmp_path / name, tmp_path / "partial")
        alphas[name] = [entry["alpha"] for entry in manifest.training["history"]]
    # The first step is judged before it is taken: both begin alike, up to rounding of the rows.
    assert alphas["own"][0] == pytest.approx(alphas["shared"][0], abs=0.01)
    drafts = {
        name: load_draft(tmp_path / name, target.model, target_digest=target.identity.digest)
        for name in alphas
    }
    ids = drafts["own"].token_ids
    theirs = target.model.get_output_embeddings().weight[ids]
    assert torch.equal(drafts["shared"].model.get_output_embeddings().weight, theirs)
    mine = drafts["own"].model.get_output_embeddings().weight
    assert mine.dtype == theirs.dtype
    assert not torch.equal(mine, theirs)
    assert torch.cosine_similarity(mine.float(), theirs.float()).min() > 0.5
    sizes = {n: d.manifest.training["trained_parameters"] for n, d in drafts.items()}
    assert sizes["own"] == sizes["shared"] + theirs.numel()


def test_another_engine_drafts_with_the_rows_of_a_draft_that_has_its_own(job, target, tmp_path):
    recipe = dataclasses.replace(RECIPE, own_head=True)
    run(job(recipe=recipe), tmp_path / "draft", tmp_path / "partial")
    draft = load_draft(tmp_path / "draft", target.model, target_digest=target.identity.digest)
    full = draft.as_causal_lm(target.model)
    ids = torch.tensor([[3, 5, 8, 13]])
    with torch.inference_mode():
        mine, theirs = (model(input_ids=ids).logits for model in (draft.model, full))
    assert torch.equal(theirs[..., draft.token_ids], mine)


def test_drafts_without_a_head_of_their_own_keep_their_digest():
    """The option is younger than many a registered draft."""
    settings = dataclasses.asdict(RECIPE)
    del settings["own_head"]
    before = digest_json({"recipe": settings, "distill": CONFIG.decisive()})
    assert recipe_digest(RECIPE, CONFIG) == before
    assert recipe_digest(dataclasses.replace(RECIPE, own_head=True), CONFIG) != before


def test_a_recipe_may_leave_its_layers_to_be_chosen(job, target, tmp_path):
    recipe = StudentConfig(family="student", layers=LayerChoice(2), vocabulary_size=200)
    first, second = (
        run(job(recipe=recipe), tmp_path / name, tmp_path / "partial") for name in ("a", "b")
    )
    assert first == second
    layers, losses = first.architecture["layers"], first.training["layer_choice"]["losses"]
    assert layers == sorted(set(layers))
    assert (len(layers), len(losses)) == (2, 2)
    assert losses[1] < losses[0]
    load_draft(tmp_path / "a", target.model, target_digest=target.identity.digest)
    assert "layer_choice" not in run(job(), tmp_path / "c", tmp_path / "partial").training


def test_a_draft_is_distilled_from_the_largest_probabilities(job, tmp_path):
    config = dataclasses.replace(CONFIG, signal="topk", topk=16)
    manifest = run(job(config), tmp_path / "draft", tmp_path / "partial")
    history = manifest.training["history"]
    assert history[-1]["alpha"] > history[0]["alpha"] + 0.1
    (folder,) = (tmp_path / "partial" / "signals").iterdir()
    other = dataclasses.replace(config, topk=4)
    run(job(other), tmp_path / "other", tmp_path / "partial")
    assert folder not in (tmp_path / "partial" / "signals").iterdir()


@pytest.mark.parametrize("recipe", [RECIPE, HEAD, HEADS], ids=["student", "eagle", "medusa"])
def test_what_is_computed_again_gives_the_same_draft(job, recipe, tmp_path):
    again = dataclasses.replace(CONFIG, gradient_checkpointing=True)
    plain, other = (
        run(job(config, recipe), tmp_path / name, tmp_path / "partial")
        for name, config in (("a", CONFIG), ("b", again))
    )
    assert other == plain


def test_early_stopping_is_told_in_the_manifest(job, rollouts, tmp_path):
    config = dataclasses.replace(CONFIG, early_stop_patience=2, early_stop_steps=6)
    facts = run(job(config), tmp_path / "draft", tmp_path / "partial").training
    told = facts["early_stop"]
    assert told["kept"] in told["evaluations"]
    assert [entry["step"] for entry in told["evaluations"]] == [6.0, 12.0, 18.0, 24.0]
    assert told["kept"]["alpha"] == max(entry["alpha"] for entry in told["evaluations"])
    assert 0 < facts["predicted_tokens"] < sum(len(r.response_ids) for r in rollouts["train"])
    plain = run(job(), tmp_path / "plain", tmp_path / "partial").training
    assert "early_stop" not in plain
    assert (plain["steps"], plain["steps_done"]) == (24, 24)


def test_a_training_that_stops_early_says_how_many_steps_it_did(job, tmp_path):
    config = dataclasses.replace(
        CONFIG, early_stop_patience=1, early_stop_steps=1, learning_rate=0.03, log_steps=7
    )
    facts = run(job(config), tmp_path / "draft", tmp_path / "partial").training
    last = facts["early_stop"]["evaluations"][-1]["step"]
    assert facts["steps"] == 24
    assert facts["steps_done"] == last < 24


@pytest.mark.parametrize("recipe", [RECIPE, HEAD, HEADS], ids=["student", "eagle", "medusa"])
def test_prompts_are_learned_as_well(job, rollouts, tmp_path, recipe):
    config = dataclasses.replace(CONFIG, early_stop_patience=2, early_stop_steps=6)
    learning = dataclasses.replace(config, prompt_positions=True)
    plain, more = (
        run(job(each, recipe), tmp_path / name, tmp_path / "partial")  # signals of their own
        for name, each in (("plain", config), ("more", learning))
    )
    assert more.recipe_digest != plain.recipe_digest
    assert more.training["predicted_tokens"] > plain.training["predicted_tokens"]
    assert more.training["history"] != plain.training["history"]
    # Both are judged by the same positions.
    judged = [
        [sequences[index] for index in one._held_out()]
        for one in (job(config, recipe), job(learning, recipe))
        for sequences in [one._sequences(one._held_out())]
    ]
    assert judged[0] == judged[1] != []


def test_a_head_on_features_comes_out_of_the_same_stage(job, target, tmp_path):
    manifest = run(job(recipe=HEAD), tmp_path / "draft", tmp_path / "partial")
    assert (manifest.family, manifest.architecture["layers"]) == ("eagle", [1, 2, 3])
    assert manifest.recipe_digest == recipe_digest(HEAD, CONFIG)
    assert manifest.architecture["dtype"] == "bfloat16"
    history = manifest.training["history"]
    assert history[-1]["alpha"] > history[0]["alpha"] + 0.1
    draft = load_draft(tmp_path / "draft", target.model, target_digest=target.identity.digest)
    assert len(draft.token_ids) == 200
    assert not draft.is_causal_lm


def test_heads_on_the_last_state_come_out_with_how_good_their_guesses_are(
    job, target, rollouts, tmp_path
):
    manifest = run(job(recipe=HEADS), tmp_path / "draft", tmp_path / "partial")
    assert (manifest.family, manifest.architecture["layers"]) == ("medusa", [])
    assert manifest.architecture["heads"] == {"num_heads": 3, "num_blocks": 1, "own_heads": True}
    assert manifest.recipe_digest == recipe_digest(HEADS, CONFIG)
    history = manifest.training["history"]
    assert history[-1]["alpha"] > history[0]["alpha"] + 0.1
    draft = load_draft(tmp_path / "draft", target.model, target_digest=target.identity.digest)
    told = manifest.training["held_out_guesses"]
    expected = held_out_guesses(draft.model, target.model, draft.token_ids, rollouts["eval"])
    assert told == expected
    assert told["positions"][0] == sum(len(row.response_ids) for row in rollouts["eval"])
    assert 0 < told["hit_rates"][0]["1"] < told["hit_rates"][0]["10"]
    assert "held_out_guesses" not in run(job(), tmp_path / "plain", tmp_path / "partial").training


@pytest.mark.parametrize("recipe", [HEAD, HEADS], ids=["eagle", "medusa"])
def test_what_reads_the_targets_states_refuses_a_signal_without_them(job, recipe, tmp_path):
    config = dataclasses.replace(CONFIG, signal="topk")
    with pytest.raises(DraftError, match=f"family {recipe.family}") as refused:
        run(job(config, recipe), tmp_path / "draft", tmp_path / "partial")
    assert "cache or online" in str(refused.value)


def test_recipes_share_their_signals_where_those_of_the_first_suffice(job, tmp_path):
    partial, filled = tmp_path / "partial", []
    for name, recipe in (("head", HEAD), ("student", RECIPE), ("heads", HEADS)):
        run(job(recipe=recipe), tmp_path / name, partial)
        (folder,) = (partial / "signals").iterdir()
        filled.append((folder / "hidden.bin").stat().st_ino)
    assert len(set(filled)) == 1


@pytest.mark.parametrize("recipe", [RECIPE, HEAD, HEADS], ids=["student", "head", "heads"])
def test_a_killed_distillation_gives_the_same_draft(job, recipe, tmp_path):
    whole = run(job(recipe=recipe), tmp_path / "whole", tmp_path / "one")

    def kill(step, _metrics):
        if step == 15:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(job(recipe=recipe), tmp_path / "first", tmp_path / "two", on_step=kill)
    steps = []
    resumed = run(
        job(recipe=recipe),
        tmp_path / "second",
        tmp_path / "two",
        on_step=lambda step, _: steps.append(step),
    )
    assert steps == list(range(10, 24))
    assert resumed == whole


def test_checkpoints_go_and_the_signals_stay(job, tmp_path):
    run(job(), tmp_path / "draft", tmp_path / "partial")
    assert not list((tmp_path / "partial" / "checkpoints").iterdir())
    assert len(list((tmp_path / "partial" / "signals").iterdir())) == 1


def test_a_finished_run_leaves_the_signals_of_its_own_corpus_alone(job, tmp_path):
    partial = tmp_path / "partial"
    run(job(), tmp_path / "one", partial)
    (own,) = (partial / "signals").iterdir()
    (partial / "signals" / "of-another-corpus").mkdir()
    (partial / "checkpoints" / "small" / "of-another-budget").mkdir(parents=True)
    (partial / "checkpoints" / "large" / "of-another-recipe").mkdir(parents=True)
    run(job(), tmp_path / "two", partial)
    assert list((partial / "signals").iterdir()) == [own]
    assert [path.name for path in (partial / "checkpoints").iterdir()] == ["large"]


def test_a_full_disk_is_one_error_of_the_stage_and_the_draft_before_stays(job, tmp_path, capsys):
    draft, partial = tmp_path / "drafts" / "small", tmp_path / "partial"
    config = make_config(steps=4, signal="cache", mixed_precision="bf16")

    def stage():
        with atomic_directory(draft) as folder:
            job(config).run(folder, partial)

    with pytest.raises(SystemExit):
        run_stage(stage)
    before = {path.name: path.read_bytes() for path in draft.iterdir()}
    capsys.readouterr()
    room = len(before["model.safetensors"]) - 1
    with files_up_to(room), pytest.raises(SystemExit) as ended:
        run_stage(stage)
    assert ended.value.code == EXIT_USER_ERROR
    assert capsys.readouterr().err.strip().startswith("draftsmith: writing ")
    assert {path.name: path.read_bytes() for path in draft.iterdir()} == before
    assert list(draft.parent.iterdir()) == [draft]


def test_another_budget_takes_up_no_foreign_checkpoint(job, tmp_path):
    def kill(step, _metrics):
        if step == 15:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(job(), tmp_path / "first", tmp_path / "partial", on_step=kill)
    steps = []
    other = make_config(steps=12, signal="cache", mixed_precision="bf16", checkpoint_steps=10)
    run(
        job(config=other),
        tmp_path / "second",
        tmp_path / "partial",
        on_step=lambda step, _: steps.append(step),
    )
    assert steps == list(range(12))


def test_layers_that_the_target_lacks_are_refused(job, tmp_path):
    recipe = StudentConfig(family="student", layers=(0, 4), vocabulary_size=0)
    with pytest.raises(DraftError, match="4 layers"):
        run(job(recipe=recipe), tmp_path / "draft", tmp_path / "partial")


def test_a_corpus_without_responses_is_refused(job, tmp_path):
    with pytest.raises(CorpusError, match="0 rollouts"):
        run(job(rows={"train": [], "eval": []}), tmp_path / "draft", tmp_path / "partial")
