"""Prompts that the target writes itself: its chat template up to the user's words, then sampling.

So a pipeline without any prompt data still has a corpus, and one close to what the target knows.
"""

from __future__ import annotations

from collections.abc import Callable

from draftsmith.corpus.chat import Chat
from draftsmith.corpus.prompts import Prompt, user_prompt
from draftsmith.corpus.rollouts import Decoder
from draftsmith.decoding import Event, Request, SamplingParams

SELF_DOMAIN = "self-written"
_MAX_TURN_TOKENS = 96
_MIN_WORDS = 4
_MIN_LETTER_SHARE = 0.6


def self_requests(chat: Chat, count: int, *, temperature: float, seed: int) -> list[Request]:
    """Requests whose answers are user turns."""
    prefix, closing = chat.user_turn()
    params = SamplingParams(
        max_new_tokens=_MAX_TURN_TOKENS,
        temperature=temperature,
        seed=seed,
        stop_token_ids=tuple({closing, *chat.stop_ids}),
    )
    return [Request(f"self-{index}", prefix, params) for index in range(count)]


def is_usable(text: str) -> bool:
    """Whether a turn reads like one: a few words, half or more of them distinct, mostly letters."""
    words = text.split()
    if len(words) < _MIN_WORDS or len({w.casefold() for w in words}) * 2 < len(words):
        return False
    letters = sum(character.isalpha() or character.isspace() for character in text)
    return letters >= _MIN_LETTER_SHARE * len(text)


def self_prompts(
    decoder: Decoder,
    chat: Chat,
    requests: list[Request],
    on_event: Callable[[Event], None] = lambda _event: None,
) -> list[Prompt]:
    """Sample the turns and keep those that end by themselves and read like a turn."""
    prompts = []
    for event in decoder.stream(requests):
        on_event(event)
        if event.result is not None and event.result.finish_reason == "stop":
            ids = event.result.token_ids[:-1]
            text = str(chat.tokenizer.decode(ids, skip_special_tokens=True)).strip()
            if is_usable(text):
                prompts.append((event.request_id, user_prompt(text, SELF_DOMAIN)))
    return [prompt for _, prompt in sorted(prompts, key=lambda pair: int(pair[0].split("-")[1]))]
