"""Decodes by asking OpenAI-compatible endpoints, as an engine decodes with a model.

Every endpoint is checked before it is asked for anything, and again after it was away: who comes
back may serve another checkpoint under the same name.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from draftsmith.corpus.dispatch import PATIENCE_S, AllLeftOutError, HopelessTaskError, dispatch
from draftsmith.corpus.endpoint import Endpoint
from draftsmith.corpus.lanes import FIRST_PAUSE_S, Lane, Verdict
from draftsmith.decoding import Event, Request
from draftsmith.errors import CorpusError

_MOST_SHOWN = 200  # characters of a prompt
_LOG = logging.getLogger(__name__)


class EndpointDecoder:
    """Endpoints in the place of an engine.

    Args:
        endpoints: At least one; all serve the target.
        max_requests: In flight at each.
        check: Tells by an endpoint's answers whether it serves the target, as `Lane` says.
        show: Makes text of a prompt's ids, for people.
        first_pause_s: After a first failure.
        patience_s: How long all endpoints may be away before it is an error.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        *,
        max_requests: int,
        check: Callable[[Endpoint], Verdict],
        show: Callable[[list[int]], str] = str,
        first_pause_s: float = FIRST_PAUSE_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._lanes = [Lane(one, one.url, max_requests, check, first_pause_s) for one in endpoints]
        self._show, self._patience_s = show, patience_s

    def stream(self, requests: Sequence[Request]) -> Iterator[Event]:
        """Decode all requests; an event holds a whole answer.

        A failing endpoint is asked again after a pause; one that goes on failing is left out until
        its check passes, and the others do its work.

        Raises:
            CorpusError: No endpoint is left, or one does not serve the target, refuses, or answers
                otherwise than asked. Or one request fails at all of them.
        """
        if not requests:
            return
        for lane in self._lanes:
            lane.num_answers, lane.faults = 0, Counter()
        tasks = [_completion(request) for request in requests]
        try:
            yield from dispatch(self._lanes, tasks, patience_s=self._patience_s)
        except AllLeftOutError as error:
            raise _nobody_left(error) from error
        except HopelessTaskError as error:
            raise self._hopeless(requests[error.place], error) from error
        finally:
            for lane in self._lanes:
                faults = " ".join(f"{name}={count}" for name, count in sorted(lane.faults.items()))
                facts = lane.name, lane.num_answers, lane.faults.total(), faults
                _LOG.info("endpoint=%s answers=%d retries=%d %s", *facts)

    def _hopeless(self, request: Request, error: HopelessTaskError) -> CorpusError:
        end = " ".join(self._show(request.prompt_ids).split())[-_MOST_SHOWN:]
        return CorpusError(
            f"asking the endpoints for the response {request.request_id}",
            found=f"{error.num_tries} failures ({error.found}), where other requests are answered; "
            f"its prompt ends with {end!r}",
            expected="an answer",
            remedy="look for this request in the logs of the endpoints, mend them or raise "
            "corpus.endpoint_timeout_s, and rerun: finished responses are kept. A prompt that the "
            "target cannot answer has to leave its source, which begins the corpus anew",
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
