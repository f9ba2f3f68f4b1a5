"""Heads on the target's states are evaluated, measured and served like any other draft."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks import decoder, gpu
from draftsmith.artifacts import digest_json, read_json
from draftsmith.corpus.prompts import user_prompt
from draftsmith.decoding.features import FeatureStore
from draftsmith.drafts.checkpoint import Lineage, load_draft, save_draft
from draftsmith.evaluation.acceptance import DecodingPlan, decode, teacher_forced_alpha
from draftsmith.evaluation.any_pair import load_any_draft, measure
from draftsmith.evaluation.arms import Contestants
from draftsmith.evaluation.profiling import forward_costs
from draftsmith.evaluation.record import Evaluator
from draftsmith.evaluation.side_costs import reading_ms
from tests.decoding.heads import fitted_head, fitted_heads
from tests.evaluation.test_any_pair import SMALL
from tests.evaluation.test_decoder_benchmark import SMALL as SMALL_BENCH
from tests.evaluation.test_record import CONFIG
from tests.evaluation.test_rewound import check_answers
from tests.tiny_target import conversations, write_prompts

LAYERS = (1, 2, 2)


@pytest.fixture(scope="module", params=["eagle", "medusa"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folder(loaded, rollouts, family, tmp_path_factory):
    texts = [(r.prompt_ids, r.response_ids) for r in rollouts if r.temperature == 0][::2]
    if family == "eagle":
        head, layers = fitted_head(loaded.model, texts, layers=LAYERS, steps=25), LAYERS
    else:
        head, layers = fitted_heads(loaded.model, texts, steps=60), ()
    lineage = Lineage(
        family,
        digest_json(family),
        loaded.identity.digest,
        loaded.identity.tokenizer_digest,
        digest_json("corpus"),
        layers,
    )
    folder = tmp_path_factory.mktemp(family)
    save_draft(folder, head, None, lineage=lineage, training={})
    return folder


@pytest.fixture(scope="module")
def draft(folder, loaded):
    return load_draft(folder, loaded.model, target_digest=loaded.identity.digest)


@pytest.mark.parametrize("draft_length", [1, 3])
def test_teacher_forced_alpha_is_what_the_decoder_accepts_where_rounds_start(
    target, draft, rollouts, stop_ids, draft_length
):
    """The same forward of the head, whether features come from one forward or from rounds."""
    greedy = [r for r in rollouts if r.temperature == 0]
    longest = max(len(r.response_ids) for r in greedy)
    plan = DecodingPlan(draft_length, 0, longest, 4, stop_ids, 0)
    prompts = [(r.prompt_id, r.prompt_ids) for r in greedy]
    results = decode(target, draft, prompts, temperature=0.0, plan=plan)
    num_rounds = num_accepted = 0
    forced = 0.0
    for rollout in greedy:
        trace, place = results[rollout.prompt_id].trace, 0
        for drafted, accepted, committed in zip(
            trace.drafted, trace.accepted, trace.committed, strict=True
        ):
            if drafted and place < len(rollout.response_ids):
                cut = dataclasses.replace(
                    rollout,
                    prompt_ids=rollout.prompt_ids + rollout.response_ids[:place],
                    response_ids=rollout.response_ids[place : place + 1],
                )
                (entry,) = teacher_forced_alpha(target, draft, [cut], temperature=0.0).values()
                num_rounds += 1
                num_accepted += accepted > 0
                forced += entry.alpha
            place += committed
    assert num_rounds > 50
    assert 0.1 < num_accepted / num_rounds < 0.99
    assert forced == num_accepted


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_fitting_raises_alpha_over_a_students(target, drafts, draft, rollouts, temperature):
    chosen = [r for r in rollouts if r.temperature == temperature]
    values = {}
    for name, one in (("random", drafts["random"]), ("head", draft)):
        found = teacher_forced_alpha(target, one, chosen, temperature=temperature)
        values[name] = sum(entry.alpha for entry in found.values()) / len(found)
    assert values["head"] > values["random"] + 0.2


def test_its_record_is_complete_and_lossless(loaded, rollouts, stop_ids, folder, family):
    config = dataclasses.replace(CONFIG, decoding_prompts=8)
    evaluator = Evaluator(config, loaded.model, loaded.identity, rollouts, stop_ids)
    record = evaluator.evaluate(folder)
    assert record["family"] == family
    assert record["losslessness"]["holds"]
    assert record["survival"]["0.0"][0] > 0.1


@pytest.mark.slow
def test_benchmarks_of_the_decoder_leave_out_the_rival_that_cannot_draft_with_it(
    checkpoint, folder, tmp_path, capsys
):
    write_prompts(tmp_path / "prompts.jsonl")
    pair = ["--target", str(checkpoint), "--draft", str(folder)]
    options = ["--prompts", str(tmp_path / "prompts.jsonl"), "--out", str(tmp_path / "out.json")]
    assert decoder.main([*pair, *options, "--budget", "8"], SMALL_BENCH) == 0
    ratios = read_json(tmp_path / "out.json")["ratios"]
    assert set(decoder.GOALS) - set(ratios) == {"speculative over assisted generation"}
    assert "no such rival" in capsys.readouterr().out
    sizes = ["--max-draft-length", "2", "--max-new-tokens", "6", "--budget", "1000"]
    cells = ["--passes", "2", "--batch-sizes", "1", "--temperatures", "0"]
    assert gpu.main([*pair, *options, *sizes, *cells]) == 0
    (cell,) = read_json(tmp_path / "out.json")["cells"]
    assert not any("assisted" in name for name in cell["arms"])


def test_it_is_measured_without_the_arm_that_cannot_draft_with_it(loaded, folder, family):
    asked = [user_prompt(text, domain) for domain, text, _ in conversations("home")[:40:6]]
    config = dataclasses.replace(SMALL, batch_sizes=(1, 2))
    entry = measure(loaded, load_any_draft(loaded, folder), asked, config)
    assert entry["family"] == family
    assert "transformers_assisted" not in entry["arms"]
    assert "speculative_vs_assisted" not in entry["ratios"]
    assert entry["ratios"]["speculative_vs_generate"]["mean"] > 0
    assert entry["cost"]["draft_step_ms"] > 0
    assert "adaptive_speedup" in entry["batch"][1]


def test_timed_verifications_pay_for_what_the_draft_reads_of_them(target, draft, monkeypatch):
    kept = []
    put = FeatureStore.put

    def counted(store, features, positions, *, first_row):
        kept.append(tuple(positions.shape))
        put(store, features, positions, first_row=first_row)

    monkeypatch.setattr(FeatureStore, "put", counted)
    forward_costs(target, draft.model, [3], batch_size=2, context=16, repeats=1)
    # Once untimed and once timed; steps without drafts, too, but not plain ones or the draft's own.
    assert sorted(kept) == [(2, 1)] * 2 + [(2, 3)] * 2


def test_rows_go_back_to_their_prompts_with_what_it_reads(target, draft, prompts):
    check_answers(Contestants(target, draft, ()), [ids for _, ids in prompts[:3]])


@pytest.mark.parametrize("context", [1, 2, 40])
def test_reading_prompts_is_timed_as_its_proposer_reads_them(target, draft, context):
    costs = reading_ms(target, draft, rows=3, context=context)
    assert costs.target > 0
    assert costs.draft > 0
