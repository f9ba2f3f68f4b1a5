"""Bodies that are wrong a thousand times over are refused for a few of their faults."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from draftsmith.serving.schema import ChatRequest, CompletionRequest

MANY = 2000
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "demo", "prompt": "hi"}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatRequest, {**CHAT, "messages": [7] * MANY}),
        (ChatRequest, {**CHAT, "messages": [{"role": "user", "content": [7] * MANY}]}),
        (ChatRequest, {**CHAT, "messages": CHAT["messages"] * 20_000}),
        (ChatRequest, {**CHAT, "stop": [7] * 16}),
        (ChatRequest, {**CHAT, "logit_bias": {str(place): "x" for place in range(MANY)}}),
        (ChatRequest, {**CHAT, "metadata": {str(place): 7 for place in range(MANY)}}),
        (ChatRequest, {**CHAT, **{f"x{place}": 7 for place in range(MANY)}}),
        (CompletionRequest, {**COMPLETION, "prompt": [-1] * MANY}),
        (CompletionRequest, {**COMPLETION, "prompt": [[-1] * MANY] * 100}),
        (CompletionRequest, {**COMPLETION, "prompt": [None] * 100}),
    ],
    ids=lambda value: str(value)[-40:],
)
def test_faults_are_few(kind, body):
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() <= 4
