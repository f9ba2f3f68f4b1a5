"""What OpenAI's client gets, against the same pair offline."""

from __future__ import annotations

import pytest
import torch

from draftsmith.targets.loading import load_target
from tests.serving.service import NAME, QUESTIONS, asked, chat, client_of, post

STOP = " in the"
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 16}


def turn(question):
    return [{"role": "user", "content": question}]


@pytest.mark.parametrize("question", QUESTIONS[:4])
def test_a_greedy_answer_is_that_of_the_pair_offline(client, pair, question):
    done = client.chat.completions.create(**chat(question))
    expected = pair.generate(question, max_new_tokens=24)
    choice = done.choices[0]
    assert choice.message.content == expected.text
    assert (choice.message.role, choice.finish_reason) == ("assistant", expected.finish_reason)
    assert done.usage.completion_tokens == len(expected.token_ids)
    assert done.usage.prompt_tokens == expected.num_prompt_tokens
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens
    assert done.usage.speculation == {
        "drafted": expected.num_drafted,
        "accepted": sum(map(min, expected.trace.accepted, expected.trace.committed)),
        "rounds": expected.num_rounds,
        "block_efficiency": round(expected.block_efficiency, 4),
    }
    assert done.usage.speculation["accepted"] > 0


def test_a_seed_gives_the_answer_of_the_pair_offline_again_and_again(client, pair):
    body = chat(QUESTIONS[0], seed=7, **SAMPLED)
    answers = [client.chat.completions.create(**body).choices[0].message.content for _ in "ab"]
    expected = pair.generate(
        QUESTIONS[0], seed=7, temperature=0.9, top_p=0.95, max_new_tokens=16
    ).text
    assert answers == [expected, expected]


def test_without_a_seed_answers_differ(client):
    body = chat(QUESTIONS[0], temperature=1.5, max_tokens=24)
    answers = {client.chat.completions.create(**body).choices[0].message.content for _ in range(4)}
    assert len(answers) > 1


def test_samples_differ_and_the_first_is_that_of_one_sample(client):
    body = chat(QUESTIONS[1], seed=3, temperature=1.5, max_tokens=24)
    several = client.chat.completions.create(**body, n=3)
    texts = [choice.message.content for choice in several.choices]
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert client.chat.completions.create(**body).choices[0].message.content == texts[0]
    one = client.chat.completions.create(**body).usage
    assert several.usage.prompt_tokens == one.prompt_tokens
    assert several.usage.completion_tokens > one.completion_tokens


@pytest.mark.parametrize("given", [{}, {"stop": STOP}, {"n": 2, "seed": 1, **SAMPLED}])
def test_a_stream_is_the_same_answer_in_pieces(client, given):
    body = chat(QUESTIONS[2], **given)
    whole = client.chat.completions.create(**body)
    chunks = list(
        client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True})
    )
    for index, choice in enumerate(whole.choices):
        mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in mine) == choice.message.content
        assert [c.finish_reason for c in mine if c.finish_reason] == [choice.finish_reason]
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage


def test_a_stream_comes_round_by_round_and_ends_as_the_api_says(server):
    done = post(server, chat(QUESTIONS[0], stream=True))
    assert done.headers["content-type"].startswith("text/event-stream")
    events = done.content.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert len(events) > 4
    assert all(event.startswith("data: {") for event in events[:-2])


def test_text_ends_before_a_stop_string_and_log_probabilities_with_it(client, pair):
    plain = client.chat.completions.create(**chat(QUESTIONS[0])).choices[0].message.content
    assert STOP in plain
    choice = client.chat.completions.create(
        **chat(QUESTIONS[0], stop=["nowhere", STOP], logprobs=True)
    ).choices[0]
    assert choice.message.content == plain.partition(STOP)[0]
    assert choice.finish_reason == "stop"
    spelled = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content).decode()
    assert spelled.startswith(choice.message.content)
    assert len(spelled) - len(choice.message.content) < len(STOP)


@pytest.fixture(scope="module")
def reference(project):
    """The target as Transformers runs it."""
    return load_target(project.root / "target", dtype="float32")


@pytest.mark.parametrize("given", [{}, {"seed": 5, "temperature": 1.3, "repetition_penalty": 1.2}])
def test_log_probabilities_are_the_targets_own_at_every_position(client, pair, reference, given):
    question = QUESTIONS[3]
    body = asked(chat(question, logprobs=True, top_logprobs=3, **given))
    done = client.chat.completions.create(**body)
    entries = done.choices[0].logprobs.content
    assert done.usage.speculation["accepted"] > 0
    names = {pair.token_text.spelled(i): i for i in range(len(reference.tokenizer))}
    answer = [names[bytes(entry.bytes)] for entry in entries]
    prompt = pair.encode(question)
    with torch.inference_mode():
        logits = reference.model(torch.tensor([prompt + answer])).logits[0].float()
    expected = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    chosen = expected.gather(-1, torch.tensor(answer)[:, None]).squeeze(-1)
    torch.testing.assert_close(
        torch.tensor([entry.logprob for entry in entries]), chosen, rtol=0, atol=1e-4
    )
    top = expected.topk(3)
    for entry, ids, values in zip(entries, top.indices, top.values, strict=True):
        found = [names[bytes(other.bytes)] for other in entry.top_logprobs]
        assert found == ids.tolist()
        assert [o.logprob for o in entry.top_logprobs] == pytest.approx(values.tolist(), abs=1e-4)


