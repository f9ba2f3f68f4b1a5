"""An imported draft is evaluated like any other: here the target itself, which always agrees."""

from __future__ import annotations

from draftsmith.distillation.imported import import_checkpoint, take_over
from draftsmith.evaluation.any_pair import load_any_draft
from draftsmith.evaluation.record import Evaluator
from draftsmith.evaluation.settings import EvaluationConfig

CONFIG = EvaluationConfig(
    decoding_prompts=4,
    draft_length=2,
    guesses=(3, 2),
    guess_prompts=6,
    lookup_length=3,
    temperatures=(0.0,),
    max_new_tokens=8,
    batch_size=4,
    exact_prompts=2,
    near_tie_prompts=2,
    self_test_tokens=8,
    seed=0,
)


def test_the_target_as_its_own_imported_draft_is_always_accepted(
    loaded, checkpoint, rollouts, stop_ids, tmp_path
):
    recipe = import_checkpoint(checkpoint, "itself", root=tmp_path, target=loaded.identity)
    folder = tmp_path / "drafts" / "itself"
    manifest = take_over(recipe, loaded.identity, folder, root=tmp_path)
    evaluator = Evaluator(CONFIG, loaded.model, loaded.identity, rollouts, stop_ids)
    record = evaluator.evaluate(folder)
    assert (record["recipe"], record["family"]) == ("itself", "causal-lm")
    assert record["draft_digest"] == manifest.digest
    assert record["alpha"]["0.0"]["mean"] == 1
    assert record["survival"]["0.0"] == [1.0, 1.0]
    assert record["losslessness"]["holds"]
    assert load_any_draft(loaded, folder).manifest == manifest
