"""Which endpoints pass for the target: those of its law, however they round."""

from __future__ import annotations

import copy
import logging

import pytest
import torch

from draftsmith.corpus.endpoint_check import TOLERANCE, EndpointCheck, Probe, regrets
from draftsmith.corpus.lanes import TransientFault
from draftsmith.decoding import Engine, Event, NoProposer, Request, Result, SamplingParams, Trace
from draftsmith.errors import CorpusError
from tests.corpus.small_target import fitted_model, small_model
from tests.tiny_target import conversations, train

NUM_PROBES, NUM_TOKENS = 16, 24


@pytest.fixture(scope="module")
def probes(chat):
    params = SamplingParams(max_new_tokens=NUM_TOKENS, stop_token_ids=chat.stop_ids)
    made = []
    for number, (_, text, _) in enumerate(conversations("home")[::12][:NUM_PROBES]):
        ids = chat.tokenizer(f"<|user|>{text}<|end|><|assistant|>").input_ids
        request = Request(f"probe-{number}", ids, params)
        made.append(Probe(request, text, chat.tokenizer(text).input_ids))
    return made


class Served:
    """An endpoint without a network, which knows answers by request.

    `faults` has what is raised at some of the requests, counted from 1.
    """

    def __init__(self, answers, *, name="a", tokenizer=None, faults=None):
        self.url = f"http://{name}/v1"
        self.answers, self.tokenizer, self.faults = answers, tokenizer, faults or {}
        self.asked = []

    def require_model(self):
        pass

    def complete(self, request):
        self.asked.append(request.request_id)
        if fault := self.faults.get(len(self.asked)):
            raise fault
        name, ids = request.request_id, self.answers[request.request_id]
        return Event(name, ids, Result(name, ids, "length", Trace()))

    def ids_of(self, text):
        return None if self.tokenizer is None else self.tokenizer(text).input_ids


def greedy(model, probes):
    engine = Engine(model, NoProposer(), max_rows=8, draft_length=0)
    results = engine.generate([probe.request for probe in probes])
    return {result.request_id: result.token_ids for result in results}


def checked(probes, target, *served):
    """The check, which has asked and judged all of them."""
    check = EndpointCheck(probes, lambda: target)
    for one in served:
        check(one)()
    return check


@pytest.fixture(scope="module")
def own(target, probes):
    """The target's own answers."""
    return greedy(target, probes)


def mean_regret(target, probes, answers):
    parts = [
        regrets(target, probe.request.prompt_ids, answers[probe.request.request_id])
        for probe in probes
    ]
    return float(torch.cat(parts).mean())


class TestRegrets:
    def test_the_targets_own_choices_cost_nothing(self, target, probes, own):
        for probe in probes:
            costs = regrets(target, probe.request.prompt_ids, own[probe.request.request_id])
            assert costs.shape == (len(own[probe.request.request_id]),)
            assert float(costs.max()) < 1e-4

    def test_another_token_costs_its_distance_and_the_rest_is_judged_behind_it(
        self, target, probes, own
    ):
        request, place = probes[0].request, 3
        ids = own[request.request_id]
        changed = [*ids[:place], 7, *ids[place + 1 :]]
        costs = regrets(target, request.prompt_ids, changed)
        with torch.no_grad():
            logits = target(torch.tensor([request.prompt_ids + changed])).logits[0]
        start = len(request.prompt_ids) - 1
        for position, token in enumerate(changed):
            row = logits[start + position].log_softmax(-1)
            expected = float(row.max() - row[token])
            assert float(costs[position]) == pytest.approx(expected, abs=1e-4)
        assert float(costs[place]) > 1.0


