from __future__ import annotations

import dataclasses

import pytest

from draftsmith.corpus.dataset import read_facts, read_split, write_corpus
from draftsmith.corpus.rollouts import Rollout
from draftsmith.errors import ArtifactError, CorpusError

FACTS = {"digest": "d" * 64, "target_digest": "t" * 64, "prompts": {"train": {"walk": 1}}}
TRAIN = Rollout("00ff", "walk", 0.7, [2, 151_935, 0, 3], [5, 5, 0, 1], finished=True)
EVAL = [
    Rollout("0a", "küche", 0.0, [7], [8], finished=False),
    Rollout("0a", "küche", 0.1 + 0.2, [7], [8, 9, 1], finished=True),
]


@pytest.fixture
def corpus(tmp_path):
    directory = tmp_path / "data" / "corpus"
    write_corpus(directory, {"train": [TRAIN], "eval": EVAL}, FACTS)
    return directory


def test_a_split_comes_back_with_exact_ids_boundary_and_temperature(corpus):
    assert read_split(corpus, "train") == [TRAIN]
    assert read_split(corpus, "eval") == EVAL
    assert read_facts(corpus) == FACTS
    ids = read_split(corpus, "train")[0]
    assert all(type(token) is int for token in ids.prompt_ids + ids.response_ids)


def test_a_split_is_a_datasets_folder(corpus):
    datasets = pytest.importorskip("datasets")
    data = datasets.load_from_disk(str(corpus / "eval"))
    assert data.column_names == [field.name for field in dataclasses.fields(Rollout)]
    assert data.num_rows == len(EVAL)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_a_missing_split_is_refused_by_name(corpus, split):
    (corpus / split).rename(corpus / "elsewhere")
    with pytest.raises(CorpusError, match=f"the {split} split"):
        read_split(corpus, split)


def test_missing_facts_are_refused_by_name(corpus):
    (corpus / "corpus.json").unlink()
    with pytest.raises(ArtifactError, match=r"corpus\.json"):
        read_facts(corpus)


def test_writing_replaces_the_whole_corpus(corpus):
    (corpus / "left over").touch()
    write_corpus(corpus, {"train": EVAL, "eval": [TRAIN]}, {"digest": "e" * 64})
    assert read_split(corpus, "train") == EVAL
    assert read_facts(corpus) == {"digest": "e" * 64}
    assert sorted(path.name for path in corpus.iterdir()) == ["corpus.json", "eval", "train"]


def test_a_write_that_fails_leaves_the_previous_corpus_and_no_rubbish(corpus):
    with pytest.raises(ValueError, match="JSON"):
        write_corpus(corpus, {"train": EVAL, "eval": EVAL}, {"share": float("nan")})
    assert read_split(corpus, "train") == [TRAIN]
    assert read_facts(corpus) == FACTS
    assert list(corpus.parent.iterdir()) == [corpus]
