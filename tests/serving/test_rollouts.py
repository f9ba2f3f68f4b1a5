"""A service of the project as the corpus's backend, with a faulty proxy before it."""

from __future__ import annotations

import logging

import pytest

from draftsmith.corpus.endpoint import Endpoint
from draftsmith.corpus.endpoint_check import EndpointCheck, Probe
from draftsmith.corpus.endpoint_decoder import EndpointDecoder
from draftsmith.corpus.rollouts import Limits, RolloutJob, ShardStore, roll_out
from draftsmith.decoding import Engine, NoProposer, Request, SamplingParams
from draftsmith.errors import CorpusError
from draftsmith.targets.loading import load_target
from tests.faulty_endpoint import KEY, FaultyEndpoint, broken_json, forwarding, hang_up, status
from tests.serving.service import NAME, QUESTIONS, serving

NUM_TOKENS = 16
NUM_JOBS = 12


@pytest.fixture(scope="module")
def reference(project):
    """The target in float32, as the service has it."""
    return load_target(project.root / "target", dtype="float32").model


@pytest.fixture(scope="module")
def jobs(pair):
    """Greedy and sampled ones in turn."""
    return [
        RolloutJob(f"p{number}", "walk", (0.0, 0.7)[number % 2], list(pair.encode(question)))
        for number, question in enumerate(QUESTIONS[:NUM_JOBS])
    ]


@pytest.fixture
def make(pair, reference, jobs, tmp_path):
    """`make(folder name, *urls)` -> rollouts; without urls by the engine here."""
    stop_ids = pair.stop_token_ids()
    tokenizer = pair.target.tokenizer

    def probes(params):
        return [
            Probe(
                Request(f"probe-{job.prompt_id}", job.prompt_ids, params),
                question,
                tokenizer(question, add_special_tokens=False).input_ids,
            )
            for job, question in zip(jobs[:3], QUESTIONS, strict=False)
        ]

    def run(name, *urls, key="", fits=True):
        size = reference.get_input_embeddings().num_embeddings
        params = SamplingParams(max_new_tokens=NUM_TOKENS, stop_token_ids=stop_ids)
        decoder = EndpointDecoder(
            [Endpoint(url, NAME, size, 30.0, key) for url in urls],
            max_requests=6,
            check=EndpointCheck(probes(params), (lambda: reference) if fits else None),
            first_pause_s=0.002,
        )
        if not urls:
            decoder = Engine(reference, NoProposer(), max_rows=4, draft_length=0)
        limits = Limits(NUM_TOKENS, stop_ids, seed=0)
        return roll_out(decoder, jobs, limits=limits, store=ShardStore(tmp_path / name, 4))

    return run


def greedy(rollouts):
    return [rollout for rollout in rollouts if rollout.temperature == 0]


def test_greedy_rollouts_are_those_of_the_engine_here(make, server):
    here, there = make("here"), make("there", f"{server.url}/v1")
    assert greedy(there) == greedy(here) != []
    assert [rollout.key for rollout in there] == [rollout.key for rollout in here]
    assert [rollout.response_ids for rollout in there] != [rollout.response_ids for rollout in here]


def test_a_target_that_does_not_fit_is_known_by_its_tokenizer(make, server, caplog):
    assert make("unseen", f"{server.url}/v1", fits=False)
    assert "probes=not_compared" in caplog.text
    assert "tokenizer=not_compared" not in caplog.text


def test_faults_between_change_no_rollout(make, server, jobs):
    direct = make("direct", f"{server.url}/v1")
    faults = [status(429, Retry_After="0.01"), status(500), broken_json, hang_up]

    def plan(number):
        return faults[number // 3 % len(faults)] if number > 3 and number % 3 == 0 else None

    with FaultyEndpoint(forwarding(f"{server.url}/v1"), plan=plan, models=(NAME,)) as proxy:
        assert make("proxied", proxy.url) == direct
        assert len(proxy.asked) - len(proxy.answered) >= len(jobs) // 3


def test_a_service_without_room_is_asked_again(make, project, caplog):
    """One row and a queue of one: most of six requests at once are told to come back."""
    caplog.set_level(logging.INFO)
    with serving(project.root, limits={"max_rows": 1, "max_queue": 1}) as small:
        there = make("small", f"{small.url}/v1")
    assert greedy(there) == greedy(make("here"))
    assert "http_429=" in caplog.text


def test_a_service_with_a_lock_takes_its_key_alone(make, project):
    with serving(project.root, keys=(KEY.encode(),)) as locked:
        there = make("locked", f"{locked.url}/v1", key=KEY)
        for wrong in ("", "sk-another-key"):
            with pytest.raises(CorpusError, match="HTTP 401") as caught:
                make("refused", f"{locked.url}/v1", key=wrong)
            assert "DRAFTSMITH_ENDPOINT_KEY" in caught.value.remedy
    assert greedy(there) == greedy(make("here"))
