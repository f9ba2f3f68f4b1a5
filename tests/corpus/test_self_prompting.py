from __future__ import annotations

import pytest

from draftsmith.corpus.self_prompting import is_usable, self_prompts, self_requests
from draftsmith.decoding import Engine, Event, NoProposer, Result, Trace

USER, END = "<|user|>", "<|end|>"


class ScriptedEngine:
    """Answers requests with given (text, finish reason), the last request first."""

    def __init__(self, tokenizer, answers):
        self._answers = [
            (tokenizer(text, add_special_tokens=False)["input_ids"], reason)
            for text, reason in answers
        ]

    def stream(self, requests):
        for request, (ids, reason) in reversed(list(zip(requests, self._answers, strict=True))):
            yield Event(request.request_id, ids[:1])
            yield Event(
                request.request_id, ids[1:], Result(request.request_id, ids, reason, Trace())
            )


@pytest.mark.parametrize(
    "text", ["what does the red fox eat?", "Wo liegt der große Fluss?", "add 2 to five, please now"]
)
def test_a_turn_of_a_few_plain_words_is_usable(text):
    assert is_usable(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hi there fox",
        "the the The the the fox",
        "12 + 44 = ? 90 % (1)",
        "a1#! b2$% c3&/ d4()",
        "🦊 🦊🐱 ... --- === ###",
    ],
)
def test_a_turn_that_is_short_repeats_itself_or_is_not_text_is_not(text):
    assert not is_usable(text)


def test_requests_start_a_user_turn_and_stop_at_its_end(chat, tokenizer):
    requests = self_requests(chat, 3, temperature=0.8, seed=5)
    assert len({request.request_id for request in requests}) == 3
    for request in requests:
        assert tokenizer.decode(request.prompt_ids) == USER
        assert (request.params.temperature, request.params.seed) == (0.8, 5)
        assert tokenizer.convert_tokens_to_ids(END) in request.params.stop_token_ids


def test_only_turns_that_end_by_themselves_and_read_like_one_are_kept_in_order(chat, tokenizer):
    answers = [
        (f"where does the red fox go?{END}", "stop"),
        ("what does the old cat eat and then", "length"),
        (f"fox fox fox fox{END}", "stop"),
        (f"  what does the lazy dog eat? {END}", "stop"),
    ]
    requests = self_requests(chat, len(answers), temperature=0.8, seed=0)
    events = []
    prompts = self_prompts(ScriptedEngine(tokenizer, answers), chat, requests, events.append)
    assert [prompt.messages for prompt in prompts] == [
        (("user", "where does the red fox go?"),),
        (("user", "what does the lazy dog eat?"),),
    ]
    assert {prompt.domain for prompt in prompts} == {"self-written"}
    assert sum(event.result is not None for event in events) == len(answers)


def test_a_fitted_target_writes_different_questions_and_the_same_ones_again(chat, target):
    requests = self_requests(chat, 12, temperature=0.8, seed=0)
    first, second = (
        self_prompts(Engine(target, NoProposer(), max_rows=rows, draft_length=0), chat, requests)
        for rows in (12, 5)
    )
    assert first == second
    texts = [prompt.messages[0][1] for prompt in first]
    assert len(set(texts)) > 1
    assert not any("<|" in text for text in texts)
