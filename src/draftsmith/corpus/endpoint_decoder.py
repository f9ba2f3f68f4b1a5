"""Decodes by asking OpenAI-compatible endpoints, as an engine decodes with a model.

Before the first request each endpoint is held against the target: it must list the model, and
continue a few prompts greedily as the target does here, but for near-ties.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from transformers import PreTrainedModel

from draftsmith.corpus.dispatch import FIRST_PAUSE_S, AllLeftOutError, Lane, dispatch
from draftsmith.corpus.endpoint import Endpoint
from draftsmith.decoding import Engine, Event, NoProposer, Request
from draftsmith.decoding.near_ties import ROWS, judge_divergences
from draftsmith.errors import CorpusError

_WIDTH = 8  # of the forwards that rounding is measured with
_LOG = logging.getLogger(__name__)


class EndpointDecoder:
    """Endpoints in the place of an engine.

    Args:
        endpoints: At least one; all serve the target.
        max_requests: In flight at each.
        probes: Greedy requests that every endpoint is held against the target with.
        reference: The target; None where it does not fit here: then only the round trip of the
            prompts' ids is checked. Freed after the check.
        first_pause_s: After a first failure.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        *,
        max_requests: int,
        probes: Sequence[Request],
        reference: PreTrainedModel | None,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        self._lanes = [Lane(one, one.url, max_requests, first_pause_s) for one in endpoints]
        self._probes, self._reference = list(probes), reference
        self._is_checked = False

    def stream(self, requests: Sequence[Request]) -> Iterator[Event]:
        """Decode all requests; an event holds a whole answer.

        A failing endpoint is asked again after a pause, and left out when it goes on failing; the
        others do its work.

        Raises:
            CorpusError: No endpoint is left, or one does not serve the target, refuses, or answers
                otherwise than asked.
        """
        if not requests:
            return
        if not self._is_checked:
            self._check()
            self._is_checked = True
        for lane in self._lanes:
            lane.num_answers, lane.faults = 0, Counter()
        tasks = [_completion(request) for request in requests]
        try:
            yield from dispatch(self._lanes, tasks)
        except AllLeftOutError as error:
            raise _nobody_left(error) from error
        finally:
            for lane in self._lanes:
                faults = " ".join(f"{name}={count}" for name, count in sorted(lane.faults.items()))
                facts = lane.name, lane.num_answers, lane.faults.total(), faults
                _LOG.info("endpoint=%s answers=%d retries=%d %s", *facts)

    def _check(self) -> None:
        """Hold every endpoint against the target; those that do not answer are left out."""
        expected = self._expected()
        for lane in self._lanes:
            try:
                list(dispatch([lane], [Endpoint.require_model]))
                answers = list(dispatch([lane], [_completion(probe) for probe in self._probes]))
            except AllLeftOutError as error:
                if all(other.is_out for other in self._lanes):
                    raise _nobody_left(error) from error
                continue
            if expected is not None:
                self._compare(lane, expected, {one.request_id: one.token_ids for one in answers})
            facts = lane.name, len(answers), expected is not None
            _LOG.info("endpoint=%s state=checked probes=%d compared=%s", *facts)
        self._reference = None

    def _expected(self) -> dict[str, list[int]] | None:
        """What the target says here."""
        if self._reference is None:
            _LOG.warning("probes=not_compared reason=the_target_exceeds_this_machines_memory")
            return None
        engine = Engine(self._reference, NoProposer(), max_rows=ROWS, draft_length=0)
        return {one.request_id: one.token_ids for one in engine.generate(self._probes)}

    def _compare(
        self, lane: Lane[Endpoint], expected: dict[str, list[int]], answers: dict[str, list[int]]
    ) -> None:
        """Answers of an endpoint against the target's.

        Raises:
            CorpusError: They part where the target does not waver.
        """
        if answers == expected or self._reference is None:
            return
        prompts = [(probe.request_id, probe.prompt_ids) for probe in self._probes]
        judged = judge_divergences(self._reference, prompts, expected, answers, width=_WIDTH)
        worst = max(judged.divergences, key=lambda divergence: divergence.gap)
        differing = len(judged.divergences)
        _LOG.info("endpoint=%s near_ties=%d gap=%.3g", lane.name, differing, worst.gap)
        if judged.holds:
            return
        ours, theirs = (
            one[worst.prompt_id][worst.position : worst.position + 1] for one in (expected, answers)
        )
        raise CorpusError(
            f"checking that the endpoint {lane.name} serves the target",
            found=f"other greedy answers to {differing} of {len(prompts)} prompts; at position "
            f"{worst.position} of {worst.prompt_id} token {theirs} in place of {ours}, which the "
            f"target prefers by {worst.gap:.3g}",
            expected=f"the target's own tokens, or near-ties within {judged.tolerance:.3g}",
            remedy="serve the checkpoint that target.source names, in its dtype, or take the "
            "endpoint out of corpus.endpoints",
        )


def _completion(request: Request) -> Callable[[Endpoint], Event]:
    return partial(Endpoint.complete, request=request)


def _nobody_left(error: AllLeftOutError) -> CorpusError:
    return CorpusError(
        "asking the endpoints for responses",
        found=f"failures of all of them ({error})",
        expected="one that answers",
        remedy="start them again and rerun: finished responses are kept",
    )