class TestSameTarget:
    def test_its_own_answers_pass(self, target, probes, own):
        checked(probes, target, Served(own))

    def test_other_arithmetic_passes(self, target, probes):
        """Weights of bfloat16, computed with in bfloat16 here and in float32 there."""
        coarse = copy.deepcopy(target).to(torch.bfloat16)
        checked(probes, coarse, Served(greedy(copy.deepcopy(coarse).float(), probes)))

    @pytest.mark.parametrize("seed", range(3))
    def test_noise_of_another_engine_passes_though_answers_part(self, target, probes, own, seed):
        """As large as what bfloat16 does to logits of this size."""
        answers = greedy(with_noise(target, 0.1, seed), probes)
        assert answers != own
        checked(probes, target, Served(answers))

    def test_one_wide_gap_is_no_other_checkpoint(self, target, probes, own):
        request, place = probes[0].request, 3
        ids = own[request.request_id]
        with torch.no_grad():
            prompt = torch.tensor([request.prompt_ids + ids[:place]])
            best, second = target(prompt).logits[0, -1].topk(2).indices.tolist()
        assert best == ids[place]
        behind = Request("", [*request.prompt_ids, *ids[:place], second], request.params)
        engine = Engine(target, NoProposer(), max_rows=1, draft_length=0)
        (rest,) = engine.generate([behind])
        changed = [*ids[:place], second, *rest.token_ids][:NUM_TOKENS]
        checked(probes, target, Served(own | {request.request_id: changed}))


def with_noise(model, scale, seed):
    """The model with its logits off by a normal number each."""
    noisy = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)

    def shift(_module, _inputs, logits):
        return logits + scale * torch.randn(logits.shape, generator=generator)

    noisy.get_output_embeddings().register_forward_hook(shift)
    return noisy


class TestOtherCheckpoint:
    def refused(self, probes, target, model):
        served = Served(greedy(model, probes))
        with pytest.raises(CorpusError) as caught:
            checked(probes, target, served)
        assert served.url in caught.value.what
        assert f"at most {TOLERANCE:g} nats" in caught.value.expected
        return caught.value

    def test_one_that_was_trained_otherwise_is_refused(self, target, probes, tokenizer):
        self.refused(probes, target, fitted_model(tokenizer, num_layers=1))

    def test_one_that_was_not_trained_is_refused(self, target, probes, tokenizer):
        error = self.refused(probes, target, small_model(tokenizer))
        assert "nats a token" in error.found

    def test_a_light_fine_tune_is_refused(self, target, probes, tokenizer):
        tuned = copy.deepcopy(target).requires_grad_(requires_grad=True)
        train(tuned, tokenizer, "away", 8)
        self.refused(probes, target, tuned)


class TestAsking:
    def test_the_target_is_loaded_once_for_equal_answers(self, target, probes, own):
        loads = []

        def load():
            loads.append(1)
            return target

        check = EndpointCheck(probes, load)
        for name in "aba":
            check(Served(own, name=name))()
        assert len(loads) == 1
        other = own | {"probe-0": own["probe-0"][:-1]}
        check(Served(other))()
        assert len(loads) == 2

    @pytest.mark.parametrize(("kind", "num_kept"), [("failed", 2), ("busy", 2), ("away", 0)])
    def test_answers_are_kept_unless_the_endpoint_was_away(
        self, target, probes, own, kind, num_kept
    ):
        served = Served(own, faults={3: TransientFault("fault", "fault", kind=kind)})
        check = EndpointCheck(probes, lambda: target)
        with pytest.raises(TransientFault):
            check(served)
        check(served)()
        names = [probe.request.request_id for probe in probes]
        assert served.asked == names[:3] + names[num_kept:]


class TestWithoutTheTarget:
    def test_the_same_tokenizer_passes(self, probes, own, tokenizer, caplog):
        EndpointCheck(probes, None)(Served(own, tokenizer=tokenizer))()
        assert "probes=not_compared" in caplog.text
        assert "tokenizer=not_compared" not in caplog.text

    def test_another_tokenizer_is_refused(self, probes, own, tokenizer):
        served = Served(own, tokenizer=lambda text: tokenizer(text[::-1]))
        with pytest.raises(CorpusError) as caught:
            EndpointCheck(probes, None)(served)
        assert served.url in caught.value.what
        assert "another tokenizer" in caught.value.found

    def test_one_that_does_not_show_itself_passes_with_a_word(self, probes, own, caplog):
        caplog.set_level(logging.WARNING)
        served = Served(own)
        EndpointCheck(probes, None)(served)()
        assert f"endpoint={served.url} tokenizer=not_compared" in caplog.text
