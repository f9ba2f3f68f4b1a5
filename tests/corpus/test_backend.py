"""Which backend the configuration opens, over a snapshot on disk."""

from __future__ import annotations

import dataclasses

import pytest

from draftsmith.artifacts import short
from draftsmith.corpus import backend
from draftsmith.corpus.chat import make_chat
from draftsmith.corpus.endpoint_decoder import EndpointDecoder
from draftsmith.corpus.settings import CorpusConfig, SourceConfig
from draftsmith.decoding import Engine, Request, SamplingParams
from draftsmith.errors import ConfigError
from draftsmith.targets.identity import identify
from draftsmith.targets.loading import fits_memory
from tests.faulty_endpoint import KEY, MODEL, FaultyEndpoint, answers_of
from tests.tiny_target import save

NUM_PROBES = 16
CONFIG = CorpusConfig(
    sources=(SourceConfig(kind="bundled"),),
    eval_fraction=0.3,
    train_temperatures=(0.0,),
    eval_temperatures=(0.0,),
    max_prompt_tokens=40,
    max_new_tokens=8,
    min_eval_prompts=1,
    batch_size=3,
    shard_size=4,
    seed=0,
    endpoint_model=MODEL,
)


@pytest.fixture(scope="module")
def snapshot(target, tokenizer, tmp_path_factory):
    """Root of the snapshots and the identity of the one that is there."""
    root = tmp_path_factory.mktemp("targets")
    save(target, tokenizer, root / "new")
    identity = identify(root / "new", "float32")
    (root / "new").rename(root / short(identity.digest))
    return root, identity


@pytest.fixture
def opened(snapshot, monkeypatch):
    """`opened(backend, *urls)` -> chat and decoder."""
    monkeypatch.delenv("DRAFTSMITH_ENDPOINT_KEY", raising=False)
    root, identity = snapshot

    def run(kind, *urls):
        config = dataclasses.replace(CONFIG, backend=kind, endpoints=urls)
        return backend.open_backend(config, identity, root)

    return run


def request_of(chat):
    params = SamplingParams(max_new_tokens=6, stop_token_ids=chat.stop_ids)
    return Request("a", chat.tokenizer("<|user|>hi<|end|><|assistant|>").input_ids, params)


def test_the_engine_here_is_the_default(opened, target, tokenizer):
    chat, decoder = opened("local")
    assert isinstance(decoder, Engine)
    assert decoder.max_rows == CONFIG.batch_size
    assert chat.stop_ids == make_chat(target, tokenizer).stop_ids


@pytest.mark.parametrize("fits", [True, False])
def test_endpoints_answer_as_the_engine_here(opened, target, tokenizer, monkeypatch, caplog, fits):
    monkeypatch.setattr(backend, "fits_memory", lambda _identity: fits)
    monkeypatch.setenv("DRAFTSMITH_ENDPOINT_KEY", f" {KEY}\n")
    local_chat, engine = opened("local")
    (expected,) = [e.result for e in engine.stream([request_of(local_chat)]) if e.result]
    with FaultyEndpoint(answers_of(target, tokenizer)) as server:
        chat, decoder = opened("openai", f"{server.url}/")
        assert isinstance(decoder, EndpointDecoder)
        assert chat.stop_ids == local_chat.stop_ids
        (event,) = decoder.stream([request_of(chat)])
        assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
        assert all(len(body["prompt"]) <= CONFIG.max_prompt_tokens for body in server.asked)
        num_texts = sum(isinstance(body["prompt"], str) for body in server.asked)
        assert num_texts == (0 if fits else NUM_PROBES)
        assert len(server.asked) == NUM_PROBES + num_texts + 1
    assert event.token_ids == expected.token_ids
    assert ("not_compared" in caplog.text) == (not fits)


@pytest.mark.parametrize("key", ["two words", "line\nbreak", "schlüssel"])
def test_a_key_that_no_header_takes_is_refused_and_not_shown(opened, monkeypatch, key):
    monkeypatch.setenv("DRAFTSMITH_ENDPOINT_KEY", key)
    with pytest.raises(ConfigError, match="DRAFTSMITH_ENDPOINT_KEY") as caught:
        opened("openai", "http://one/v1")
    assert key not in str(caught.value)


def test_a_target_fits_when_its_weights_do(snapshot):
    _, identity = snapshot
    assert fits_memory(identity)
    assert not fits_memory(dataclasses.replace(identity, num_parameters=1 << 50))
