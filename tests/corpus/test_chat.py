from __future__ import annotations

import copy

import pytest

from draftsmith.corpus.chat import Chat, make_chat
from draftsmith.corpus.prompts import Prompt, user_prompt
from draftsmith.errors import CorpusError

CONVERSATIONS = [
    (("user", "where does the red fox go?"),),
    (("system", "be brief"), ("user", "what does the old cat eat?")),
    (("user", "hello"), ("assistant", "good morning"), ("user", "naïve café ☕\n\n  two lines ")),
]


def with_template(tokenizer, template):
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_prompt_ids_are_the_templates_own(chat, tokenizer, messages):
    prompt = Prompt(messages, "general")
    expected = tokenizer.apply_chat_template(
        prompt.as_messages(), tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert chat.prompt_ids(prompt) == expected


def test_a_prompt_ends_where_the_assistant_begins(chat, tokenizer):
    ids = chat.prompt_ids(user_prompt("where does the red fox go?", "walk"))
    assert ids[-1] == tokenizer.convert_tokens_to_ids("<|assistant|>")


def test_a_user_turn_is_its_prefix_its_words_and_its_closing_id(chat, tokenizer):
    text = "where does the red fox go?"
    prefix, closing = chat.user_turn()
    words = tokenizer(text, add_special_tokens=False)["input_ids"]
    whole = chat.prompt_ids(user_prompt(text, "walk"))
    assert whole[:-1] == [*prefix, *words, closing]


def test_a_system_turn_of_the_templates_own_is_part_of_the_prefix(tokenizer):
    template = "<|system|>be kind<|end|>" + tokenizer.chat_template
    prefix, closing = Chat(with_template(tokenizer, template), ()).user_turn()
    assert tokenizer.decode(prefix) == "<|system|>be kind<|end|><|user|>"
    assert closing == tokenizer.convert_tokens_to_ids("<|end|>")


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}<|user|>{{ m['content'] | upper }}<|end|>{% endfor %}",
        "{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}",
    ],
    ids=["words are changed", "the turn is not closed"],
)
def test_a_template_whose_user_turn_cannot_be_found_is_refused(tokenizer, template):
    with pytest.raises(CorpusError, match="user turn"):
        Chat(with_template(tokenizer, template), ()).user_turn()


def test_a_target_without_a_chat_template_is_refused(target, tokenizer):
    with pytest.raises(CorpusError, match="chat template"):
        make_chat(target, with_template(tokenizer, None))


@pytest.mark.parametrize(
    ("configured", "expected"), [(None, [1]), (1, [1]), ([7, 1, 4], [1, 4, 7]), (9, [1, 9])]
)
def test_every_id_that_ends_a_turn_stops_a_response(target, tokenizer, configured, expected):
    model = copy.deepcopy(target)
    model.generation_config.eos_token_id = configured
    assert tokenizer.eos_token_id == 1
    assert make_chat(model, tokenizer).stop_ids == tuple(expected)
