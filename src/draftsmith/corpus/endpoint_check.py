"""Whether an endpoint serves the target, judged by what it says: nothing there states a digest.

It continues a few prompts greedily, and the target reads what it wrote. Every token costs the
target a regret: by how many nats it would have preferred another one there, behind the same text.
The target's own choice costs nothing. Another engine rounds otherwise, so it takes other tokens
where the target hardly prefers one: rare, and cheap. Another checkpoint does so often, and where it
costs much. The mean over all positions tells them apart whichever answers part first or widest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.corpus.endpoint import Endpoint
from draftsmith.corpus.lanes import TransientFault, Verdict
from draftsmith.decoding import Request
from draftsmith.errors import CorpusError

TOLERANCE = 0.02  # nats a token; docs/decisions.md says what was measured on both sides of it
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Probe:
    """What every endpoint is asked.

    Attributes:
        request: Greedy.
        text: Plain words.
        text_ids: How the target's tokenizer reads them, without anything added.
    """

    request: Request
    text: str
    text_ids: list[int]


class EndpointCheck:
    """Holds endpoints against the target.

    Args:
        probes: What they are asked.
        load: Loads the target; called for answers that no endpoint gave before, and nothing is kept
            afterwards. None where it does not fit here: then its tokenizer has to do.
    """

    def __init__(self, probes: Sequence[Probe], load: Callable[[], PreTrainedModel] | None) -> None:
        self._probes, self._load = list(probes), load
        self._passed: list[dict[str, list[int]]] = []
        self._begun: dict[str, dict[str, list[int]]] = {}

    def __call__(self, endpoint: Endpoint) -> Verdict:
        """Ask one; several may be asked at once. Gives what judges the answers.

        Raises:
            CorpusError: It has another tokenizer, refuses, or answers otherwise than asked. What
                judges raises it where the endpoint does not serve the target.
            TransientFault: It cannot be told now. Answers are kept for the next time, but where the
                endpoint was away.
        """
        answers = self._answers_of(endpoint)
        if self._load is None:
            self._compare_tokenizers(endpoint)
        return partial(self._judge, endpoint, answers)

    def _answers_of(self, endpoint: Endpoint) -> dict[str, list[int]]:
        answers = self._begun.pop(endpoint.url, {})
        try:
            endpoint.require_model()
            for probe in self._probes:
                name = probe.request.request_id
                if name not in answers:
                    answers[name] = endpoint.complete(probe.request).token_ids
        except TransientFault as fault:
            if fault.kind != "away":
                self._begun[endpoint.url] = answers
            raise
        return answers

    def _judge(self, endpoint: Endpoint, answers: dict[str, list[int]]) -> None:
        if self._load is not None and answers not in self._passed:
            self._compare(endpoint, answers, self._load())
            self._passed.append(answers)
        _LOG.info("endpoint=%s state=checked probes=%d", endpoint.url, len(answers))

    def _compare(
        self, endpoint: Endpoint, answers: dict[str, list[int]], target: PreTrainedModel
    ) -> None:
        """The endpoint's tokens under the target."""
        requests = [probe.request for probe in self._probes]
        by_name = {
            one.request_id: regrets(target, one.prompt_ids, answers[one.request_id])
            for one in requests
        }
        costs = torch.cat(list(by_name.values()))
        mean, num_others = float(costs.mean()), int((costs > 0).sum())
        facts = endpoint.url, mean, num_others, len(costs)
        _LOG.info("endpoint=%s regret=%.3g other_tokens=%d of=%d", *facts)
        if mean <= TOLERANCE:
            return
        worst = max(by_name, key=lambda name: float(by_name[name].max()))
        cost, place = by_name[worst].max(0)
        raise CorpusError(
            f"checking that the endpoint {endpoint.url} serves the target",
            found=f"greedy tokens that the target would not have taken at {num_others} of "
            f"{len(costs)} positions, and that cost it {mean:.3g} nats a token; {float(cost):.3g} "
            f"at position {int(place)} of {worst}",
            expected=f"at most {TOLERANCE:g} nats a token, which rounding does not come to",
            remedy="serve the checkpoint that target.source names, in its dtype and not quantised, "
            "or take the endpoint out of corpus.endpoints",
        )

    def _compare_tokenizers(self, endpoint: Endpoint) -> None:
        """Hold the endpoint's tokenizer against the target's, where it shows itself."""
        _LOG.warning("probes=not_compared reason=the_target_exceeds_this_machines_memory")
        for probe in self._probes:
            ids = endpoint.ids_of(probe.text)
            if ids is None:
                _LOG.warning("endpoint=%s tokenizer=not_compared", endpoint.url)
                return
            if ids != probe.text_ids:
                raise CorpusError(
                    f"checking that the endpoint {endpoint.url} serves the target",
                    found=f"another tokenizer, by its ids for {probe.text[:60]!r}",
                    expected="the ids that the target's tokenizer gives",
                    remedy="serve the checkpoint that target.source names with its own tokenizer, "
                    "or take the endpoint out of corpus.endpoints",
                )


@torch.inference_mode()
def regrets(target: PreTrainedModel, prompt_ids: list[int], response_ids: list[int]) -> Tensor:
    """By how many nats a target prefers its best token to each one of a response, behind its own.

    Returns:
        float32 `[len(response_ids)]`, 0 where the token is the target's first choice.
    """
    ids = torch.tensor([prompt_ids + response_ids[:-1]], device=target.device)
    logits: Tensor = target(input_ids=ids).logits[0, len(prompt_ids) - 1 :].float()
    taken = torch.tensor(response_ids, device=logits.device)
    return logits.amax(-1) - logits.gather(-1, taken[:, None])[:, 0]
