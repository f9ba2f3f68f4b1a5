"""Exact token ids in answers, whole and streamed, and stop ids of the caller's own."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import pytest
from tokenizers.processors import TemplateProcessing

from draftsmith.serving.parameters import encode
from draftsmith.serving.schema import CompletionRequest
from tests.serving.service import NAME, QUESTIONS, chat, post

STOP = " in the"


def completion(prompt, **given):
    return {"model": NAME, "prompt": prompt, "temperature": 0, "max_tokens": 24, **given}


def asked(server, body, path):
    done = post(server, {**body, "return_token_ids": True}, path)
    assert done.status_code == 200, done.text
    return done.json()


def streamed(server, body, path):
    """The chunks of a stream that was asked for ids."""
    done = post(server, {**body, "return_token_ids": True, "stream": True}, path)
    lines = done.content.decode().split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if "{" in line]


@pytest.fixture(scope="module")
def prompts(pair):
    return [list(pair.encode(question)) for question in QUESTIONS[:2]]


@pytest.mark.parametrize("given", [{}, {"stop": STOP}, {"temperature": 0.9, "seed": 3}])
def test_a_chat_tells_the_ids_of_its_prompt_and_of_each_answer(server, pair, given):
    body = chat(QUESTIONS[0], n=2, **given)
    whole = asked(server, body, "/v1/chat/completions")
    assert whole["prompt_token_ids"] == list(pair.encode(QUESTIONS[0]))
    sampling = {
        "temperature": body["temperature"],
        "seed": given.get("seed", 0),
        "stop_strings": [STOP] if "stop" in given else [],
    }
    expected = pair.generate(QUESTIONS[0], max_new_tokens=24, **sampling).token_ids
    assert whole["choices"][0]["token_ids"] == expected
    chunks = streamed(server, body, "/v1/chat/completions")
    told = [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk]
    assert told == [whole["prompt_token_ids"]]
    assert "prompt_token_ids" in chunks[0]
    for index, choice in enumerate(whole["choices"]):
        assert "prompt_token_ids" not in choice
        assert joined(chunks, index, "token_ids") == choice["token_ids"]


def joined(chunks, index, name):
    mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return sum((choice.get(name, []) for choice in mine), [])


def test_completions_tell_the_ids_of_each_choice(server, prompts):
    body = completion(prompts, n=2, temperature=0.9, seed=5)
    whole = asked(server, body, "/v1/completions")
    chunks = streamed(server, body, "/v1/completions")
    assert len(whole["choices"]) == 4
    assert "prompt_token_ids" not in whole
    for index, choice in enumerate(whole["choices"]):
        assert choice["prompt_token_ids"] == prompts[index // 2]
        assert joined(chunks, index, "token_ids") == choice["token_ids"] != []
        assert joined(chunks, index, "prompt_token_ids") == prompts[index // 2]


def test_a_text_is_read_with_the_special_tokens_of_its_tokenizer_or_without(pair):
    tokenizer = copy.deepcopy(pair.target.tokenizer)
    first, known = tokenizer.eos_token, tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, known)]
    )
    target = SimpleNamespace(tokenizer=tokenizer, model=pair.target.model)
    served = SimpleNamespace(pair=SimpleNamespace(target=target))
    words = tokenizer(QUESTIONS[0], add_special_tokens=False).input_ids
    for given, expected in (({}, [known, *words]), ({"add_special_tokens": False}, words)):
        body = CompletionRequest.model_validate(completion(QUESTIONS[0], **given))
        assert encode(body, served).prompts == [expected]


def test_ids_hold_what_the_text_does_not_show(server, pair, prompts):
    body = completion(prompts[0], max_tokens=100)
    (choice,) = asked(server, body, "/v1/completions")["choices"]
    spelled = b"".join(map(pair.token_text.spelled, choice["token_ids"][:-1])).decode()
    assert choice["text"] == spelled
    assert choice["finish_reason"] == "stop"
    assert choice["token_ids"][-1] in pair.stop_token_ids()


def test_ids_come_with_their_round_while_the_text_is_held_back(server, pair):
    text = pair.generate(QUESTIONS[0], max_new_tokens=24).text
    body = chat(QUESTIONS[0], stop=f"{text[:-1]} never")
    whole = asked(server, body, "/v1/chat/completions")
    chunks = streamed(server, body, "/v1/chat/completions")
    assert joined(chunks, 0, "token_ids") == whole["choices"][0]["token_ids"]
    told = [c for chunk in chunks for c in chunk["choices"] if "token_ids" in c]
    assert sum("content" not in choice["delta"] for choice in told) > 1


def test_nobody_gets_ids_who_did_not_ask(server, prompts):
    for body, path in (
        (chat(QUESTIONS[0]), "/v1/chat/completions"),
        (completion(prompts[0]), "/v1/completions"),
    ):
        assert "token_ids" not in post(server, body, path).text
        assert b"token_ids" not in post(server, {**body, "stream": True}, path).content


def test_an_answer_ends_with_a_stop_id_of_the_callers_own(server, prompts):
    (plain,) = asked(server, completion(prompts[0]), "/v1/completions")["choices"]
    ids = plain["token_ids"]
    stop = next(token for place, token in enumerate(ids[2:], start=2) if token not in ids[:place])
    body = completion(prompts[0], stop_token_ids=[stop])
    (choice,) = asked(server, body, "/v1/completions")["choices"]
    assert choice["token_ids"] == ids[: ids.index(stop) + 1]
    assert choice["finish_reason"] == "stop"
    assert plain["text"].startswith(choice["text"])
    assert len(choice["text"]) < len(plain["text"])


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ({"stop_token_ids": [9999]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"return_token_ids": 1}, "return_token_ids"),
        ({"add_special_tokens": 0}, "add_special_tokens"),
    ],
    ids=str,
)
def test_ids_that_are_none_are_refused(server, prompts, field, param):
    done = post(server, completion(prompts[0], **field), "/v1/completions")
    assert done.status_code == 400
    assert done.json()["error"]["param"] == param
