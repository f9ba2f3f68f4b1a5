from __future__ import annotations

import datasets
import pytest

from draftsmith.corpus.hub_prompts import read_dataset
from draftsmith.corpus.settings import SourceConfig
from draftsmith.errors import CorpusError

MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "name a lake"},
    {"role": "assistant", "content": "Garda"},
]


@pytest.fixture
def save(tmp_path):
    """`save(rows, split=)` -> the folder of a saved dataset."""

    def write(rows, split=None):
        data = datasets.Dataset.from_list(rows)
        whole = data if split is None else datasets.DatasetDict({split: data})
        datasets.disable_progress_bars()
        whole.save_to_disk(str(tmp_path / "saved"))
        return str(tmp_path / "saved")

    return write


def read(path, **settings):
    return list(read_dataset(SourceConfig(kind="dataset", path=path, **settings)))


def test_a_saved_dataset_gives_prompts_with_their_labels(save):
    rows = [{"prompt": "a", "category": "maths"}, {"prompt": "b", "category": None}]
    one, two = read(save(rows), domain="other")
    assert (one.messages, one.domain) == ((("user", "a"),), "maths")
    assert (two.messages, two.domain) == ((("user", "b"),), "other")


def test_conversations_lose_their_last_answer(save):
    (prompt,) = read(save([{"messages": MESSAGES}]))
    assert prompt.messages == (("system", "be brief"), ("user", "name a lake"))


def test_a_row_may_hold_a_prompt_or_a_conversation(save):
    rows = [{"prompt": None, "messages": MESSAGES}, {"prompt": "name a river", "messages": None}]
    assert [prompt.messages[-1][1] for prompt in read(save(rows))] == [
        "name a lake",
        "name a river",
    ]


def test_the_named_split_is_read_and_a_missing_one_refused(save):
    path = save([{"prompt": "a"}], split="extra")
    assert len(read(path, split="extra")) == 1
    with pytest.raises(CorpusError, match="split train"):
        read(path)


def test_a_row_without_the_columns_is_named(save):
    path = save([{"prompt": "fine", "text": "x"}, {"prompt": None, "text": "y"}])
    with pytest.raises(CorpusError, match="row 1"):
        read(path)


@pytest.mark.parametrize("has_a_data_file", [True, False])
def test_a_dataset_without_rows_is_refused_by_name(tmp_path, has_a_data_file):
    datasets.disable_progress_bars()
    data = datasets.Dataset.from_list([{"prompt": "a"}])
    empty = data.filter(lambda _row: False) if has_a_data_file else data.select([])
    empty.save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(CorpusError, match="no row") as caught:
        read(str(tmp_path / "saved"))
    assert str(tmp_path / "saved") in caught.value.what


def test_a_folder_without_data_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(CorpusError) as caught:
        read(str(tmp_path))
    assert str(tmp_path) in caught.value.what
    assert "save_to_disk" in caught.value.remedy
