from __future__ import annotations

import json

import pytest

from draftsmith.corpus.prompts import bundled_prompts, distinct
from draftsmith.corpus.rollouts import Rollout
from draftsmith.corpus.settings import CorpusConfig, SourceConfig
from draftsmith.errors import CorpusError
from draftsmith.planning.corpus import Expected, at_most, counted


def make_config(*sources, **changes):
    plain = {
        "eval_fraction": 0.25,
        "train_temperatures": (0.0, 0.7),
        "train_answers": 2,
        "eval_temperatures": (0.0,),
        "max_prompt_tokens": 50,
        "max_new_tokens": 20,
        "min_eval_prompts": 1,
        "batch_size": 2,
        "shard_size": 2,
        "seed": 0,
    }
    return CorpusConfig(sources=sources or (SourceConfig("bundled"),), **(plain | changes))


def rollout(prompt, response):
    return Rollout("p", "chat", 0.0, [1] * prompt, [2] * response, finished=True)


def test_a_corpus_that_is_there_is_counted():
    size = counted(
        {"train": [rollout(4, 6), rollout(9, 2), rollout(3, 0)], "eval": [rollout(2, 5)]}
    )
    assert (size.train_responses, size.train_tokens, size.rollout_tokens) == (2, 8, 13)
    assert size.train_prompt_tokens == 13
    assert size.predicted_tokens(prompt_positions=False) == 8
    assert size.num_entries == 9 + 10
    assert size.longest_response == 6
    assert size.longest_prompt + size.longest_response == 11


def test_prompts_that_are_learned_are_counted_as_the_training_counts_them():
    rows = [
        Rollout(f"p{end}", "chat", temperature, [1, 2, 3, end], [9] * 5, finished=True)
        for end in (4, 5)
        for temperature in (0.0, 0.7)
    ]
    size = counted({"train": rows, "eval": rows})
    assert size.predicted_tokens(prompt_positions=False) == 4 * 5
    assert size.predicted_tokens(prompt_positions=True) == 4 * 5 + 2 * 1


def test_without_one_every_answer_counts_with_its_limit(tmp_path):
    size = at_most(make_config(), Expected(prompts=100), root=tmp_path)
    assert size.origin == "limits"
    assert size.train_responses == 75 * 2
    assert size.train_tokens == 150 * 20
    assert size.rollout_tokens == (150 + 25) * 20
    assert size.train_prompt_tokens == 150 * 50
    assert size.predicted_tokens(prompt_positions=True) == 150 * 20 + 75 * 49  # each prompt once
    assert (size.longest_prompt, size.longest_response) == (50, 20)


def test_a_mean_that_is_expected_takes_the_place_of_a_limit(tmp_path):
    expected = Expected(prompts=100, prompt_tokens=8, response_tokens=10)
    size = at_most(make_config(), expected, root=tmp_path)
    assert (size.train_tokens, size.train_prompt_tokens) == (1500, 1200)
    assert (size.longest_prompt, size.longest_response) == (50, 20)


def test_prompts_of_files_are_counted_once(tmp_path):
    lines = [json.dumps({"prompt": text}) for text in ("one", "two", "One", "three")]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    source = SourceConfig("jsonl", path="prompts.jsonl")
    own = SourceConfig("self", count=7)
    size = at_most(make_config(source, own, eval_fraction=0.3), Expected(), root=tmp_path)
    assert size.train_responses == (3 - 1 + 7) * 2
    bundled = at_most(make_config(), Expected(), root=tmp_path)
    assert bundled.train_responses == 2 * round(0.75 * len(distinct(bundled_prompts())))


def test_self_written_prompts_are_split_only_where_there_are_no_others(tmp_path):
    size = at_most(make_config(SourceConfig("self", count=40)), Expected(), root=tmp_path)
    assert size.train_responses == 30 * 2


def test_a_dataset_is_not_downloaded_to_be_counted(tmp_path):
    config = make_config(SourceConfig("dataset", path="org/name"))
    with pytest.raises(CorpusError, match="--prompts"):
        at_most(config, Expected(), root=tmp_path)
    counted_one = make_config(SourceConfig("dataset", path="org/name", count=8))
    assert at_most(counted_one, Expected(), root=tmp_path).train_responses == 12


@pytest.mark.parametrize(
    ("expected", "key"),
    [
        (Expected(prompts=9, prompt_tokens=51), "corpus.max_prompt_tokens = 50"),
        (Expected(prompts=9, response_tokens=21), "corpus.max_new_tokens = 20"),
    ],
)
def test_a_mean_above_its_limit_is_refused(tmp_path, expected, key):
    with pytest.raises(CorpusError, match=key):
        at_most(make_config(), expected, root=tmp_path)
