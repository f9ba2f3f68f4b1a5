"""Many callers at once: each gets the answer of the pair offline, and nobody's place is lost."""

from __future__ import annotations

import asyncio
import random

import pytest

from benchmarks.soak_load import offline
from draftsmith.serving.served_pair import EngineOptions
from tests.serving.service import (
    QUESTIONS,
    asked,
    async_client_of,
    chat,
    is_idle,
    serving,
    wait_until,
)

NUM_CALLS = 80  # 64 of them streams that are read to their end
ROOM = {"max_rows": 6, "max_queue": NUM_CALLS}


def mixed_bodies(seed):
    chance = random.Random(seed)
    kinds = [
        {},
        {"frequency_penalty": 0.5, "presence_penalty": 0.2},
        {"logit_bias": {"30": 4.0, "40": -3.0}},
        {"temperature": 0.8, "top_p": 0.9, "seed": 11},
        {"temperature": 1.0, "top_k": 20, "min_p": 0.02, "seed": 12},
        {"temperature": 1.2, "repetition_penalty": 1.1, "seed": 13},
        {"min_tokens": 5, "stop": ["."]},
    ]
    return [
        chat(chance.choice(QUESTIONS), max_tokens=chance.randint(5, 40), **kinds[i % len(kinds)])
        for i in range(NUM_CALLS)
    ]


async def one(client, body, *, is_cancelled, is_streamed):
    body = asked(body)
    if is_cancelled:
        stream = await client.chat.completions.create(**body, stream=True)
        async for _ in stream:
            break
        await stream.close()
        return None
    if is_streamed:
        stream = await client.chat.completions.create(**body, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return "".join(pieces)
    done = await client.chat.completions.create(**body)
    return done.choices[0].message.content


async def all_at_once(server, bodies):
    async with async_client_of(server) as client:
        calls = [
            one(client, body, is_cancelled=i % 10 == 9, is_streamed=i % 10 != 4)
            for i, body in enumerate(bodies)
        ]
        return await asyncio.gather(*calls)


@pytest.mark.parametrize("verify", ["rejection", "match"])
def test_answers_among_many_are_those_of_the_pair_offline(project, pair, verify):
    bodies = mixed_bodies(0)
    engine = EngineOptions(verify=verify)
    with serving(project.root, engine=engine, limits=ROOM) as server:
        answers = asyncio.run(all_at_once(server, bodies))
        wait_until(lambda: is_idle(server))
        assert server.state.gateway.thread._engines == {}
    expected = [offline(pair, body, verify) for body in bodies]
    assert [a for a in answers if a is not None] == [
        text for i, text in enumerate(expected) if i % 10 != 9
    ]


def test_lengths_that_adapt_are_used_where_their_costs_were_measured(project, pair):
    """Greedy answers are the same; what was measured once is found at the next start."""
    limits = {"max_rows": 2}
    with serving(project.root, "models:/demo/2", limits=limits) as server:
        assert server.state.gateway.served.draft_length == 3
    measured = EngineOptions(draft_length="adaptive")
    with serving(project.root, "models:/demo/2", engine=measured, limits=limits) as server:
        assert server.state.gateway.served.draft_length == "adaptive"
    with serving(project.root, "models:/demo/2", limits=limits) as server:
        assert server.state.gateway.served.draft_length == "adaptive"
        bodies = [chat(question) for question in QUESTIONS[:8]]
        answers = asyncio.run(all_at_once(server, bodies))
    assert answers == [pair.generate(q, max_new_tokens=24).text for q in QUESTIONS[:8]]