def test_a_bias_forces_and_bans_tokens(client, pair):
    question = QUESTIONS[0]
    plain = pair.generate(question, max_new_tokens=4)
    banned = {str(token): -100 for token in plain.token_ids}
    (forced,) = pair.target.tokenizer(" honey", add_special_tokens=False).input_ids[:1]
    for bias in (banned, {str(forced): 100}):
        done = client.chat.completions.create(**chat(question, logit_bias=bias, max_tokens=4))
        expected = pair.generate(
            question, max_new_tokens=4, logit_bias=[(int(k), v) for k, v in bias.items()]
        )
        assert done.choices[0].message.content == expected.text
        assert not set(expected.token_ids) & set(map(int, banned)) or bias is not banned
    assert set(expected.token_ids) == {forced}


@pytest.mark.parametrize("given", [{}, {"temperature": 0.8, "seed": 4}])
def test_bad_words_are_in_no_answer(client, pair, given):
    """Neither at the beginning of a word nor behind a space."""
    question, sampling = QUESTIONS[1], {"max_new_tokens": 24, **given}
    plain = pair.generate(question, **sampling)
    words = sorted({word for word in plain.text.split() if word.isalpha()})[:3]
    assert len(words) == 3
    tokenizer = pair.target.tokenizer
    spelled = [
        tokenizer(text, add_special_tokens=False).input_ids
        for word in words
        for text in (word, f" {word}")
    ]
    assert max(map(len, spelled)) > 1
    expected = pair.generate(question, bad_words_ids=spelled, **sampling)
    body = asked(chat(question, bad_words=words, **given))
    done = client.chat.completions.create(**body)
    assert done.choices[0].message.content == expected.text != plain.text
    for ids in spelled:
        places = range(len(expected.token_ids) - len(ids) + 1)
        assert ids not in [expected.token_ids[i : i + len(ids)] for i in places]


def test_completions_take_texts_and_tokens_without_a_template(client, pair):
    texts = ["the red fox", "nobody knows"]
    ids = [list(pair.target.tokenizer(text).input_ids) for text in texts]
    body = {"model": NAME, "temperature": 0, "max_tokens": 8}
    by_text = client.completions.create(prompt=texts, **body)
    by_ids = client.completions.create(prompt=ids, **body)
    assert [c.text for c in by_text.choices] == [c.text for c in by_ids.choices]
    assert by_text.usage.prompt_tokens == sum(map(len, ids))
    one = client.completions.create(prompt=texts[1], logprobs=2, **body).choices[0]
    assert one.text == by_text.choices[1].text
    assert "".join(one.logprobs.tokens) == one.text
    for name, top in zip(one.logprobs.tokens, one.logprobs.top_logprobs, strict=True):
        assert name in top
        assert len(top) in (2, 3)
    assert one.logprobs.text_offset[1] == len(one.logprobs.tokens[0])
    streamed = client.completions.create(prompt=texts[1], stream=True, **body)
    assert "".join(chunk.choices[0].text for chunk in streamed) == one.text


def test_an_answer_without_a_limit_ends_with_its_turn_or_the_context(client, server, pair):
    body = chat(QUESTIONS[0])
    del body["max_tokens"]
    done = client.chat.completions.create(**body)
    assert done.choices[0].message.content == pair.generate(QUESTIONS[0]).text
    full = client.chat.completions.create(**body, logit_bias={"1": -100})
    assert full.choices[0].finish_reason == "length"
    limit = server.state.gateway.served.max_tokens
    assert full.usage.total_tokens == limit == 256


def test_a_message_in_parts_is_one_text_and_the_developer_is_the_system(client):
    parts = [{"type": "text", "text": word} for word in (QUESTIONS[0][:9], QUESTIONS[0][9:])]
    body = chat(QUESTIONS[0])
    plain = client.chat.completions.create(**body)
    body["messages"] = [{"role": "user", "content": parts}]
    in_parts = client.chat.completions.create(**body)
    assert in_parts.choices[0].message.content == plain.choices[0].message.content
    answers = []
    for role in ("developer", "system"):
        body["messages"] = [{"role": role, "content": "be brief"}, *turn(QUESTIONS[0])]
        done = client.chat.completions.create(**body)
        answers.append((done.usage.prompt_tokens, done.choices[0].message.content))
    assert answers[0] == answers[1]


def test_the_model_is_listed_and_found(client, server):
    (listed,) = client.models.list().data
    assert listed.id == NAME
    assert client.models.retrieve(NAME) == listed
    assert listed.pair["version"] == "1"
    assert client_of(server, timeout=5).models.list().data == [listed]
