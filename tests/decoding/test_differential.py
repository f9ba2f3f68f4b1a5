"""Greedy output with every deterministic parameter is that of Transformers' `generate`.

With one difference that is meant: before `min_new_tokens` a stop string does not stop here.
"""

from __future__ import annotations

import pytest
import torch

from draftsmith.decoding import DraftModelProposer, Engine, Request, SamplingParams
from tests.decoding.test_engine_greedy import KINDS

NUM_NEW = 16


def reference(models, tokenizer, prompt: list[int], params: SamplingParams) -> list[int]:
    strings = {}
    if params.stop_strings:
        strings = {"stop_strings": list(params.stop_strings), "tokenizer": tokenizer}
    output = models.reference.generate(
        torch.tensor([prompt]),
        do_sample=False,
        max_new_tokens=params.max_new_tokens,
        min_new_tokens=params.min_new_tokens,
        repetition_penalty=params.repetition_penalty,
        eos_token_id=list(params.stop_token_ids) or None,
        pad_token_id=0,
        **strings,
    )
    return output[0, len(prompt) :].tolist()


def text_inside(token_text, token_ids: list[int]) -> str:
    """Characters from the middle of an answer, begun and ended inside tokens where possible."""
    for start in range(6, len(token_ids) - 3):
        text = token_text.text(token_ids[start : start + 3])
        if "\ufffd" not in text and len(text) > 3:
            return text[1:-1]
    raise AssertionError("an answer of broken characters: choose another prompt")


@pytest.mark.parametrize("kind", KINDS)
def test_output_is_that_of_transformers(family, tokenizer, token_text, ragged_prompts, kind):
    models = family(kind)
    prompts = ragged_prompts[1:4]

    def decode(params: SamplingParams, draft_length: int) -> list[list[int]]:
        engine = Engine(
            models.target,
            DraftModelProposer(models.draft),
            max_rows=2,
            draft_length=draft_length,
            token_text=token_text,
        )
        results = engine.generate([Request(str(i), p, params) for i, p in enumerate(prompts)])
        return [result.token_ids for result in results]

    plain = decode(SamplingParams(max_new_tokens=NUM_NEW, repetition_penalty=1.3), 0)
    string, early = text_inside(token_text, plain[0]), plain[1][2]
    cases = [
        SamplingParams(
            max_new_tokens=NUM_NEW,
            repetition_penalty=1.4,
            min_new_tokens=7,
            stop_token_ids=(early,),
        ),
        SamplingParams(max_new_tokens=NUM_NEW, repetition_penalty=1.3, stop_strings=(string,)),
        SamplingParams(
            max_new_tokens=NUM_NEW,
            repetition_penalty=1.3,
            min_new_tokens=3,
            stop_token_ids=(early, plain[2][8]),
            stop_strings=(string, text_inside(token_text, plain[2])),
        ),
    ]
    stopped = 0
    for params in cases:
        expected = [reference(models, tokenizer, prompt, params) for prompt in prompts]
        stopped += sum(len(token_ids) < NUM_NEW for token_ids in expected)
        for draft_length in (0, 4):
            for found, wanted in zip(decode(params, draft_length), expected, strict=True):
                if len(wanted) < params.min_new_tokens:
                    assert found[: len(wanted)] == wanted
                    assert len(found) >= params.min_new_tokens
                else:
                    assert found == wanted
    assert stopped >= 3, "the stops were never met"
