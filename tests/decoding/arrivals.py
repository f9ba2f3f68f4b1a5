"""Random requests, and a day in the life of an engine: arrivals, aborts and preemptions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from draftsmith.decoding import Engine, Request, SamplingParams

VOCAB = 64
LONGEST_PROMPT, LONGEST_ANSWER = 40, 24
CONTEXT = LONGEST_PROMPT + LONGEST_ANSWER


def random_requests(count: int, seed: int = 0) -> list[Request]:
    chance = random.Random(seed)
    requests = []
    for index in range(count):
        num_new = chance.randint(1, LONGEST_ANSWER)
        params = SamplingParams(
            max_new_tokens=num_new,
            temperature=chance.choice([0.0, 0.0, 0.7, 1.2]),
            top_k=chance.choice([0, 0, 5]),
            top_p=chance.choice([1.0, 1.0, 0.9]),
            min_p=chance.choice([0.0, 0.0, 0.05]),
            repetition_penalty=chance.choice([1.0, 1.0, 1.3]),
            presence_penalty=chance.choice([0.0, 0.0, 0.6]),
            frequency_penalty=chance.choice([0.0, 0.0, 0.3]),
            min_new_tokens=chance.choice([0, 0, num_new // 2]),
            seed=chance.randint(0, 3),
            stop_token_ids=tuple(chance.sample(range(VOCAB), chance.choice([0, 1, 3]))),
        )
        length = chance.choice([1, 2, chance.randint(3, LONGEST_PROMPT), LONGEST_PROMPT])
        prompt = [chance.randrange(VOCAB) for _ in range(length)]
        requests.append(Request(f"r{index}", prompt, params))
    return requests


@dataclass
class Day:
    """What became of the requests: tokens by id, and how often it happened."""

    answers: dict[str, list[int]] = field(default_factory=dict)
    aborted: dict[str, list[int]] = field(default_factory=dict)
    num_preempted: int = 0


def live_through(
    engine: Engine,
    requests: Sequence[Request],
    chance: random.Random,
    *,
    abort: float = 0.05,
    preempt: float = 0.15,
) -> Day:
    """Submit the requests at random times to an opened engine; chances are those of a step.

    Whoever was submitted and has not ended may be taken out: in line, being read, or in flight. The
    events are checked on the way.
    """
    day, arriving, streamed = Day(), list(requests), {}
    while arriving or engine.is_busy:
        if arriving and chance.random() < 0.7:
            number = chance.randint(1, 3)
            engine.submit(arriving[:number])
            streamed |= {request.request_id: [] for request in arriving[:number]}
            del arriving[:number]
        for event in engine.step():
            assert event.token_ids, "a round without a token"
            streamed[event.request_id] += event.token_ids
            if event.result is not None:
                assert event.result.request_id == event.request_id
                day.answers[event.request_id] = event.result.token_ids
                assert streamed.pop(event.request_id) == event.result.token_ids
        if streamed and chance.random() < preempt:
            engine.preempt(chance.choice(sorted(streamed)))
            day.num_preempted += 1
        if streamed and chance.random() < abort:
            taken = chance.choice(sorted(streamed))
            result = engine.abort(taken)
            assert result.finish_reason == "abort"
            day.aborted[taken] = result.token_ids
            assert streamed.pop(taken) == result.token_ids
    assert streamed == {}, "requests without an end"
    return day
