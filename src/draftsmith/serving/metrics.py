"""What a server counts, as Prometheus text: latencies, queue, and speculation by position.

The names follow vLLM's under our prefix. Speculation is counted from the same lines as telemetry,
when requests end. Driven by one thread; knows nothing of HTTP.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from draftsmith.drift.export import PairCounters, escaped
from draftsmith.drift.telemetry import ServedRequest

_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_REQUEST_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Histogram:
    """Counts of values up to each bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value so many times."""
        self._counts[bisect.bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def lines(self, name: str, text: str) -> list[str]:
        """Its exposition."""
        total = list(itertools.accumulate(self._counts))
        bounds = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        return [
            *_head(name, text, "histogram"),
            *(f'{name}_bucket{{le="{b}"}} {n}' for b, n in zip(bounds, total, strict=True)),
            f"{name}_sum {self._sum:.9g}",
            f"{name}_count {total[-1]}",
        ]


class ServerMetrics:
    """All that one server counts."""

    def __init__(self) -> None:
        self._first = Histogram(_TTFT_S)
        self._between = Histogram(_TOKEN_S)
        self._whole = Histogram(_REQUEST_S)
        self._pairs = PairCounters()
        self._rounds: Counter[tuple[str, int]] = Counter()  # by pair and draft length
        self._finished: Counter[str] = Counter()
        self._refused: Counter[int] = Counter()
        self._swaps: Counter[str] = Counter({"taken over": 0, "refused": 0})
        self._prompt_tokens = self._new_tokens = 0

    def serves(self, pair_digest: str) -> None:
        """A pair answers from now on; its counters are shown at once."""
        self._pairs.expect(pair_digest)

    def first_tokens(self, seconds: float) -> None:
        """A request's first round is over, so long after it arrived."""
        self._first.observe(seconds)

    def next_tokens(self, seconds: float, num_tokens: int) -> None:
        """So many tokens came, so long after those before them."""
        if num_tokens:
            self._between.observe(seconds / num_tokens, num_tokens)

    def finished(self, line: ServedRequest, reason: str) -> None:
        """A request has ended."""
        self._finished[reason] += 1
        self._whole.observe(line.latency_s)
        self._prompt_tokens += line.prompt_tokens
        self._new_tokens += line.committed
        self._pairs.add(line)
        for length, rounds in enumerate(line.draft_lengths):
            self._rounds[line.pair_digest, length] += rounds

    def refused(self, status: int) -> None:
        """A request was answered with an error."""
        self._refused[status] += 1

    def swapped(self, outcome: str) -> None:
        """The pair was replaced, or was to be."""
        self._swaps[outcome] += 1

    def exposition(self, *, gauges: Mapping[str, float], pair: Mapping[str, str]) -> str:
        """Everything in the Prometheus text format.

        Args:
            gauges: What is so now, by name without the prefix.
            pair: Labels of the pair that answers new requests.
        """
        labels = ",".join(f'{name}="{escaped(text)}"' for name, text in pair.items())
        lines = [
            *_head("draftsmith_pair_info", "The pair that answers new requests.", "gauge"),
            f"draftsmith_pair_info{{{labels}}} 1",
        ]
        for name, value in gauges.items():
            lines += [*_head(f"draftsmith_{name}", _GAUGES[name], "gauge")]
            lines += [f"draftsmith_{name} {value:g}"]
        for histogram, name, text in (
            (self._first, "time_to_first_token_seconds", "From arrival to the first tokens."),
            (self._between, "inter_token_latency_seconds", "Time a token, by rounds."),
            (self._whole, "e2e_request_latency_seconds", "From arrival to the last token."),
        ):
            lines += histogram.lines(f"draftsmith_{name}", text)
        return "\n".join([*lines, *self._counters()]) + "\n" + self._pairs.exposition()

    def _counters(self) -> Iterable[str]:
        single = {"prompt_tokens": self._prompt_tokens, "generation_tokens": self._new_tokens}
        for name, value in single.items():
            yield from _head(f"draftsmith_{name}_total", f"Sum of {name}.", "counter")
            yield f"draftsmith_{name}_total {value}"
        for name, text, label, counts in (
            ("request_success", "Requests that ended.", "finished_reason", self._finished),
            ("requests_refused", "Requests answered with an error.", "status", self._refused),
            ("swaps", "Pairs that took over, or were refused.", "outcome", self._swaps),
        ):
            yield from _head(f"draftsmith_{name}_total", text, "counter")
            for key, value in sorted(counts.items(), key=str):
                yield f'draftsmith_{name}_total{{{label}="{key}"}} {value}'
        name = "draftsmith_spec_decode_rounds_total"
        yield from _head(name, "Rounds by the number of tokens that the draft drafted.", "counter")
        for (digest, length), rounds in sorted(self._rounds.items()):
            yield f'{name}{{pair_digest="{escaped(digest)}",draft_length="{length}"}} {rounds}'


_GAUGES = {
    "num_requests_running": "Samples that have tokens and are being decoded.",
    "num_requests_waiting": "Samples that wait, or whose prompt is being read.",
    "is_draining": "1 once the server ends.",
}


def _head(name: str, text: str, kind: str) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
