from __future__ import annotations

import pytest

from draftsmith.corpus.settings import CorpusConfig, SourceConfig

BUNDLED = SourceConfig(kind="bundled")
SETTINGS = {
    "sources": (BUNDLED,),
    "eval_fraction": 0.3,
    "train_temperatures": (0.0, 0.7),
    "eval_temperatures": (0.0,),
    "max_prompt_tokens": 64,
    "max_new_tokens": 8,
    "min_eval_prompts": 1,
    "batch_size": 4,
    "shard_size": 4,
    "seed": 0,
}


@pytest.mark.parametrize("kind", ["jsonl", "dataset"])
def test_a_source_that_reads_needs_a_path(kind):
    assert SourceConfig(kind=kind, path="x").path == "x"
    with pytest.raises(ValueError, match="path"):
        SourceConfig(kind=kind)


def test_self_written_prompts_need_a_count():
    with pytest.raises(ValueError, match="count"):
        SourceConfig(kind="self")


@pytest.mark.parametrize("setting", [{"count": -1}, {"temperature": -0.1}])
def test_a_count_or_temperature_below_zero_is_refused(setting):
    with pytest.raises(ValueError, match="0 or more"):
        SourceConfig(kind="bundled", **setting)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("sources", (), "sources"),
        ("eval_fraction", 0.0, "eval_fraction"),
        ("eval_fraction", 1.0, "eval_fraction"),
        ("train_temperatures", (), "train_temperatures"),
        ("train_temperatures", (0.7, 0.7), "differ"),
        ("train_answers", 0, "train_answers"),
        ("train_answers", 3, "train_answers"),
        ("eval_temperatures", (), "eval_temperatures"),
        ("eval_temperatures", (-0.1,), "temperatures"),
        ("max_new_tokens", 0, "token limits"),
        ("batch_size", 0, "batch_size"),
        ("shard_size", 0, "shard_size"),
    ],
)
def test_a_value_out_of_range_is_refused(key, value, message):
    assert CorpusConfig(**SETTINGS).batch_size == 4
    with pytest.raises(ValueError, match=message):
        CorpusConfig(**{**SETTINGS, key: value})


ENDPOINTS = ("http://one:8000/v1", "https://two/v1")


def test_endpoints_need_a_model_and_are_needed():
    given = {**SETTINGS, "backend": "openai", "endpoints": ENDPOINTS, "endpoint_model": "base"}
    assert CorpusConfig(**given).endpoints == ENDPOINTS
    for name, empty in (("endpoints", ()), ("endpoint_model", "")):
        with pytest.raises(ValueError, match="needs endpoints and endpoint_model"):
            CorpusConfig(**{**given, name: empty})
        assert CorpusConfig(**{**given, name: empty, "backend": "local"}).backend == "local"


@pytest.mark.parametrize(
    "address",
    [
        "one:8000/v1",
        "ftp://one/v1",
        "http:///v1",
        "http://one:port/v1",
        "http://me:secret@one/v1",
        "http://secret@one/v1",
        "http://me:secret/v1",
        "http://one/v1?key=secret",
        "http://one/v1#secret",
    ],
)
def test_an_address_that_is_none_or_holds_a_secret_is_refused_and_not_shown(address):
    with pytest.raises(ValueError, match=r"endpoints\[1\] must be") as caught:
        CorpusConfig(**SETTINGS, endpoints=(ENDPOINTS[0], address))
    assert address not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_an_endpoint_counts_once():
    with pytest.raises(ValueError, match="differ"):
        CorpusConfig(**SETTINGS, endpoints=("http://one/v1", "http://one/v1/"))


def test_an_answer_has_some_time():
    with pytest.raises(ValueError, match="endpoint_timeout_s"):
        CorpusConfig(**SETTINGS, endpoint_timeout_s=0.0)
